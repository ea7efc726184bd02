"""Export of a checkpoint as published weights: safetensors files, their index and a config, in a folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from legoai.runtime.checkpoint.checkpoint import WEIGHTS, cause
from legoai.runtime.checkpoint.damage import damaged
from legoai.runtime.checkpoint.safe_metadata import SafeReader
from legoai.runtime.durable import not_writable, sync
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.published.beside import Beside
from legoai.runtime.published.folder import CONFIG, INDEX, SINGLE, check_installed
from legoai.runtime.published.whole_model import WholeModel
from legoai.specs.published.pieces import Piece, published_shapes

DRAFT: Final = ".tmp"
"""Ends the name of a folder in which another is being written."""

WITH_ITS_PLAN: Final = "export it with the plan that it was trained with"
"""What helps where a checkpoint is of another model."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export: numbers of tensors, bytes, and files of weights."""

    tensors: int
    nbytes: int
    files: int


def export(
    checkpoint: Path,
    folder: Path,
    whole: WholeModel,
    fields: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    most_bytes: int = 5 * 10**9,
    beside: Beside | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write the weights of a checkpoint as a folder that `transformers` can load.

    The folder is written under another name beside it, and renamed. One file is held in memory at a time, and one
    tensor of the checkpoint.

    Args:
        checkpoint: verified.
        folder: to be created; it must not exist.
        whole: the model, which has a mapping.
        fields: of the model's config.
        dtype: of the weights, not of integers; None keeps the checkpoint's dtypes.
        most_bytes: limit of one file, unless a single tensor is larger.
        beside: sources of further files of published weights, such as a tokenizer.
        say: called with a message for each file that is written.

    Raises:
        RunError: the checkpoint has not the tensors of the model, or cannot be read; or the folder exists, or cannot
            be written.
    """
    check_installed(folder)
    if folder.exists():
        raise RunError(
            RunErrorCode.FOLDER_NOT_WRITABLE, f"{folder} is there already", help="remove it, or name another"
        )
    source = _Source(checkpoint, whole, dtype)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _draft_beside(folder) as draft:
            exported = _write_weights(source, draft, most_bytes, say)
            ids = {} if beside is None else beside.copy(draft)
            _write_config(draft, {**fields, **ids}, source.common_dtype())
            draft.rename(folder)
    except OSError as error:
        raise not_writable(f"{folder} cannot be written", error, "name another folder") from error
    return exported


@contextmanager
def _draft_beside(folder: Path) -> Iterator[Path]:
    """Create an empty folder on the same file system, which no other export uses; it is removed unless it is renamed.

    It is inside a temporary one, which is private: this one has the permissions of any new folder.
    """
    with TemporaryDirectory(
        prefix=f"{folder.name}-", suffix=DRAFT, dir=folder.parent, ignore_cleanup_errors=True
    ) as temporary:
        draft = Path(temporary, folder.name)
        draft.mkdir()
        yield draft


class _Source:
    """Yield the published tensors converted from those of a checkpoint."""

    def __init__(self, checkpoint: Path, whole: WholeModel, dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self._reader = _OnceRead(checkpoint)
        self._saved = {
            name: entry
            for name, entry in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        assert whole.published is not None, "see `check_map`"
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for name, shape in whole.shapes.items():
            saved = self._saved_name(name, shape, whole)
            for piece in next(whole.published(name, shape)):
                self._pieces[piece.name].append((saved, piece))
        self.shapes = published_shapes(piece for found in self._pieces.values() for _, piece in found)
        stored = {name: self._saved[found[0][0]].properties.dtype for name, found in self._pieces.items()}
        self.dtypes = {
            name: own if dtype is None or not own.is_floating_point else dtype for name, own in stored.items()
        }

    def common_dtype(self) -> torch.dtype:
        """The dtype of most weights."""
        kinds = [kind for kind in self.dtypes.values() if kind.is_floating_point]
        return max(dict.fromkeys(kinds), key=kinds.count)

    def nbytes(self, name: str) -> int:
        """The size of a published tensor."""
        return self.dtypes[name].itemsize * torch.Size(self.shapes[name]).numel()

    def files(self, most_bytes: int) -> Iterator[list[str]]:
        """Names of published tensors that go into a file each, in the order of the model."""
        names: list[str] = []
        total = 0
        for name in self.shapes:
            if names and total + self.nbytes(name) > most_bytes:
                yield names
                names, total = [], 0
            names.append(name)
            total += self.nbytes(name)
        yield names

    def tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The values of published tensors."""
        found = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in names}
        wanted: dict[str, list[Piece]] = defaultdict(list)
        for name in names:
            for saved, piece in self._pieces[name]:
                wanted[saved].append(piece)
        for saved, pieces in wanted.items():
            value = self._read(saved)
            for piece in pieces:
                box = value[tuple(slice(first, first + length) for first, length in zip(*piece[1:3], strict=True))]
                region = piece.region((0,) * len(piece.start), piece.size)
                target = found[piece.name][tuple(slice(first, first + length) for first, length in region)]
                target = target.transpose(-1, -2) if piece.transposed else target
                target.copy_(box.reshape(target.shape))
        return found

    def _read(self, name: str) -> torch.Tensor:
        entry = self._saved[name]
        value = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load_distributed({name: value}, storage_reader=self._reader)
        except CheckpointException as error:
            raise damaged(f"checkpoint {self._checkpoint} could not be read: {cause(error)}") from error
        return value

    def _saved_name(self, name: str, shape: tuple[int, ...], whole: WholeModel) -> str:
        """The name under which a tensor, or one that is tied to it, is in the checkpoint."""
        for alike in (name, *(other for other, first in whole.tied.items() if first == name)):
            entry = self._saved.get(f"{WEIGHTS}{alike}")
            if entry is not None and tuple(entry.size) == shape:
                return f"{WEIGHTS}{alike}"
        entry = self._saved.get(f"{WEIGHTS}{name}")
        has = f"has no {name}" if entry is None else f"has {name} in the shape {list(entry.size)}"
        raise RunError(
            RunErrorCode.CHECKPOINT_OTHER_MODEL,
            f"checkpoint {self._checkpoint} is not of the plan's model: it {has}, which is {list(shape)} there",
            help=WITH_ITS_PLAN,
        )


class _OnceRead(SafeReader):
    """Reads the metadata of a checkpoint once, however many of its tensors are read one by one."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As of `SafeReader`."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def _write_weights(source: _Source, draft: Path, most_bytes: int, say: Callable[[str], None]) -> Exported:
    from safetensors.torch import save_file

    files = list(source.files(most_bytes))
    placed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        try:
            save_file(source.tensors(names), draft / file, metadata={"format": "pt"})
        except Exception as error:
            if isinstance(error, OSError | RunError):
                raise
            # safetensors reports a full disk by an exception of its own
            raise OSError(0, f"{type(error).__name__}: {error}") from error
        (draft / file).chmod(draft.stat().st_mode & 0o666)  # safetensors makes the file private
        sync(draft / file)
        placed |= dict.fromkeys(names, file)
        say(f"{file}: {len(names)} tensors")
    total = sum(map(source.nbytes, placed))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Exported(len(placed), total, len(files))


def _write_config(draft: Path, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
    # Every release of transformers reads `torch_dtype`; the newest calls it `dtype`.
    config = {**fields, "torch_dtype": str(dtype).removeprefix("torch.")}
    config.pop("dtype", None)
    config.pop("transformers_version", None)
    (draft / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
