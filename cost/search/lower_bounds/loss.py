"""Lower bound of the time of a loss beside the layers: its kernels read and write the logits of each micro batch."""

from __future__ import annotations

from typing import Final

from legoai.cost.kernels.kinds import KindAndForm
from legoai.cost.kernels.work import LONG_ROW
from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.local_kernels import least_moved
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.compile import compiles_only_blocks
from legoai.dsl.analysis.computation.precision import output_bytes
from legoai.dsl.analysis.magnitudes.bounds import local_logits
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.training.loss import layer_of_loss, pieces_of_last_layer
from legoai.specs.directives.loss import ChunkedLoss, EagerLoss
from legoai.specs.dtypes import DTYPE_BYTES

_SHARED: Final[tuple[KindAndForm, ...]] = (
    ("copy", ""), ("elementwise", ""), ("softmax", ""), ("reduction", ""), ("loss", ""),
)  # fmt: skip
"""What its kernels may be on ranks that share the vocabulary."""
_OF_LONG: Final[dict[KindAndForm, int]] = {("softmax", "long"): 2, ("loss", ""): 1, ("softmax", "long backward"): 3}
_OF_SHORT: Final[dict[KindAndForm, int]] = {("softmax", ""): 2, ("loss", ""): 1, ("softmax", "backward"): 3}
"""Passes over the logits: their logarithms; the gradient of these, and of the logits."""
_SUM: Final = 3
"""Passes over a gradient that is added to another: two are read, and one is written."""
_SCALED: Final = 2
"""Passes over one that is scaled in place."""
_CASTS: Final[tuple[KindAndForm, ...]] = (("copy", ""), ("copy", "unvectorised"))
"""Of the logits to a wider dtype, and of their gradient from it."""
_LEAST: Final = 4
"""Bytes of a logit in these."""


def seconds_of_loss(analysis: Analysis, machine: Machine) -> float:
    """Least seconds of a micro batch's loss, forward and backward; 0 where a compiler chooses its kernels.

    Args:
        analysis: of a plan whose mesh and micro batch are decided.
        machine: on which it runs.

    Raises:
        Undecided: the form of the loss is a hole, or which modules are compiled.
    """
    plan, logits = analysis.plan, local_logits(analysis)
    eager = isinstance(plan.loss.form, EagerLoss | ChunkedLoss) and not is_traced(analysis)
    if (
        not eager
        or not compiles_only_blocks(analysis)
        or not logits
        or analysis.manifest is None
        or not analysis.manifest.reads_tokens
    ):
        return 0.0
    size = output_bytes(plan.precision)
    exact = max(_LEAST, size)
    summed = _seconds_of_sums(analysis, machine)
    if plan.mesh.tp > 1:
        casts = 2 * (size + exact) if size < exact else 0
        return summed + least_moved(_SHARED, logits * (casts + sum(_OF_LONG.values()) * exact), machine.profile)
    long = analysis.manifest.vocab_size is not None and analysis.manifest.vocab_size > LONG_ROW
    moved: dict[KindAndForm, int] = {one: passes * exact for one, passes in (_OF_LONG if long else _OF_SHORT).items()}
    if size < exact:
        moved |= dict.fromkeys(_CASTS, size + exact)
    return summed + sum(least_moved([one], logits * each, machine.profile) for one, each in moved.items())


def _seconds_of_sums(analysis: Analysis, machine: Machine) -> float:
    """Least seconds in which the gradients of a last layer in pieces are summed, and scaled in backward."""
    plan, manifest, layer = analysis.plan, analysis.manifest, layer_of_loss(analysis)
    if layer is None or manifest is None:
        return 0.0
    pieces = pieces_of_last_layer(plan.loss.form)
    weights = sum(item.numel for item in manifest.modules[layer].parameters if not item.frozen) // plan.mesh.tp
    size = min(DTYPE_BYTES[plan.precision.param], DTYPE_BYTES[plan.precision.master])
    return least_moved([("elementwise", "")], weights * size * (_SUM * (pieces - 1) + _SCALED), machine.profile)
