"""Hypothesis strategy for whole plans, drawn from the declarations of the directives.

Every option, treatment and axis comes from ``legoai.specs.directives``, so that a new one is drawn without a change
here. What a person would make fit (mesh and cluster, batch and mesh, styles of neighbouring modules) mostly fits, since
a plan with errors shows nothing about lowering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from legoai.specs.directives import FAMILIES, REQUIRED, family
from legoai.specs.directives import kinds as k
from legoai.specs.directives.base import Calls, Directive, Treatment
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource
from support.models.presets import distinct_presets
from support.texts.plan_parts import Called, Drawn, DrawnPlan, Value, simple_values, treatments

CONFIGS: Final = Path(__file__).parents[1] / "huggingface"
"""Config files of small Hugging Face models; plans that name them are linted in this folder."""


@cache
def manifest_of(name: str, preset: str) -> Manifest:
    """The manifest of a preset, or of a config file in `CONFIGS`."""
    if name == "huggingface":
        source = ModelSource(kind="huggingface", target=preset, preset=None, arguments={})
    else:
        source = ModelSource(kind="builtin", target=name, preset=preset, arguments={})
    return load_manifest(source, base_directory=CONFIGS)


_LARGE: Final = ("xl", "13b", "6.7b", "2.7b", "175b", "70b", "405b", "8x22b", "h14", "v2", "v3")
"""Presets of many blocks or modules, which are drawn less often since each takes longer to lower."""


@cache
def _models() -> list[tuple[str, str]]:
    """Families and presets; those at the front are simplest, and most often drawn."""
    found = list(distinct_presets())
    usual = [item for item in found if item[1] not in _LARGE]
    small = [item for item in usual if item[1] in ("tiny", "small", "125m")]
    return [*small * 6, *usual, *usual, *(item for item in found if item[1] in _LARGE)]


@cache
def _foreign() -> list[tuple[str, str]]:
    """The Hugging Face models of `CONFIGS`."""
    return [("huggingface", path.name) for path in sorted(CONFIGS.glob("*.json"))]


class _Values:
    """Draws values of kinds for one model."""

    def __init__(self, draw: st.DrawFn, manifest: Manifest) -> None:
        self.draw = draw
        self.manifest = manifest
        blocks = manifest.block_lists[0]
        first = f"{blocks.path}.{blocks.names[0]}"
        self.block, self.blocks, self.count = first, f"{blocks.path}.*", len(blocks)
        self.inside = [path.replace(first, self.blocks, 1) for path in manifest.modules if path.startswith(f"{first}.")]
        self.outside = [path for path in manifest.modules if path and not path.startswith(f"{blocks.path}.")]

    def chance(self, percent: int) -> bool:
        """Whether something happens that happens so often; it does not in the simplest example."""
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def one(self, items: Sequence[Any]) -> Any:
        """One of the items; the first is the simplest."""
        return self.draw(st.sampled_from(items))

    def value(self, kind: k.Kind) -> Value:
        """A value of the kind, as a plan writes it."""
        choices = simple_values(kind)
        if choices:
            return str(self.one(choices))
        if isinstance(kind, k.ModulePath):
            return str(self.one([self.block, f"{self.block[:-1]}{self.count // 2}", *self.outside]))
        if isinstance(kind, k.ListOf):
            count = kind.length or self.draw(st.integers(1, 3))
            return f"[{', '.join(str(self.value(kind.item)) for _ in range(count))}]"
        if isinstance(kind, Calls):
            return self.treatment(self.one(kind.treatments))
        assert isinstance(kind, k.Either), f"no values are drawn for {type(kind).__name__}"
        return self.value(self.one(kind.kinds))

    def treatment(self, declared: type[Treatment]) -> Called:
        """The treatment with some of its options."""
        return Called(declared.name, self.options(declared.options, {}))

    def options(self, declared: Sequence[Any], fitting: Mapping[str, str | None]) -> tuple[tuple[str, Value], ...]:
        """Some of the options; those related to other statements mostly take a consistent value."""
        found: list[tuple[str, Value]] = []
        for item in declared:
            if item.name in fitting and not self.chance(1):
                if (value := fitting[item.name]) is not None:
                    found.append((item.name, value))
            elif item.required or self.chance(30):
                found.append((item.name, self.value(item.kind)))
        return tuple(found)

    def parameter(self) -> str:
        """A path pattern of parameters."""
        found = [path.replace(self.block, self.blocks, 1) for path in self.manifest.parameter_paths()]
        return str(self.one(list(dict.fromkeys(found))))

    def path(self) -> str:
        """A path pattern of the model."""
        kind = self.draw(st.integers(0, 9))
        if kind < 5:
            return self.blocks
        if kind < 7:
            return "root"
        if kind < 8:
            return str(self.one((self.block, self.blocks.replace("*", "{0..1}"))))
        return str(self.one([*self.inside, *self.outside]))


def _llama_of_others(feed_forward: str) -> tuple[dict[str, str], ...]:
    """Styles of the decoders of `transformers` that are built as its Llama is."""
    attention = {
        "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
    dense = {
        f"model.layers.*.{feed_forward}.{{gate,up}}_proj": "colwise",
        f"model.layers.*.{feed_forward}.down_proj": "rowwise",
    }
    return (
        attention,
        dense,
        {"model.embed_tokens": "rowwise(input = replicate)"},
        {"lm_head": "colwise(loss_parallel = true)"},
        {"lm_head": "colwise(output = replicate)"},
    )


_STYLES: Final = {
    "llama.json": _llama_of_others("mlp"),
    "gemma2.json": _llama_of_others("mlp"),
    "mixtral.json": _llama_of_others("mlp"),
    "qwen3.json": _llama_of_others("mlp"),
    "qwen3_moe.json": _llama_of_others("mlp"),
    "deepseek_v3.json": (
        {"lm_head": "colwise(loss_parallel = true)"},
        {
            "model.layers.0.mlp.{gate,up}_proj": "colwise",
            "model.layers.0.mlp.down_proj": "rowwise",
        },
    ),
    "gpt2.json": ({"lm_head": "colwise(output = replicate)"},),
    "llama3": (
        {"layers.*.attention.{wq, wk, wv}": "colwise", "layers.*.attention.wo": "rowwise"},
        {"layers.*.feed_forward.{w1, w3}": "colwise", "layers.*.feed_forward.w2": "rowwise"},
        {"tok_embeddings": "rowwise(input = replicate)"},
        {"output": "colwise(loss_parallel = true)"},
        {"output": "colwise(output = replicate)"},
        {"output": "rowwise(input = replicate)"},
        {
            "tok_embeddings": "rowwise(input = replicate, output = shard(1))",
            "layers.*.{attention, ffn}_norm": "sequence",
            "layers.*.attention": "inputs(from = shard(1), to = replicate)",
            "layers.*.attention.{wq, wk, wv}": "colwise",
            "layers.*.attention.wo": "rowwise(output = shard(1))",
            "layers.*.feed_forward": "inputs(from = shard(1), to = replicate)",
            "layers.*.feed_forward.{w1, w3}": "colwise",
            "layers.*.feed_forward.w2": "rowwise(output = shard(1))",
            "norm": "sequence",
            "output": "colwise(input = shard(1), loss_parallel = true)",
        },
    ),
    "mixtral": (
        {"layers.*.attention.{wq, wk, wv}": "colwise", "layers.*.attention.wo": "rowwise"},
        {"tok_embeddings": "rowwise(input = replicate)"},
        {"output": "colwise(loss_parallel = true)"},
        {
            "tok_embeddings": "rowwise(input = replicate, output = shard(1))",
            "layers.*.{attention, ffn}_norm": "sequence",
            "layers.*.attention": "inputs(from = shard(1), to = replicate)",
            "layers.*.attention.{wq, wk, wv}": "colwise",
            "layers.*.attention.wo": "rowwise(output = shard(1))",
            "layers.*.feed_forward": "inputs(from = shard(1), to = replicate, local = true, "
            "then = outputs(from = replicate, to = shard(1)))",
            "norm": "sequence",
            "output": "colwise(input = shard(1), loss_parallel = true)",
        },
    ),
    "deepseek": (
        {
            "layers.*.attention.{wq_b, wkv_b}": "colwise",
            "layers.*.attention.k_rope": "shared",
            "layers.*.attention.wo": "rowwise",
        },
        {"layers.0.feed_forward.{w1, w3}": "colwise", "layers.0.feed_forward.w2": "rowwise"},
        {"tok_embeddings": "rowwise(input = replicate)"},
        {"output": "colwise(loss_parallel = true)"},
    ),
    "gpt": (
        {"layers.*.attention.{wq, wk, wv}": "colwise", "layers.*.attention.wo": "rowwise"},
        {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
        {"tok_embeddings": "rowwise(input = replicate)", "output": "colwise(loss_parallel = true)"},
        {"tok_embeddings": "rowwise(input = replicate)", "output": "colwise(output = replicate)"},
        {"layers.*.mlp.up.weight": "replicate"},
    ),
    "vit": (
        {"layers.*.attention.{wq, wk, wv}": "colwise", "layers.*.attention.wo": "rowwise"},
        {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
        {"head": "colwise(output = replicate)"},
    ),
}
"""Styles that fit together, by model: any of the sets may stand beside the others. Rules drawn at random stand beside
them; alone they hardly ever fit."""


@st.composite
def drawn_plans(draw: st.DrawFn, *, foreign: bool = False) -> DrawnPlan:
    """A plan whose statements, options and rules are drawn from what the directives declare.

    Args:
        draw: of hypothesis.
        foreign: draw Hugging Face models too, and only built-in models whose shapes are small.
    """
    models = _models()
    if foreign:
        models = [item for item in _models() if item[1] not in _LARGE]
        models = [*sorted(set(models)), *_foreign() * 3]
    name, preset = draw(st.sampled_from(models))
    manifest = manifest_of(name, preset)
    values = _Values(draw, manifest)
    sizes = _sizes(values, name, manifest)
    dimensions = _dimensions(values, name) if foreign else ()
    found: list[Drawn] = [Drawn("model", Called(name, (("", f'"{preset}"'), *dimensions)))]
    across_tp = foreign and sizes["tp"] > 1 and sizes["ep"] > 1 and values.chance(50)
    for keyword in FAMILIES:
        if keyword == "model":
            continue
        declared = family(keyword)
        for axes in _axes(values, declared, sizes):
            fitting = _fitting(values, keyword, sizes, manifest)
            if foreign and keyword == "shard" and values.chance(95 if across_tp else 50):
                found.append(_standard(values, axes, across_tp=across_tp))
                continue
            found.append(_statement(values, declared, axes, fitting, preset if name == "huggingface" else name))
    return DrawnPlan(tuple(found))


_DIMENSIONS: Final[Mapping[str, Sequence[tuple[tuple[str, str], ...]]]] = {
    "llama3": (
        (("qk_norm", "true"),),
        (("head_dim", "16"), ("attention_bias", "true"), ("mlp_bias", "true")),
        (("qkv_bias", "true"), ("rope_type", '"yarn"'), ("rope_scaling", "4.0")),
        (("rope_type", '"linear"'), ("rope_scaling", "2.0"), ("tie_embeddings", "true")),
    ),
    "mixtral": (
        (("qk_norm", "true"), ("attention_bias", "true")),
        (("head_dim", "16"), ("qkv_bias", "true")),
        (("tie_embeddings", "true"),),
    ),
    "deepseek": (
        (("scores", '"softmax"'), ("normalize_weights", "false"), ("n_shared_experts", "2")),
        (("n_dense_layers", "0"), ("rope_scaling", "4.0")),
        (("tie_embeddings", "true"), ("v_head_dim", "24")),
    ),
    "gpt2": ((("tie_embeddings", "false"),), (("bias", "false"),)),
    "gpt3": ((("tie_embeddings", "false"), ("bias", "false")),),
    "vit": ((("image_size", "56"), ("patch_size", "8")),),
}
"""Options of built-in models that change what is computed."""


def _dimensions(values: _Values, name: str) -> tuple[tuple[str, str], ...]:
    """Options of the model in addition to its preset."""
    return values.one(_DIMENSIONS[name]) if name in _DIMENSIONS and values.chance(50) else ()


def _standard(values: _Values, axes: tuple[str, ...], *, across_tp: bool) -> Drawn:
    """A standard layout, with some of its options."""
    names = ("sequence", "loss_parallel") if axes == ("tp",) else ()
    chosen = [name for name in names if (across_tp and name == "sequence") or values.chance(60)]
    chosen += ["across_tp"] if across_tp else []
    return Drawn("shard", "standard", axes, tuple((name, "true") for name in chosen))


def _sizes(values: _Values, model: str, manifest: Manifest) -> dict[str, int]:
    """Sizes of the mesh's axes, by which statements can be there."""
    declared = family("mesh")
    sizes = {item.name: 1 for item in declared.options}
    for axis in sizes:
        often = 40 if axis == "dp_shard" else 25
        if values.chance(often):
            sizes[axis] = values.one((2, 2, 4))
    if not any(item.kind == "experts" for item in manifest.modules.values()) and not values.chance(2):
        sizes["ep"] = 1
    if model == "vit" and not values.chance(2):
        sizes["cp"] = 1
    if manifest.tied_parameters and not values.chance(5):
        sizes["pp"] = 1  # the stages of any pipeline would cut between the two places of a tied parameter
    if sizes["ep"] > sizes["dp_shard"] * sizes["cp"] and not values.chance(2):
        sizes["dp_shard"] = sizes["ep"]
    return sizes


