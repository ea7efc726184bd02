"""Every sample is read once per epoch, in one global order, wherever and however often the run was stopped."""

from __future__ import annotations

import numpy as np
import pytest

from legoai.runtime.data.sequences import Shuffle, TokenStream
from legoai.runtime.errors import RunError, RunErrorCode

TOKENS = np.arange(1001, dtype=np.int64) % 256


def stream(**options) -> TokenStream:
    return TokenStream(**{"tokens": TOKENS.astype(np.uint8), "seq_len": 10, "micro_batch": 2, "seed": 5} | options)


def global_order(degree: int, samples: int, consumed: int = 0) -> list[list[int]]:
    """The first token rows in global order, as the ranks of a degree read them together."""
    ranks = [stream(rank=rank, degree=degree, consumed=consumed) for rank in range(degree)]
    rows = []
    while len(rows) < samples:
        for rank in ranks:
            rows += rank.next().tokens.tolist()
    return rows[:samples]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000, 4097, 65536])
def test_a_shuffle_is_a_permutation(size):
    order = Shuffle(size, seed=1, epoch=0)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_shuffles_look_random_and_differ_by_epoch_and_seed():
    size = 10_000
    items = np.arange(size)
    orders = [Shuffle(size, seed=seed, epoch=epoch)(items) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for index, order in enumerate(orders):
        assert abs(np.corrcoef(items, order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert all((order == other).sum() < 20 for other in orders[index + 1 :])


def test_large_shuffle_computes_only_requested_items():
    size = 10**12
    order = Shuffle(size, seed=0, epoch=0)(np.array([0, 1, size - 1]))
    assert len(set(order.tolist())) == 3 and (order < size).all()


def test_an_epoch_reads_every_window_once():
    rows = global_order(degree=5, samples=100)
    starts = sorted(row[0] for row in rows)
    assert starts == sorted((index * 10) % 256 for index in range(100))


def test_targets_are_the_next_tokens():
    batch = stream().next()
    assert batch.tokens.shape == batch.targets.shape == (2, 10)
    assert ((batch.tokens + 1) % 256 == batch.targets).all()


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_the_global_order_is_the_same_for_every_degree(degree):
    assert global_order(degree, 230) == global_order(1, 230)


def test_a_stream_resumes_in_the_middle_of_an_epoch_on_another_degree():
    whole = global_order(1, 260)
    assert whole[:132] + global_order(4, 128, consumed=132) == whole


def test_epochs_are_in_different_orders():
    rows = global_order(1, 200)
    assert rows[:100] != rows[100:] and sorted(rows[:100]) == sorted(rows[100:])


def test_without_a_seed_the_order_is_the_corpus_order():
    assert stream(seed=None).next().tokens[:, 0].tolist() == [0, 10]


def test_corpus_shorter_than_a_sequence_is_refused():
    with pytest.raises(RunError, match="has 10 tokens, and one sequence of 10 needs 11") as caught:
        stream(tokens=TOKENS[:10].astype(np.uint8))
    assert caught.value.code == RunErrorCode.DATA_TOO_SHORT
    assert stream(tokens=TOKENS[:11].astype(np.uint8)).windows == 1
