"""Unsupported: a configuration that this version turns into no program."""

from __future__ import annotations

from legoai.specs.record import Record
from legoai.specs.span import Span


class Unsupported(Record):
    """A configuration that a family's `supports` predicate reports, with its span in the plan."""

    span: Span
    message: str
    label: str = "not lowered yet"
    help: tuple[str, ...] = ()
