"""Stages with a few captured blocks equal stages that were captured whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai.api import lower
from legoai.cost import capture as capturing
from legoai.cost.capture import capture, capture_equal_ranks
from legoai.cost.memory.reserving import reserve
from legoai.cost.memory.storages import memory
from legoai.cost.pipelines import deep_stages
from legoai.cost.pipelines.equal_stages import equal_coordinates
from legoai.cost.replay.walk import Unequal
from legoai.cost.step import simulate_pipeline
from legoai.cost.timing.timeline import Cost, Host, Resource
from legoai.cost.trace.records import Kernel
from legoai.cost.trace.trace import Trace
from legoai.lowering.program import Program
from support.simulation.simulated import in_a_fork

PLAN = """\
plan tiny

model     {model}
cluster   cpu(devices = {ranks})
batch     (global = {batch}, micro = 2, seq_len = 16)
optimizer adamw(lr = 1e-2)
clip      (norm = 1.0)
mesh      (pp = {pp}{mesh})
{body}pipeline on pp (schedule = {schedule}, microbatches = {micro_batches})
"""
LLAMA = 'llama3("tiny", n_layers = {layers})'
CHECKPOINT = {
    "none": "",
    "full": "checkpoint { layers.* = full }\n",
    "selective": "checkpoint { layers.* = selective([attention]) }\n",
}
AXES = {
    "": ("", 1, ""),
    "tp": (", tp = 2", 2, "shard standard on tp (sequence)\n"),
    "cp": (", cp = 2", 2, "context on cp\n"),
}
TWO_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def program_of(
    folder: Path,
    schedule: str,
    *,
    layers: int,
    model: str = LLAMA,
    reshard: str = "",
    checkpoint: str = "none",
    axis: str = "",
    pp: int = 2,
    passes: int = 1,
    micro_batches: int = 8,
    body: str = "",
) -> tuple[Program, int]:
    """A program of a pipeline of many blocks, sharded where it says when units are resharded, and its ranks."""
    shards = 2 if reshard else 1
    more, times, text = AXES[axis]
    if reshard:
        text += f"fsdp on dp_shard {{ layers.* = unit(reshard = {reshard}), root = unit }}\nprecision (param = bf16)\n"
    ranks = pp * shards * times
    file = folder / "tiny.plan"
    file.write_text(
        PLAN.format(
            model=model.format(layers=layers),
            ranks=ranks,
            batch=2 * shards * micro_batches * passes,
            pp=pp,
            mesh=(", dp_shard = 2" if reshard else "") + more,
            body=text + CHECKPOINT[checkpoint] + body,
            schedule=schedule,
            micro_batches=micro_batches,
        )
    )
    return lower(file), ranks


def _counting(captured: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """A function that captures, and notes how many runs of blocks were short, and these numbers."""
    runs: list[int] = []

    def taken(*args: Any, **kwargs: Any) -> Any:
        found = captured(*args, **kwargs)
        derived = found[0].derived
        runs.append(len(found[0].runs) if derived is not None and derived.own else 0)
        return found

    return taken, runs


def _runs(program: Program, ranks: int) -> list[int]:
    """For each rank of two how many runs of blocks are short, without a change of the minimum."""
    found = []
    taken, runs = _counting(capturing._captured)
    capturing._captured = taken
    for group in equal_coordinates(program, 2):
        traces = capture_equal_ranks(program, world=ranks, pp=2, coordinate=group[0], others=group[1:])
        found += [runs[-1]] * len(traces)
    return found


def _compared(program: Program, ranks: int, pp: int) -> list[tuple[int, int, bool]]:
    """For each rank how many runs of blocks were short, and whether its trace is that of a whole capture."""
    real = capturing._captured
    taken, runs = _counting(real)
    reasons = []
    for group in equal_coordinates(program, pp):
        capturing._captured, capturing._LEAST_LEFT_OUT = taken, 1
        found = capture_equal_ranks(program, world=ranks, pp=pp, coordinate=group[0], others=group[1:])
        capturing._captured = real
        for trace in found:
            whole = capture(program, world=ranks, rank=trace.stage * (ranks // pp), replay=False)
            reasons.append((trace.stage, runs[-1], trace == whole))
    return reasons


def check(folder: Path, schedule: str, *, pp: int = 2, runs: int | None = None, **options: Any) -> None:
    """Compare the traces of all ranks; each has as many runs of blocks as stages, or as many as given."""
    program, ranks = program_of(folder, schedule, pp=pp, **options)
    stages = 2 if schedule in TWO_STAGES else 1
    expected = stages if runs is None else runs
    assert in_a_fork(_compared, program, ranks, pp) == [(place, expected, True) for place in range(pp)]


@pytest.mark.slow
def test_shortened_sharded_stage_has_the_full_trace(tmp_path: Path):
    """Each stage has 6 blocks; one also has the embedding, the other the output."""
    check(tmp_path, "1F1B", layers=12, reshard="after_backward", micro_batches=6)


@pytest.mark.slow  # so are stages with split backward, which is more
def test_shortened_stages_of_different_depths_have_full_traces(tmp_path: Path):
    check(tmp_path, "Interleaved1F1B", layers=25, reshard="after_backward", micro_batches=6)


@pytest.mark.slow  # sharded stages with split backward do so too
def test_shortened_split_backward_frees_as_full_stages(tmp_path: Path):
    """The second rank passes the output of its first stage to its second one, instead of a received tensor."""
    check(tmp_path, "ZBVZeroBubble", layers=26, micro_batches=6)


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("reshard", ["after_backward", "after_forward"])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_shortened_stages_have_full_traces(schedule: str, reshard: str, checkpoint: str, axis: str, tmp_path: Path):
    layers = 29 if schedule in TWO_STAGES else 15
    check(tmp_path, schedule, layers=layers, reshard=reshard, checkpoint=checkpoint, axis=axis)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["", "after_backward"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", *TWO_STAGES])
def test_shortened_stages_have_full_traces_under_every_schedule(
    schedule: str, passes: int, reshard: str, tmp_path: Path
):
    check(tmp_path, schedule, layers=29, passes=passes, reshard=reshard)


@pytest.mark.slow
def test_shortened_sharded_stages_with_split_backward_have_full_traces(tmp_path: Path):
    """Gradients of all blocks wait for the next half of a backward, and are summed then."""
    check(tmp_path, "ZBVZeroBubble", layers=26, reshard="after_backward", micro_batches=6)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "checkpoint"), [("", "none"), ("", "full"), ("tp", "none"), ("cp", "none")])
@pytest.mark.parametrize("schedule", SPLITS_BACKWARD)
def test_shortened_stages_with_split_backward_have_full_traces(
    schedule: str, axis: str, checkpoint: str, tmp_path: Path
):
    """With DTensors, tensors saved by half a backward are freed in an order that depends on Python's object depth."""
    runs = 0 if axis == "tp" else None
    check(tmp_path, schedule, layers=25, reshard="after_backward", checkpoint=checkpoint, axis=axis, runs=runs)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_derived_traces_of_shortened_stages_equal_captures(schedule: str, tmp_path: Path):
    check(tmp_path, schedule, layers=60, pp=4, reshard="after_backward", checkpoint="full")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        'gpt3("125m", dim = 64, n_heads = 4, n_layers = {layers}, vocab_size = 256, tie_embeddings = false)',
        'mixtral("tiny", n_layers = {layers})',
    ],
)
def test_shortened_stages_of_other_models_have_full_traces(model: str, tmp_path: Path):
    check(tmp_path, "1F1B", model=model, layers=16, reshard="after_backward")


