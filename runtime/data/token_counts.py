"""Counts of a corpus's tokens, and the file beside it that has them: a large corpus takes minutes to count."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from legoai.runtime.data.building import building
from legoai.runtime.durable import sync

Parts = Sequence[NDArray[Any]]
"""The tokens of each part of a corpus."""

Counts = NDArray[np.int64]
"""[parts, vocabulary]: how often each token occurs."""

_AT_ONCE: Final = 1 << 24
"""Tokens that are counted together."""


def count(parts: Parts, vocabulary: int) -> Counts:
    """Count the tokens, by reading all of them."""
    counts = np.zeros((len(parts), vocabulary), dtype=np.int64)
    for number, tokens in enumerate(parts):
        for start in range(0, len(tokens), _AT_ONCE):
            counts[number] += np.bincount(tokens[start : start + _AT_ONCE], minlength=vocabulary)
    return counts


def save(file: Path, counts: Counts) -> None:
    """Write the file, durably."""
    with file.open("wb") as binary:  # numpy adds a suffix to a path
        np.save(binary, counts, allow_pickle=False)
    sync(file)


def stored(file: Path, parts: Parts, vocabulary: int) -> Counts:
    """Return the counts of a file; where it is missing or damaged, count, and write it where that is allowed."""
    counts = _loaded(file)
    if (
        counts is None
        or counts.shape != (len(parts), vocabulary)
        or counts.sum(axis=1).tolist() != [len(tokens) for tokens in parts]
    ):
        counts = count(parts, vocabulary)
        with contextlib.suppress(OSError), building(file.parent) as folder:
            save(folder / file.name, counts)
            (folder / file.name).replace(file)
    return counts


def lengths(file: Path) -> list[int]:
    """Return the lengths of the parts of which a file has the counts; none where it is missing or damaged."""
    counts = _loaded(file)
    return [] if counts is None else counts.sum(axis=-1).reshape(-1).tolist()


def _loaded(file: Path) -> Counts | None:
    try:
        with file.open("rb") as binary:  # `np.load` takes some damaged files for archives
            counts = np.lib.format.read_array(binary, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return counts if counts.dtype == np.int64 else None
