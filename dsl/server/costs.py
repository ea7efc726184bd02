"""Cost of a saved plan, simulated in a separate process, and shown at the lines that cause it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Final, Protocol

from lsprotocol import types

from legoai.dsl.frontend.syntax import Statement
from legoai.dsl.server.documents import Document
from legoai.specs.record import Record

_NICE: Final = 10


class CostCommand(Protocol):
    """Returns the command that prints a plan's cost as JSON with the costs of each line."""

    def __call__(self, path: Path, *, factories: bool) -> list[str]:
        """The command; without ``factories`` it runs none."""


class Costs(Record):
    """Costs of the lines of a text: descriptions by line, counted from 0."""

    text: str
    by_line: dict[int, str]


class CostError(Exception):
    """A plan could not be costed; the message gives the reason."""


async def costs_of(document: Document, command: list[str]) -> Costs:
    """Return the costs of a saved document. Cancelling the coroutine ends the process.

    Raises:
        CostError: it could not be costed.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=document.directory,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, process.pid, _NICE)  # whoever edits comes first
    try:
        said, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    try:
        return read_costs(document, json.loads(said))
    except (ValueError, KeyError, TypeError) as error:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise CostError(lines[-1] if lines else f"`legoai cost` ended with status {process.returncode}") from error


def read_costs(document: Document, body: dict[str, object]) -> Costs:
    """Return the costs from the output of `legoai cost --json --lines`, for the lines of the document's own file."""
    lines = body["lines"]
    assert isinstance(lines, list)
    found = {item["line"] - 1: item["text"] for item in lines if _is_own(document, item["file"]) and item["text"]}
    for statement in document.file.statements:
        if isinstance(statement, Statement) and statement.keyword.text == "plan":
            line = document.positions.line_of(statement.span.start)
            found[line] = ", ".join([str(body["summary"]), *([found[line]] if line in found else [])])
    return Costs(document.text, found)


def _is_own(document: Document, file: str) -> bool:
    return document.path is not None and Path(os.path.normpath(document.directory / file)) == document.path


def hints(document: Document, costs: Costs, first: int, last: int) -> list[types.InlayHint]:
    """The hints of the lines from ``first`` to ``last``. A line that was changed since has none."""
    positions = document.positions
    found = []
    for line, text in costs.by_line.items():
        now = _moved(line, costs.text, document.text)
        if now is not None and first <= now <= last:
            found.append(
                types.InlayHint(
                    position=positions.position(positions.line_end(now)),
                    label=text,
                    padding_left=True,
                    tooltip="predicted by `legoai cost` when the plan was saved",
                )
            )
    return found


def _moved(line: int, before: str, after: str) -> int | None:
    """Return the new index of a line of an older text; lines outside the changed range are unchanged."""
    if before == after:
        return line
    old, new = before.split("\n"), after.split("\n")
    if old[: line + 1] == new[: line + 1]:
        return line
    below = len(old) - line
    return len(new) - below if below <= len(new) and old[line:] == new[-below:] else None
