"""Digest of a corpus's tokens, and the file beside it that has it: a large corpus takes long to read."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Final

from legoai.runtime.data.building import building
from legoai.runtime.data.token_counts import Parts
from legoai.runtime.durable import sync

_PREFIX: Final = "tokens:"
"""Distinguishes it from what checkpoints of earlier versions have: names, sizes and times of files, as a digest."""

_EARLIER: Final = re.compile("[0-9a-f]{64}")

_AT_ONCE: Final = 1 << 22
"""Tokens that are read together."""


def digest(parts: Parts) -> str:
    """Return the digest of the tokens of each part, by reading all of them."""
    found = hashlib.sha256()
    for tokens in parts:
        found.update(f"{tokens.dtype.str}:{len(tokens)}\n".encode())
        for start in range(0, len(tokens), _AT_ONCE):
            found.update(tokens[start : start + _AT_ONCE].tobytes())
    return f"{_PREFIX}{found.hexdigest()}"


def save(file: Path, text: str) -> None:
    """Write the file, durably."""
    file.write_text(f"{text}\n", encoding="ascii")
    sync(file)


def stored(file: Path, parts: Parts) -> str:
    """Return the digest of a file; where it is missing or damaged, compute it, and write it where that is allowed."""
    with contextlib.suppress(OSError, ValueError):
        text = file.read_text(encoding="ascii").strip()
        if text.startswith(_PREFIX) and _EARLIER.fullmatch(text.removeprefix(_PREFIX)):
            return text
    text = digest(parts)
    with contextlib.suppress(OSError), building(file.parent) as folder:
        save(folder / file.name, text)
        (folder / file.name).replace(file)
    return text


def is_of_files(digest: str) -> bool:
    """Whether a digest is of names, sizes and times of files, as checkpoints of earlier versions have it."""
    return _EARLIER.fullmatch(digest) is not None
