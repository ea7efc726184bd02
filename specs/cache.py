"""LegoAI's folder in the user's cache, private directories in it, and files with a digest of their content.

A cached file begins with a line that has the digest. One that was changed, or written by a version without digests,
counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from legoai.specs.files import replace_file

_REFRESH: Final = ContextVar("refresh", default=b"")
"""Name of the refresh that is under way, which is in the first line of each file that is written in it."""


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


@contextlib.contextmanager
def refreshed(wanted: bool = True) -> Iterator[None]:
    """In the block, and in processes that are forked in it, cached files from before it count as missing.

    Files that are written in the block are read there, so that what candidates share is computed once.

    Args:
        wanted: else the block changes nothing.
    """
    if not wanted or _REFRESH.get():
        yield
        return
    token = _REFRESH.set(secrets.token_hex(8).encode())
    try:
        yield
    finally:
        _REFRESH.reset(token)


def read_cached(path: Path, *, before: bool = False) -> bytes | None:
    """Return the content of a cached file; None where it is missing, cannot be read, or was changed.

    Args:
        path: of a file that :func:`write_cached` wrote.
        before: in a block of :func:`refreshed`, also return what was written before it.
    """
    try:
        held = path.read_bytes()
    except OSError:
        return None
    refresh = _REFRESH.get()
    if refresh and not before and held.partition(b"\n")[0].partition(b" ")[2] != refresh:
        return None
    return without_digest(held)


def write_cached(path: Path, content: bytes, *, whole: bool = True) -> None:
    """Write a file with the digest of its content, atomically.

    Args:
        path: in a directory that exists.
        content: what :func:`read_cached` returns.
        whole: whether all of it was computed now: a block of :func:`refreshed` reads no other file.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, with_digest(content, _REFRESH.get() if whole else b""))


def with_digest(content: bytes, more: bytes = b"") -> bytes:
    """Return a file's content behind a line with its digest, and ``more``, which has no line break."""
    return hashlib.sha256(content).hexdigest().encode() + (b" " + more if more else b"") + b"\n" + content


def without_digest(held: bytes) -> bytes | None:
    """Return the content of what :func:`with_digest` returned; None where it was changed, or has no digest."""
    head, _, content = held.partition(b"\n")
    return content if head.partition(b" ")[0] == hashlib.sha256(content).hexdigest().encode() else None
