"""Standard layouts of models: the usual sharding of each family.

A layout is written as the rules of a plan, with the paths of the family's modules and the treatments of
:mod:`legoai.specs.directives`. A plan uses it by name: `shard standard on tp`, `fsdp blocks on dp_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from legoai.specs.record import Record, replace

DENSE: Final = "<dense>"
"""Path placeholder for the indices of the blocks of a mixture whose feed-forward has no experts."""


class LayoutRule(Record):
    """One rule of a layout: a path, its treatment as a plan writes it, and the options under which it applies.

    Where ``sequence``, ``loss_parallel`` or ``across_tp`` is None, the rule does not depend on that option.
    """

    path: str
    treatment: str
    sequence: bool | None = None
    loss_parallel: bool | None = None
    across_tp: bool | None = None
    when: str | None = None
    """The field of the model's config that must be true."""
    unless: str | None = None
    """The field of the model's config that must be false."""


class StandardLayouts(Record, kw_only=True):
    """Declaration of a family: its repeated blocks, and the styles of its modules on `tp` and on `ep`.

    ``tp`` and ``ep`` are empty where the family has no such layout.
    """

    blocks: str
    tp: tuple[LayoutRule, ...] = ()
    ep: tuple[LayoutRule, ...] = ()
    reasons: Mapping[str, str] = {}
    """Reasons why there is no layout on `tp`, or no form of it with one of its options, by these names."""

    def has_form(self, option: str) -> bool:
        """Whether the layout on `tp` has a form with the option."""
        if option == "overlap":
            return any(_overlapped(rule.treatment) != rule.treatment for rule in self.tp)
        return any(getattr(rule, option) for rule in (*self.tp, *self.ep))

    def on(
        self,
        axis: str,
        *,
        fields: Mapping[str, Any],
        sequence: bool = False,
        loss_parallel: bool = False,
        overlap: bool = False,
        across_tp: bool = False,
    ) -> Iterator[LayoutRule]:
        """Yield the rules on an axis under these options, for a model of the family with these config fields.

        With `overlap` every all-gather along the sequence for column-wise layers is repeated in backward.
        """
        given = {"sequence": sequence, "loss_parallel": loss_parallel, "across_tp": across_tp}
        for rule in self._on(axis, given, fields):
            yield replace(rule, treatment=_overlapped(rule.treatment)) if overlap else rule

    def _on(self, axis: str, given: Mapping[str, bool], fields: Mapping[str, Any]) -> Iterator[LayoutRule]:
        for rule in self.tp if axis == "tp" else self.ep:
            if any(getattr(rule, option) not in (None, value) for option, value in given.items()):
                continue
            if rule.when is not None and not fields.get(rule.when):
                continue
            if rule.unless is not None and fields.get(rule.unless):
                continue
            dense = _dense_blocks(fields) if DENSE in rule.path else ()
            if DENSE not in rule.path:
                yield rule
            elif dense:
                chosen = str(dense[0]) if len(dense) == 1 else f"{{{', '.join(map(str, dense))}}}"
                yield LayoutRule(rule.path.replace(DENSE, chosen), rule.treatment)


