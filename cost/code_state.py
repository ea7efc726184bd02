"""State of the code and the shipped data on which cached results depend: versions and files."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Final

import legoai

_SUFFIXES: Final = frozenset({".py", ".toml", ".gz"})
"""Endings of the files that count: modules, the catalogue, and profiles."""
SIMULATION: Final = ("cost", "dsl", "lowering", "runtime", "specs")
"""Folders of the package whose code decides what a simulation captures, and with it every figure of a plan."""


@functools.cache
def state_of_code(*folders: str) -> str:
    """Return a digest of the versions of LegoAI, torch, numpy and Python, and of the package's files in ``folders``.

    A file counts with its path, size and modification time: results of other code are not reused.
    """
    # numpy is in it because pickled arrays name its functions.
    others = " ".join(importlib.metadata.version(name) for name in ("torch", "numpy"))
    digest = hashlib.sha256(f"{legoai.__version__} {others} {sys.version}\n".encode())
    for folder in folders:
        files = Path(legoai.__file__).parent.joinpath(folder).resolve().rglob("*")
        for file in sorted(file for file in files if file.suffix in _SUFFIXES):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
