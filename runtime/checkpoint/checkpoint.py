"""One checkpoint: its tensors and metadata, its verification, and loading onto any mesh.

A checkpoint is a folder with torch's Distributed Checkpoint files, `meta.json`, `details.json`, and the digest of the
fields of `meta.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from legoai.runtime.checkpoint.damage import damaged, newer
from legoai.runtime.checkpoint.safe_metadata import SafeReader, read_metadata
from legoai.runtime.errors import RunError, RunErrorCode, listed
from legoai.runtime.float8 import as_stored
from legoai.runtime.json_object import read_json_object
from legoai.runtime.process_group import gather_objects, on_first_rank

FORMAT = 1
"""Of `meta.json` and of the names of tensors; a reader refuses a newer one."""

META = "meta.json"

META_DIGEST = "meta.sha256"
"""A file of the checkpoint: the digest of the fields of `meta.json`. Earlier readers refuse a field that they do not
know, and check this file like any other. Checkpoints of earlier versions have none."""

DETAILS = "details.json"
"""A file of the checkpoint: the fields that earlier readers would refuse in `meta.json`. Those that a reader does not
know are left out. Checkpoints of earlier versions have none."""

MOST_POSITION: Final = 1 << 48
"""Of steps, samples, ranks and branches that a checkpoint may have: beyond what is trained, and within 64 bits."""

WEIGHTS, OPTIMIZER = "model.", "optimizer."
"""Begin the names of a checkpoint's tensors."""

State = dict[str, torch.Tensor]

Files = dict[str, tuple[int, int]]
"""Bytes and CRC-32 per file."""


class SavePoint(NamedTuple):
    """Position of a checkpoint among those of one folder; the newest is the greatest."""

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
        point = cls(int(match[2] or 0), int(match[1])) if match else None
        return point if point is not None and point.name == name and max(point) <= MOST_POSITION else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """Content of `meta.json` and `details.json`.

    Attributes:
        step: optimizer steps done.
        plan: the plan's name.
        plan_hash: the plan's hash.
        model: digest of the names and shapes of the model's tensors, the same on every mesh.
        seed: the run's seed. With the step it is the whole random state.
        samples: sequences consumed by all ranks together: the data position.
        corpus: digest of the corpus in whose order the position is, as of `Data`.
        world: ranks that saved.
        torch: version that saved.
        optimizer: the class of the optimizer; empty where the checkpoint does not record it.
        seq_len: tokens of a sequence, in which the position is counted; None where the checkpoint does not record it.
        format: of the checkpoint.
        files: bytes and CRC-32 per file.
        updated: whether the optimizer had made an update; before its first it has no state.
        model_class: the class of the model; empty where the checkpoint does not record it.
        model_config: the fields of the model's config; empty where it has none, or the checkpoint does not record it.
        factory: the plan's `model` where a factory makes it; empty elsewhere, or where it is not recorded.
        tied: the names of its tied tensors, each with the one in whose memory it is.
        constants: of the training, as `constants_of` returns them; empty where the checkpoint does not record them.
        mesh: sizes of the axes of the mesh; empty where the checkpoint does not record it.
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
    seq_len: int | None = None
    format: int = FORMAT
    files: Files = field(default_factory=dict)
    updated: bool = True
    model_class: str = ""
    model_config: dict[str, Any] = field(default_factory=dict)
    factory: str = ""
    tied: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)


_FIELDS = {
    name: dict if get_origin(kind) is dict else kind
    for name, kind in get_type_hints(CheckpointMeta).items()
    if name != "files"
}
"""The types of a checkpoint's fields; the entries of `files` are converted as they are read."""

_REQUIRED: Final = tuple(
    entry.name for entry in dataclass_fields(CheckpointMeta) if entry.default is entry.default_factory is MISSING
)
"""The fields that every checkpoint has."""

_LEAST: Final = {"step": 1, "samples": 0, "world": 1, "seq_len": 1, "format": 1}
"""The least values of the fields that are counts."""

_IN_DETAILS: Final = ("updated", "model_class", "model_config", "factory", "tied", "constants", "mesh")
"""The fields of `details.json`."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the tensors of model and optimizer by name, as references; nothing is changed.

    Names are those of the plain model, on every mesh. The optimizer's options are not among them: the program states
    them, and the learning rate follows from the step. A parameter that no update has reached has no state.

    Raises:
        RunError: the optimizer keeps something else than tensors.
    """
    state = weights(model)
    if not optimizer.state:
        return state  # for which torch would make an update
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


