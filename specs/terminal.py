"""Colour on terminals."""

from __future__ import annotations

import os
from typing import TextIO


def may_color(stream: TextIO) -> bool:
    """Whether lines may carry colour: on a terminal, unless NO_COLOR is set to anything (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
