"""Plans for tests of single rules: statements laid over a small base, and their diagnostics."""

from __future__ import annotations

from pathlib import Path

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.lint import lint

BASE = """
plan base
model   llama3("tiny")
cluster h100_sxm
batch   (global = 64, micro = 1, seq_len = 256)
"""


def diagnostics(text: str, directory: Path = Path(), base: str = BASE) -> list[Diagnostic]:
    """Everything that is found in the statements, which replace like ones of the base."""

    def read(path: Path) -> str:
        assert path.name == "base.plan"
        return base

    found = lint(f'plan test\nextends "base.plan"\n{text}', "test.plan", directory=directory, read=read).diagnostics
    unreadable = [item for item in found if item.code.startswith(("LP1", "LP2"))]
    assert not unreadable, [f"{item.code} {item.message}" for item in unreadable]
    return list(found)


def codes(text: str, directory: Path = Path(), base: str = BASE) -> set[str]:
    """The codes of everything that is found."""
    return {item.code for item in diagnostics(text, directory, base)}


def message(text: str, code: str, directory: Path = Path(), base: str = BASE) -> str:
    """The message of the one diagnostic with this code."""
    found = [item.message for item in diagnostics(text, directory, base) if item.code == code]
    assert len(found) == 1, found
    return found[0]


def place(text: str, code: str) -> str:
    """The text that the one diagnostic with this code underlines."""
    whole = f'plan test\nextends "base.plan"\n{text}'
    spans = [item.label.span for item in diagnostics(text) if item.code == code]
    assert len(spans) == 1, spans
    return whole[spans[0].start : spans[0].end]
