"""Checkpoints: written atomically, so that a crash at any point leaves the last good one, and found again.

A checkpoint is a folder `step-N` with torch's Distributed Checkpoint files and `meta.json`. It is written
as `step-N.tmp`, and renamed when everything in it is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.process_group import gather_objects, on_first_rank
from legoai.runtime.safe_metadata import SafeReader, read_metadata

FORMAT = 1
"""Of `meta.json` and of the names of tensors; a reader refuses a newer one."""

META = "meta.json"
STEP_FOLDER = re.compile(r"step-(\d+)")

State = dict[str, torch.Tensor]

Files = dict[str, tuple[int, int]]
"""Bytes and CRC-32 per file."""


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
    format: int = FORMAT
    files: Files = field(default_factory=dict)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the tensors of model and optimizer by name, as references.

    Loading into them loads into the training. Names are those of the plain model, on every mesh. The
    optimizer's options are not among them: the program states them, and the learning rate follows from the
    step.
    """
    state = {f"model.{name}": tensor for name, tensor in _model_tensors(model).items()}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for name, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        if name.startswith("state."):
            if not isinstance(value, torch.Tensor):
                raise RunError(
                    RunErrorCode.CHECKPOINT_UNSAFE,
                    f"{type(optimizer).__name__} keeps {name} as {type(value).__name__}; only tensors can be saved",
                )
            state[f"optimizer.{name.removeprefix('state.')}"] = value
    return state


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
        keep: complete checkpoints kept; 0 keeps all.
    """

    def __init__(self, root: Path, *, keep: int = 3) -> None:
        self.root = root
        self.keep = keep

    def steps(self) -> list[int]:
        """Return the steps of the checkpoint folders, complete or not, ascending; the same on every rank."""
        return on_first_rank(self._steps)

    def save(self, state: State, meta: CheckpointMeta) -> Path:
        """Write a checkpoint, make it visible at once, and remove those beyond `keep`.

        Raises:
            RunError: it could not be written; earlier checkpoints are as they were.
        """
        final = self.root / f"step-{meta.step}"
        draft = self.root / f"step-{meta.step}.tmp"
        try:
            on_first_rank(lambda: _make_empty(draft))
            save_distributed(dict(state), storage_writer=FileSystemWriter(draft))
            files: Files = {}
            for part in gather_objects(_checksums(draft, _own_files(draft))):
                files |= part
            on_first_rank(lambda: self._publish(draft, final, meta, files))
        except (OSError, CheckpointException) as error:
            raise RunError(
                RunErrorCode.CHECKPOINT_MISSING, f"checkpoint {final} could not be written: {_cause(error)}"
            ) from error
        return final

    def newest(self, *, warn: Callable[[str], None] = warnings.warn) -> tuple[Path, CheckpointMeta] | None:
        """Return the newest complete checkpoint, or None.

        Each newer one that is damaged is named in a warning on rank 0.

        Raises:
            RunError: one carries code.
        """
        for step in reversed(self.steps()):
            path = self.root / f"step-{step}"
            try:
                return path, verified_meta(path)
            except RunError as error:
                if error.code == RunErrorCode.CHECKPOINT_UNSAFE:
                    raise
                if dist.get_rank() == 0:
                    warn(f"checkpoint {path} is skipped: {error.message}")
        return None

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        found = (STEP_FOLDER.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def _publish(self, draft: Path, final: Path, meta: CheckpointMeta, files: Files) -> None:
        _write_durably(draft / META, json.dumps({**asdict(meta), "files": files}, indent=1))
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        _sync_folder(self.root)
        if self.keep:
            for step in self._steps()[: -self.keep]:
                shutil.rmtree(self.root / f"step-{step}")


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
            if name.startswith("optimizer."):
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
