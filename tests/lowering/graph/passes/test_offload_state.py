"""Offloading of optimizer state under a limit: the choice of state, the place of copies, and the resulting memory."""

from __future__ import annotations

import functools
import random
from collections import Counter
from pathlib import Path

import pytest

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Copy
from legoai.cost.trace.trace import Trace
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.fragments import state_fragments
from legoai.dsl.analysis.magnitudes.state import offloaded_bytes
from legoai.lowering.graph.contracts import watched
from legoai.lowering.graph.passes.memory import held_without_state, state_bytes
from legoai.lowering.graph.passes.offload_state import backs_under, frees_under, sufficient
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.runtime.offloading.state_copies import StateCopies
from legoai.specs.fragments import Fragment, within
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY, after_each_pass
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered, manifest_of, resolved

SMALL = HEAD.replace('"tiny"', '"tiny", n_layers = 2')
BODY_OF_GPUS = HEAD.replace("cpu(devices = 4)", "h100_sxm") + BODY.replace("seq_len = 16", "seq_len = 256")


def held(curve: list[int], fragments: list[Fragment], frees: list, backs: list[int]) -> list[int]:
    """Bytes at each place: of the curve, and of the fragments that are there."""
    away = {fragment.parameter: (free, back) for (fragment, free), back in zip(frees, backs, strict=True)}
    found = []
    for place, rest in enumerate(curve):
        spans = [(fragment.bytes, *away.get(fragment.parameter, (len(curve), 0))) for fragment in fragments]
        found.append(rest + sum(size for size, free, back in spans if not free <= place < back))
    return found


def test_offloaded_state_returns_as_early_as_memory_allows():
    for seed in range(300):
        chosen = random.Random(seed)
        top = chosen.randint(2, 8)
        curve = [chosen.randint(0, 20) + 10 * min(place, 2 * top - place) for place in range(2 * top + 1)]
        fragments = [Fragment(str(index), chosen.randint(1, 15)) for index in range(chosen.randint(1, 8))]
        state = sum(fragment.bytes for fragment in fragments)
        limit = chosen.randint(max(curve), max(curve) + state)
        frees = frees_under(curve, fragments, limit)
        first = min(len(curve) - 1, max([top, *(place + 1 for _, place in frees)]))
        backs = backs_under(curve, [fragment for fragment, _ in frees], state, limit, first=first)
        assert max(held(curve, fragments, frees, backs)[:-1]) <= limit
        resident = state
        for fragment, place in frees:
            assert max(curve) + resident > limit, "all that leaves has to"
            assert curve[place] + resident > limit, "and no earlier"
            resident -= fragment.bytes
        assert max(curve) + resident <= limit
        for (fragment, _), place in zip(reversed(frees), reversed(backs), strict=True):
            resident += fragment.bytes
            assert place == first or max(curve[place - 1 :]) + resident > limit, "there was no room before"


def test_fragments_are_chosen_by_size():
    state = [
        Fragment("embedding", 525),
        *(Fragment(f"{index}", size) for index, size in enumerate((60, 15, 60, 15, 1))),
    ]

    def names(chosen: list[Fragment]) -> str:
        return " ".join(fragment.parameter for fragment in chosen)

    assert names(within(state, 100)) == "0 1 3 4" and names(within(state, 0)) == "" == names(sufficient(state, 0))
    assert names(sufficient(state, 1)) == "4"
    assert names(sufficient(state, 61)) == "0 4"
    assert names(sufficient(state, 525)) == "embedding" == names(sufficient(state, 300))
    assert names(sufficient(state, 10_000)) == names(within(state, 10_000)) == names(state)


def test_few_bytes_more_than_the_excess_are_chosen():
    for seed in range(300):
        chosen = random.Random(seed)
        state = [Fragment(str(index), chosen.randint(1, 15)) for index in range(chosen.randint(1, 10))]
        excess = chosen.randint(1, sum(fragment.bytes for fragment in state))
        found = [fragment.bytes for fragment in sufficient(state, excess)]
        assert sum(found) - min(found) < excess <= sum(found), "all that leaves has to"
        left = [fragment.bytes for fragment in state if fragment not in within(state, excess)]
        assert not left or sum(found) - excess < min(left)


EXPERTS = (
    BODY.replace("dp_shard = 2", "dp_shard = 4, ep = 2") + "shard on ep { layers.*.feed_forward.experts = experts }\n"
)


def fragments_of(graph: StepGraph) -> dict[str, int]:
    return state_bytes(graph, moments=2)


@pytest.mark.parametrize(
    ("body", "world"),
    [
        pytest.param(SMALL + BODY, 2, marks=pytest.mark.slow),
        (SMALL + BODY.replace("global = 8", "global = 12").replace("= 2)", "= 3)"), 3),  # divides no parameter
        pytest.param(
            SMALL + BODY.replace("dp_shard = 2", "dp_shard = 2, tp = 2") + SEQUENCE_PARALLEL, 4, marks=pytest.mark.slow
        ),
        pytest.param(SMALL.replace("llama3", "mixtral") + EXPERTS, 4, marks=pytest.mark.slow),
    ],
)
def test_lint_counts_the_state_that_a_pass_moves(body: str, world: int):
    plan = resolved(body)
    shown = in_the_simulator(after_each_pass, lowered(plan).text, fragments_of, world)
    analysis = Analysis(plan, manifest_of(plan.model.source()), Path())
    assert shown["trace"] == {one.parameter: one.bytes for one in state_fragments(analysis)}


