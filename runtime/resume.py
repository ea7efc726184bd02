"""Continuation of a run from a checkpoint, and what differs since it was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from legoai.runtime.checkpoint import (
    META,
    CheckpointMeta,
    Checkpoints,
    load,
    training_state,
    verified_meta,
)
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.options import RunOptions
from legoai.runtime.process_group import gather_objects, on_first_rank
from legoai.runtime.samples import Data
from legoai.runtime.training import Training


def find_checkpoint(
    options: RunOptions, checkpoints: Checkpoints | None, *, warn: Callable[[str], None]
) -> tuple[Path, CheckpointMeta] | None:
    """Return the checkpoint that `--resume` means, verified, or None to start from the beginning.

    Args:
        options: of the run.
        checkpoints: the run's own; None where it keeps none.
        warn: is told of each damaged checkpoint that is skipped.

    Raises:
        RunError: the named checkpoint is missing or damaged, or `never` would mix two runs in one folder.
    """
    if options.resume == "auto":
        return checkpoints.newest(warn=warn) if checkpoints is not None else None
    if options.resume != "never":
        return _named(Path(options.resume), warn=warn)
    if checkpoints is not None and (steps := checkpoints.steps()):
        raise RunError(
            RunErrorCode.WRONG_OPTION,
            f"--resume never: {checkpoints.root} already has checkpoints, up to step {steps[-1]}",
            help="choose another --out, or remove them",
        )
    return None


def _named(path: Path, *, warn: Callable[[str], None]) -> tuple[Path, CheckpointMeta]:
    if on_first_rank((path / META).is_file):
        return path, verified_meta(path)
    root = path if path.name == "checkpoints" else path / "checkpoints"
    found = Checkpoints(root).newest(warn=warn)
    if found is None:
        raise RunError(
            RunErrorCode.CHECKPOINT_MISSING,
            f"--resume {path}: no complete checkpoint there",
            help="give a step-N folder, or a run's --out folder",
        )
    return found


def restore(path: Path, meta: CheckpointMeta, training: Training, *, other_plan: bool) -> list[str]:
    """Load a checkpoint into model and optimizer; return the names of tensors that it does not have.

    Raises:
        RunError: it is of another model, and `other_plan` does not allow that.
    """
    same_model = meta.model == training.digest
    if not same_model and not other_plan:
        raise RunError(
            RunErrorCode.CHECKPOINT_OTHER_MODEL,
            f"checkpoint {path} is of another model (plan {meta.plan}): its tensors have other names or shapes",
            help="pass --resume-other-plan to load what has the same name and shape, or choose another --out",
        )
    state = training_state(training.model, training.optimizer)
    left_out = load(path, state, other_model=not same_model)
    if same_model:
        return []
    return sorted({name for names in gather_objects(left_out) for name in names})


def differences(meta: CheckpointMeta, *, plan_hash: str, seed: int, data: Data, left_out: list[str]) -> list[str]:
    """Return what a user should know of a run that does not continue just as it was."""
    notices = []
    if meta.plan_hash != plan_hash:
        notices.append(f"the checkpoint is of plan {meta.plan} {meta.plan_hash[:19]}; this plan's hash is another")
    if meta.seed != seed:
        notices.append(f"the checkpoint's seed was {meta.seed}; the data continues in the order of seed {seed}")
    if meta.corpus != data.digest:
        notices.append(f"the checkpoint is of another corpus; {data.name} is read from the same sample number")
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        notices.append(f"{len(left_out)} tensors are not in the checkpoint and start afresh: {shown}")
    return notices
