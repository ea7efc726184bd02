"""Bounds of memory, rules and checkpoints of models in which some parameters have no gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.state import StateBytes, state_bytes
from legoai.dsl.differences.checkpoints import loading
from legoai.dsl.lint import lint
from support.models import frozen_models
from support.texts.rule_plans import codes, message

PLAN = """
plan test
model   python("support.models.frozen_models:{factory}"{sizes})
cluster h100_sxm(devices = 2)
batch   (global = 4, micro = 1, seq_len = 16)
mesh    (dp_shard = 2)
fsdp    on dp_shard {{ layers.* = unit }}
optimizer adamw(lr = 1e-3)
"""


def analysed(factory: str, *, sizes: str = "") -> Analysis:
    found = lint(PLAN.format(factory=factory, sizes=sizes), "test.plan", directory=Path())
    assert found.analysis is not None and not found.has_errors, found.diagnostics
    return found.analysis


def held(factory: str) -> StateBytes:
    """Bytes after an update on one device."""
    model = getattr(frozen_models, factory)()
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-3)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    return StateBytes(
        parameters=sum(item.nbytes for item in model.parameters()),
        gradients=sum(item.grad.nbytes for item in model.parameters() if item.grad is not None),
        optimizer=sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim),
    )


@pytest.mark.parametrize("factory", ["whole", "added_layers", "head_alone", "spare_layer", "spare_tied"])
def test_memory_bound_is_the_state_of_pytorch(factory: str) -> None:
    found, real = state_bytes(analysed(factory)), held(factory)
    assert found is not None
    assert found == StateBytes(
        parameters=real.parameters // 2, gradients=real.gradients // 2, optimizer=real.optimizer // 2
    )


def test_budget_that_a_frozen_model_keeps_is_clean() -> None:
    found = {}
    for factory in ("whole", "added_layers"):
        text = PLAN.format(factory=factory, sizes=", dim = 1024, depth = 8") + "require peak_memory <= 0.4GiB\n"
        found[factory] = {item.code for item in lint(text, "test.plan", directory=Path()).diagnostics}
    assert "LP703" in found["whole"]
    assert "LP703" not in found["added_layers"]


def test_group_of_frozen_parameters_changes_nothing() -> None:
    model = 'model python("support.models.frozen_models:added_layers")\n'
    model += "optimizer adamw(lr = 1e-3) {{ {} = group(lr = 1e-4) }}"
    assert "the model freezes `layers.0.up.weight` and `layers.1.up.weight`" in message(
        model.format("layers.*.up"), "LP686"
    )
    assert "LP686" not in codes(model.format("layers.*"))


def test_optimizer_state_of_parameters_that_were_frozen_is_not_in_checkpoints() -> None:
    tuned, whole = analysed("added_layers"), analysed("whole")
    found = loading(tuned, whole)
    assert found.verdict == "resumes"
    factory, fresh = found.notes
    assert factory.startswith("the model's factory is another")
    expected = (
        "the optimizer starts afresh with `layers.0.norm.weight` (and 7 more), frozen in the model of the checkpoint"
    )
    assert fresh == expected
    assert len(loading(whole, tuned).notes) == 1
    assert loading(whole, whole).notes == ()
