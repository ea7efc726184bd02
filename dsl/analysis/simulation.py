"""Models that cannot be simulated."""

from __future__ import annotations

from typing import NamedTuple

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.model import help_to_follow, shaped_by_values, synchronised_norms
from legoai.dsl.analysis.parallelism.mesh import all_ranks


class NotSimulated(NamedTuple):
    """Why a model cannot be simulated, though it can be lowered and run."""

    cause: str
    """What the model does, as of "it"."""
    help: tuple[str, ...]


def not_simulated(analysis: Analysis) -> NotSimulated | None:
    """Why the model cannot be simulated; None where it can."""
    function = shaped_by_values(analysis)
    if function is not None:
        return NotSimulated(f"has shapes that depend on values (`{function}`)", help_to_follow(analysis))
    norms = synchronised_norms(analysis)
    if norms and analysis.device_kind != "cpu" and all_ranks(analysis) > 1:
        cause = f"normalises by the samples of all ranks (`{norms[0]}`)"
        return NotSimulated(cause, ("take a normalisation of each rank's samples, as `nn.GroupNorm` is",))
    return None