def taken(text: str) -> tuple[Trace, int]:
    """The trace of a program, and the peak of all but the state by its graph."""
    peaks = []
    with watched(lambda _, graph: peaks.append(max(held_without_state(graph)))):
        trace = capture(text, world=2, kind="cuda")
    return trace, peaks[-1]


@functools.cache
def plain_run() -> tuple[Trace, int]:
    return in_the_simulator(taken, lowered(BODY_OF_GPUS).text)


def moved(trace: Trace) -> Counter[str]:
    """Bytes of asynchronous copies in the last step, by direction."""
    span, found = trace.steps[-1], Counter[str]()
    for item in trace.records[span.start : span.stop]:
        if isinstance(item, Copy) and item.stream:
            found[item.direction] += item.bytes
    return found


@pytest.mark.slow
def test_only_state_above_the_limit_is_offloaded():
    plain, beside = plain_run()
    peak, state = memory(plain).peak, memory(plain).by_category["optimizer_state"]
    numbers = 39 * 512  # of Adam's steps, which stay
    assert 0 <= beside - (peak - state + numbers) < 8 * 512
    limit = peak - state // 2
    text = lowered(f"{BODY_OF_GPUS}offload (optimizer = adaptive)\nrequire peak_memory <= {limit}B\n").text
    assert f"partial(offload_optimizer_state, limit={limit}, moments=2)" in text
    trace, _ = in_the_simulator(taken, text)
    found = moved(trace)
    assert found["device_to_host"] == found["host_to_device"]
    assert 0.49 * state < found["device_to_host"] < 0.75 * state
    assert memory(trace).peak <= limit


@pytest.mark.slow
def test_one_byte_above_the_limit_moves_the_smallest_fragment():
    plain, _ = plain_run()
    limit = memory(plain).peak - 1
    text = lowered(f"{BODY_OF_GPUS}offload (optimizer = adaptive)\nrequire peak_memory <= {limit}B\n").text
    trace, _ = in_the_simulator(taken, text)
    assert memory(trace).peak <= limit and 0 < moved(trace)["device_to_host"] <= 8 * 512


@pytest.mark.slow
def test_bytes_of_state_are_offloaded_and_counted_for_activations():
    plain, _ = plain_run()
    peak = memory(plain).peak
    both = "offload (activations = adaptive, optimizer = bytes(100KB))\n"
    limit = peak - 2**16
    text = lowered(f"{BODY_OF_GPUS}{both}require peak_memory <= {limit}B\n").text
    trace, _ = in_the_simulator(taken, text)
    assert memory(trace).peak <= limit
    alone, _ = in_the_simulator(taken, lowered(f"{BODY_OF_GPUS}offload (optimizer = bytes(100KB))\n").text)
    assert 90_000 < moved(alone)["device_to_host"] <= 100_000, "the embedding's state is larger"
    plan = resolved(f"{BODY_OF_GPUS}offload (optimizer = bytes(100KB))\n")
    analysis = Analysis(plan, manifest_of(plan.model.source()), Path())
    assert offloaded_bytes(analysis).optimizer == moved(alone)["device_to_host"]


@pytest.mark.slow
def test_full_state_offload_copies_each_way_once_per_step():
    plan = f"{BODY_OF_GPUS}offload (optimizer = all)\n"
    plain, _ = plain_run()
    trace, _ = in_the_simulator(taken, lowered(plan).text)
    state = memory(plain).by_category["optimizer_state"]
    assert moved(trace)["device_to_host"] == moved(trace)["host_to_device"] <= state
    assert memory(trace).peak <= memory(plain).peak - 0.5 * state
    assert memory(trace).start == memory(plain).start


@pytest.mark.slow
def test_only_activations_above_the_limit_are_offloaded():
    plain, _ = plain_run()
    peak, state = memory(plain).peak, memory(plain).by_category["optimizer_state"]
    adaptive, both = "offload (activations = adaptive)\n", "offload (activations = adaptive, optimizer = adaptive)\n"
    limit = peak - state - 2**20
    text = lowered(f"{BODY_OF_GPUS}{both}require peak_memory <= {limit}B\n").text
    assert f"partial(offload_activations, limit={limit})" in text
    trace, _ = in_the_simulator(taken, text)
    assert memory(trace).peak <= limit
    alone = lowered(f"{BODY_OF_GPUS}{adaptive}require peak_memory <= {peak - 2**20}B\n").text
    assert f"partial(offload_activations, limit={peak - 2**20}, moments=2)" in alone
    trace, _ = in_the_simulator(taken, alone)
    assert memory(trace).peak <= peak - 2**20
    assert 2**20 <= moved(trace)["device_to_host"] < 8 * 2**20


def ends_of_copies(text: str) -> dict[str, list[str]]:
    """Operations on each fragment, in graph order."""
    found: dict[str, list[str]] = {}

    def look(_: str, graph: StepGraph) -> None:
        found.clear()
        for node in graph.graph.nodes:
            if isinstance(getattr(node.target, "__self__", None), StateCopies):
                found.setdefault(node.args[0], []).append(node.target.__name__)

    with watched(look):
        capture(text, world=2, kind="cuda")
    return found


@pytest.mark.slow
def test_fragment_is_freed_after_its_copy_beside_activation_offload():
    plan = f"{BODY_OF_GPUS}offload (activations = all, optimizer = all)\n"
    found = in_the_simulator(ends_of_copies, lowered(plan).text)
    once = ["state_to_host", "free_state", "state_to_device", "wait_for_state"]
    assert set(map(tuple, found.values())) == {tuple(once)}
