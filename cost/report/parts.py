"""Parts of a step's time."""

from __future__ import annotations

from typing import Final

from legoai.cost.estimate import Estimate

COMPUTATION: Final = "computation"
COMMUNICATION: Final = "exposed communication"
COPIES: Final = "exposed copies to and from the host"
HOST: Final = "computation on the host"
BUBBLE: Final = "pipeline bubble"
LAUNCH: Final = "waiting for the host to launch"


def parts(estimate: Estimate) -> dict[str, float]:
    """Seconds of each part on the busiest rank; they add up to the step."""
    one = estimate.slowest.breakdown
    bubble = min(one.idle, estimate.slowest.bubble * estimate.step_time)
    return {
        COMPUTATION: one.compute,
        COMMUNICATION: one.exposed,
        COPIES: one.copies,
        HOST: one.host,
        BUBBLE: bubble,
        LAUNCH: one.idle - bubble,
    }
