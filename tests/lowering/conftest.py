"""Puts the tests' own modules on the path, and compares programs with the golden ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from legoai.lowering.program import Program

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
sys.path.insert(0, str(HERE))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-programs", action="store_true", help="write the programs as they are now to golden/")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Program], None]:
    """`golden(name, program)` compares a program with `golden/NAME.py`, all but the version and the plan's hash."""

    def compare(name: str, program: Program) -> None:
        text = re.sub(r"by legoai \d+\.\d+\.\d+\S*\.$", "by legoai 0.0.0.", program.text, count=1, flags=re.MULTILINE)
        text = text.replace(program.digest, "sha256:" + "0" * 64)
        path = GOLDEN / f"{name}.py"
        if request.config.getoption("--update-programs", default=False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing: run pytest tests/lowering --update-programs, and read it"
        assert text == path.read_text(encoding="utf-8")

    return compare
