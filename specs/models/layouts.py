"""Standard layouts of models: how each family is usually sharded, declared once.

A layout is written as the rules of a plan, with the paths of the family's modules and the treatments of
:mod:`legoai.specs.directives`. A plan takes it by name: `shard standard on tp`, `fsdp blocks on dp_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from legoai.specs.record import Record


class LayoutRule(Record):
    """One rule of a layout: a path, its treatment as a plan writes it, and the options under which it is there.

    Where ``sequence`` or ``loss_parallel`` is None, the rule does not depend on that option.
    """

    path: str
    treatment: str
    sequence: bool | None = None
    loss_parallel: bool | None = None


class StandardLayouts(Record, kw_only=True):
    """What a family declares: its repeated blocks, and the styles of its modules on `tp` and on `ep`.

    ``tp`` and ``ep`` are empty where the family has no such layout; ``sequence`` says whether ``tp`` has one with
    sequence parallelism.
    """

    blocks: str
    tp: tuple[LayoutRule, ...] = ()
    ep: tuple[LayoutRule, ...] = ()

    @property
    def has_sequence(self) -> bool:
        """Whether the layout on `tp` has a form with sequence parallelism."""
        return any(rule.sequence for rule in self.tp)

    def on(self, axis: str, *, sequence: bool, loss_parallel: bool) -> Iterator[LayoutRule]:
        """The rules on an axis under these options."""
        for rule in self.tp if axis == "tp" else self.ep:
            if rule.sequence in (None, sequence) and rule.loss_parallel in (None, loss_parallel):
                yield rule


_SEQUENCE: Final = "inputs(from = shard(1), to = replicate)"
_LOCAL: Final = "inputs(from = shard(1), to = replicate, local = true, then = outputs(from = replicate, to = shard(1)))"


def _ends(embedding: str, norm: str, output: str, *, in_pieces: bool = True) -> tuple[LayoutRule, ...]:
    """The embedding, the last norm and the output layer of a decoder."""
    rows, columns = "rowwise(input = replicate", "colwise("
    found = [
        LayoutRule(embedding, f"{rows})", sequence=False if in_pieces else None),
        LayoutRule(output, f"{columns}output = replicate)", False if in_pieces else None, loss_parallel=False),
        LayoutRule(output, f"{columns}loss_parallel = true)", False if in_pieces else None, loss_parallel=True),
    ]
    if in_pieces:
        found += [
            LayoutRule(embedding, f"{rows}, output = shard(1))", sequence=True),
            LayoutRule(norm, "sequence", sequence=True),
            LayoutRule(output, f"{columns}input = shard(1), output = replicate)", True, loss_parallel=False),
            LayoutRule(output, f"{columns}input = shard(1), loss_parallel = true)", True, loss_parallel=True),
        ]
    return tuple(found)


def _part(holder: str, inner: str, last: str) -> tuple[LayoutRule, ...]:
    """Matrices of a block that come in pairs: the first by columns, the last by rows."""
    return (
        LayoutRule(holder, _SEQUENCE, sequence=True),
        LayoutRule(f"{holder}.{inner}", "colwise"),
        LayoutRule(f"{holder}.{last}", "rowwise", sequence=False),
        LayoutRule(f"{holder}.{last}", "rowwise(output = shard(1))", sequence=True),
    )


_DECODER: Final = (
    *_ends("tok_embeddings", "norm", "output"),
    LayoutRule("layers.*.{attention, ffn}_norm", "sequence", sequence=True),
    *_part("layers.*.attention", "{wq, wk, wv}", "wo"),
)
_GPT: Final = StandardLayouts(
    blocks="layers.*",
    tp=(
        # Positions are added to the embedding's output, which therefore stays whole.
        *_ends("tok_embeddings", "norm", "output", in_pieces=False),
        LayoutRule("layers.*.attention.{wq, wk, wv}", "colwise"),
        LayoutRule("layers.*.attention.wo", "rowwise"),
        LayoutRule("layers.*.mlp.up", "colwise"),
        LayoutRule("layers.*.mlp.down", "rowwise"),
    ),
)

QK_NORMS: Final = LayoutRule("layers.*.attention.{q_norm, k_norm}", "heads")
"""Of a built-in model with `qk_norm`."""

BUILT_IN: Final[Mapping[str, StandardLayouts]] = {
    "llama3": StandardLayouts(blocks="layers.*", tp=(*_DECODER, *_part("layers.*.feed_forward", "{w1, w3}", "w2"))),
    "gpt2": _GPT,
    "gpt3": _GPT,
    "mixtral": StandardLayouts(
        blocks="layers.*",
        tp=(*_DECODER, LayoutRule("layers.*.feed_forward", _LOCAL, sequence=True)),
        ep=(LayoutRule("layers.*.feed_forward.experts", "experts"),),
    ),
    "vit": StandardLayouts(
        blocks="layers.*",
        tp=(
            LayoutRule("layers.*.attention.{wq, wk, wv}", "colwise"),
            LayoutRule("layers.*.attention.wo", "rowwise"),
            LayoutRule("layers.*.mlp.up", "colwise"),
            LayoutRule("layers.*.mlp.down", "rowwise"),
            LayoutRule("head", "colwise(output = replicate)"),
        ),
    ),
}
"""Layouts of the built-in families."""

_HF_DECODER: Final = StandardLayouts(
    blocks="model.layers.*",
    tp=(
        *_ends("model.embed_tokens", "model.norm", "lm_head", in_pieces=False),
        LayoutRule("model.layers.*.self_attn.{q_proj, k_proj, v_proj}", "colwise"),
        LayoutRule("model.layers.*.self_attn.o_proj", "rowwise"),
        LayoutRule("model.layers.*.mlp.{gate_proj, up_proj}", "colwise"),
        LayoutRule("model.layers.*.mlp.down_proj", "rowwise"),
    ),
)

HUGGING_FACE: Final[Mapping[str, StandardLayouts]] = {
    "llama": _HF_DECODER,
    "mistral": _HF_DECODER,
    "qwen2": _HF_DECODER,
    "gemma": _HF_DECODER,
    "gpt2": StandardLayouts(blocks="transformer.h.*"),
    "mixtral": StandardLayouts(blocks="model.layers.*"),
    "qwen3": StandardLayouts(blocks="model.layers.*"),
    "t5": StandardLayouts(blocks="{encoder, decoder}.block.*"),
    "vit": StandardLayouts(blocks="vit.layers.*"),
    "clip": StandardLayouts(blocks="{text_model, vision_model}.encoder.layers.*"),
    "convnextv2": StandardLayouts(blocks="convnextv2.encoder.stages.*.layers.*"),
}
"""Layouts of Hugging Face models, by the `model_type` of their config."""
