"""Private cache directory for files that can be made again, readable and writable by the user alone."""

from __future__ import annotations

import os
from pathlib import Path


def private_cache(name: str) -> Path | None:
    """The directory ``name`` under LegoAI's folder in the user's cache, made if needed.

    Returns None where there is no such place: a home that cannot be written, or a directory that somebody else owns or
    may write. What is read back from here may include pickled tables, so another user's hand in it is not acceptable.
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
