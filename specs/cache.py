"""Private cache directory for reproducible files, readable and writable by the user alone."""

from __future__ import annotations

import os
from pathlib import Path


def private_cache(name: str) -> Path | None:
    """Return the directory ``name`` under LegoAI's folder in the user's cache, created if needed.

    Returns None where there is none: a home that cannot be written, or a directory that another user owns or may write.
    Files in it may include pickled tables, so another user's files must not be read.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home raises where there is none
    directory = Path(home) / "legoai" / name
    try:
        for folder in (directory.parent, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None
