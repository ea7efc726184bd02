"""Rows of a file of published runs, with typed fields, and the rows to drop."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a CSV file; an empty field was not stated.

    Attributes:
        id: its own, or the file's name and the number of the row in it.
        fields: by column, as written.
    """

    id: str
    fields: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """The text of a field without surrounding blanks; ``default`` where it is empty or has no column."""
        return (self.fields.get(name) or "").strip() or default

    def whole(self, name: str, default: int | None = None) -> int:
        """The field as a whole number.

        Raises:
            UnstatedError: it is empty and there is no default, or it is not a number.
        """
        text = self.text(name)
        if not text:
            if default is None:
                raise UnstatedError(f"`{name}` is not stated")
            return default
        try:
            return int(text)
        except ValueError:
            raise UnstatedError(f"`{name}` is no whole number: {text}") from None

    def number(self, name: str) -> float | None:
        """The field as a number, or None where it is empty or not a number."""
        try:
            return float(self.text(name).replace(",", ""))
        except ValueError:
            return None

    @property
    def dropped(self) -> str | None:
        """The file's own reason to drop the row; None for a good row."""
        notes = self.text("notes") + self.text("note")
        return next((word for word in ("SUSPECT", "DUPLICATE") if word in notes), None)


class UnstatedError(Exception):
    """A row that cannot be written as a plan; the message says why, for a person who reads a table of them."""


def read(path: Path) -> list[Row]:
    """Read a CSV file whose lines that begin with `#` are remarks.

    Raises:
        UnstatedError: it has no header or cannot be read as text.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            found = [
                Row(fields.get("id") or f"{path.stem}-{index:04}", fields) for index, fields in enumerate(reader, 1)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnstatedError(f"{path} cannot be read: {error}") from error
    if not found:
        raise UnstatedError(f"{path} has no rows")
    return found
