"""Errors of checkpoints that cannot be read. Text of their files is shown such that it cannot steer the terminal."""

from __future__ import annotations

from pathlib import Path

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.specs.visible_text import visible_line


def damaged(message: str) -> RunError:
    """The error of a checkpoint that is damaged or incomplete."""
    return RunError(
        RunErrorCode.CHECKPOINT_CORRUPT,
        visible_line(message),
        help="take another checkpoint, or restore this one from a copy",
    )


def unsafe(message: str) -> RunError:
    """The error of a checkpoint that may run code, or read files of others, when it is loaded."""
    return RunError(
        RunErrorCode.CHECKPOINT_UNSAFE,
        visible_line(message),
        help="do not load this file; use a checkpoint that you trust",
    )


def newer(path: Path, why: str) -> RunError:
    """The error of a checkpoint that a later version wrote: it may be good, and is not to be removed."""
    return RunError(
        RunErrorCode.CHECKPOINT_NEWER,
        visible_line(f"{path} was written by a newer LegoAI: {why}"),
        help="upgrade LegoAI, or choose another --out, or another checkpoint where one was named; it stays as it is",
    )
