"""Every form of the loss gives the same value and gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch

from legoai.runtime.torch_internals.distributed.fake_world import forget_meshes
from legoai.runtime.training import trainer
from support.marks import slow_but
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.training.meshed import TRAINING, TWO_BLOCKS, UNITS, text_of
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, together, train

BOTH = f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}\nfsdp on dp_shard {UNITS}{DOUBLE}"


def train_anew(text: str, data: str, **options) -> dict:
    """Train without what the process keeps of earlier programs: a compiled loss distinguishes their equal meshes."""
    torch._dynamo.reset()
    forget_meshes()
    return train(text, data, **options)


def train_cached(text: str, data: str, cache: str, apart: bool = True) -> dict:
    """Train with the compiler's caches in a folder, which ranks of different groups keep apart or share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        if not apart:
            patch.setattr(trainer, "own_compile_cache", lambda mesh: contextlib.nullcontext())
        return train_anew(text, data, timeout=90.0)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_chunked_loss_on_vocabulary_shards_equals_one_process(pieces: int, gloo, data, alone_in_two_blocks):
    for result in gloo(4)(train, text_of(f"{BOTH}loss chunked({pieces})", TWO_BLOCKS), data):
        assert_close(result, alone_in_two_blocks, TOLERANCE)


LAST = "loss chunked(3, last_layer = true)\n"
STAGED = f"mesh (pp = 2, tp = 2)\n{SEQUENCE_PARALLEL}pipeline on pp (schedule = 1F1B)\n{PLAIN_DOUBLE}"
GATHERED = f"mesh (tp = 2)\nshard on tp {{ output = colwise(output = replicate) }}\n{PLAIN_DOUBLE}"
PLACED = f"mesh (tp = 2)\nshard on tp {{ output.weight = shard(0) }}\n{PLAIN_DOUBLE}"
UNIT = f"mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit, output = unit, root = unit }}\n{DOUBLE}"
BUCKET = f"{UNIT.replace('layers', 'norm = unit, layers')}comm {{ {{norm, output}} = bucket(group) }}\n"
OF_LAST = {"vocabulary": BOTH, "stages": STAGED, "gathered": GATHERED, "placed": PLACED, "unit": UNIT, "bucket": BUCKET}


@pytest.mark.parametrize("name", slow_but(OF_LAST, "vocabulary", "bucket"))
def test_last_layer_in_pieces_equals_one_process(name: str, gloo, data, alone_in_two_blocks):
    world = 4 if name in ("vocabulary", "stages") else 2
    results = gloo(world)(train, text_of(f"{OF_LAST[name]}{LAST}", TWO_BLOCKS), data)
    assert_close(together(results), alone_in_two_blocks, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_compiled_loss_equals_the_eager_one(world: int, gloo, data, alone_in_two_blocks):
    body = PLAIN_DOUBLE if world == 1 else BOTH
    for result in gloo(world)(train_anew, text_of(f"{body}loss fused", TWO_BLOCKS), data):
        assert_close(result, alone_in_two_blocks, TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compile_cache_is_separate_per_rank(gloo, data, alone_in_two_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr("support.training.gloo.CALL_SECONDS", 280.0)
    for _ in range(2):  # the second time from the cache on disk
        for result in gloo(4)(train_cached, text_of(f"{BOTH}loss fused", TWO_BLOCKS), data, str(tmp_path)):
            assert_close(result, alone_in_two_blocks, TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shared_compile_cache_mixes_process_groups(gloo, data, tmp_path, monkeypatch):
    """Without `own_compile_cache` the test above fails; when this test fails, torch needs it no more.

    A rank asks for the group of another, or waits in it for ranks that are elsewhere.
    """
    monkeypatch.setattr("support.training.gloo.CALL_SECONDS", 280.0)
    arguments = text_of(f"{BOTH}loss fused", TWO_BLOCKS), data, str(tmp_path), False
    ranks = gloo(4)
    ranks(train_cached, *arguments)
    with pytest.raises(Exception, match=r"(?i)could not resolve the process group|timed out|closed by peer"):
        ranks(train_cached, *arguments)
    ranks.close()  # ranks that waited in vain have closed their connections within groups that later meshes reuse


def test_program_names_the_form_of_the_loss():
    def text(loss: str) -> str:
        return lowered(f"{HEAD}{TRAINING}{loss}").text

    assert "    return functools.partial(chunked_cross_entropy, pieces=8)  # tiny.plan:9\n" in text("loss chunked(8)")
    assert "    return torch.compile(token_cross_entropy, fullgraph=True)  # tiny.plan:9\n" in text("loss fused")
    assert "    return token_cross_entropy  # tiny.plan:9\n" in text("loss eager")
    last = text("loss chunked(8, last_layer = true)")
    assert '    return last_layer_cross_entropy(model, "output", pieces=8)  # tiny.plan:9\n' in last
    assert "build_model_loss=build_model_loss" in last and "build_loss" not in last
