"""Every form of the loss gives the same value and gradients."""

from __future__ import annotations

import os

import pytest
import torch

from support.meshed import TRAINING, UNITS, text_of
from support.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

BOTH = f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}\nfsdp on dp_shard {UNITS}{DOUBLE}"


def train_anew(text: str, data: str) -> dict:
    torch._dynamo.reset()
    return train(text, data)


def train_cached(text: str, data: str, cache: str) -> dict:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return train_anew(text, data)


@pytest.mark.parametrize("pieces", [2, 5])
def test_pieces_train_as_the_whole_does_also_on_shards_of_the_vocabulary(pieces: int, gloo, data, alone):
    for result in gloo(4)(train, text_of(f"{BOTH}loss chunked({pieces})"), data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_a_compiled_loss_trains_as_an_eager_one_does(world: int, gloo, data, alone):
    body = PLAIN_DOUBLE if world == 1 else BOTH
    for result in gloo(world)(train_anew, text_of(f"{body}loss fused"), data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_warm_cache_gives_no_rank_the_group_of_another(gloo, data, alone, tmp_path, monkeypatch):
    monkeypatch.setattr("support.gloo.CALL_SECONDS", 280.0)
    for _ in range(2):  # the second time from the cache on disk
        for result in gloo(4)(train_cached, text_of(f"{BOTH}loss fused"), data, str(tmp_path)):
            assert_close(result, alone, TOLERANCE)


def test_the_program_says_how_the_loss_is_computed():
    def text(loss: str) -> str:
        return lowered(f"{HEAD}{TRAINING}{loss}").text

    assert "    return functools.partial(chunked_cross_entropy, pieces=8)  # tiny.plan:9\n" in text("loss chunked(8)")
    assert "    return torch.compile(token_cross_entropy, fullgraph=True)  # tiny.plan:9\n" in text("loss fused")
    assert "    return token_cross_entropy  # tiny.plan:9\n" in text("loss eager")
