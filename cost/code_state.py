"""State of the code on which cached results depend: versions and files."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

import legoai


@functools.cache
def state_of_code(*folders: str) -> str:
    """Return a digest of the versions of LegoAI, torch and Python, and of the files in ``folders`` of this package.

    A file counts with its path, size and modification time: results of other code are not reused.
    """
    digest = hashlib.sha256(f"{legoai.__version__} {importlib.metadata.version('torch')} {sys.version}\n".encode())
    for folder in folders:
        for file in sorted(Path(legoai.__file__).parent.joinpath(folder).resolve().rglob("*.py")):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
