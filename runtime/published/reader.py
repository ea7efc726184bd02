"""Reader of published weights for torch's Distributed Checkpoint: a rank reads only its part of each tensor.

Torch's own `HuggingFaceStorageReader` maps no names or layouts, reads every safetensors file of a folder regardless of
its index, and fails with assertions. Here a model's tensor consists of pieces of published ones.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from legoai.runtime.checkpoint.checkpoint import WEIGHTS, State, cause
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.published.folder import DTYPES, INTEGERS, Folder, unreadable
from legoai.runtime.published.matching import Match
from legoai.specs.published.pieces import Piece

_ALL: Final = {**DTYPES, **INTEGERS}


def read(folder: Folder, matched: Match, state: State) -> None:
    """Read published weights into tensors of a model on any mesh; collective.

    Args:
        folder: of the weights.
        matched: the pieces of each tensor, by its name in the full model.
        state: tensors by name in a checkpoint; matched ones are written in place.

    Raises:
        RunError: a file cannot be read, on some rank.
    """
    wanted: dict[str, Any] = {name: tensor for name, tensor in state.items() if name.removeprefix(WEIGHTS) in matched}
    try:
        load_distributed(wanted, storage_reader=PiecesReader(folder, matched))
    except CheckpointException as error:
        found = next(iter(error.failures.values()))[0]
        if isinstance(found, RunError):
            raise found from error
        raise RunError(
            RunErrorCode.WEIGHTS_CORRUPT,
            f"{folder.path} could not be read: {cause(error)}",
            help="download or write it again",
        ) from error


class PiecesReader(StorageReader):
    """Presents published tensors as chunks of the model's tensors."""

    def __init__(self, folder: Folder, matched: Match) -> None:
        self._folder = folder
        self._matched = matched
        self._pieces: dict[MetadataIndex, Piece] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a folder's name may be one of published weights."""
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe each tensor as the chunks that its pieces are."""
        described: dict[str, Any] = {}
        for tensor, pieces in self._matched.items():
            name = f"{WEIGHTS}{tensor}"
            chunks = [ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.size)) for piece in pieces]
            dtype = getattr(torch, _ALL[self._folder.tensors[pieces[0].name].dtype])
            ends = zip(
                *([a + b for a, b in zip(piece.start, piece.size, strict=True)] for piece in pieces), strict=True
            )
            described[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(map(max, ends)), chunks)
            for piece in pieces:
                self._pieces[MetadataIndex(name, torch.Size(piece.start))] = piece
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the pieces are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return a rank's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the ranks' plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a rank's plan, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._folder.tensors[self._pieces[item.storage_index].name].file].append(item)
        for file, items in by_file.items():
            path = self._folder.path / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for item in items:
                        self._read(opened, item, planner)
            except (OSError, SafetensorError) as error:
                raise unreadable(path, error) from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, opened: Any, item: ReadItem, planner: LoadPlanner) -> None:
        piece = self._pieces[item.storage_index]
        region = piece.region(item.storage_offsets, item.lengths)
        found = opened.get_slice(piece.name)[tuple(slice(first, first + length) for first, length in region)]
        if piece.transposed:
            found = found.transpose(-1, -2)
        target = planner.resolve_tensor(item).detach()
        target.copy_(found.reshape(target.shape))
        planner.commit_tensor(item, target)
