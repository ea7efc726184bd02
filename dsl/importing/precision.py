"""Dtypes of TorchTitan: the `precision` statement, with linear layers in float8 or mxfp8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from legoai.dsl.importing.config import Config
from legoai.dsl.importing.draft import Draft
from legoai.dsl.importing.keys import GROUPED

_DTYPES: Final = {"bfloat16": "bf16", "float32": "fp32"}
_FLOAT8: Final = "quantize.linear.float8."
_CURRENT: Final = {
    "output": "lm_head",
    **{f"layers.*.attention.{name}": "layers.*.attention.qkv_linear.wqkv" for name in ("wq", "wk", "wv")},
}
"""TorchTitan's names in August 2026, where they are others."""
_OF_EXPERTS: Final = {
    "layers.*.feed_forward.router": "layers.*.moe.router.gate",
    **{f"layers.*.feed_forward.shared.{name}": f"layers.*.moe.shared_experts.{name}" for name in ("w1", "w2", "w3")},
}
"""TorchTitan's names in blocks with experts."""


def computes_in(draft: Draft) -> str:
    """The dtype of forward and backward.

    Beside tensor or pipeline parallelism FSDP alone lowers it, no autocast. In August 2026 there always is FSDP, if
    over one rank.
    """
    config, sizes = draft.config, draft.sizes
    if draft.sharded or config.is_current or not (config.is_old or sizes["tp"] * sizes["pp"] > 1):
        return _DTYPES[config["training.mixed_precision_param"]]
    return _DTYPES[config["training.dtype"]]


def add_precision(draft: Draft) -> None:
    """Add the dtypes, and the layers in less."""
    config = draft.config
    options = ["master = bf16"] if config["training.dtype"] == "bfloat16" else []
    options.append(f"param = {computes_in(draft)}")
    if draft.sharded or (draft.sizes["dp_replicate"] > 1 and not config.is_old):
        options.append(f"reduce = {_DTYPES[config['training.mixed_precision_reduce']]}")
    rules = list(_low_precision(draft))
    block = " {\n" + "\n".join(f"  {rule}" for rule in rules) + "\n}" if rules else ""
    draft.lines.append(f"precision ({', '.join(options)}){block}")


def in_float8(config: Config) -> bool:
    """Whether linear layers are converted to float8."""
    names = {name.removeprefix("quantize.linear.") for name in config["model.converters"]}
    return "float8" in names or bool(config[_FLOAT8 + "enable_float8_linear"])


def _low_precision(draft: Draft) -> Iterator[str]:
    """Rules of the linear layers in float8 or mxfp8."""
    config = draft.config
    for name in config["model.converters"]:
        short = name.removeprefix("quantize.linear.")
        if short not in ("float8", "mx") and "grouped_mm" not in short:
            draft.lost["model.converters"] = f"no statement converts a model by `{name}`"
        elif "grouped_mm" in short and draft.flavour.has_experts:
            draft.lost.setdefault("model.converters", f"{GROUPED}, and linear layers alone may have a lower one")
    names = {name.removeprefix("quantize.linear.") for name in config["model.converters"]}
    if in_float8(config):
        treatment, filters = _float8(draft), _FLOAT8 + "filter_fqns"
    elif "mx" in names:
        treatment, filters = "mxfp8", f"quantize.linear.mx.{'fqns' if config.is_current else 'filter_fqns'}"
    else:
        return
    skipped = [*config[filters], *(["output"] if config.is_old else [])]
    if "auto_filter_small_kn" in skipped:
        draft.lost[filters] = "small layers are not left out by themselves"
    for holder, layers in draft.flavour.linear.items():
        kept = [name for name in layers if not _skips(draft, filters, skipped, f"{holder}.{name}")]
        if kept:
            inner = f"{{{', '.join(kept)}}}" if len(kept) > 1 else kept[0]
            yield f"{holder}.{inner} = {treatment}"
    if not _skips(draft, filters, skipped, "output"):
        yield f"output = {treatment}"


def _skips(draft: Draft, filters: str, skipped: Sequence[str], path: str) -> bool:
    """Whether a layer is not converted: a part of its name is in the list, or in no list of those that are."""
    there = _OF_EXPERTS.get(path, path)
    if draft.config.is_current and not (draft.flavour.has_latent_attention and there.endswith(".wq")):
        there = _CURRENT.get(there, there)
    paths = [there.replace("*", str(number)) for number in range(draft.flavour.layers)]
    found = [any(part in item for part in skipped) for item in paths]
    if filters.endswith(".fqns"):
        found = [bool(skipped) and not one for one in found]
    if any(found) and not all(found):
        draft.lost[filters] = f"`{path}` is left out in some blocks and not in others"
        return False
    return found[0]


def _float8(draft: Draft) -> str:
    config = draft.config
    recipe = config[_FLOAT8 + "recipe_name"]
    gathered = config[_FLOAT8 + "enable_fsdp_float8_all_gather"]
    if recipe is not None and gathered:
        config.wrong(_FLOAT8 + "enable_fsdp_float8_all_gather", "TorchTitan gathers no weights in float8 by a recipe")
    if recipe not in (None, "tensorwise"):
        return f"float8({recipe})"
    what = ["weights"] * (gathered and draft.sizes["dp_shard"] > 1) + ["activations"] * (draft.sizes["tp"] > 1)
    return f"float8(gather = [{', '.join(what)}])" if what else "float8(tensorwise)"