def loadable_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the tensors of a model and of an optimizer that has made no update; loading into them loads into both.

    The optimizer gets the state that it has after an update, of every parameter and with any values: what is not loaded
    is to be removed with :func:`forget_state`.

    Raises:
        RunError: as of :func:`training_state`.
    """
    if any(group["params"] for group in optimizer.param_groups):  # else torch takes the empty state for a mistake
        get_optimizer_state_dict(model, optimizer)
    return training_state(model, optimizer)


def forget_state(optimizer: torch.optim.Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    """Remove the state of the parameters to whose state tensors belong, as if no update had reached these."""
    forgotten = {id(tensor) for tensor in tensors}
    for part in (optimizer, *getattr(optimizer, "parts", ())):
        for holder in (part, getattr(part, "sliced", part)):  # they share the state of a parameter
            for parameter, state in list(holder.state.items()):
                if any(id(value) in forgotten for value in state.values()):
                    del holder.state[parameter]


def weights(model: nn.Module) -> State:
    """Return the tensors of a model by name, as references."""
    return {f"{WEIGHTS}{name}": tensor for name, tensor in _model_tensors(model).items()}


def optimizer_state_kinds(names: Iterable[str]) -> set[str]:
    """Return the names of an optimizer's state of each parameter, such as `exp_avg`, from the names of its tensors."""
    return {name.rpartition(".")[2] for name in names if name.startswith(OPTIMIZER)}


def _model_tensors(model: nn.Module) -> State:
    tensors = get_model_state_dict(model).items()
    return {name: as_stored(value) for name, value in tensors if isinstance(value, torch.Tensor)}


def model_digest(model: nn.Module) -> str:
    """Return a digest of the names and global shapes of the model's tensors in a checkpoint."""
    shapes = {name: list(tensor.shape) for name, tensor in _model_tensors(model).items()}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()


def write_meta(folder: Path, meta: CheckpointMeta, files: Files, write: Callable[[Path, str], None]) -> None:
    """Write `details.json`, `meta.json` and its digest.

    Args:
        folder: of the checkpoint.
        meta: its fields but for `files`.
        files: the checkpoint's other files.
        write: writes a text into a file.
    """

    def written(name: str, text: str) -> Files:
        write(folder / name, text)
        return {name: ((folder / name).stat().st_size, checksum(folder / name))}

    fields = asdict(meta)
    details = {name: fields.pop(name) for name in _IN_DETAILS}
    files = files | written(DETAILS, json.dumps(details, indent=1))
    files |= written(META_DIGEST, _digest(fields | {"files": files}))
    write(folder / META, json.dumps(fields | {"files": files}, indent=1))


def verified_meta(path: Path) -> CheckpointMeta:
    """Read a checkpoint's `meta.json`, and check every file against it, the ranks sharing the reading.

    Raises:
        RunError: a file is missing, damaged, of a newer format, or carries code.
    """
    meta = on_first_rank(lambda: read_meta(path))
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = sorted(meta.files)[rank::world]
    problems = [problem for part in gather_objects(_damage(path, meta, mine)) for problem in part]
    if problems:
        raise damaged(f"{path}: {problems[0]}")
    on_first_rank(lambda: _check_metadata(path))
    return meta


def saved_names(path: Path) -> list[str]:
    """Return the names of a checkpoint's tensors.

    Raises:
        RunError: the checkpoint carries code.
    """
    return on_first_rank(lambda: list(_saved_shapes(path)))


