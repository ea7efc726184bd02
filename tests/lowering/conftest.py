"""Golden programs, and the trainings without a mesh that others are compared with."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai.lowering.program import Program
from support.training import corpus

GOLDEN = Path(__file__).parent / "golden"


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


own_cache = corpus.own_cache


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text to train on."""
    path: Path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(string.printable[(7 * i * i + i // 3) % 95] for i in range(20_000)))
    return str(path)


@pytest.fixture(scope="module")
def alone(gloo: Callable[..., Any], data: str) -> dict[str, Any]:
    """The training of `meshed` on one process, without mesh and wrappers."""
    from support.training.meshed import text_of
    from support.training.staged import PLAIN_DOUBLE, train

    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE), data)
    assert {str(dtype) for dtype in result["dtypes"]} == {"torch.float64"}
    return result


@pytest.fixture(scope="module")
def alone_in_two_blocks(gloo: Callable[..., Any], data: str) -> dict[str, Any]:
    """The same for a model with two blocks."""
    from support.training.meshed import TWO_BLOCKS, text_of
    from support.training.staged import PLAIN_DOUBLE, train

    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE, TWO_BLOCKS), data)
    assert {str(dtype) for dtype in result["dtypes"]} == {"torch.float64"}
    return result


@pytest.fixture(scope="module")
def unstaged(gloo: Callable[..., Any], data: str) -> dict[str, Any]:
    """The training of `staged` on one process, without mesh and wrappers."""
    from support.training.staged import PLAIN_DOUBLE, text_of, train

    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE), data, evaluate_every=2, evaluate_batches=4)
    return result
