"""Lower bound of the time of the optimizer's update: its kernels read and write the state of a rank's parameters."""

from __future__ import annotations

from typing import Final

from legoai.cost.kernels.kinds import KindAndForm
from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.local_kernels import least_moved
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters

_KERNELS: Final[tuple[KindAndForm, ...]] = (("optimizer", ""), ("elementwise", "foreach"))
"""What its kernels are: one that is fused for all, or operators on lists of tensors."""


def seconds_of_update(analysis: Analysis, machine: Machine) -> float:
    """Least seconds of a mean rank's update; 0 where the host may do a part of it.

    Trained parameters and moments are read and written, and gradients, which are no wider than parameters, are read.

    Args:
        analysis: of a plan whose mesh is decided.
        machine: on which it runs.

    Raises:
        Undecided: the state depends on a hole.
    """
    state = state_bytes(analysis)
    if state is None or analysis.plan.offload is not None:
        return 0.0
    parameters = min(state.parameters, state.gradients) if untrained_parameters(analysis) else state.parameters
    moved = 2 * (parameters + state.optimizer) + state.gradients
    return least_moved(_KERNELS, moved, machine.profile)
