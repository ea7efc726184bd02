"""Captured pipelines with a split backward execute torch's schedules, whatever actions the capture skips."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legoai.cost import capture as capturing
from legoai.cost import step
from legoai.cost.capture import capture, capture_equal_ranks
from legoai.cost.estimate import estimate
from legoai.cost.pipelines.action_classes import Action
from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.gradients import Gradients
from legoai.cost.pipelines.patterns import UnequalError
from legoai.lowering.program import Program
from support.simulation import simulated
from support.simulation.pipelines import four_ranks, two_ranks
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered, manifest_of, resolved

SPLIT = """\
plan split
model     llama3("tiny")
cluster   h100_sxm(hosts = 1)
batch     (global = 16, micro = 1, seq_len = 64)
mesh      (pp = 2, dp_shard = 4)
pipeline  on pp (schedule = ZBVZeroBubble)
fsdp      blocks on dp_shard { layers.* = unit(reshard = after_backward) }
loss      fused
optimizer adamw(lr = 1e-3)
"""


def step_times(*texts: str) -> list[float]:
    """Seconds of the steps of plans, all simulated in this process."""
    step.may_fork = lambda: False
    found = []
    for text in texts:
        plan = resolved(text)
        found.append(estimate(lowered(text), plan, manifest_of(plan.model.source()), directory=Path()).step_time)
    return found


@pytest.mark.slow
def test_compiled_loss_keeps_its_graph_for_the_second_half(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "together"))
    *_, behind = simulated.in_a_fork(step_times, SPLIT.replace("ZBVZeroBubble", "1F1B"), SPLIT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    assert [behind] == simulated.in_a_fork(step_times, SPLIT)


SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _few_and_whole(program: Program, world: int) -> list[tuple[bool, int, int]]:
    """For each rank whether its trace is that of a whole capture, and the actions that were run for the two."""
    run: Counter[Action] = Counter()
    real = Repeats.add_executed

    def ran(repeats: Repeats, action: Action, *args: Any, **kwargs: Any) -> None:
        run[action] += 1
        real(repeats, action, *args, **kwargs)

    Repeats.add_executed = ran
    found = []
    for rank in (0, world // 2):
        run.clear()
        taken = capturing._few_actions(program, world=world, rank=rank, kind="cuda", gpu=None, ways=(None,))
        assert taken is not None, "the first way is the right one"
        few = run.total()
        run.clear()
        whole = capture(program, world=world, rank=rank, replay=False)
        found.append((replace(taken[1], items=taken[0].finished()) == whole, few, run.total()))
    return found


def check(program: Program, world: int) -> None:
    for equal, few, every in simulated.in_a_fork(_few_and_whole, program, world):
        assert equal
        assert few < 0.8 * every


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SPLITS_BACKWARD)
def test_replayed_actions_with_delayed_gradients_equal_executed_actions(schedule: str, tmp_path: Path):
    check(two_ranks(tmp_path, schedule, sharded=True, micro_batches=16), 4)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["", "checkpoint { layers.* = full }\n"])
@pytest.mark.parametrize(
    ("axis", "body"), [("", ""), ("tp", "shard standard on tp (sequence)\n"), ("cp", "context on cp\n")]
)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("schedule", SPLITS_BACKWARD)
def test_replayed_split_backward_equals_executed_under_every_treatment(
    schedule: str, passes: int, axis: str, body: str, checkpoint: str, tmp_path: Path
):
    program = two_ranks(
        tmp_path, schedule, sharded=True, micro_batches=16, passes=passes, axis=axis, body=checkpoint + body
    )
    check(program, 8 if axis else 4)


@pytest.mark.slow
def test_full_backwards_between_halves_accumulate_gradients(tmp_path: Path):
    (tmp_path / "order.csv").write_text(order := _mixed_order(12))
    assert {"0B6", "1I8", "1W8", "1B9"} <= {item for row in order.splitlines() for item in row.split(",")}
    check(two_ranks(tmp_path, 'csv("order.csv")', sharded=True, micro_batches=12), 4)


def _mixed_order(micro_batches: int) -> str:
    """An order in which of three backwards one is whole, with gradients of weights waiting before it or not."""
    first = [f"0F{index}" for index in range(micro_batches)]
    last = []
    for index in range(0, micro_batches, 3):
        one, two, three = index, index + 1, index + 2
        first += [f"0B{one}", f"0I{two}", f"0W{two}", f"0I{three}", f"0W{three}"]
        last += [f"1F{one}", f"1B{one}", f"1F{two}", f"1I{two}", f"1F{three}", f"1I{three}", f"1W{two}"]
        last += [f"1W{three}"] if index % 2 else []
    left = [f"1W{index + 2}" for index in range(0, micro_batches, 3) if not index % 2]
    return f"{','.join(first)}\n{','.join([*last, *left])}\n"


def _derived(program: Program, others: list[int]) -> list[tuple[int, bool]]:
    """Ranks whose traces are derived from the third, and whether their traces are those of whole captures."""
    derived = capture_equal_ranks(program, world=8, pp=4, coordinate=2, others=others)
    return [(one.stage, one == capture(program, world=8, rank=2 * one.stage, replay=False)) for one in derived]


@pytest.mark.slow
def test_trace_with_delayed_gradients_is_derived(tmp_path: Path):
    """Not the last, on which one stage hands on to the other, and also where that is tried before."""
    program = four_ranks(tmp_path, "ZBVZeroBubble", sharded=True, micro_batches=8)
    assert in_the_simulator(_derived, program, [3, 1]) == [(2, True), (1, True)]


def _whole_in_vain(program: Program) -> tuple[list[str], bool]:
    """Why actions could not be identified, and whether the trace is that of a whole capture all the same."""
    said: list[str] = []
    real = Gradients.add_executed

    def left(gradients: Gradients, *args: Any) -> Any:
        found = real(gradients, *args)
        if said or any(item not in (None, "kept") for item in found):
            said.append("refused")
            raise UnequalError
        return found

    Gradients.add_executed = left
    (found,) = capture_equal_ranks(program, world=4, pp=2, coordinate=1, others=())
    return said, found == capture(program, world=4, rank=2, replay=False)


@pytest.mark.slow
def test_all_actions_are_executed_if_gradients_cannot_be_identified(tmp_path: Path):
    program = two_ranks(tmp_path, "ZBVZeroBubble", sharded=True)
    said, equal = simulated.in_a_fork(_whole_in_vain, program)
    assert said
    assert equal