@pytest.mark.slow
def test_differently_treated_blocks_of_a_stage_are_all_captured(tmp_path: Path):
    """In the first stage too few blocks follow the different one; in the second stage all are equal."""
    program, ranks = program_of(tmp_path, "1F1B", layers=16, body="checkpoint { layers.3 = full }\n")
    assert in_a_fork(_compared, program, ranks, 2) == [(0, 0, True), (1, 1, True)]


@pytest.mark.slow
def test_stages_slightly_over_the_minimum_are_captured_in_full(tmp_path: Path):
    """Of 15 blocks one stage has seven and the other eight: two and three more than the minimum."""
    program, ranks = program_of(tmp_path, "1F1B", layers=15, micro_batches=6)
    assert sorted(in_a_fork(_runs, program, ranks)) == [0, 1]


@pytest.mark.slow
def test_stages_with_few_micro_batches_are_captured_in_full(tmp_path: Path):
    check(tmp_path, "1F1B", layers=16, micro_batches=4, runs=0)


def _whole_in_vain(program: Program, ranks: int) -> tuple[list[str], bool]:
    """Why stages of few blocks could not be used, and whether the trace is that of a whole capture all the same."""
    reasons: list[str] = []
    real = capturing._captured

    def taken(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except deep_stages.DepthError as error:
            reasons.append(str(error))
            raise

    def unequal(*_: Any) -> Any:
        raise Unequal

    capturing._captured, capturing._LEAST_LEFT_OUT = taken, 1
    deep_stages.stretched = unequal
    (found,) = capture_equal_ranks(program, world=ranks, pp=2, coordinate=0, others=())
    return reasons, found == capture(program, world=ranks, rank=0, replay=False)


@pytest.mark.slow
def test_stage_without_repeated_blocks_is_captured_in_full(tmp_path: Path):
    program, ranks = program_of(tmp_path, "1F1B", layers=12, micro_batches=6)
    assert in_a_fork(_whole_in_vain, program, ranks) == (["the blocks of a stage are not equal"], True)


def _left_over(program: Program, ranks: int) -> list[str]:
    reasons: list[str] = []
    counts: list[int] = []
    real = deep_stages._living

    def living(items: Any) -> set[int]:
        found = real(items)
        counts.append(len(found))
        return found - {max(found)} if len(counts) == 2 else found

    def tell(*args: Any) -> Any:
        try:
            return whole(*args)
        except deep_stages.DepthError as error:
            reasons.append(str(error))
            raise

    whole = deep_stages.items_of_all_blocks
    deep_stages._living, deep_stages.items_of_all_blocks, capturing._LEAST_LEFT_OUT = living, tell, 1
    capture_equal_ranks(program, world=ranks, pp=2, coordinate=0, others=())
    return reasons


@pytest.mark.slow
def test_stage_with_other_remaining_storages_is_captured_in_full(tmp_path: Path):
    program, ranks = program_of(tmp_path, "1F1B", layers=12, micro_batches=6)
    assert in_a_fork(_left_over, program, ranks) == [
        "blocks that were left out leave storages that captured blocks do not"
    ]


def _cost(op: Any) -> Cost:
    """Seconds of an op; of a longer one more."""
    size = op.flops + op.bytes_read if isinstance(op, Kernel) else op.bytes
    resource: Resource = "compute" if isinstance(op, Kernel) else "intra_host"
    return Cost(seconds=1e-6 + size * 1e-9, resource=resource, model="test")


def _measured(trace: Trace) -> Any:
    active = memory(trace)
    live = sorted((item.bytes, item.category, item.module, item.phase) for item in active.live)
    return live, dataclasses.replace(active, live=()), reserve(trace)


def _steps(program: Program, ranks: int) -> list[tuple[list[float], list[Any]]]:
    capturing._LEAST_LEFT_OUT = 1
    found = []
    for one in (program, dataclasses.replace(program, block_classes=())):
        step = simulate_pipeline(
            one, world=ranks, pp=2, kind="cpu", cost=_cost, host=Host(dispatch_seconds=1e-6), measure=_measured
        )
        times = [step.seconds, *(rank.bubble for rank in step.ranks), *(rank.times.timeline.end for rank in step.ranks)]
        found.append((times, [rank.measured for rank in step.ranks]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1F1B", "layers": 13, "reshard": "after_backward", "micro_batches": 6},
        {"schedule": "Interleaved1F1B", "layers": 27, "reshard": "after_forward", "checkpoint": "selective"},
        {"schedule": "1F1B", "layers": 16, "reshard": "after_forward", "checkpoint": "full", "axis": "tp"},
        {"schedule": "DualPipeV", "layers": 28, "reshard": "after_backward"},
        {"schedule": "InterleavedZeroBubble", "layers": 28, "axis": "tp"},
        {"schedule": "ZBVZeroBubble", "layers": 26, "reshard": "after_backward"},
    ],
)
def test_shortened_stages_have_full_memory_and_time(options: dict[str, Any], tmp_path: Path):
    program, ranks = program_of(tmp_path, **options)
    (times, measured), (whole_times, whole_measured) = in_a_fork(_steps, program, ranks)
    assert times == pytest.approx(whole_times, rel=1e-9)
    assert measured == whole_measured