def _dense_blocks(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The blocks without experts: of `deepseek`, or of a Qwen mixture by its config's fields and their defaults."""
    if "n_dense_layers" in fields:
        return tuple(range(fields["n_dense_layers"])) if isinstance(fields["n_dense_layers"], int) else ()
    count, step = fields.get("num_hidden_layers", 24), fields.get("decoder_sparse_step", 1)
    named = fields.get("mlp_only_layers") or ()
    if not (isinstance(count, int) and isinstance(step, int) and isinstance(named, list | tuple) and step > 0):
        return ()
    return tuple(number for number in range(count) if number in named or (number + 1) % step)


_WHOLE: Final = "inputs(from = shard(1), to = replicate)"
_WHOLE_LOCAL: Final = "inputs(from = shard(1), to = replicate, local = true)"
_LOCAL: Final = "inputs(from = shard(1), to = replicate, local = true, then = outputs(from = replicate, to = shard(1)))"
_PIECES: Final = "inputs(from = shard(1), to = shard(1), local = true, then = outputs(from = shard(1), to = shard(1)))"
_ROWS: Final = "sequence(dim = 0, local = true)"
_GATHERING: Final = "colwise(input = shard(1)"
"""Prefix of the treatment of a layer that gathers its own input."""


def _overlapped(treatment: str) -> str:
    """The treatment with hidden communication in backward, where it gathers for column-wise layers alone."""
    gathers = treatment == _WHOLE or treatment.startswith(_GATHERING)
    return f"{treatment[:-1]}, overlap = backward)" if gathers else treatment


def _table(path: str) -> tuple[LayoutRule, ...]:
    """Style of an embedding whose output is sharded along the sequence where the option requests it."""
    return (
        LayoutRule(path, "rowwise(input = replicate)", sequence=False),
        LayoutRule(path, "rowwise(input = replicate, output = shard(1))", sequence=True),
    )


def _logits(norm: str, output: str) -> tuple[LayoutRule, ...]:
    """The last norm and the output layer of a decoder."""
    return (
        LayoutRule(norm, "sequence", sequence=True),
        LayoutRule(output, "colwise(output = replicate)", sequence=False, loss_parallel=False),
        LayoutRule(output, "colwise(loss_parallel = true)", sequence=False, loss_parallel=True),
        LayoutRule(output, "colwise(input = shard(1), output = replicate)", sequence=True, loss_parallel=False),
        LayoutRule(output, "colwise(input = shard(1), loss_parallel = true)", sequence=True, loss_parallel=True),
    )


def _part(holder: str, inner: str, last: str) -> tuple[LayoutRule, ...]:
    """Matrices of a block that come in pairs: the first by columns, the last by rows."""
    return (
        LayoutRule(holder, _WHOLE, sequence=True),
        *_pair(holder, inner, last)[:2],
        LayoutRule(f"{holder}.{last}", "rowwise(output = shard(1))", sequence=True),
    )


def _pair(holder: str, inner: str, last: str) -> tuple[LayoutRule, ...]:
    """The same without sequence parallelism."""
    return (
        LayoutRule(f"{holder}.{inner}", "colwise"),
        LayoutRule(f"{holder}.{last}", "rowwise", sequence=False),
    )


def _mixture(holder: str, *inside: str) -> tuple[LayoutRule, ...]:
    """A mixture of experts: the whole sequence, or a piece of it, of which layers inside take the tokens as rows."""
    return (
        LayoutRule(holder, _LOCAL, sequence=True, across_tp=False),
        LayoutRule(holder, _PIECES, sequence=True, across_tp=True),
        *(LayoutRule(f"{holder}.{name}", _ROWS, sequence=True, across_tp=True) for name in inside),
    )


def _experts(path: str) -> tuple[LayoutRule, ...]:
    return (
        LayoutRule(path, "experts", across_tp=False),
        LayoutRule(path, "experts(across_tp = true)", across_tp=True),
    )


def _norms(path: str) -> tuple[LayoutRule, ...]:
    return (LayoutRule(path, "sequence", sequence=True),)


_NO_IMAGE_LOSS: Final = "the classes of images are few, and its loss is computed on all of them"
_FUSED: Final = "has queries, keys and values in one layer, of which each rank would get one contiguous piece"
_DECODER: Final = (
    *_table("tok_embeddings"),
    *_logits("norm", "output"),
    *_norms("layers.*.{attention, ffn}_norm"),
    *_part("layers.*.attention", "{wq, wk, wv}", "wo"),
    LayoutRule("layers.*.attention.{q_norm, k_norm}", "heads", when="qk_norm"),
)
_GPT: Final = StandardLayouts(
    blocks="layers.*",
    tp=(
        *_table("tok_embeddings"),
        # Its output is added to that of `tok_embeddings`, and is sharded like it; alone it is too small to be sharded.
        LayoutRule("pos_embeddings", "rowwise(input = replicate, output = shard(1))", sequence=True),
        *_logits("norm", "output"),
        *_norms("layers.*.{attention, mlp}_norm"),
        *_part("layers.*.attention", "{wq, wk, wv}", "wo"),
        *_part("layers.*.mlp", "up", "down"),
    ),
)


BUILT_IN: Final[Mapping[str, StandardLayouts]] = {
    "llama3": StandardLayouts(blocks="layers.*", tp=(*_DECODER, *_part("layers.*.feed_forward", "{w1, w3}", "w2"))),
    "gpt2": _GPT,
    "gpt3": _GPT,
    "mixtral": StandardLayouts(
        blocks="layers.*",
        tp=(*_DECODER, *_mixture("layers.*.feed_forward", "router")),
        ep=_experts("layers.*.feed_forward.experts"),
    ),
    "deepseek": StandardLayouts(
        blocks="layers.*",
        tp=(
            *_table("tok_embeddings"),
            *_logits("norm", "output"),
            *_norms("layers.*.{attention, ffn}_norm"),
            # Latents are whole on every rank, and the layers that compute them have plain weights.
            LayoutRule("layers.*.attention", _WHOLE_LOCAL, sequence=True),
            LayoutRule("layers.*.attention.wq_b", "colwise", when="q_lora_rank"),
            LayoutRule("layers.*.attention.wq", "colwise", unless="q_lora_rank"),
            LayoutRule("layers.*.attention.wkv_b", "colwise"),
            LayoutRule("layers.*.attention.k_rope", "shared"),
            LayoutRule("layers.*.attention.wo", "rowwise", sequence=False),
            LayoutRule("layers.*.attention.wo", "rowwise(output = shard(1))", sequence=True),
            *_mixture("layers.*.feed_forward", "router"),
            LayoutRule(
                "layers.*.feed_forward.shared.{w1, w2, w3}", "sequence(local = true)", sequence=True, across_tp=True
            ),
            *_part(f"layers.{DENSE}.feed_forward", "{w1, w3}", "w2"),
        ),
        ep=_experts("layers.*.feed_forward.experts"),
    ),
    "vit": StandardLayouts(
        blocks="layers.*",
        tp=(
            LayoutRule("embedding", "outputs(from = replicate, to = shard(1))", sequence=True),
            *_norms("layers.*.{attention, mlp}_norm"),
            *_part("layers.*.attention", "{wq, wk, wv}", "wo"),
            *_part("layers.*.mlp", "up", "down"),
            # The class token, the only one that the head reads, is on one of the ranks.
            LayoutRule("norm", "inputs(from = shard(1), to = replicate, local = true)", sequence=True),
            LayoutRule("head", "colwise(output = replicate)"),
        ),
        reasons={"loss_parallel": _NO_IMAGE_LOSS},
    ),
}
"""Layouts of the built-in families."""


def _decoder_of_others(
    *feed_forward: LayoutRule,
    attention: str = "{q_proj, k_proj, v_proj}",
    output: str = "o_proj",
    norms: str = "{input_layernorm, post_attention_layernorm}",
    last_norm: str = "model.norm",
) -> tuple[LayoutRule, ...]:
    """A decoder of `transformers`, which counts positions from the length of its embedding's output.

    The embedding's output is therefore replicated, and is sharded before the first block.
    """
    return (
        LayoutRule("model.embed_tokens", "rowwise(input = replicate)"),
        *_logits(last_norm, "lm_head"),
        LayoutRule("model.layers.0", "inputs(from = replicate, to = shard(1), local = true)", sequence=True),
        *_norms(f"model.layers.*.{norms}"),
        *_part("model.layers.*.self_attn", attention, output),
        *feed_forward,
    )


_SWIGLU: Final = _part("model.layers.*.mlp", "{gate_proj, up_proj}", "down_proj")
_NORMS_OF_HEADS: Final = LayoutRule("model.layers.*.self_attn.{q_norm, k_norm}", "heads")
_MIXTURE: Final = _mixture("model.layers.*.mlp", "gate")
_EXPERTS: Final = _experts("model.layers.*.mlp.experts")
_DENSE_BLOCKS: Final = _part(f"model.layers.{DENSE}.mlp", "{gate_proj, up_proj}", "down_proj")

_LLAMA: Final = StandardLayouts(blocks="model.layers.*", tp=_decoder_of_others(*_SWIGLU))


def _without(rules: tuple[LayoutRule, ...], *options: str) -> tuple[LayoutRule, ...]:
    """The rules of a family that has no forms with these options."""
    return tuple(rule for rule in rules if not any(getattr(rule, option) for option in options))


_NORMS_BEHIND: Final = "its norms behind attention and feed-forward give DTensors, which are added to plain tensors"
_SCALED: Final = "its logits are scaled behind the layer that computes them"

HUGGING_FACE: Final[Mapping[str, StandardLayouts]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral3": _LLAMA,
    "qwen2": _LLAMA,
    "smollm3": _LLAMA,
    "granite": StandardLayouts(
        blocks="model.layers.*", tp=_without(_LLAMA.tp, "loss_parallel"), reasons={"loss_parallel": _SCALED}
    ),
    "gemma": _LLAMA,
    "qwen3": StandardLayouts(blocks="model.layers.*", tp=(*_LLAMA.tp, _NORMS_OF_HEADS)),
    "gemma2": StandardLayouts(
        blocks="model.layers.*",
        tp=_without(_LLAMA.tp, "sequence", "loss_parallel"),
        reasons={"sequence": _NORMS_BEHIND, "loss_parallel": _SCALED},
    ),
    "gemma3_text": StandardLayouts(
        blocks="model.layers.*",
        tp=(*_without(_LLAMA.tp, "sequence"), _NORMS_OF_HEADS),
        reasons={"sequence": _NORMS_BEHIND},
    ),
    "starcoder2": StandardLayouts(
        blocks="model.layers.*", tp=_decoder_of_others(*_part("model.layers.*.mlp", "c_fc", "c_proj"))
    ),
    "phi": StandardLayouts(
        blocks="model.layers.*",
        tp=(
            *_decoder_of_others(
                *_part("model.layers.*.mlp", "fc1", "fc2"),
                output="dense",
                norms="input_layernorm",
                last_norm="model.final_layernorm",
            ),
            LayoutRule("model.layers.*.self_attn.{q_layernorm, k_layernorm}", "heads", when="qk_layernorm"),
        ),
    ),
    "mixtral": StandardLayouts(blocks="model.layers.*", tp=_decoder_of_others(*_MIXTURE), ep=_EXPERTS),
    "qwen2_moe": StandardLayouts(
        blocks="model.layers.*",
        tp=_decoder_of_others(
            *_mixture(
                "model.layers.*.mlp", "gate", "shared_expert.{gate_proj, up_proj, down_proj}", "shared_expert_gate"
            ),
            *_DENSE_BLOCKS,
        ),
        ep=_EXPERTS,
    ),
    "qwen3_moe": StandardLayouts(
        blocks="model.layers.*", tp=(*_decoder_of_others(*_MIXTURE, *_DENSE_BLOCKS), _NORMS_OF_HEADS), ep=_EXPERTS
    ),
    "deepseek_v3": StandardLayouts(
        blocks="model.layers.*",
        ep=_EXPERTS,
        reasons={"tp": "the rotated part of its keys is one for all heads, and no module of its own computes it"},
    ),
    "phi3": StandardLayouts(blocks="model.layers.*", reasons={"tp": f"its attention {_FUSED}"}),
    "olmo2": StandardLayouts(
        blocks="model.layers.*",
        reasons={"tp": "its norms of queries and keys are taken over all heads, of which each rank would have some"},
    ),
    "gpt2": StandardLayouts(blocks="transformer.h.*", reasons={"tp": f"its `c_attn` {_FUSED}"}),
    "gpt_neox": StandardLayouts(blocks="gpt_neox.layers.*", reasons={"tp": f"its attention {_FUSED}"}),
    "t5": StandardLayouts(
        blocks="{encoder, decoder}.block.*",
        reasons={"tp": "its attention makes a bias for all heads, of which each rank would have some"},
    ),
    "vit": StandardLayouts(
        blocks="vit.layers.*",
        tp=(
            *_pair("vit.layers.*.attention", "{q_proj, k_proj, v_proj}", "o_proj"),
            *_pair("vit.layers.*.mlp", "fc1", "fc2"),
            LayoutRule("classifier", "colwise(output = replicate)"),
        ),
        reasons={
            "sequence": "how many tokens an image becomes is not known",
            "loss_parallel": _NO_IMAGE_LOSS,
        },
    ),
    "clip": StandardLayouts(
        blocks="{text_model, vision_model}.encoder.layers.*",
        tp=(
            LayoutRule("text_model.embeddings.token_embedding", "rowwise(input = replicate)"),
            *_pair("{text_model, vision_model}.encoder.layers.*.self_attn", "{q_proj, k_proj, v_proj}", "out_proj"),
            *_pair("{text_model, vision_model}.encoder.layers.*.mlp", "fc1", "fc2"),
        ),
        reasons={
            "sequence": "how many tokens an image becomes is not known",
            "loss_parallel": "its loss compares images with texts, and knows no vocabulary",
        },
    ),
    "convnextv2": StandardLayouts(
        blocks="convnextv2.encoder.stages.*.layers.*", reasons={"tp": "no style cuts its convolutions"}
    ),
}
"""Layouts of Hugging Face models, by the `model_type` of their config."""
