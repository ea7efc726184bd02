"""Inspection of models in a subprocess, which other tests avoid."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def inspector() -> None:
    """Models are inspected as they are for users, in a subprocess."""
