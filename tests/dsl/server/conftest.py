"""A language server that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands.command_line import GOOD
from support.commands.language_client import Client, client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workspace").resolve()


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Client]:
    """One server for the tests that leave it running."""
    with client(folder, options={"costs": False}) as made:
        yield made


@pytest.fixture
def editor(shared: Client, request: pytest.FixtureRequest) -> Iterator[tuple[Client, str]]:
    """The shared server, and the name of a document of the test's own, with a good plan."""
    name = f"{request.node.name.partition('[')[0]}.plan"
    assert shared.open(name, GOOD) == []
    yield shared, name
    shared.close(name)
