"""JSON objects in files and their lines, which anyone may have written or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_MOST_NESTED: Final = 100
"""Levels; far fewer than can be read, since what was read is also pickled and shown."""


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else; the message says what is wrong.
    """
    return json_object(file.read_bytes())


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text states.

    Raises:
        ValueError: it is something else; the message says what is wrong.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    level: list[Any] = [found]
    for _ in range(_MOST_NESTED):
        parts = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return found
    raise ValueError("it is nested too deeply")
