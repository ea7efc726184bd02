"""Reads and writes the line that the solver leaves in a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from legoai.dsl.diagnostics.codes.syntax import MalformedSolvedLine
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.syntax import SolvedLine
from legoai.specs.plan import Solved, Stop
from legoai.specs.span import Origin

STOPS: Final[Mapping[Stop, str]] = {"time_limit": "stopped at the time limit", "interrupted": "interrupted"}
"""What stopped a search, in words."""

_LINE = re.compile(
    r'"(?P<digest>sha256:[0-9a-f]{64})" by legoai (?P<version>[0-9][\w.+\-]*), '
    r"device profile (?P<profile>[\w.\-]+@[0-9a-f]+), gap (?:(?P<gap>[0-9]+(?:\.[0-9]+)?)%|unknown)"
    rf"(?:, (?P<stopped>{'|'.join(STOPS.values())}))?"
)


def read(line: SolvedLine) -> Solved | Diagnostic:
    """The contents of the line, or the error in it."""
    match = _LINE.fullmatch(line.text)
    if match is None:
        return MalformedSolvedLine.at(
            line.span,
            "the solver's line cannot be read",
            label='expected `solved "sha256:…" by legoai VERSION, device profile NAME@HASH, gap G%`',
            help=["delete the line; solving writes a new one"],
        )
    return Solved(
        digest=match["digest"],
        version=match["version"],
        profile=match["profile"],
        gap=None if match["gap"] is None else float(match["gap"]) / 100,
        stopped=next((stop for stop, words in STOPS.items() if words == match["stopped"]), None),
        origin=Origin("solver", line.span),
    )


def write(record: Solved) -> str:
    """The line as written in a plan."""
    gap = "unknown" if record.gap is None else f"{record.gap * 100:.6g}%"
    stopped = "" if record.stopped is None else f", {STOPS[record.stopped]}"
    return f'solved "{record.digest}" by legoai {record.version}, device profile {record.profile}, gap {gap}{stopped}'
