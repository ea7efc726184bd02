"""Folder of published weights: contents of its safetensors files, read from their headers only.

A safetensors file is a header, which is JSON, and numbers; it holds no code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.json_object import read_json_object
from legoai.specs.models.manifests.cache import read_config
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.visible_text import visible_line

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
SUFFIX: Final = ".safetensors"

_PICKLES: Final = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")

DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported dtypes of weights: safetensors' name, and torch's dtype."""

INTEGERS: Final = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
"""The same of counters and indices among a model's buffers."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A published tensor: its file in the folder, its shape, and safetensors' name of its dtype."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of published weights.

    Attributes:
        path: of the folder.
        tensors: by name.
        config: the fields of its config.json; empty where it has none.
    """

    path: Path
    tensors: dict[str, Stored]
    config: dict[str, Any]


def is_published(path: Path) -> bool:
    """Whether a path is a folder of weights as Hugging Face publishes them, or seems to be meant as one."""
    if not path.is_dir():
        return False
    found = (any(path.glob(pattern)) for pattern in (f"*{SUFFIX}", INDEX, CONFIG, *_PICKLES))
    return any(found)


def open_folder(path: Path) -> Folder:
    """Read the headers of a folder of published weights.

    Raises:
        RunError: files are missing or damaged, or the package `safetensors` is missing.
    """
    check_installed(path)
    tensors: dict[str, Stored] = {}
    files = _files(path)
    for file, names in files.items():
        held = _header(path / file)
        lost = sorted(set(names) - held.keys())
        if lost:
            raise _corrupt(f"{path / INDEX} looks for {lost[0]} in {file}, which does not have it")
        for name in names or held:
            if name in tensors:
                raise RunError(
                    RunErrorCode.WEIGHTS_CORRUPT,
                    visible_line(f"{path}: both {tensors[name].file} and {file} hold {name}"),
                    help=f"remove the file that is of another model, or take a folder with its {INDEX}",
                )
            tensors[name] = Stored(file, *held[name])
    return Folder(path, tensors, _config(path))


def check_installed(path: Path) -> None:
    """Check that the package `safetensors` is installed.

    Raises:
        RunError: it is not.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise RunError(
            RunErrorCode.NO_SAFETENSORS,
            f"{path} needs the package `safetensors`, which is not installed",
            help="`pip install 'legoai[safetensors]'` installs it",
        ) from None


def unreadable(file: Path, error: Exception) -> RunError:
    """The error of a file that cannot be read as safetensors."""
    if isinstance(error, OSError):
        return _corrupt(f"{file} cannot be read: {error.strerror or error}")
    return _corrupt(f"{file} is damaged, or no safetensors file: {error}")


def _corrupt(message: str) -> RunError:
    return RunError(RunErrorCode.WEIGHTS_CORRUPT, visible_line(message), help="download or write it again")


def _files(path: Path) -> dict[str, list[str]]:
    """Return the files of the weights, each with the names that are read from it; None for all."""
    if (path / INDEX).is_file():
        return dict(_listed(path))
    if (path / SINGLE).is_file():
        return {SINGLE: []}
    found = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    if found:
        return {name: [] for name in found}
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise RunError(
            RunErrorCode.WEIGHTS_MISSING,
            f"{path} has no {SUFFIX} files, but {pickles[0]}, a pickle, which may run code when it is read",
            help="save the model again with `save_pretrained` of transformers, or take its safetensors files",
        )
    raise RunError(
        RunErrorCode.WEIGHTS_MISSING,
        f"{path} has no {SUFFIX} files",
        help="give a folder of them, as `hf download` makes it, or a checkpoint",
    )


def _listed(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        weights = read_json_object(path / INDEX)["weight_map"]
        if not isinstance(weights, dict):
            raise ValueError("its 'weight_map' does not map names of tensors to files")
        files: dict[str, list[str]] = {}
        for name, file in weights.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"it names {file!r}, which is no file beside it")
            files.setdefault(file, []).append(name)
    except OSError as error:
        raise _corrupt(f"{path / INDEX} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise _corrupt(f"{path / INDEX} is damaged, or no index of safetensors files: {why}") from None
    for file, names in files.items():
        if not os.path.isfile(path / file):  # noqa: PTH113 - Path.is_file raises for a name that is too long
            raise RunError(
                RunErrorCode.WEIGHTS_MISSING,
                visible_line(f"{path / file} is missing, which has {len(names)} of the tensors of {INDEX}"),
                help="download it, or the whole folder again",
            )
        yield file, names


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
            return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise unreadable(file, error) from None


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        return {}
    try:
        return read_config(path / CONFIG)
    except ManifestError as error:
        raise _corrupt(error.message) from None