def _axes(values: _Values, declared: type[Directive], sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """The axes of each statement of a family, nothing where the plan has none."""
    keyword = declared.keyword
    if keyword in REQUIRED or keyword == "mesh":
        yield ()
    elif declared.axis_use is None:
        if values.chance(40):
            yield ()
    elif declared.repeats_by_axis:
        for axis in declared.axis_use.names:
            if values.chance(97 if sizes[axis] > 1 else 4):
                yield (axis,)
        if values.chance(1):
            yield declared.axis_use.names
    else:
        used = tuple(axis for axis in declared.axis_use.names if sizes[axis] > 1)
        sharded = sizes["dp_shard"] > 1 or sizes["cp"] > 1
        if keyword == "fsdp":
            wanted = 98 if sharded else 3 if sizes["dp_replicate"] > 1 else 15
            used = used or ("dp_shard",)
            if used[0] == "dp_replicate" and len(used) == 1:
                used = (*used, "dp_shard")
            if used[-1] == "cp" and values.chance(30):
                used = (*used[:-2], "dp_shard") if len(used) > 1 else ("dp_shard",)
        else:
            wanted = 97 if used and not (keyword == "replicate" and sharded) else 2
        if values.chance(wanted):
            yield used or declared.axis_use.names[: declared.axis_use.minimum]


def _fitting(values: _Values, keyword: str, sizes: Mapping[str, int], manifest: Manifest) -> dict[str, str | None]:
    """Values of options that fit with each other, None for one to leave out."""
    devices = 1
    for axis, size in sizes.items():
        devices *= size if axis != "ep" else 1
    if keyword == "mesh":
        return {axis: str(size) if size > 1 else None for axis, size in sizes.items()}
    if keyword == "cluster":
        hosts = 2 if devices > 8 or (devices > 1 and values.chance(20)) else 1
        return {
            "profile": None,
            "hosts": str(hosts) if hosts > 1 else None,
            "devices": str(devices // hosts),
            "fabric": "infiniband_ndr" if hosts > 1 else None,
        }
    if keyword == "batch":
        micro, passes = values.one((1, 2, 4)), values.one((1, 2, 4, 8) if sizes["pp"] == 1 else (8, 16))
        ranks = sizes["dp_replicate"] * sizes["dp_shard"]
        length = values.one((64, 128, 256, 1024)) if manifest.vocab_size is not None else None
        return {
            "global": str(micro * passes * ranks),
            "micro": str(micro),
            "seq_len": None if length is None else str(length),
            "ramp": f"stages(global = [{micro * ranks}], until = [1])"
            if passes > 1 and sizes["pp"] == 1 and values.chance(25)
            else None,
        }
    if keyword == "pipeline":
        return {"stages": None, "split": None} if values.chance(60) else {}
    return {}


def _statement(
    values: _Values, declared: type[Directive], axes: tuple[str, ...], fitting: Mapping[str, str | None], model: str
) -> Drawn:
    """One statement of the family with some of its options and, where it has a block, some rules."""
    subject: Value | None = None
    options = [item for item in declared.options if item.name != declared.subject]
    if declared.subject is not None:
        item = declared.option(declared.subject)
        subject = values.value(item.kind)
    written = values.options(options, fitting)
    if declared.subject_holds_options:
        subject, written = Called(str(subject), written), ()
    rules: dict[str, Value] = {}
    if declared.treatments is not None:
        if declared.keyword == "shard":
            rules.update(_styles(values, axes, model))
        elif declared.keyword == "fsdp" and values.chance(70):
            rules[values.blocks] = Called("unit")
        if axes == ("tp",) and values.chance(25):
            placement = values.one(("replicate", "shard(0)", "shard(1)"))
            rules[values.parameter()] = placement
        many = 1 if rules and not values.chance(30) else 2 if values.chance(30) else 1
        for _ in range(many if not rules or values.chance(25) else 0):
            path = values.parameter() if declared.names_parameters and values.chance(30) else values.path()
            rules[path] = values.treatment(values.one(declared.treatments.treatments))
    return Drawn(declared.keyword, subject, axes, written, tuple(rules.items()))


def _styles(values: _Values, axes: Sequence[str], model: str) -> dict[str, Value]:
    """Rules of `shard` that fit together."""
    if axes == ("ep",):
        blocks = values.manifest.block_lists[0]
        for name in blocks.names:
            for path, info in values.manifest.modules.items():
                if info.kind == "experts" and path.startswith(f"{blocks.path}.{name}."):
                    pattern = path.replace(f"{blocks.path}.{name}", values.blocks, 1)
                    return {pattern: values.treatment(treatments()["experts"])}
        return {}
    sets = _STYLES[model if model in _STYLES else "gpt"]
    found: dict[str, Value] = dict(values.one(sets))
    for styles in sets[:3]:
        if values.chance(40) and "norm" not in found:
            found.update(styles)
    return found
