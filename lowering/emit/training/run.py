"""`data`, `weights`, `save`, `evaluate`, `seed` and `steps`: defaults of a run's command line."""

from __future__ import annotations

from typing import Final

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import literal, quoted
from legoai.specs.directives.schedule import Constant
from legoai.specs.plan import Plan

_ARGUMENTS: Final = {
    "data": {"source": "data", "field": "data_field", "tokenizer": "tokenizer"},
    "weights": {"huggingface": "load_weights"},
    "steps": {"count": "steps"},
    "seed": {"value": "seed"},
    "save": {"every": "save_every", "asynchronous": "save_async", "keep": "keep"},
    "evaluate": {"every": "evaluate_every", "batches": "evaluate_batches"},
}
"""For each option of each statement, the argument of `legoai.runtime.Trainer` that it sets."""


def planned(plan: Plan) -> dict[str, str | int]:
    """Return the plan's settings of a run, by arguments of `legoai.runtime.Trainer`: defaults of its command line."""
    form = plan.schedule.form
    found: dict[str, str | int] = {} if isinstance(form, Constant) else {"steps": form.steps}
    for keyword, arguments in _ARGUMENTS.items():
        statement = getattr(plan, keyword)
        if statement is not None:
            found |= {argument: getattr(statement, name) for name, argument in arguments.items()}
    return found


def emit_data(lowering: Lowering, draft: Draft) -> None:
    """Add the data, and the field of a JSONL object where the plan names one."""
    _emit(lowering, draft, "data")


def emit_weights(lowering: Lowering, draft: Draft) -> None:
    """Add the folder of the initial weights."""
    _emit(lowering, draft, "weights")


def emit_steps(lowering: Lowering, draft: Draft) -> None:
    """Add the number of steps, in place of the schedule's."""
    _emit(lowering, draft, "steps")


def emit_seed(lowering: Lowering, draft: Draft) -> None:
    """Add the seed."""
    _emit(lowering, draft, "seed")


def emit_save(lowering: Lowering, draft: Draft) -> None:
    """Emit when checkpoints are saved, and how many are kept."""
    _emit(lowering, draft, "save")


def emit_evaluate(lowering: Lowering, draft: Draft) -> None:
    """Emit when validation runs, and on how much data."""
    _emit(lowering, draft, "evaluate")


def _emit(lowering: Lowering, draft: Draft, keyword: str) -> None:
    statement = getattr(lowering.plan, keyword)
    if statement is None:
        return
    for name, argument in _ARGUMENTS[keyword].items():
        value = getattr(statement, name)
        if isinstance(value, bool) and value == statement.option(name).default:
            continue
        if isinstance(value, int):
            draft.train_with(argument, literal(value), lowering.note(statement, name))
        elif name == "source" or value != statement.option(name).default:
            draft.train_with(argument, quoted(value), lowering.note(statement, name))
