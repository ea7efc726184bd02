"""Dependencies of the manifest of a factory's model beside the factory's own file: other files, and the environment.

The cache compares both with those of the inspection, without running anything. A file is known by the digest of its
content, a large one by its size and the time of its last change, a missing one as missing. Of environment variables
the cache holds their names and one digest of all values, as values may be secrets.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from legoai.specs.files import MOST_TEXT

ALL_NAMES: Final = ""
"""Among the names of environment variables: the factory listed them all."""
UNRELATED: Final = frozenset({"_", "COLUMNS", "LINES", "OLDPWD", "PATH", "PWD", "SHLVL", "TERM"})
"""Environment variables that differ between two terminals and determine no model."""

_MISSING: Final = "missing"
_BY_TIME: Final = "changed "


def fingerprint(path: str | Path, *, digested: bool = True) -> str | None:
    """What identifies a file's content; None for a directory, a device, or a file that cannot be read.

    Args:
        path: of the file.
        digested: whether the content is read; without, and for a large file, its size and its time count.
    """
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        if digested and status.st_size <= MOST_TEXT:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return f"{_BY_TIME}{status.st_size} {status.st_mtime_ns}"
    except (FileNotFoundError, NotADirectoryError):
        return _MISSING
    except (OSError, ValueError):
        return None


def is_missing(fingerprint: str) -> bool:
    """Whether there was no such file."""
    return fingerprint == _MISSING


def unchanged(files: Iterable[tuple[str, str]]) -> bool:
    """Whether files have the fingerprints that they had."""
    return all(fingerprint(path, digested=not known.startswith(_BY_TIME)) == known for path, known in files)


def environment_digest(names: Collection[str], environment: Mapping[str, str]) -> str:
    """The digest of the values of environment variables, and of all their names where `ALL_NAMES` is asked for."""
    values = {name: environment.get(name) for name in sorted(names) if name != ALL_NAMES}
    listed = sorted(set(environment) - UNRELATED) if ALL_NAMES in names else None
    return hashlib.sha256(json.dumps([values, listed]).encode()).hexdigest()
