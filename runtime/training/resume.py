"""Continuation of a run from a checkpoint, and differences since it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from legoai.runtime.attempt import is_restart
from legoai.runtime.checkpoint.checkpoint import (
    META,
    OPTIMIZER,
    WEIGHTS,
    CheckpointMeta,
    State,
    forget_state,
    load,
    loadable_state,
    optimizer_state_kinds,
    saved_names,
    verified_meta,
    weights,
)
from legoai.runtime.checkpoint.folder import Checkpoints
from legoai.runtime.data.content import is_of_files
from legoai.runtime.data.samples import Data
from legoai.runtime.errors import RunError, RunErrorCode, listed
from legoai.runtime.launching.options import RunOptions
from legoai.runtime.process_group import gather_objects, on_first_rank
from legoai.runtime.published.saved_model import check_model
from legoai.runtime.training.constants import listed_differences, optimizer_name, sameness
from legoai.runtime.training.state import Training
from legoai.specs.visible_text import visible_line

_AFRESH: Final = "choose another --out to start afresh"
_DRAWN: Final = "leave --load-weights out"
"""What helps against a checkpoint of another model: to resume none, or to take no weights of it."""


def followed_already(options: RunOptions, checkpoints: Checkpoints | None) -> bool:
    """Return whether restarted ranks have already followed `--resume PATH`, or `never`, before they failed; collective.

    They continue where they were, as with `auto`: following the option again would abandon what was saved since.
    """
    if options.resume == "auto" or checkpoints is None:
        return False
    if not any(gather_objects(is_restart())):  # each agent counts only the failures of its own ranks
        return False
    return checkpoints.was_asked(options.resume)


def find_checkpoint(
    options: RunOptions, checkpoints: Checkpoints | None, *, warn: Callable[[str], None]
) -> tuple[Path, CheckpointMeta] | None:
    """Return the checkpoint that `--resume` selects, verified, or None to start from the beginning.

    Args:
        options: of the run.
        checkpoints: the run's own; None where it saves none.
        warn: called with a message for each damaged checkpoint that is skipped.

    Raises:
        RunError: the named checkpoint is missing or damaged, all of the run's own are damaged and `--restart` is not
            given, or `never` would mix two runs in one folder.
    """
    if options.resume == "auto":
        if checkpoints is None:
            return None
        try:
            return checkpoints.newest(warn=warn)
        except RunError as error:
            if not options.restart or error.code != RunErrorCode.CHECKPOINT_CORRUPT:
                raise
            return None
    if options.resume != "never":
        return named_checkpoint(Path(options.resume), option="--resume", warn=warn)
    if checkpoints is not None and (points := checkpoints.points()):
        raise RunError(
            RunErrorCode.WRONG_OPTION,
            f"--resume never: {checkpoints.root} already has checkpoints, up to {points[-1].name}",
            help="choose another --out, or remove them",
        )
    return None


def named_checkpoint(path: Path, *, option: str, warn: Callable[[str], None]) -> tuple[Path, CheckpointMeta]:
    """Return the checkpoint at a path, or the newest one of the run at a path, verified.

    Raises:
        RunError: there is none, or it is damaged.
    """
    if on_first_rank((path / META).is_file):
        return path, verified_meta(path)
    root = path if path.name == "checkpoints" else path / "checkpoints"
    found = Checkpoints(root).newest(warn=warn)
    if found is None:
        there = on_first_rank(path.exists)
        raise RunError(
            RunErrorCode.CHECKPOINT_MISSING,
            f"{option} {path}: no complete checkpoint there{'' if there else ', and no such folder'}",
            help="give a step-N folder, or a run's --out folder"
            + (", or a folder of safetensors files, as `hf download` makes it" if option == "--load-weights" else ""),
        )
    return found


def restore(path: Path, meta: CheckpointMeta, training: Training, *, other_plan: bool) -> tuple[list[str], list[str]]:
    """Load a checkpoint into model and optimizer; return the names of tensors that it lacks, and what its model has.

    The latter are sentences about differences from the plan's model.

    Raises:
        RunError: it is of another model or another optimizer, and `other_plan` does not allow that.
    """
    notices = _check_model(path, meta, training, other_plan=other_plan, otherwise=_AFRESH)
    state = loadable_state(training.model, training.optimizer)
    names, kept = set().union(*gather_objects(_of_optimizer(state))), _of_optimizer(saved_names(path))
    own, saved = optimizer_state_kinds(names), optimizer_state_kinds(kept)
    # Of a parameter that never had a gradient the optimizer kept nothing, as of one that no update has reached.
    parameters = {_parameter(name) for name in kept}
    lacking = {name for name in names - kept if _parameter(name) in parameters}
    if own == saved and lacking and not other_plan and meta.model == training.digest:
        raise RunError(
            RunErrorCode.CHECKPOINT_OTHER_OPTIMIZER,
            f"checkpoint {path} is of an optimizer that keeps other things of some parameters: it has no "
            f"{sorted(lacking)[0].removeprefix(OPTIMIZER)}",
            help=f"pass --load-weights {path} and another --out to start with its weights, or --resume-other-plan to "
            "go on from its step with fresh state where it has none",
        )
    if own != saved and meta.updated and not other_plan:
        keeps = "keep" if hasattr(training.optimizer, "parts") else "keeps"
        raise RunError(
            RunErrorCode.CHECKPOINT_OTHER_OPTIMIZER,
            f"checkpoint {path} is of another optimizer: it keeps {visible_line(_listed(saved))} of each parameter, "
            f"and {optimizer_name(training.optimizer)} {keeps} {_listed(own)}",
            help=f"pass --load-weights {path} and another --out to start with its weights, or --resume-other-plan to "
            "go on from its step with a fresh optimizer",
        )
    other = meta.model != training.digest or own != saved or not names <= kept
    left_out = _left_out(path, state, other_model=other, otherwise=_AFRESH)
    afresh = {_parameter(name) for name in _of_optimizer(left_out)}
    left_out = sorted({*left_out, *(name for name in names if _parameter(name) in afresh)})
    forget_state(training.optimizer, [tensor for name, tensor in state.items() if _parameter(name) in afresh])
    if meta.model != training.digest or (own != saved and meta.updated):
        return left_out, notices
    left_out = [name for name in left_out if not name.startswith(OPTIMIZER) or _parameter(name) in parameters]
    return left_out, notices


def load_weights(
    path: Path, meta: CheckpointMeta, training: Training, *, other_plan: bool
) -> tuple[list[str], list[str]]:
    """Load only the weights of a checkpoint; return the same as :func:`restore`.

    Raises:
        RunError: it is of another model, and `other_plan` does not allow that.
    """
    notices = _check_model(path, meta, training, other_plan=other_plan, otherwise=_DRAWN)
    other = meta.model != training.digest
    return _left_out(path, weights(training.model), other_model=other, otherwise=_DRAWN), notices


def _left_out(path: Path, state: State, *, other_model: bool, otherwise: str) -> list[str]:
    """Load a checkpoint; return the names of tensors that it lacks, of all ranks.

    Args:
        path: of the checkpoint.
        state: to load into.
        other_model: whether it is of another model, and may lack tensors.
        otherwise: what helps where it has no weight of the model, apart from another checkpoint.

    Raises:
        RunError: it has no weight of the model.
    """
    left_out = sorted(set().union(*gather_objects(load(path, state, other_model=other_model))))
    if not left_out:
        return []
    own = {name for names in gather_objects(list(state)) for name in names if name.startswith(WEIGHTS)}
    if own.issubset(left_out):
        raise RunError(
            RunErrorCode.CHECKPOINT_OTHER_MODEL,
            f"checkpoint {path} has none of the tensors of the plan's model by name and shape",
            help=f"take a checkpoint of such a model, or {otherwise}",
        )
    return left_out


def _of_optimizer(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith(OPTIMIZER)}


def _parameter(name: str) -> str:
    return name.rpartition(".")[0]


def _check_model(
    path: Path, meta: CheckpointMeta, training: Training, *, other_plan: bool, otherwise: str
) -> list[str]:
    if meta.model != training.digest and not other_plan:
        raise RunError(
            RunErrorCode.CHECKPOINT_OTHER_MODEL,
            f"checkpoint {path} is of another model (plan {visible_line(meta.plan)}): its tensors have other names or "
            "shapes",
            help=f"pass --resume-other-plan to load what has the same name and shape, or {otherwise}",
        )
    help = f"give the plan's model the value of the checkpoint's, pass --resume-other-plan to load it, or {otherwise}"
    return check_model(path, meta, training.whole, others=other_plan, help=help)


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds)) or "nothing"


def differences(
    meta: CheckpointMeta,
    *,
    plan_hash: str,
    optimizer: str,
    constants: Mapping[str, Any],
    mesh: Mapping[str, int],
    seed: int,
    seq_len: int,
    data: Data,
    left_out: list[str],
) -> list[str]:
    """Return notices about a run that does not continue exactly as it was, apart from those about its model."""
    notices = []
    if meta.plan_hash != plan_hash:
        notices.append(
            f"the checkpoint is of plan {meta.plan} {meta.plan_hash[:19]}; this plan's hash is another"
            + _what_differs(meta, constants, mesh)
        )
    if meta.optimizer not in ("", optimizer):
        notices.append(f"the checkpoint's optimizer was {meta.optimizer}; the training goes on with {optimizer}")
    if meta.seed != seed:
        notices.append(f"the checkpoint's seed was {meta.seed}; the data continues in the order of seed {seed}")
    if meta.corpus not in (data.digest, data.key):
        what = "is of another corpus"
        if is_of_files(meta.corpus):
            what = "is of an earlier version, and of a corpus whose files had other names, sizes or times"
        notices.append(f"the checkpoint {what}; {data.name} is read from the same sample number")
    if meta.seq_len not in (None, seq_len):
        notices.append(
            f"the checkpoint's sequences have {meta.seq_len} tokens; {data.name} is read from the same sample number "
            f"in sequences of {seq_len}, which is another position"
        )
    if left_out:
        notices.append(fresh_tensors(left_out, lacking="in the checkpoint"))
    return [visible_line(notice) for notice in notices]


def _what_differs(meta: CheckpointMeta, constants: Mapping[str, Any], mesh: Mapping[str, int]) -> str:
    """Continue the notice of another plan by what else differs, where the checkpoint records it."""
    if not meta.constants:
        return ""
    meshes = ""
    if meta.mesh != mesh:
        meshes = f"mesh {', '.join(f'{name} = {size}' for name, size in meta.mesh.items())} → "
        meshes += ", ".join(f"{name} = {size}" for name, size in mesh.items())
    changed = listed_differences(meta.constants, constants)
    if changed:
        return f", with other constants of the training: {changed}" + (f"; and another {meshes}" if meshes else "")
    same = f", {sameness(meta.constants, constants)}"
    return f"{same}, and another {meshes}" if meshes else same


def fresh_tensors(names: list[str], *, lacking: str) -> str:
    """A notice of the tensors that start afresh since they are not where the others were read."""
    many = len(names) > 1
    return (
        f"{len(names)} tensor{'s are' if many else ' is'} not {lacking} and start{'' if many else 's'} afresh: "
        f"{listed(names)}"
    )
