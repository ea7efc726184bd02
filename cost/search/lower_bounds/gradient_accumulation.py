"""Lower bound of the time of accumulating unsharded gradients over micro batches that are not reduced.

Behind each backward of a unit its gradients are added to those of the micro batches before: what was added up is read
and written in the dtype in which it is reduced, and the new ones are read in that of the parameters. Where backward is
in halves, some are added up in the dtype of the parameters.
"""

from __future__ import annotations

from typing import Final

from legoai.cost.kernels.kinds import KindAndForm
from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.local_kernels import least_moved
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, passes
from legoai.dsl.analysis.communication.comm import reduces_last
from legoai.dsl.analysis.computation.precision import computes_in_float8
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.specs.dtypes import DTYPE_BYTES

_SUM: Final[KindAndForm] = ("elementwise", "")
_SUM_OF_DTYPES: Final[KindAndForm] = ("elementwise", "unvectorised")


def adding_up(analysis: Analysis, machine: Machine, summed: float, *, halves: bool) -> float:
    """Least seconds of a step.

    Args:
        analysis: of a plan whose mesh and batch are decided.
        machine: on which it runs.
        summed: bytes of the gradients that a rank adds up, in the dtype in which they are reduced.
        halves: whether backward is in halves.

    Raises:
        Undecided: it depends on a hole.
    """
    plan, staged = analysis.plan, is_staged(analysis)
    batches = micro_batches(plan)
    times = passes(plan) if staged else 1
    known = plan.fsdp is not None and plan.offload is None and plan.compile is None and plan.precision.gradient is None
    if batches is None or times is None or not known or is_traced(analysis) or computes_in_float8(plan.precision):
        return 0.0
    if not staged and not reduces_last(analysis):
        return 0.0
    reduced, new = DTYPE_BYTES[plan.precision.reduce], DTYPE_BYTES[plan.precision.param]
    old = min(reduced, new) if halves else reduced
    moved = summed * (2 * old + min(reduced, new)) / reduced
    return (batches - times) * least_moved([_SUM if old == new else _SUM_OF_DTYPES], moved, machine.profile)
