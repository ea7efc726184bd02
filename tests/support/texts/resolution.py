"""Resolution of small plans, with the spans and the codes of its diagnostics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.specs.plan import Plan
from legoai.specs.span import Origin

HEAD = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 4)\nbatch (global = 4, micro = 1, seq_len = 64)\n'


def resolution(text: str, directory: Path = Path(), **options: Any) -> Resolution:
    return resolve(text, "t.plan", directory=directory, **options)


def plan_of(text: str, directory: Path = Path(), **options: Any) -> Plan:
    found = resolution(text, directory, **options)
    assert found.diagnostics == []
    assert found.plan is not None
    return found.plan


def codes(text: str, directory: Path = Path(), **options: Any) -> list[str]:
    return [item.code for item in resolution(text, directory, **options).diagnostics]


def written(origin: Origin, text: str) -> str:
    """The characters that a value came from."""
    assert origin.span is not None
    return text[origin.span.start : origin.span.end]
