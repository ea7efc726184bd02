"""Messages of a failed job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai.lowering.verify.processes import JobError, Processes


def stage(tell: Callable[[str], None], hear: Callable[[], Any]) -> Any:
    """Fail as a stage of a pipeline does, whose error shows the arguments alone."""
    try:
        raise AttributeError("no weight here")
    except AttributeError as error:
        raise RuntimeError("[Stage 1] failed to run forward: args: ('Tensor(dtype=torch.float64)',)") from error


def test_error_of_a_stage_is_its_cause(tmp_path: Path):
    with (
        Processes({"rank 1": stage}, tmp_path, silence=60.0, watch=lambda told: None) as processes,
        pytest.raises(JobError) as raised,
    ):
        processes.results(["rank 1"])
    assert raised.value.message == "AttributeError: no weight here"
