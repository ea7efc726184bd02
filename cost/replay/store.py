"""Pieces that are kept in the user's cache folder, each in a file named by its key.

A file is written beside its place and then renamed, so that it is whole or not there. One that is damaged counts as
none, and is written again. The files that were not used for longest are removed when there are too many bytes of them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from legoai.cost.replay.file import load, save
from legoai.cost.replay.piece import Piece
from legoai.dsl.frontend.sources import replace_file
from legoai.specs.cache import private_cache

MOST_BYTES: Final = 128 * 2**20
"""Bytes of all files together; a piece takes some 100 kB."""


def kept_piece(key: str) -> Piece | None:
    """Return the piece of a key; None where there is none that can be read."""
    file = _file(key)
    if file is None:
        return None
    try:
        found = load(file.read_bytes())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return found


def keep_piece(key: str, piece: Piece) -> None:
    """Keep a piece under its key, if there is a place for it."""
    file = _file(key)
    if file is None:
        return
    with contextlib.suppress(OSError, ValueError):
        replace_file(file, save(piece))
        _remove_old(file.parent)


def _file(key: str) -> Path | None:
    folder = private_cache("pieces")
    return None if folder is None else folder / f"{key}.json"


def _remove_old(folder: Path) -> None:
    """Remove the files that were not used for longest, until the others are few enough."""
    found = []
    for file in folder.glob("*.json"):
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
