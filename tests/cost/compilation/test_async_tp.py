"""AsyncTP: decomposed products that overlap their collectives, against the same plan without."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from legoai.cost.memory.use import MemoryUse
from legoai.cost.trace.records import Collective, Kernel, WaitStream
from legoai.cost.trace.trace import Trace
from legoai.specs.cluster import device
from support.simulation.simulator import in_the_simulator
from support.texts.plans import SEQUENCE_PARALLEL

pytestmark = pytest.mark.slow  # each of the two programs is compiled

RANKS = 4
PLAN = """
plan pieces
model llama3("1b", n_layers = 1, max_seq_len = 4096)
cluster h100_sxm(devices = 4)
batch (global = 2, micro = 2, seq_len = 4096)
mesh (tp = 4)
SHARDSprecision (param = bf16, master = bf16)
compile (async_tp = ASYNC) { COMPILED = inductor }
optimizer adamw(lr = 3e-4)
"""


def estimated(asynchronous: str, folder: Path, compiled: str = "layers.*") -> tuple[Trace, float, MemoryUse, bool]:
    """The trace, the exposed seconds on `tp`, the memory, and whether later programs would compile so too."""
    import legoai
    from legoai.cost.capture import capture

    path = folder / "pieces.plan"
    text = PLAN.replace("SHARDS", SEQUENCE_PARALLEL).replace("ASYNC", asynchronous).replace("COMPILED", compiled)
    path.write_text(text, encoding="utf-8")
    trace = capture(legoai.lower(path).text, world=RANKS, gpu=device("h100_sxm"))
    left = sys.modules["torch._inductor.config"]._micro_pipeline_tp
    found = legoai.estimate(path)
    return trace, found.exposed_by_axis["tp"], found.ranks[0].use, left


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Trace, float, MemoryUse, bool]]:
    return [in_the_simulator(estimated, word, tmp_path_factory.mktemp("pieces")) for word in ("true", "false")]


def test_layer_of_the_logits_leaves_them_as_the_loss_takes_them(tmp_path):
    """A split product writes the sequence first, and what leaves a module has the strides that it has without."""
    found = in_the_simulator(estimated, "true", tmp_path, "output")[0]
    assert communicated(found, in_layers=False)["peer_copy"]


def products(trace: Trace) -> list[Kernel]:
    return [item for item in trace.records if isinstance(item, Kernel) and item.op == "aten.mm"]


def communicated(trace: Trace, *, in_layers: bool) -> Counter[str]:
    return Counter(
        item.kind
        for item in trace.records
        if isinstance(item, Collective) and item.axis == "tp" and item.module.startswith("layers") == in_layers
    )


def test_decomposed_products_have_equal_flops(both):
    (pieces, *_), (whole, *_) = both
    assert sum(item.flops for item in products(pieces)) == sum(item.flops for item in products(whole))
    assert len(products(pieces)) > len(products(whole))


def test_each_peer_is_read_once_without_nccl(both):
    (pieces, *_), (whole, *_) = both
    collectives, copies = communicated(whole, in_layers=True), communicated(pieces, in_layers=True)
    fused = collectives.total() - (copies.total() - copies["peer_copy"])
    assert copies["peer_copy"] == (RANKS - 1) * fused
    assert not copies["all_gather"]
    assert communicated(pieces, in_layers=False) == communicated(whole, in_layers=False)


def test_each_copy_has_the_shard_of_one_rank(both):
    pieces = both[0][0]
    copies = [item for item in pieces.records if isinstance(item, Collective) and item.kind == "peer_copy"]
    assert {item.bytes for item in copies} == {2 * 4096 // RANKS * 2048 * 2}
    assert {item.ranks for item in copies} == {(peer, 0) for peer in range(1, RANKS)}


def test_copies_alternate_between_two_streams(both):
    pieces = both[0][0]
    copies = [item for item in pieces.records if isinstance(item, Collective) and item.kind == "peer_copy"]
    side = copies[0].stream
    assert [item.stream for item in copies[: RANKS - 1]] == [side, 0, side]
    joins = [item for item in pieces.records if isinstance(item, WaitStream) and (item.stream, item.other) == (0, side)]
    assert len(joins) == len(copies) // (RANKS - 1)


def test_less_communication_is_exposed(both):
    (_, pieces, *_), (_, whole, *_) = both
    assert pieces < 0.75 * whole


def test_copies_create_no_communicators(both):
    assert both[0][2].outside == both[1][2].outside


def test_async_tp_setting_does_not_leak_into_the_next_program(both):
    assert [left for *_, left in both] == [False, False]
