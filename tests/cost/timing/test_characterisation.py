"""Timelines of generated traces equal recorded ones of earlier engines.

``pytest tests/dsl tests/cost/timing --update-golden -k test_characterisation`` rewrites the file. That is
right after a change of the timing model, never after one of the engine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from legoai.cost.timing.engine import simulate, simulate_ranks
from legoai.cost.timing.rank_timeline import ActionOp, RankTimeline
from legoai.cost.timing.timeline import Timeline
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import Collective, HostWaitDevice, Mark, WaitWork
from legoai.cost.trace.trace import Trace
from support.simulation.random_traces import HOSTS, Program, price

KEPT = Path(__file__).with_name("timelines.json")
ALONE = range(36)
TOGETHER = [seed for seed in range(36) if seed not in (24, 30)]
"""In the two others a completion releases an operation and, through a joint, the host at the same moment. A rank alone
always let the host go on last; ranks together did not, before they became the same engine."""


def ranks_together(seed: int) -> dict[int, list[Any]]:
    """Records of ranks that meet in transfers, batches of them and collectives, in an order that all can keep."""
    chance = random.Random(seed)
    count = chance.choice([2, 3, 4])
    programs = {rank: Program(1000 * seed + rank) for rank in range(count)}
    found: dict[int, list[Any]] = {rank: [Mark("step 1")] for rank in programs}
    for place in range(14):
        for rank, program in programs.items():
            name = f"{rank}F{place}"
            inside = list(program.records(chance.randint(0, 6)))
            if chance.random() < 0.4:
                seconds = chance.randint(1, 4000) / 971
                inside.append(
                    ActionOp(stream=0, seconds=seconds, latency=seconds * chance.choice([1.0, 1.31]),
                             host_seconds=seconds * chance.random())
                )  # fmt: skip
            found[rank] += [Mark(f"{ACTION}{name}"), *inside, Mark(f"{END_ACTION}{name}")]
        kind = chance.choice(["transfer", "transfer", "batch", "all", "none"])
        first, second = chance.sample(list(programs), 2)
        if kind == "all":
            size = chance.randint(1, 2500)
            for rank, program in programs.items():
                record = program.collective(chance.choice([0, 7]), "all_reduce", tuple(programs), "pp")
                found[rank] += [_sized(record, size + rank), *([WaitWork(0, record.work)] * (chance.random() < 0.6))]
        elif kind != "none":
            batched = kind == "batch"
            both = [(first, second), (second, first)] if batched else [(first, second)]
            size = chance.randint(1, 2500)
            for rank in (first, second):
                sent = [
                    _sized(
                        programs[rank].collective(0, "send" if rank == ends[0] else "receive", ends, "pp"), size + rank
                    )
                    for ends in both
                ]
                found[rank] += [Mark(BATCH), *sent, Mark(END_BATCH)] if batched else sent
                if chance.random() < 0.7:
                    found[rank] += [WaitWork(0, item.work) for item in sent]
    for records in found.values():
        records += [HostWaitDevice(), Mark("end step 1")]
    return found


def _sized(record: Collective, size: int) -> Collective:
    return Collective(**{name: getattr(record, name) for name in Collective.__slots__} | {"bytes": size})


def summary(timeline: Timeline, digits: int) -> dict[str, Any]:
    """A timeline, shortened so that any difference shows."""
    intervals = sorted((item.start, item.end, item.queue) for item in timeline.intervals)
    weighed = sum((place % 89 + 1) * (3 * start + end) for place, (start, end, _) in enumerate(intervals))
    return {
        "end": f"{timeline.end:.{digits}g}", "intervals": len(intervals), "weighed": f"{weighed:.{digits}g}",
        "queues": [queue for *_, queue in intervals][:40:3],
        "marks": [[name, f"{at:.{digits}g}"] for name, at in timeline.marks if name.startswith(("step", "end step"))],
    }  # fmt: skip


def alone(seed: int) -> dict[str, Any]:
    """The timeline of a rank that is simulated alone, in every digit."""
    trace = Trace(rank=0, world=65, stage=0, items=tuple(Program(seed).alone()))
    return summary(simulate(trace, price, HOSTS[seed % len(HOSTS)]), 17)


def together(seed: int) -> dict[str, Any]:
    """Those of ranks that wait for each other, in the digits that rounding leaves."""
    found = simulate_ranks(ranks_together(seed), price, HOSTS[seed % len(HOSTS)])
    return {str(rank): _rank(item) for rank, item in found.items()}


def _rank(item: RankTimeline) -> dict[str, Any]:
    waits = sum(stop - start for start, stop in item.waits)
    actions = sum((place + 1) * (3 * one.start + one.end) for place, one in enumerate(item.actions))
    return {**summary(item.timeline, 10), "waits": f"{waits:.9g}", "actions": [len(item.actions), f"{actions:.10g}"]}


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.config.getoption("--update-golden", default=False):
        found = {"alone": {str(n): alone(n) for n in ALONE}, "together": {str(n): together(n) for n in TOGETHER}}
        lines = [f'"{name}": {{\n' + ",\n".join(f'"{n}": {json.dumps(one)}' for n, one in seeds.items()) + "\n}"
                 for name, seeds in found.items()]  # fmt: skip
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return json.loads(KEPT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("seed", ALONE)
def test_single_rank_timeline_equals_the_golden_one(seed: int, golden: dict[str, Any]):
    assert alone(seed) == golden["alone"][str(seed)]


@pytest.mark.parametrize("seed", TOGETHER)
def test_timelines_of_coupled_ranks_equal_the_golden_ones(seed: int, golden: dict[str, Any]):
    assert together(seed) == golden["together"][str(seed)]
