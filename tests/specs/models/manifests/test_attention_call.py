"""Calls of attention that pieces of a sequence do not allow, and why."""

from __future__ import annotations

import pytest

from legoai.specs.models.manifests.attention_call import AttentionCall

FLAT, WHOLE, MORE = (2, 8, 4), (2, 2, 8, 4), (1, 2, 2, 8, 4)


@pytest.mark.parametrize(
    ("queries", "keys", "dims"),
    [(FLAT, FLAT, 3), (WHOLE, FLAT, 3), (WHOLE, MORE, 5), (MORE, WHOLE, 5), (FLAT, MORE, 3)],
)
def test_misfit_names_the_dims_that_are_not_four(queries: tuple[int, ...], keys: tuple[int, ...], dims: int) -> None:
    found = AttentionCall(queries, keys, mask=False, dropout=False, grouped=False).misfit()
    assert found is not None
    assert found.given == f"tensors of {dims} dims"


def test_call_on_tensors_of_four_dims_fits() -> None:
    assert AttentionCall(WHOLE, WHOLE, mask=False, dropout=False, grouped=False).misfit() is None
