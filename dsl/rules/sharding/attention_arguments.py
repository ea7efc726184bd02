"""`context`: a rule about the arguments of attention over the pieces of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.computation.attention import attention_modules
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class AttentionArguments(Check):
    """Context parallelism for attention that is not computed over the pieces of a sequence.

    The ranks of `cp` compute `torch.nn.functional.scaled_dot_product_attention` together, on queries, keys and values
    [batch, heads, tokens, head_dim] of the same tokens. It may be causal (`is_causal = True`). It has no mask
    (`attn_mask`), whose rows and columns would have to be those of a rank's tokens, and no dropout in training
    (`dropout_p`). Where several heads of queries share one of keys, `enable_gqa = True` says so.

    The built-in models call it so. A factory's model is traced in the mode in which the factory returns it.

    Not `scaled_dot_product_attention(q, k, v, attn_mask=causal_mask)`, but `scaled_dot_product_attention(q, k, v,
    is_causal=True)`.
    """

    code = "LP316"
    slug = "attention-arguments"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, use = analysis.manifest, analysis.plan.context
        if use is None or manifest is None or manifest.flow_error is not None or analysis.plan.mesh.cp == 1:
            return
        told = set()
        for path in attention_modules(analysis):
            template = manifest.template_of(path)
            if template in told:
                continue
            told.add(template)
            misfit = next(filter(None, (call.misfit() for call in manifest.modules[path].attention_calls)), None)
            if misfit is None:
                continue
            yield self.at(
                analysis.span_of(use, "axes"),
                f"`context on cp` cannot compute the attention of `{general(manifest, path)}` over the pieces of a "
                f"sequence: its forward calls `scaled_dot_product_attention` with {misfit.given}",
                label="cuts sequences between ranks",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), "this model")],
                help=[misfit.help, "or use the devices for `dp_shard` or `tp`"],
            )
