"""What the patches of pipelines do; each test fails without the patches that name it."""

from __future__ import annotations

from collections import Counter

import pytest

from legoai.cost.capture import capture
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import Collective, Mark, WaitWork
from legoai.cost.trace.trace import Trace
from support.pipelines import two_ranks
from support.simulated import in_a_fork

MICRO_BATCHES = 4


def traced(text: str) -> Trace:
    return capture(text, world=4, rank=2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The second rank of two, under a schedule whose neighbouring stages are on different ranks, sharded as well."""
    text = two_ranks(
        tmp_path_factory.mktemp("plans"), "InterleavedZeroBubble", sharded=True, micro_batches=MICRO_BATCHES
    )
    return in_a_fork(traced, text)


def test_every_action_and_transfer_is_recorded(trace: Trace):
    last = trace.steps[-1]
    records = list(trace.records[last.start : last.stop])
    names = [record.name for record in records if isinstance(record, Mark)]
    begun = [name.removeprefix(ACTION) for name in names if name.startswith(ACTION)]
    assert sorted(begun) == sorted(name.removeprefix(END_ACTION) for name in names if name.startswith(END_ACTION))
    kinds = Counter(name.lstrip("0123456789").rstrip("0123456789") for name in begun)
    # Two stages of this rank; the loss is in the last one's forward, and gradients are reduced once for each stage.
    assert (kinds["F"], kinds["I"], kinds["W"]) == (2 * MICRO_BATCHES,) * 3
    assert (kinds["UNSHARD"], kinds["RESHARD"], kinds["REDUCE_GRAD"]) == (2, 2, 2)
    assert names.count(BATCH) == names.count(END_BATCH)
    transfers = [record for record in records if isinstance(record, Collective) and record.kind in ("send", "receive")]
    # Of each micro batch: two activations come and one goes, two gradients go and one comes.
    assert Counter(item.kind for item in transfers) == {"receive": 3 * MICRO_BATCHES, "send": 3 * MICRO_BATCHES}
    waited = {record.work for record in records if isinstance(record, WaitWork)}
    assert {item.work for item in transfers if item.kind == "receive"} <= waited
