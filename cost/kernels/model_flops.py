"""Floating-point operations that a model asks for, however it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from legoai.cost.trace.records import Kernel
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.specs.models.manifest import Manifest, ModuleInfo
from legoai.specs.plan import Plan

DECODERS: Final = ("llama3", "gpt2", "gpt3", "mixtral")
"""Built-in families of which every matrix sees every token once, or the tokens that are routed to it."""

FORMULA: Final = "6 N + 12 L H Q T per token"
CAPTURED: Final = "3 times the forward products that were captured, on all ranks"

_BACKWARD: Final = 3
"""Forward and backward over forward: a product has two in its backward, one for each factor."""


def model_flops(plan: Plan, manifest: Manifest, steps: Sequence[Sequence[Item]]) -> tuple[float, str]:
    """Operations that the model itself asks for in one optimizer step, on all devices, and by which convention.

    For the built-in decoders it is `6 N + 12 L H Q T` for each token (PaLM, arXiv 2204.02311, appendix B; TorchTitan's
    `get_num_flop_per_token`): N are the elements of matrices that multiply tokens, without embedding tables, of experts
    those to which a token is routed, and the second term is attention in L layers of H heads of width Q over T tokens,
    without regard to a causal mask. For other models it is three times the products of the forward that a rank was
    seen to run, times the ranks; what several ranks repeat counts as often. Recomputation never counts.

    Args:
        plan: the plan.
        manifest: of its model.
        steps: the items of one step, of one rank for each stage of a pipeline.
    """
    if plan.model.family in DECODERS:
        length = plan.batch.seq_len
        assert length is not None, "a decoder reads sequences"
        tokens = plan.batch.global_batch * length
        return float(tokens * _BACKWARD * forward_flops_per_token(manifest, length)), FORMULA
    forward = sum(_forward(item) for items in steps for item in items)
    return float(_BACKWARD * forward * plan.mesh.world_size / len(steps)), CAPTURED


class ForwardFlops:
    """Operations of a segment's kernels in forward."""

    def __init__(self, segment: Segment) -> None:
        self.total = sum(map(_forward, segment.records))


def _forward(item: Item) -> int:
    """Operations of an item of a trace in forward."""
    if isinstance(item, Instance):
        return item.segment.summary(ForwardFlops).total
    return item.flops if isinstance(item, Kernel) and item.phase == "forward" else 0


def forward_flops_per_token(manifest: Manifest, seq_len: int) -> int:
    """Operations of one token's forward through a decoder, two for a multiply-add."""
    total = 0
    for module in manifest.modules.values():
        if module.kind == "linear":
            total += 2 * int(module.attributes["in_features"]) * int(module.attributes["out_features"])
        elif module.kind == "attention":
            total += 4 * int(module.attributes["n_heads"]) * int(module.attributes["head_dim"]) * seq_len
        elif module.kind == "experts":
            total += 2 * routed_elements(manifest, module)
    return total


def routed_elements(manifest: Manifest, experts: ModuleInfo) -> int:
    """Elements of the experts' weights through which a token goes: of those to which it is routed."""
    router = manifest.modules[experts.path.rpartition(".")[0]]
    elements = sum(item.numel for item in experts.parameters)
    return elements * int(router.attributes["top_k"]) // int(experts.attributes["n_experts"])
