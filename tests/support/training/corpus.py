"""Fixtures of tests that train: a small corpus, and an empty cache, to be imported under a module's own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

TEXT = "".join(f"line {n} of a corpus that says {n * n % 97}\n" for n in range(30))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus small enough that training passes over it more than once."""
    path: Path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of models and data are separate for the tests of each file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
