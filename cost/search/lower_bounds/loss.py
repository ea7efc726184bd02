"""Lower bound of the time of a loss beside the layers: its kernels read and write the logits of each micro batch."""

from __future__ import annotations

from typing import Final

from legoai.cost.kernels.work import Movement, MovementKind
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.kernel_time import seconds_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.precision import output_bytes
from legoai.dsl.analysis.magnitudes.bounds import local_logits
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.specs.directives.loss import ChunkedLoss, EagerLoss
from legoai.specs.models.reads import Tokens

_KINDS: Final[tuple[MovementKind, ...]] = ("copy", "elementwise", "softmax", "reduction", "loss")
"""What its kernels may be, on one rank or on several that share the vocabulary."""
_LOG_SOFTMAX: Final = 2
_OF_ITS_BACKWARD: Final = 1 + 3
"""Passes over the logits: a gradient is written, and then read with the logarithms, for that of the logits."""
_LEAST: Final = 4
"""Bytes of a logit in these."""


def seconds_of_loss(analysis: Analysis, machine: Machine) -> float:
    """Least seconds of a micro batch's loss, forward and backward; 0 where a compiler chooses its kernels.

    Args:
        analysis: of a plan whose mesh and micro batch are decided.
        machine: on which it runs.

    Raises:
        Undecided: the form of the loss is a hole.
    """
    plan, logits = analysis.plan, local_logits(analysis)
    known = isinstance(plan.loss.form, EagerLoss | ChunkedLoss) and plan.compile is None and not is_traced(analysis)
    if not known or not logits or analysis.manifest is None or not isinstance(analysis.manifest.reads, Tokens):
        return 0.0
    size = output_bytes(plan.precision)
    exact = max(_LEAST, size)
    casts = 2 * (size + exact) if size < exact else 0
    moved = logits * (casts + (_LOG_SOFTMAX + _OF_ITS_BACKWARD) * exact)
    works = (Movement(kind=kind, bytes=moved, rate=plan.precision.param) for kind in _KINDS)
    return min(seconds_of(work, machine.profile)[0] for work in works)
