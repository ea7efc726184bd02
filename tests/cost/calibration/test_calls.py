"""Host time of calls, measured on this processor."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size

from legoai.cost.calibration import calls
from legoai.cost.calibration.calls import call_constants
from legoai.cost.calibration.host import HostTimer
from legoai.cost.timing.timeline import call_constant
from legoai.cost.trace.records import CALLS


@pytest.mark.slow
def test_every_call_has_a_time_on_this_processor() -> None:
    found = call_constants("cpu")
    seconds = {call: found[call_constant(call)]["value"] for call in CALLS}
    assert len(found) == len(CALLS)
    assert all(0.0 <= one < 1e-2 for one in seconds.values())
    # A collective of DTensor takes several conversions' time, and a parameter a small part of its unit's.
    assert seconds["functional collective"] > 2 * seconds["conversion"] > 2 * seconds["function"]
    assert seconds["gather"] > 2 * seconds["gathered parameter"] > 0
    assert not dist.is_initialized()


def test_parts_share_the_seconds_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []

    def least(timer: HostTimer, *_: object) -> float:
        budgets.append(timer.budget)
        return 1.0

    monkeypatch.setattr(HostTimer, "least", least)
    monkeypatch.setattr(calls, "python_seconds", lambda device: 1e-6)
    unwaited = _get_work_registry_size()
    assert set(call_constants("cpu", 5.0)) == {call_constant(call) for call in CALLS}
    assert sum(budgets) == pytest.approx(5.0)
    assert _get_work_registry_size() == unwaited, "torch warns of these when the process ends"
