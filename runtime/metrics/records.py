"""Append-only files of records."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from legoai.runtime.json_object import json_object


class RecordFile:
    """A JSONL file to which records are appended; one that was written in part, as by a killed run, is ended first.

    Args:
        path: of the file, which is made with its folders where there is none.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        self._file = path.open("ab+", buffering=0)
        self._is_torn = False
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._is_torn = self._file.read() != b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, record: dict[str, Any]) -> None:
        """Append a line.

        Raises:
            OSError: it cannot be written, or not the whole of it.
        """
        rest = ("\n" * self._is_torn + json.dumps(_json_safe(record)) + "\n").encode()
        while rest:
            rest = rest[self._file.write(rest) :]
            self._is_torn = bool(rest)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path, *, behind: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, but for those that were written in part, or damaged.

    There are none where there is no such file, or it is no regular one: a pipe would be waited for.

    Args:
        path: of the file.
        behind: bytes at its beginning that are not read.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            file.seek(behind)
            for line in file:
                with contextlib.suppress(ValueError):
                    yield json_object(line.decode("utf-8", errors="replace"))
    except OSError:
        return


def _json_safe(record: dict[str, Any]) -> dict[str, Any]:
    """Write numbers that JSON does not have as strings."""
    return {
        key: str(value) if isinstance(value, float) and not (abs(value) < float("inf")) else value
        for key, value in record.items()
    }
