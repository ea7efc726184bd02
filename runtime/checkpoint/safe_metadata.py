"""Reading of a Distributed Checkpoint's metadata without running code that it may carry.

Tensors are read with `torch.load(weights_only=True)`. Two other ways in remain: the `.metadata` file is a
pickle, and an item that it declares to be bytes is unpickled without restriction. The reader here admits
only the classes that metadata is made of, and only tensors.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from legoai.runtime.errors import RunError, RunErrorCode

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
            raise RunError(
                RunErrorCode.CHECKPOINT_UNSAFE,
                f"checkpoint metadata names {module}.{name}, which no checkpoint needs: "
                "it may run code when it is loaded",
                help="do not load this file; use a checkpoint that you trust",
            )
        return super().find_class(module, name)


def read_metadata(file: BinaryIO) -> Metadata:
    """Read and check a `.metadata` file.

    Raises:
        RunError: it holds something else than metadata of tensors in files beside it, or is damaged.
    """
    try:
        metadata = MetadataUnpickler(file).load()
    except RunError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its damaged operations do
        raise RunError(RunErrorCode.CHECKPOINT_CORRUPT, f"checkpoint metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise RunError(RunErrorCode.CHECKPOINT_CORRUPT, "checkpoint metadata is not metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise RunError(RunErrorCode.CHECKPOINT_UNSAFE, f"checkpoint entry {name} is not a tensor")
    for storage in metadata.storage_data.values():
        file_name = str(storage.relative_path)
        if PurePath(file_name).name != file_name or file_name in ("", ".", ".."):
            raise RunError(
                RunErrorCode.CHECKPOINT_UNSAFE, f"checkpoint metadata points outside its folder, to {file_name}"
            )
        if storage.transform_descriptors:
            raise RunError(RunErrorCode.CHECKPOINT_UNSAFE, "checkpoint metadata asks for a stream transform")
    return metadata


class SafeReader(FileSystemReader):
    """`FileSystemReader` for checkpoints that anyone may have written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata with `read_metadata`.

        Raises:
            RunError: as `read_metadata` does.
        """
        with Path(self.path, ".metadata").open("rb") as file:
            metadata = read_metadata(file)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
