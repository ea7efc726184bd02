"""Floating-point operations of a decoder in one step, independent of how it is trained."""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.attention import head_widths
from legoai.specs.cluster import CatalogueError
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo

DECODERS: Final = ("llama3", "gpt2", "gpt3", "mixtral", "deepseek")
"""Built-in families in which every matrix multiplies every token once, or the tokens that are routed to it."""

FEATURES_KNOWN: Final = ("llama3", "gpt2", "gpt3", "mixtral")
"""Those whose attention keeps queries, keys and values of one width for backward, all computed from its input."""

FORMULA: Final = "6 N + 12 L H Q T per token"

FORWARD_AND_BACKWARD: Final = 3
"""Over forward alone: a product has two in its backward, one for each factor."""


def flops_per_token(manifest: Manifest, seq_len: int) -> int:
    """Operations of a token's forward and backward through a decoder, without recomputation.

    They are `6 N + 12 L H Q T` (PaLM, arXiv 2204.02311, appendix B; TorchTitan's `get_num_flop_per_token`): N are the
    elements of matrices that multiply tokens, without embedding tables, of experts those to which a token is routed,
    and the second term is attention in L layers of H heads of width Q over T tokens, without regard to a causal mask;
    where values have another width than queries, Q is the mean of the two. A token that an expert drops for want of
    capacity counts like any other, as in TorchTitan and Megatron-LM, which count active parameters too.
    """
    return FORWARD_AND_BACKWARD * forward_flops_per_token(manifest, seq_len)


def forward_flops_per_token(manifest: Manifest, seq_len: int) -> int:
    """Operations of one token's forward through a decoder, two for a multiply-add."""
    return sum(forward_flops_of_modules(manifest, seq_len).values())


def forward_flops_of_modules(manifest: Manifest, seq_len: int) -> dict[str, int]:
    """Operations of one token's forward through each module of a decoder that has some of its own, by path."""
    found = {}
    for path, module in manifest.modules.items():
        if module.kind == "linear":
            found[path] = 2 * int(module.attributes["in_features"]) * int(module.attributes["out_features"])
        elif module.kind == "attention":
            found[path] = 2 * int(module.attributes["n_heads"]) * sum(head_widths(module)) * seq_len
        elif module.kind == "experts":
            found[path] = 2 * routed_elements(manifest, module)
    return found


def routed_elements(manifest: Manifest, experts: ModuleInfo) -> int:
    """Return the elements of the experts' weights that multiply a token: those of the experts to which it is routed."""
    router = manifest.modules[experts.path.rpartition(".")[0]]
    elements = sum(item.numel for item in experts.parameters)
    return elements * int(router.attributes["top_k"]) // int(experts.attributes["n_experts"])


def published_peak(analysis: Analysis) -> float | None:
    """Return the operations per second of the plan's GPU in dense products of its dtype; None without a datasheet.

    Raises:
        Undecided: the device is a hole.
    """
    device = analysis.device
    if device is None or device.kind == "cpu":
        return None
    try:
        return device.peak(analysis.plan.precision.param)
    except CatalogueError:
        return None
