"""Disk cache: files in a folder of the user's cache, named by their keys, for pieces and simulated pipelines.

A file is written under a temporary name and then renamed, so that it is complete or missing. It begins with a digest of
its content: a damaged file counts as missing, and is written again. When a folder exceeds its size limit, the least
recently used files are removed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from legoai.cost.replay.file import load, save
from legoai.cost.replay.piece import Piece
from legoai.specs.cache import private_cache, read_cached, write_cached
from legoai.specs.units import MIB

MOST_BYTES: Final = 128 * MIB
"""Size limit of a folder, in bytes; a piece takes some 100 kB."""
_PIECES: Final = "pieces"


def cached_piece(key: str) -> Piece | None:
    """Return the piece of a key; None where none is cached, or a damaged one."""
    held = kept_bytes(_PIECES, f"{key}.json")
    if held is None:
        return None
    try:
        return load(held)
    except ValueError:
        return None


def keep_piece(key: str, piece: Piece) -> None:
    """Store a piece under its key, if there is a cache folder."""
    with contextlib.suppress(ValueError):
        keep_bytes(_PIECES, f"{key}.json", save(piece).encode())


def kept_bytes(folder: str, name: str) -> bytes | None:
    """Return the content of a file in a folder of the cache; None where there is none, or a damaged one."""
    place = private_cache(folder)
    if place is None:
        return None
    file = place / name
    held = read_cached(file)
    if held is not None:
        with contextlib.suppress(OSError):
            os.utime(file)
    return held


def keep_bytes(folder: str, name: str, held: bytes) -> None:
    """Write a file with its digest in a folder of the cache, if there is a cache folder."""
    place = private_cache(folder)
    if place is None:
        return
    with contextlib.suppress(OSError):
        write_cached(place / name, held)
        _remove_old(place)


def _remove_old(folder: Path) -> None:
    """Remove the least recently used files until the folder is within its size limit."""
    found = []
    for file in folder.glob("[!.]*"):
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((status.st_mtime_ns, status.st_size, file))
    left = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if left <= MOST_BYTES:
            break
        with contextlib.suppress(OSError):
            file.unlink()
            left -= size
