"""Smaller values for the fields of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from legoai.lowering.shrink_decoder import DecoderConfig, smaller_decoder, smaller_ids, without_dropout
from legoai.lowering.shrink_sizes import LARGEST_AS_IT_IS, PATCHES, VOCABULARY, Shape, Sizes, check_size, shape_of
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.reads import Images
from legoai.specs.plan import Plan


def smaller_fields(
    fields: Mapping[str, Any], manifest: Manifest, sizes: Sizes, source: str
) -> tuple[dict[str, Any], float]:
    """Return the fields of a config file that change, and the size of a block's parameters relative to the original.

    Fields have the names that the file gives them, or else those of their class.

    Raises:
        CannotShrinkError: the model is large, and the meaning of its config's fields is not known.
    """
    missing = ""
    if manifest.reads_tokens:
        decoder = DecoderConfig(fields)
        if decoder.unknown is None:
            values, ratio = smaller_decoder(decoder, sizes)
            return {**values, **without_dropout(fields)}, ratio
        missing = f" ({decoder.unknown})"
    elif isinstance(manifest.reads, Images) and _is_vision(fields):
        values = _vision_fields(fields, sizes)
        return {**without_dropout(fields), **values}, (values["hidden_size"] / int(fields["hidden_size"])) ** 2
    elif fields.get("model_type") == "t5":
        return {**without_dropout(fields), **_t5_fields(fields, manifest, sizes)}, 1.0
    check_size(
        manifest,
        f"{source} has {manifest.parameter_count:,} parameters, and its config is not one that can be made smaller"
        f"{missing}: name one of at most {LARGEST_AS_IT_IS:,} parameters",
    )
    return without_dropout(fields), 1.0


def keeps_blocks(plan: Plan, manifest: Manifest, config: Mapping[str, Any] | None) -> bool:
    """Whether the number of the model's blocks cannot be changed by a field of its config."""
    if plan.model.family != "huggingface":
        return False
    fields = {**(config or {}), **plan.model.arguments}
    if manifest.reads_tokens:
        return DecoderConfig(fields).unknown is not None
    return not (isinstance(manifest.reads, Images) and _is_vision(fields))


def block_kinds(plan: Plan, config: Mapping[str, Any] | None) -> list[object] | None:
    """Return for each block what the config's lists with an element per block say of it; None for other models."""
    if plan.model.family != "huggingface":
        return None
    decoder = DecoderConfig({**(config or {}), **plan.model.arguments})
    return None if decoder.unknown is not None else decoder.kinds()


def _is_vision(fields: Mapping[str, Any]) -> bool:
    return all(isinstance(fields.get(name), int) for name in _VISION_NAMES.values())


_VISION_NAMES: Final = {
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "blocks": "num_hidden_layers",
    "patch": "patch_size",
}


def _vision_fields(fields: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    dim, heads, hidden, _, patch = (int(fields[name]) for name in _VISION_NAMES.values())
    found = shape_of(Shape(dim=dim, heads=heads, kv_heads=heads, hidden=hidden), sizes)
    values: dict[str, Any] = {
        "hidden_size": found.dim,
        "num_attention_heads": found.heads,
        "intermediate_size": found.hidden,
        "image_size": PATCHES * patch,
    }
    return values if sizes.blocks is None else {**values, "num_hidden_layers": sizes.blocks}


def _t5_fields(fields: Mapping[str, Any], manifest: Manifest, sizes: Sizes) -> dict[str, Any]:
    """Heads and feed-forward as for a decoder; the stacks keep their blocks."""
    dim, heads, hidden = (int(fields[name]) for name in ("d_model", "num_heads", "d_ff"))
    vocab = int(fields.get("vocab_size") or manifest.vocab_size or VOCABULARY)
    found = shape_of(Shape(dim=dim, heads=heads, kv_heads=heads, hidden=hidden, vocab=vocab), sizes)
    return {
        "d_model": found.dim,
        "num_heads": found.heads,
        "d_kv": found.dim // found.heads,
        "d_ff": found.hidden,
        "vocab_size": found.vocab,
        "dropout_rate": 0.0,  # 0.1 by default
        **smaller_ids(fields, found.vocab),
    }
