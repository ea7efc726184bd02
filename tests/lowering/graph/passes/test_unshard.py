"""Selective unsharding: the units that stay unsharded, and their memory in the graph and in simulation."""

from __future__ import annotations

import json
import random

import pytest

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Collective
from legoai.lowering.graph import StepGraph, unshard_selectively
from legoai.lowering.graph.contracts import watched
from legoai.lowering.graph.passes.memory import Life, held
from legoai.lowering.graph.passes.overlap import gathers_of
from legoai.lowering.graph.passes.unshard import with_changes
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY, after_each_pass
from support.texts.plans import HEAD, lowered

SPLIT = BODY.replace("layers.* = unit", "layers.*.{attention, feed_forward} = unit")
ON_GPUS = f"""\
{HEAD.replace("cpu(devices = 4)", "h100_sxm")}
{BODY.replace("seq_len = 16", "seq_len = 256").replace("reorder = true", "reorder = true, unshard = selective")}
optimizer adamw(lr = 1e-3)
"""


def under_limits(graph: StepGraph) -> str:
    """Peaks without a limit, with none to spare, and between; of each the units that stay for backward and longer."""

    def under(limit: int) -> tuple[int, int, list[str], list[str]]:
        trial = graph.copied()
        unshard_selectively(trial, limit=limit, moments=2)
        stay = [unit for unit in trial.units if not unit.reshard_after_forward]
        kept = [unit for unit in trial.units if not unit.reshard_after_backward]
        peak = max(held(trial, moments=2))
        return limit, peak, *([unit.parameters[0].rpartition(".")[0] for unit in units] for units in (stay, kept))

    if len(gathers_of(graph)[0]) > len(graph.units):
        return ""  # no buckets yet
    whole, least = under(2**40), under(0)
    found = [least, whole]
    for parts in range(1, 6):
        found.append(under(least[1] + (whole[1] - least[1]) * parts // 6))
    return json.dumps(found)


@pytest.mark.slow
def test_smallest_and_first_freed_units_stay_unsharded():
    found = json.loads(
        in_the_simulator(after_each_pass, lowered(HEAD + SPLIT).text, under_limits)["overlap_communication"]
    )
    (_, least, *_), (_, whole, stay, kept), *between = found
    assert stay == kept and len(stay) == 9 and least < whole
    for limit, peak, stay, _ in between:
        assert limit - 300_000 < peak <= limit, "a feed-forward layer of 294,912 bytes more would not fit"
        assert "tok_embeddings" in stay, "the root, which stays for backward by itself"
    attention = [f"layers.{index}.attention.wq" for index in range(4)]
    *_, stay, kept = between[0]
    assert kept == [attention[0], *attention[2:]], "the first stands beside less than the others"
    assert stay == ["tok_embeddings", *kept]
    *_, stay, kept = between[3]
    large = [name for name in kept if "feed_forward" in name]
    assert large == ["layers.2.feed_forward.w1", "layers.3.feed_forward.w1"]
    assert {*kept} == {*stay} == {"tok_embeddings", *attention, *large}


@pytest.mark.slow
def test_one_micro_batch_keeps_units_for_backward_only():
    body = HEAD + BODY.replace("global = 8", "global = 4")
    found = json.loads(in_the_simulator(after_each_pass, lowered(body).text, under_limits)["overlap_communication"])
    (_, least, stay_least, _), (_, whole, stay, _), *_ = found
    assert stay_least == ["tok_embeddings"] and len(stay) == 5 and least < whole
    assert all(not kept and peak <= limit for limit, peak, _, kept in found[1:])
    text = body.replace("reorder = true", "unshard = selective") + "require peak_memory <= 1GiB\n"
    assert "keep_unsharded" not in lowered(text).text and "reshard()" not in lowered(text).text


def taken(text: str) -> tuple[int, int, int]:
    """The peak of a simulation, that of the graph, and the all-gathers of its last step."""
    peaks = []
    with watched(lambda _, graph: peaks.append(max(held(graph, moments=2)))):
        trace = capture(text, world=2, kind="cuda")
    span = trace.steps[-1]
    records = trace.records[span.start : span.stop]
    gathers = sum(isinstance(item, Collective) and item.kind == "all_gather" for item in records)
    return memory(trace).peak, peaks[-1], gathers


@pytest.mark.slow
def test_unsharded_units_stay_within_the_memory_limit():
    least, in_graph, gathers = in_the_simulator(taken, lowered(f"{ON_GPUS}require peak_memory <= 1MiB\n").text)
    assert gathers == 18  # in each of two micro batches five units, and four again
    assert 0 <= in_graph - least < 8 * 512
    limit = least + 1_000_000
    peak, in_graph, gathers = in_the_simulator(taken, lowered(f"{ON_GPUS}require peak_memory <= {limit}B\n").text)
    assert least < peak <= in_graph <= limit
    assert gathers == 8  # five units; and one layer, which did not fit, three times more


def test_memory_curve_equals_live_tensor_sums():
    chosen = random.Random(0)
    for _ in range(100):
        places = chosen.randint(1, 12)
        spans = [sorted(chosen.choices(range(places), k=2)) for _ in range(chosen.randint(0, 6))]
        changes = [Life(first, last, chosen.randint(-9, 9)) for first, last in spans]
        curve = [chosen.randint(0, 99) for _ in range(places)]
        assert with_changes(curve, changes) == [
            before + sum(size for first, last, size in changes if first <= place <= last)
            for place, before in enumerate(curve)
        ]
