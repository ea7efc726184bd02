"""LegoAI's folder in the user's cache, and private directories in it, readable and writable by the user alone."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return `legoai` under `$XDG_CACHE_HOME`, by default `~/.cache`; None for a user without a home directory.

    A relative `$XDG_CACHE_HOME` is ignored, as the XDG base directory specification demands.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises where there is none
        if not home.is_absolute():
            return None
        cache = home / ".cache"
    return cache / "legoai"


def private_cache(name: str) -> Path | None:
    """Return the directory ``name`` under LegoAI's folder in the user's cache, created if needed.

    Returns None where there is none: no home or one that cannot be written, or a directory that another user owns or
    may write.
    Files in it may include pickled tables, so another user's files must not be read.
    """
    cache = user_cache()
    if cache is None:
        return None
    directory = cache / name
    try:
        for folder in (directory.parent, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None