def load(path: Path, state: State, *, other_model: bool = False) -> list[str]:
    """Load a checkpoint into the tensors of a training, on any mesh.

    Args:
        path: of a verified checkpoint.
        state: as `loadable_state` or `weights` returns it; written in place.
        other_model: leave out what the checkpoint does not have with the same name and shape.

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
            del wanted[name]
    try:
        load_distributed(dict(wanted), storage_reader=SafeReader(path))
    except CheckpointException as error:
        raise damaged(f"checkpoint {path} could not be read: {cause(error)}") from error
    return left_out


def read_meta(path: Path) -> CheckpointMeta:
    """Read a checkpoint's `meta.json` and `details.json`; its other files are not checked.

    Raises:
        RunError: one of them is missing or damaged, or of a newer format.
    """
    try:
        return _meta_of(path, _object(path, META))
    except FileNotFoundError as error:
        raise damaged(f"{path} is incomplete: it has no {Path(str(error.filename)).name}") from None
    except OSError as error:
        name = Path(str(error.filename or META)).name
        raise damaged(f"{path / name} cannot be read: {error.strerror or error}") from None


def is_newer(path: Path) -> bool:
    """Return whether a checkpoint is of a newer format."""
    try:
        read_meta(path)
    except RunError as error:
        return error.code == RunErrorCode.CHECKPOINT_NEWER
    return False


def _meta_of(path: Path, fields: dict[str, Any]) -> CheckpointMeta:
    if type(fields.get("format")) is int and fields["format"] > FORMAT:
        raise newer(path, f"its format is {fields['format']}, and this version reads {FORMAT}")
    files = _entries(path, fields.get("files"))
    if META_DIGEST in files and (path / META_DIGEST).read_bytes() != _digest(fields).encode():
        raise damaged(f"{path}: {META} is damaged: its digest differs")
    details = _object(path, DETAILS) if DETAILS in files else {}
    found = fields | {name: details[name] for name in _IN_DETAILS if name in details}
    for name in _REQUIRED:
        if name not in found:
            raise damaged(f"{path}: {META} is damaged: it has no {name}")
    if unknown := found.keys() - _FIELDS.keys() - {"files"}:
        raise newer(path, f"{META} has what this version does not know: {listed(unknown)}")
    meta = CheckpointMeta(**found | {"files": files})
    if problem := _damage_of_meta(path, meta):
        raise damaged(f"{path}: {META} {problem}")
    return meta


def _object(path: Path, name: str) -> dict[str, Any]:
    try:
        return read_json_object(path / name)
    except ValueError as error:
        raise damaged(f"{path / name} cannot be read: {error}") from None


def _entries(path: Path, entries: object) -> Files:
    if not isinstance(entries, dict):
        raise damaged(f"{path}: {META} is damaged: it lists no files")
    for name, entry in entries.items():
        if not isinstance(entry, list) or [type(number) for number in entry] != [int, int]:
            raise damaged(f"{path}: {META} is damaged: the entry of {name} is {entry!r}")
    return {name: (size, crc) for name, (size, crc) in entries.items()}


def _damage_of_meta(path: Path, meta: CheckpointMeta) -> str:
    """Return what is wrong with the fields of a `meta.json`; or nothing."""
    for name, kind in _FIELDS.items():
        value = getattr(meta, name)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            return f"is damaged: {name} is {value!r}"
    for name, least in _LEAST.items():
        number: int | None = getattr(meta, name)
        if number is not None and not least <= number <= MOST_POSITION:
            return f"is damaged: {name} is {number}"
    point = SavePoint.named(path.resolve().name)
    return "" if point is None or point.step == meta.step else f"is of step {meta.step}"


def _digest(fields: Mapping[str, Any]) -> str:
    """Return the digest of the fields of `meta.json`, but for the entry of the file that holds it."""
    others = {name: entry for name, entry in fields["files"].items() if name != META_DIGEST}
    return hashlib.sha256(json.dumps({**fields, "files": others}, sort_keys=True).encode()).hexdigest()


def _metadata(path: Path) -> Metadata:
    try:
        return read_metadata(path)
    except OSError as error:
        raise damaged(f"{path}: .metadata cannot be read: {error.strerror or error}") from error


def _check_metadata(path: Path) -> None:
    _metadata(path)


def _saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    entries = _metadata(path).state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _damage(path: Path, meta: CheckpointMeta, names: list[str]) -> list[str]:
    """Return what is wrong with files, also where they cannot be read: other ranks wait for the answer."""
    problems = []
    for name in names:
        try:
            problem = _damage_of(path, name, *meta.files[name])
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        if problem:
            problems.append(f"{name} {problem}")
    return problems


def _damage_of(path: Path, name: str, size: int, crc: int) -> str:
    file = path / name
    if Path(name).name != name or not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes instead of {size}"
    return "is damaged: its checksum differs" if checksum(file) != crc else ""


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def cause(error: BaseException) -> str:
    """Return a one-line description of an error, and of the rank where torch gathered the ranks' errors."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause(inner)}"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
