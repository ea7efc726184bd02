"""`data`, `save`, `evaluate`, `seed` and `steps`: what the trainer does where the command line does not say."""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import literal, quoted


def emit_data(lowering: Lowering, draft: Draft) -> None:
    """Add the data, and the field of a JSONL object where the plan names one."""
    data = lowering.plan.data
    if data is not None:
        draft.train_with("data", quoted(data.source), lowering.note(data, "source"))
        if data.field != data.option("field").default:
            draft.train_with("data_field", quoted(data.field), lowering.note(data, "field"))


def emit_steps(lowering: Lowering, draft: Draft) -> None:
    """Add the number of steps, in place of the schedule's."""
    steps = lowering.plan.steps
    if steps is not None:
        draft.train_with("steps", literal(steps.count), lowering.note(steps, "count"))


def emit_seed(lowering: Lowering, draft: Draft) -> None:
    """Add the seed."""
    seed = lowering.plan.seed
    if seed is not None:
        draft.train_with("seed", literal(seed.value), lowering.note(seed, "value"))


def emit_save(lowering: Lowering, draft: Draft) -> None:
    """Add when checkpoints are saved, and how many are kept."""
    save = lowering.plan.save
    if save is not None:
        draft.train_with("checkpoint_every", literal(save.every), lowering.note(save, "every"))
        draft.train_with("keep", literal(save.keep), lowering.note(save, "keep"))


def emit_evaluate(lowering: Lowering, draft: Draft) -> None:
    """Add when and on how much validation is done."""
    evaluate = lowering.plan.evaluate
    if evaluate is not None:
        draft.train_with("validate_every", literal(evaluate.every), lowering.note(evaluate, "every"))
        draft.train_with("validate_batches", literal(evaluate.batches), lowering.note(evaluate, "batches"))
