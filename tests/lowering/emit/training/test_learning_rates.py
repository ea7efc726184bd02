"""Programs follow their learning-rate schedules, as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from legoai.lowering.verify.one_device import _factor
from support.texts.plans import lowered, resolved

HEAD = """plan a
model llama3("tiny")
cluster cpu
batch (global = 4, micro = 1, seq_len = 64)
optimizer adamw(lr = 2e-3)
"""
SCHEDULES = {
    "wsd(steps = 20, warmup = 4, decay = 8)": {0: 0.25, 3: 1.0, 4: 1.0, 12: 1.0, 16: 0.5, 20: 0.0, 30: 0.0},
    "wsd(steps = 20, warmup = 10%, decay = 50%, shape = cosine)": {0: 0.5, 1: 1.0, 10: 1.0, 15: 0.5, 20: 0.0},
    "wsd(steps = 20, decay = 4, shape = sqrt, floor = 0.5)": {0: 1.0, 16: 1.0, 17: 0.75, 20: 0.5},
    "cosine(steps = 20, warmup = 20%, floor_lr = 1e-3)": {0: 0.25, 4: 1.0, 12: 0.75, 20: 0.5},
    "linear(steps = 20, floor_lr = 5e-4)": {0: 1.0, 10: 0.625, 20: 0.25},
    "cosine(steps = 20, warmup = 5, floor = 0.1)": {0: 0.2, 5: 1.0, 20: 0.1},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_program_learning_rates_equal_one_device(schedule: str):
    text = f"{HEAD}schedule {schedule}\n"
    program: dict[str, Any] = {"__name__": "lowered"}
    exec(lowered(text).text, program)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    scheduler = program["build_lr_scheduler"](optimizer)
    plan, rates = resolved(text), []
    for _ in range(31):
        rates.append(optimizer.param_groups[0]["lr"] / 2e-3)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([_factor(plan, step) for step in range(31)], abs=1e-12)
    assert {step: rates[step] for step in SCHEDULES[schedule]} == pytest.approx(SCHEDULES[schedule], abs=1e-12)
