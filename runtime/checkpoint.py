"""Checkpoints: written atomically, so that a crash at any point leaves the last good one, and found again.

A checkpoint is a folder `step-N` with torch's Distributed Checkpoint files and `meta.json`. It is written
as `step-N.tmp`, and renamed when everything in it is on disk. A run that went back to an earlier step than the newest
saves on a branch of its own, as `step-N-branch-B`; of several branches the last is the one that goes on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.process_group import gather_objects, on_every_rank, on_first_rank
from legoai.runtime.safe_metadata import SafeReader, read_metadata

FORMAT = 1
"""Of `meta.json` and of the names of tensors; a reader refuses a newer one."""

META = "meta.json"

DRAFT = ".tmp"
"""Ends the name of a folder that is being written or removed."""

WEIGHTS, OPTIMIZER = "model.", "optimizer."
"""Begin the names of a checkpoint's tensors."""

State = dict[str, torch.Tensor]

Files = dict[str, tuple[int, int]]
"""Bytes and CRC-32 per file."""


class SavePoint(NamedTuple):
    """Where a checkpoint stands among those of one folder; the newest is the greatest."""

    branch: int
    step: int

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return f"step-{self.step}-branch-{self.branch}" if self.branch else f"step-{self.step}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Return the point of a checkpoint's folder; None for another folder."""
        match = re.fullmatch(r"step-(\d+)(?:-branch-(\d+))?", name)
        return cls(int(match[2] or 0), int(match[1])) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """What `meta.json` says.

    Attributes:
        step: optimizer steps done.
        plan: the plan's name.
        plan_hash: the plan's hash.
        model: digest of the names and shapes of the model's tensors, the same on every mesh.
        seed: the run's seed. With the step it is the whole random state.
        samples: sequences consumed by all ranks together: the data position.
        corpus: digest of the corpus in whose order the position is.
        world: ranks that saved.
        torch: version that saved.
        optimizer: the class of the optimizer; empty where the checkpoint does not say.
        format: of the checkpoint.
        files: bytes and CRC-32 per file.
    """

    step: int
    plan: str
    plan_hash: str
    model: str
    seed: int
    samples: int
    corpus: str
    world: int
    torch: str
    optimizer: str = ""
    format: int = FORMAT
    files: Files = field(default_factory=dict)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the tensors of model and optimizer by name, as references.

    Loading into them loads into the training. Names are those of the plain model, on every mesh. The
    optimizer's options are not among them: the program states them, and the learning rate follows from the
    step.
    """
    state = weights(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for name, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        if name.startswith("state."):
            if not isinstance(value, torch.Tensor):
                raise RunError(
                    RunErrorCode.CHECKPOINT_UNSAFE,
                    f"{type(optimizer).__name__} keeps {name} as {type(value).__name__}; only tensors can be saved",
                )
            state[f"{OPTIMIZER}{name.removeprefix('state.')}"] = value
    return state


def weights(model: nn.Module) -> State:
    """Return the tensors of a model by name, as references."""
    return {f"{WEIGHTS}{name}": tensor for name, tensor in _model_tensors(model).items()}


def optimizer_state_kinds(names: Iterable[str]) -> set[str]:
    """Return what an optimizer keeps of each parameter, such as `exp_avg`, from the names of its tensors."""
    return {name.rpartition(".")[2] for name in names if name.startswith(OPTIMIZER)}


def _model_tensors(model: nn.Module) -> State:
    return {name: value for name, value in get_model_state_dict(model).items() if isinstance(value, torch.Tensor)}


def model_digest(model: nn.Module) -> str:
    """Return a digest of the names and global shapes of the tensors that a checkpoint of the model holds."""
    shapes = {name: list(tensor.shape) for name, tensor in _model_tensors(model).items()}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run. All methods are collective: every rank calls them.

    Args:
        root: the folder that holds `step-N` folders; on storage that all ranks see.
        keep: checkpoints kept that have been read back whole; 0 keeps all.

    Attributes:
        branch: on which this run saves.
    """

    def __init__(self, root: Path, *, keep: int = 3) -> None:
        self.root = root
        self.keep = keep
        self.branch = 0
        self._verified: dict[SavePoint, list[tuple[str, int, int]]] = {}

    def points(self) -> list[SavePoint]:
        """Return the checkpoints, complete or not, the newest last; the same on every rank."""
        return on_first_rank(self._points)

    def path(self, point: SavePoint) -> Path:
        """Return the folder of a checkpoint."""
        return self.root / point.name

    def sweep(self) -> None:
        """Remove what a run left half written or half removed; no other run may be using the folder."""
        on_first_rank(self._sweep)

    def choose_branch(self, path: Path | None, *, newer_are_damaged: bool = False) -> bool:
        """Choose the branch on which this run saves, and return whether it is a new one.

        Args:
            path: of the checkpoint from which the run continues, here or elsewhere; None where it begins.
            newer_are_damaged: whether every newer checkpoint here is known to be damaged.
        """
        points = self.points()
        own = None if path is None else on_first_rank(lambda: self._point_of(path))
        if not points or (own is not None and (newer_are_damaged or own == points[-1])):
            self.branch = own.branch if own is not None else 0
            return False
        self.branch = points[-1].branch + 1
        return True

    def save(self, state: State, meta: CheckpointMeta) -> Path:
        """Write a checkpoint, make it visible at once, and remove those beyond `keep`.

        Nothing is removed before this checkpoint has been read back whole, and only those that can be read count.

        Raises:
            RunError: it could not be written, or what was written is damaged; earlier checkpoints are as they were.
        """
        point = SavePoint(self.branch, meta.step)
        final, draft = self.path(point), self.root / f"{point.name}{DRAFT}"
        size = sum(gather_objects(sum(_local_bytes(tensor) for tensor in state.values())))
        try:
            on_first_rank(lambda: _make_empty(draft))
            save_distributed(dict(state), storage_writer=FileSystemWriter(draft))
            files: Files = {}
            for part in on_every_rank(lambda: _checksums(draft, _own_files(draft))):
                files |= part
            on_first_rank(lambda: self._publish(draft, final, meta, files))
            self._verified.pop(point, None)
            self._remove_oldest(point)
        except (OSError, CheckpointException) as error:
            raise on_first_rank(partial(self._not_written, draft, final, error, size)) from error
        return final

    def newest(self, *, warn: Callable[[str], None] = warnings.warn) -> tuple[Path, CheckpointMeta] | None:
        """Return the newest complete checkpoint, or None where there is no checkpoint at all.

        Each newer one that is damaged is named in a warning on rank 0.

        Raises:
            RunError: one carries code, or all are damaged.
        """
        problems = []
        for point in reversed(self.points()):
            path = self.path(point)
            try:
                return path, self._verify(point)
            except RunError as error:
                if error.code == RunErrorCode.CHECKPOINT_UNSAFE:
                    raise
                problems.append(error.message)
                if dist.get_rank() == 0:
                    warn(f"checkpoint {path} is skipped: {error.message}")
        if problems:
            many = "the only checkpoint" if len(problems) == 1 else f"each of the {len(problems)} checkpoints"
            raise RunError(
                RunErrorCode.CHECKPOINT_CORRUPT,
                f"{many} in {self.root} is damaged; of the newest: {problems[0]}",
                help="restore one, or pass --restart to train from the first step; they are left as they are",
            )
        return None

    def _points(self) -> list[SavePoint]:
        if not self.root.is_dir():
            return []
        found = (SavePoint.named(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(point for point in found if point is not None)

    def _point_of(self, path: Path) -> SavePoint | None:
        return SavePoint.named(path.resolve().name) if path.resolve().parent == self.root.resolve() else None

    def _sweep(self) -> None:
        if self.root.is_dir():
            for entry in self.root.glob(f"step-*{DRAFT}"):
                shutil.rmtree(entry)

    def _verify(self, point: SavePoint) -> CheckpointMeta:
        meta = verified_meta(self.path(point))
        self._verified[point] = on_first_rank(lambda: _listed(self.path(point)))
        return meta

    def _is_complete(self, point: SavePoint) -> bool:
        """Return whether a checkpoint can be read; its files are read once, and then looked at from outside."""
        known = self._verified.get(point)
        if known is not None and known == on_first_rank(lambda: _listed(self.path(point))):
            return True
        try:
            self._verify(point)
        except RunError:
            return False
        return True

    def _publish(self, draft: Path, final: Path, meta: CheckpointMeta, files: Files) -> None:
        _write_durably(draft / META, json.dumps({**asdict(meta), "files": files}, indent=1))
        if final.exists():  # damaged: a run does not save a step twice on one branch
            shutil.rmtree(final)
        draft.rename(final)
        _sync_folder(self.root)

    def _remove_oldest(self, saved: SavePoint) -> None:
        points = self.points()
        if not self.keep or len(points) <= self.keep:
            return
        try:
            self._verify(saved)
        except RunError as error:
            raise RunError(
                RunErrorCode.CHECKPOINT_NOT_WRITTEN,
                f"checkpoint {self.path(saved)} was written, but cannot be read back: {error.message}",
                help="look after the disk; earlier checkpoints are as they were",
            ) from error
        complete = 0
        for point in reversed(points):
            if complete == self.keep:
                on_first_rank(partial(self._remove, point))
                self._verified.pop(point, None)
            elif self._is_complete(point):
                complete += 1

    def _remove(self, point: SavePoint) -> None:
        """Remove a checkpoint, so that a crash on the way leaves a folder which is swept."""
        doomed = self.root / f"{point.name}{DRAFT}"
        self.path(point).rename(doomed)
        shutil.rmtree(doomed)

    def _not_written(self, draft: Path, final: Path, error: BaseException, size: int) -> RunError:
        """Take a draft that could not be finished away, and say why."""
        full = _is_full(error) or _is_full_there(draft)
        shutil.rmtree(draft, ignore_errors=True)
        message, help = f"checkpoint {final} could not be written: {_cause(error)}", ""
        try:
            free = shutil.disk_usage(self.root if self.root.is_dir() else self.root.parent).free
        except OSError:
            free = size
        if full or free < size:
            message = (
                f"checkpoint {final} could not be written: the disk is full, or its quota; {_mebibytes(free)} are free "
                f"there, and it needs about {_mebibytes(size)}"
            )
            help = "free space, keep fewer with --keep, or choose another --out; earlier checkpoints are as they were"
        return RunError(RunErrorCode.CHECKPOINT_NOT_WRITTEN, message, help=help)


def verified_meta(path: Path) -> CheckpointMeta:
    """Read a checkpoint's `meta.json`, and check every file against it, the ranks sharing the reading.

    Raises:
        RunError: a file is missing, damaged, of a newer format, or carries code.
    """
    meta = on_first_rank(lambda: _read_meta(path))
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = sorted(meta.files)[rank::world]
    problems = [problem for part in gather_objects(_damage(path, meta, mine)) for problem in part]
    if problems:
        raise RunError(RunErrorCode.CHECKPOINT_CORRUPT, f"{path}: {problems[0]}")
    on_first_rank(lambda: _check_metadata(path))
    return meta


def saved_names(path: Path) -> list[str]:
    """Return the names of a checkpoint's tensors.

    Raises:
        RunError: the checkpoint carries code.
    """
    return on_first_rank(lambda: list(_saved_shapes(path)))


def load(path: Path, state: State, *, other_model: bool = False) -> list[str]:
    """Read a checkpoint into the tensors of a training, on whatever mesh they are.

    Args:
        path: of a verified checkpoint.
        state: as `training_state` returns it; written in place.
        other_model: leave out what the checkpoint does not have with the same name and shape; its tensors
            of the optimizer start at zero, as fresh ones do.

    Returns:
        The names that were left out.

    Raises:
        RunError: the checkpoint carries code, or tensors are missing.
    """
    on_first_rank(lambda: _check_metadata(path))
    wanted: State = dict(state)
    left_out: list[str] = []
    if other_model:
        saved = on_first_rank(lambda: _saved_shapes(path))
        left_out = [name for name, tensor in state.items() if saved.get(name) != tuple(tensor.shape)]
        for name in left_out:
            tensor = wanted.pop(name)
            if name.startswith(OPTIMIZER):
                tensor.zero_()
    try:
        load_distributed(dict(wanted), storage_reader=SafeReader(path))
    except CheckpointException as error:
        raise RunError(
            RunErrorCode.CHECKPOINT_CORRUPT, f"checkpoint {path} could not be read: {_cause(error)}"
        ) from error
    return left_out


def _read_meta(path: Path) -> CheckpointMeta:
    try:
        values: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
        if values["format"] > FORMAT:
            raise RunError(RunErrorCode.CHECKPOINT_CORRUPT, f"{path} was written by a newer LegoAI")
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in values.pop("files").items()}
        return CheckpointMeta(files=files, **values)
    except FileNotFoundError:
        raise RunError(RunErrorCode.CHECKPOINT_CORRUPT, f"{path} is incomplete: it has no {META}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(RunErrorCode.CHECKPOINT_CORRUPT, f"{path / META} cannot be read: {error}") from None


def _check_metadata(path: Path) -> None:
    with (path / ".metadata").open("rb") as file:
        read_metadata(file)


def _saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with (path / ".metadata").open("rb") as file:
        entries = read_metadata(file).state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _damage(path: Path, meta: CheckpointMeta, names: list[str]) -> list[str]:
    problems = []
    for name in names:
        size, crc = meta.files[name]
        file = path / name
        if Path(name).name != name or not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        elif _crc(file) != crc:
            problems.append(f"{name} is damaged: its checksum differs")
    return problems


def _listed(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a checkpoint's files, which differ when one was touched."""
    found = ((entry.name, entry.stat()) for entry in path.iterdir()) if path.is_dir() else ()
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in found)


def _local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes if isinstance(tensor, DTensor) or dist.get_rank() == 0 else 0


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _is_full(error: BaseException) -> bool:
    """Return whether what went wrong, on any rank, is a disk or a quota that is full."""
    if isinstance(error, CheckpointException):
        return any(_is_full(cause) for cause, _ in error.failures.values())
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_full_there(folder: Path) -> bool:
    """Return whether a small file does not fit into a folder; torch's writer hides why its own did not."""
    probe = folder / "probe"
    try:
        probe.write_bytes(bytes(1 << 16))
    except OSError as error:
        return _is_full(error)
    probe.unlink()
    return False


def _own_files(draft: Path) -> list[Path]:
    """Return the files that this rank wrote: `__RANK_n.distcp` is torch's name; rank 0 also wrote the metadata."""
    rank = dist.get_rank()
    files = list(draft.glob(f"__{rank}_*.distcp"))
    return [*files, draft / ".metadata"] if rank == 0 else files


def _checksums(draft: Path, files: list[Path]) -> Files:
    return {file.name: (file.stat().st_size, _crc(file)) for file in files}


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """Return in one line what went wrong, and on which rank where torch gathered the ranks' errors."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(cause)}"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
