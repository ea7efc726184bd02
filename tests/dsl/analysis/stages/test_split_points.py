"""Blocks are shared among stages evenly, by weight or by number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.specs.models.source import ModelSource
from support.texts.plans import lowered, manifest_of, without_hash


def points(n_layers: int = 12) -> SplitPoints:
    source = ModelSource(kind="builtin", target="llama3", preset="tiny", arguments={"n_layers": n_layers})
    return SplitPoints(manifest_of(source))


def counts(known: SplitPoints, first: tuple[str, ...]) -> list[int]:
    blocks = set(known.blocks)
    return [len(blocks.intersection(stage)) for stage in known.stages(first, len(first) + 1)]


@pytest.mark.parametrize(
    ("stages", "embedding", "loss", "shared"),
    [
        (4, 0, 0, [3, 3, 3, 3]),
        (5, 0, 0, [2, 2, 3, 3, 2]),
        (4, 1, 1, [2, 4, 4, 2]),
        (4, 0, 2, [3, 4, 4, 1]),
        (4, 2, 2, [2, 4, 4, 2]),
        (2, 100, 0, [1, 11]),
        (1, 1, 1, [12]),
    ],
)
def test_embedding_and_loss_weights_reduce_blocks_of_the_end_stages(
    stages: int, embedding: float, loss: float, shared: list[int]
):
    known = points()
    assert counts(known, known.even(stages, embedding=embedding, loss=loss)) == shared


@given(st.integers(1, 12), st.floats(0, 9), st.floats(0, 9))
@settings(max_examples=50)
def test_no_move_of_one_block_lowers_the_largest_load(stages: int, embedding: float, loss: float):
    known = points()
    shared = counts(known, known.even(stages, embedding=embedding, loss=loss))
    assert sum(shared) == 12
    assert min(shared) >= 1
    loads = [float(count) for count in shared]
    loads[0] += embedding
    loads[-1] += loss
    for stage, count in enumerate(shared):
        if loads[stage] == max(loads) and count > 1:
            assert all(loads[other] + 1 >= loads[stage] for other in range(stages) if other != stage)


def test_numbers_of_blocks_are_split_points():
    known = points()
    assert known.counted((5, 4, 3)) == ("layers.5", "layers.9")


HEAD = """plan a
model llama3("tiny")
cluster cpu(devices = 2)
batch (global = 8, micro = 1, seq_len = 64)
mesh (pp = 2)
"""


@pytest.mark.parametrize(
    ("split", "named"),
    [("[1, 3]", "[layers.1]"), ("even(loss = 2)", "[layers.3]"), ("even(embedding = 2)", "[layers.1]")],
)
def test_numeric_split_lowers_to_the_program_of_named_split_points(split: str, named: str):
    texts = [without_hash(lowered(f"{HEAD}pipeline on pp (split = {item})\n")) for item in (split, named)]
    assert texts[0] == texts[1]
