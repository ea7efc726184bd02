"""Reading of a Distributed Checkpoint's metadata without running code that it may carry.

Tensors are read with `torch.load(weights_only=True)`. Two other ways in remain: the `.metadata` file is a
pickle, and an item that it declares to be bytes is unpickled without restriction. The reader here admits
only the classes that metadata is made of, and only tensors.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from legoai.runtime.checkpoint.damage import damaged, unsafe
from legoai.runtime.errors import RunError

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
)

_METADATA = "torch.distributed.checkpoint.metadata"

ADMITTED = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
    }
    | {("torch", name) for name in DTYPES}
)
"""What a pickled `Metadata` of tensors is made of. Constructing any of these has no effect outside itself."""


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles nothing but `Metadata`, whatever the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted class.

        Raises:
            RunError: the pickle names something else.
        """
        if (module, name) not in ADMITTED:
            raise unsafe(
                f"checkpoint metadata names {module}.{name}, which no checkpoint needs: "
                "it may run code when it is loaded"
            )
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Read and check the `.metadata` file of a checkpoint.

    Raises:
        OSError: it cannot be read.
        RunError: it holds something else than metadata of tensors in files beside it, or is damaged.
    """
    content = (path / ".metadata").read_bytes()
    try:
        metadata = MetadataUnpickler(BytesIO(content)).load()
        problem = _problem(metadata)
    except RunError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its damaged operations, and what they made, do
        raise damaged(f"{path}: .metadata cannot be read: {error}") from error
    if problem:
        raise damaged(f"{path}: .metadata is damaged: {problem}")
    found: Metadata = metadata
    return found


def _problem(metadata: Any) -> str:
    """Return what is wrong with an unpickled object; or nothing.

    Raises:
        RunError: it reads something else than files beside it.
    """
    if not isinstance(metadata, Metadata):
        return "it is something else"
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        return "it does not map names of tensors to their places"
    if not isinstance(metadata.storage_meta, StorageMeta | None):
        return f"it is from {metadata.storage_meta!r}"
    for place in places.values():
        if problem := _problem_of_place(place):
            return problem
    for name, tensor in tensors.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise unsafe(f"checkpoint entry {name} is not a tensor")
        if not isinstance(name, str):
            return f"{name!r} is no name of a tensor"
        if problem := problem_of_tensor(tensor):
            return f"{name} {problem}"
        if not all(MetadataIndex(name, chunk.offsets) in places for chunk in tensor.chunks):
            return f"{name} has a part without a place in a file"
    return ""


def _problem_of_place(place: Any) -> str:
    file_name = getattr(place, "relative_path", None)
    numbers = [getattr(place, "offset", None), getattr(place, "length", None)]
    if not isinstance(file_name, str) or not all(type(number) is int and number >= 0 for number in numbers):
        return f"{place!r} is no place in a file"
    if PurePath(file_name).name != file_name or file_name in ("", ".", ".."):
        raise unsafe(f"checkpoint metadata points outside its folder, to {file_name}")
    if place.transform_descriptors:
        raise unsafe("checkpoint metadata asks for a stream transform")
    return ""


def problem_of_tensor(tensor: TensorStorageMetadata) -> str:
    """Return what is wrong with a tensor and its parts: these cover it, and no element is in two of them."""
    size, chunks = tensor.size, tensor.chunks
    if not isinstance(size, torch.Size) or not isinstance(tensor.properties.dtype, torch.dtype):
        return "has no shape or no dtype"
    if not isinstance(chunks, list):
        return "has no parts"
    for chunk in chunks:
        bounds = chunk.offsets, chunk.sizes
        if not all(isinstance(bound, torch.Size) and len(bound) == len(size) for bound in bounds):
            return f"of the shape {list(size)} has a part that is no box: {chunk}"
        box = zip(size, *bounds, strict=True)
        if not all(first >= 0 and length >= 0 and first + length <= whole for whole, first, length in box):
            return f"of the shape {list(size)} has a part outside of it: {chunk}"
    if sum(chunk.sizes.numel() for chunk in chunks) != size.numel() or _overlap(chunks):
        return f"of the shape {list(size)} has parts that do not cover it, each element once"
    return ""


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two boxes have an element in common; only those are compared that meet along the axis of most bounds."""
    boxes = [list(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in chunks if chunk.sizes.numel()]
    if len(boxes) < 2:
        return False
    axis = max(range(len(boxes[0])), key=lambda axis: len({box[axis] for box in boxes}))
    met: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[axis]):
        met = [other for other in met if sum(other[axis]) > box[axis][0]]
        if any(
            all(first < sum(its) and its[0] < first + length for (first, length), its in zip(box, other, strict=True))
            for other in met
        ):
            return True
        met.append(box)
    return False


class SafeReader(FileSystemReader):
    """`FileSystemReader` for checkpoints that anyone may have written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata with `read_metadata`.

        Raises:
            RunError: as `read_metadata` does.
        """
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
