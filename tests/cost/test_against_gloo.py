"""The collectives of a simulated rank equal those of a real run over gloo, on every rank and in both steps.

Each program is the lowering of a plan. Real processes run it and record every collective that they call, and it is
captured for each of their ranks: kinds, groups, sizes, dtypes and order are equal.

Gloo's process groups also keep a log, without sends and receives; it must contain the same otherwise, with one
exception: gloo has no reduce-scatter, and executes one as an all-reduce of the whole buffer. The simulated device does
not: it records the program's own collectives, and their time is that of the cluster's library.

Before its first pass a pipeline's schedule tests each link with an integer (`_PipelineSchedule._warmup_p2p`). That is
not part of a step, and the simulation omits it.
"""

from __future__ import annotations

import itertools

import pytest

from legoai.cost.capture import capture
from legoai.cost.trace.records import Collective
from legoai.cost.trace.trace import Trace
from support.marks import slow_but
from support.simulation.simulator import in_the_simulator
from support.texts.combinations import COMBINATIONS
from support.texts.plans import lowered
from support.training.recorded import ALL_REDUCES, STEPS, Issued, run_and_record

ISSUED_AS = {"permute": "all_to_all"}
"""Kinds of which torch has no collective of their own: a ring's exchange is one to a single rank."""
TRIAL = (4, "int32")
"""Bytes and dtype by which a schedule tries each link before its first pass; see the head of this file."""

QUICK = ("tensor and sequence parallel",)
"""The family with most kinds of collectives; the others take too long for every run of the tests."""


def simulated(text: str, world: int) -> list[list[list[Issued]]]:
    """Collectives of a program on the simulated device, by rank and step."""
    return [by_step(capture(text, world=world, rank=rank, kind="cpu")) for rank in range(world)]


def by_step(trace: Trace) -> list[list[Issued]]:
    return [
        [
            Issued(ISSUED_AS.get(record.kind, record.kind), record.ranks, record.bytes, record.dtype)
            for record in trace.records[span.start : span.stop]
            if isinstance(record, Collective)
        ]
        for span in trace.steps
    ]


@pytest.mark.parametrize("name", slow_but(COMBINATIONS, *QUICK))
def test_simulated_collectives_equal_a_real_run(name: str, gloo):
    combination = COMBINATIONS[name]
    text = lowered(combination.text).text
    real = gloo(combination.world)(run_and_record, text)
    found = in_the_simulator(simulated, text, combination.world)
    assert len(found) == len(real) == combination.world
    for rank, (called, noted) in enumerate(real):
        for step in range(1, STEPS):  # of the first, only one micro batch is simulated
            wanted = [item for item in called[step] if not (between_two(item) and item[2:] == TRIAL)]
            assert listed(found[rank][step]) == listed(wanted), f"rank {rank}, step {step + 1}"
        groups = [item for item in itertools.chain(*called) if not between_two(item)]
        assert [(as_gloo_does(item.kind), item.ranks) for item in groups] == noted


def listed(issued: list[Issued]) -> list[str]:
    """One line for each, which pytest compares line by line."""
    return [f"{item.kind} {item.bytes} B {item.dtype} {item.ranks}" for item in issued]


def between_two(item: Issued) -> bool:
    return item.kind in ("send", "receive")


def as_gloo_does(kind: str) -> str:
    return "all_reduce" if kind in ALL_REDUCES else kind
