"""Golden texts of diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the tool says now into the golden files")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`golden(path, text)` compares a text with a file, or writes it there under `--update-golden`."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing: run pytest tests/dsl --update-golden, and read it"
        assert text == path.read_text(encoding="utf-8")

    return compare
