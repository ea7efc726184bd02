"""Assignment of blocks to stages against brute force, and the action graph against torch's schedules."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import ASSIGNED_GAP, BoundsOf
from legoai.cost.search.stages.action_graph import Action, ActionGraph, _gathered, graph_of
from legoai.cost.search.stages.assignment import Block, Moment, StageProblem
from legoai.cost.search.stages.costs import Room, StageWork, observed_problem, work_of_stages
from legoai.cost.timing.engine import simulate_ranks
from legoai.cost.timing.timeline import Host
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.marks import NEEDS_SOLVER
from support.simulation.orders import SECONDS, multi_stage, price
from support.simulation.simulator import in_the_simulator
from support.simulation.stage_splits import splits

SCHEDULES = {
    "GPipe": (1, (2, 3, 4)),
    "1F1B": (1, (2, 3, 4)),
    "Interleaved1F1B": (2, (2,)),
    "LoopedBFS": (2, (2,)),
    "InterleavedZeroBubble": (2, (2,)),
    "ZBVZeroBubble": (2, (2,)),
    "DualPipeV": (2, (2,)),
}


def analysis(schedule: str, *, ranks: int, micro_batches: int, passes: int = 1, layers: int = 8) -> Analysis:
    linted = lint(
        f"""\
plan test
model   llama3("tiny", n_layers = {layers})
cluster cpu(devices = {ranks})
batch   (global = {micro_batches * passes}, micro = 1, seq_len = 128)
mesh    (pp = {ranks})
precision (param = fp32, reduce = fp32)
pipeline on pp (schedule = {schedule}, microbatches = {micro_batches})
""",
        "test.plan",
        directory=Path(),
    )
    assert not linted.has_errors, linted.diagnostics
    assert linted.analysis is not None
    return linted.analysis


def graph(schedule: str, *, ranks: int, micro_batches: int, passes: int = 1) -> ActionGraph:
    found = graph_of(analysis(schedule, ranks=ranks, micro_batches=micro_batches, passes=passes))
    assert found is not None
    return found


@pytest.mark.parametrize("schedule", [name for name, (each, _) in SCHEDULES.items() if each > 1])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8)])
def test_longest_path_equals_the_time_of_the_torch_schedule(schedule: str, ranks: int, micro_batches: int):
    records = multi_stage(schedule, ranks=ranks, stages_of_rank=2, micro_batches=micro_batches)
    times = simulate_ranks(records, price, Host(dispatch_seconds=0.0))
    found = graph(schedule, ranks=ranks, micro_batches=micro_batches)
    seconds, [path, *_] = found.longest([SECONDS] * found.stages)
    end = max(item.timeline.end for item in times.values())
    # Where two actions overlap, torch waits for what both receive.
    assert seconds == pytest.approx(end) or (schedule == "DualPipeV" and 0.9 * end < seconds < end)
    assert path.seconds([SECONDS] * found.stages) == pytest.approx(seconds)
    assert found.time([SECONDS] * found.stages) == seconds


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("passes", [1, 2])
def test_equal_stages_take_the_closed_form_time(schedule: str, ranks: int, passes: int):
    """The second of several passes starts as the first leaves the ranks, so that the pipeline is not filled again."""
    found = graph(schedule, ranks=ranks, micro_batches=8, passes=passes)
    seconds, _ = found.longest([SECONDS] * ranks)
    once = (8 + ranks - 1) * (SECONDS["F"] + SECONDS["B"])
    assert seconds == once if passes == 1 else once < seconds <= passes * once


def test_micro_batches_in_flight_equal_the_schedule():
    most = [list(rank) for rank in graph("1F1B", ranks=4, micro_batches=8).held]
    assert most == [[({rank: 4 - rank}, {rank}, {rank}, {}, 0)] for rank in range(4)]


def test_micro_batches_between_backward_halves_are_counted():
    """The last rank takes no second half before the pipeline is full; a first stage has no first half."""
    found = graph("InterleavedZeroBubble", ranks=4, micro_batches=8).held
    assert [max(sum(moment.halved.values()) for moment in rank) for rank in found] == [1, 2, 3, 4]
    most = max(found[-1], key=lambda moment: sum(moment.halved.values()))
    assert sum(most.kept(between_halves=True).values()) == 4 + sum(most.kept(between_halves=False).values())
    assert all(0 not in moment.with_gradients for moment in found[0])
    assert all(not moment.halved for rank in graph("Interleaved1F1B", ranks=4, micro_batches=8).held for moment in rank)


def test_unreduced_gradients_live_from_first_to_last_backward():
    first, second = graph("GPipe", ranks=2, micro_batches=8).held
    assert first == (({0: 8}, set(), {0}, {}, 0), ({0: 7}, {0}, {0}, {}, 0))
    assert second == (({1: 8}, set(), {1}, {}, 0), ({1: 7}, {1}, {1}, {}, 0))
    again = graph("GPipe", ranks=2, micro_batches=8, passes=2).held
    assert again == (first, second), "a pass reduces them"
    assert graph("GPipe", ranks=2, micro_batches=1).held[0] == (({0: 1}, set(), {0}, {}, 0),)


def test_tensors_sent_by_ranks_of_several_stages_are_kept_to_the_end_of_a_pass():
    """A rank sends what each stage gives, but the last; and the gradients of what each takes, but the first."""
    ranks = graph("Interleaved1F1B", ranks=2, micro_batches=8).held
    # Stages 0 and 2, then 1 and 3: three results of each micro batch, without those that are still to come.
    assert [max(moment.sent for moment in rank) for rank in ranks] == [22, 21]
    assert ranks == graph("Interleaved1F1B", ranks=2, micro_batches=8, passes=2).held
    # In a V stages 1 and 2 are on one rank: of both stages of the first rank half as much is sent.
    v_shaped = graph("ZBVZeroBubble", ranks=2, micro_batches=8).held
    assert max(moment.sent for moment in v_shaped[0]) <= 2 * 8
    assert all(not moment.sent for rank in graph("1F1B", ranks=2, micro_batches=8).held for moment in rank)


def test_gathered_stages_equal_those_of_torch():
    from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard

    names = ["0F0", "2F0", "4F0", "6F0", "6B0", "0F1", "4B0", "2B0", "2F1", "0B0", "2B1", "0B1"]
    active: set[int] = set()
    at: list[set[int]] = []
    for action in _add_unshard_reshard([_Action.from_str(name) for name in names]):
        kind = action.computation_type.name
        if kind == "UNSHARD":
            active.add(action.stage_index)
        elif kind == "RESHARD":
            active.remove(action.stage_index)
        else:
            at.append(set(active))
    actions = [Action(int(name[0]), name[1], int(name[2])) for name in names]
    assert _gathered(actions, 2, 3) == at


def test_deadlocked_order_is_refused():
    graph = ActionGraph([[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], 1)
    with pytest.raises(ValueError, match="wait for each other"):
        graph.time([{"F": 1.0, "B": 1.0}] * 2)


def drawn(seed: int) -> StageProblem:
    """A small problem: few kinds of blocks, ends of their own, and memory that may be too little for any split."""
    draw = random.Random(seed)
    schedule = draw.choice(list(SCHEDULES))
    each, choices = SCHEDULES[schedule]
    ranks = draw.choice(choices)
    stages = each * ranks
    found = graph(schedule, ranks=ranks, micro_batches=draw.choice([4, 8]))

    def block(scale: float = 1.0) -> Block:
        f, b = scale * draw.uniform(0.5, 2.0), scale * draw.uniform(1.0, 4.0)
        seconds = {"F": f, "B": b, "I": b / 2, "W": b / 2}
        return Block(seconds, f + b, draw.uniform(0.0, 4.0), *(draw.uniform(0.0, 2.0) for _ in range(4)))

    kinds = [block() for _ in range(draw.choice([1, 1, 2, 3]))]
    count = draw.randint(stages, 9)
    blocks = [draw.choice(kinds) for _ in range(count)] if draw.random() < 0.5 else [kinds[0]] * count
    held = {
        "V": [(rank, stages - 1 - rank) for rank in range(ranks)],
        "": [tuple(range(rank, stages, ranks)) for rank in range(ranks)],
    }["V" if schedule in ("ZBVZeroBubble", "DualPipeV") else ""]
    room = draw.choice([math.inf, draw.uniform(5.0, 60.0)])
    return StageProblem(
        blocks=blocks,
        first=block(draw.choice([0.0, 0.1, 1.5])),
        last=block(draw.choice([0.0, 0.5, 2.5])),
        ranks=held,
        moments=[
            [
                Moment(held.kept(between_halves=True), room, held.summed, held.gathered, 0.5, held.with_gradients)
                for held in moments
            ]
            for moments in found.held
        ],
        graph=found,
        micro_batches=8,
    )


def compared(seed: int) -> tuple[str, float, float]:
    """The status of a drawn problem, its answer's seconds, and the least of all splits."""
    problem = drawn(seed)
    found = problem.solve()
    fitting = [problem.time(one) for one in splits(len(problem.blocks), problem.stages) if problem.fits(one)]
    least = min(fitting, default=math.inf)
    assert found.bound <= least * (1.0 + 1e-6)
    assert not found.counts or (
        problem.fits(found.counts) and problem.time(found.counts) == pytest.approx(found.seconds)
    )
    return found.status, found.seconds, least


@NEEDS_SOLVER
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 400), marks=pytest.mark.slow)])
def test_stage_assignment_equals_brute_force(seeds: range):
    statuses = set()
    for seed in seeds:
        status, seconds, least = compared(seed)
        statuses.add(status)
        assert seconds == pytest.approx(least, rel=1e-5), seed
        assert (status == "infeasible") == math.isinf(least)
        assert status != "stopped", seed
    assert statuses == {"optimal", "infeasible"}


@NEEDS_SOLVER
def test_embedding_and_loss_replace_a_block_of_the_end_stages():
    """126 layers with an embedding and a loss of one each: split as Llama 3.1 405B was, one layer less at the ends."""
    one = Block({"F": 1.0, "B": 2.0}, 3.0)
    found = StageProblem(
        blocks=[one] * 126,
        first=one,
        last=one,
        ranks=[(rank,) for rank in range(16)],
        moments=[[]] * 16,
        graph=_of_16(),
        micro_batches=32,
    ).solve()
    assert found.counts == (7, *[8] * 14, 7)
    assert found.status == "optimal"


SPLIT = """\
plan test
model   llama3("1b", n_layers = 6, tie_embeddings = false)
cluster h100_sxm(devices = 4)
batch   (global = 16, micro = 1, seq_len = 4096)
mesh    (pp = 2, dp_shard = 2)
fsdp blocks on dp_shard {{ layers.* = unit(reshard = after_backward) }}
pipeline on pp (schedule = {schedule}, split = auto)
checkpoint {{ layers.* = {treatment} }}
attention flash
"""


def opened(schedule: str, treatment: str) -> OpenPlan:
    linted = lint(SPLIT.format(schedule=schedule, treatment=treatment), "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def split(plan: OpenPlan, counts: tuple[int, ...]) -> Analysis:
    """The plan with a split."""
    found = plan.candidate([plan.add(0, f"[{', '.join(map(str, counts))}]")])
    assert not found.errors
    assert found.analysis is not None
    return found.analysis


@NEEDS_SOLVER
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("treatment", ["none", "full", "every(2)"])
def test_open_split_bound_is_below_every_split(schedule: str, treatment: str):
    plan, bounds = opened(schedule, treatment), BoundsOf()
    whole = plan.candidate([None]).analysis
    assert whole is not None
    least = bounds(whole).step_time
    found = bounds.assignment(whole)
    assert found is not None
    assert found.seconds <= least * (1.0 + ASSIGNED_GAP + 1e-9) or found.bound <= least
    for counts in splits(6, len(found.counts)):
        assert least <= bounds(split(plan, counts)).step_time * (1.0 + 1e-9)


@NEEDS_SOLVER
def test_bound_is_infinite_if_no_split_fits():
    """Parameters and the state of the optimizer of 6 layers take 8 GB on two ranks, and no split leaves less."""
    text = SPLIT.format(schedule="1F1B", treatment="none") + "require peak_memory <= 1GB\n"
    whole = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path()).candidate([None]).analysis
    assert whole is not None
    assert BoundsOf()(whole).memory == math.inf


@NEEDS_SOLVER
@pytest.mark.parametrize("seed", range(8))
def test_one_observed_split_gives_the_times_of_all_splits(seed: int):
    """Synthetic actions, kernels and memory of one split give the times of all splits."""
    draw = random.Random(seed)
    plan, bounds = opened("1F1B", "none"), BoundsOf()
    seen = split(plan, (4, 2))
    problem = bounds.stage_problem(seen)
    assert problem is not None
    paths = ["tok_embeddings", *(f"layers.{index}" for index in range(6)), "norm", "output"]
    forward = {path: draw.uniform(0.1, 1.0) for path in paths}
    backward = {path: draw.uniform(0.1, 1.0) for path in paths}
    for index in range(6):
        forward[f"layers.{index}"], backward[f"layers.{index}"] = 1.0, 2.0
    held = {path: 7 if path.startswith("layers.") else 3 for path in paths}
    stages = [paths[:5], paths[5:]]
    waiting = 1.25  # an action takes more than its kernels
    work = StageWork(
        actions={
            f"{stage}{kind}": waiting * sum(took[path] for path in stages[stage])
            for stage in range(2)
            for kind, took in (("F", forward), ("B", backward))
        },
        forward={path: 16 * took for path, took in forward.items()},
        backward={path: 16 * took for path, took in backward.items()},
        held=held,
        active=[4 * 7 + 3 + 10, 2 * 7 + 6 + 10],
        beyond=[5, 5],
        unused=[2, 2],
    )
    room = Room(device=64.0, active=math.inf, reserved=61.0)
    learnt = observed_problem(problem, seen, work, room)
    assert learnt is not None
    for counts in splits(6, 2):
        made = [
            {
                kind: waiting * (counts[stage] * took["layers.0"] + sum(took[path] for path in ends))
                for kind, took in (("F", forward), ("B", backward))
            }
            for stage, ends in enumerate((["tok_embeddings"], ["norm", "output"]))
        ]
        assert learnt.time(counts) == pytest.approx(problem.graph.longest(made)[0])
        assert learnt.fits(counts) == (counts[0] * 7 + 13 <= 59 and counts[1] * 7 + 16 <= 59)


def _of_16() -> ActionGraph:
    found = graph_of(analysis("1F1B", ranks=16, micro_batches=32, layers=16))
    assert found is not None
    return found


def simulated(counts: tuple[int, ...], others: list[tuple[int, ...]]) -> list[tuple[float, float, float, float]]:
    """Seconds and bytes of the fullest rank under other splits, simulated and predicted from one split."""
    plan, bounds = opened("1F1B", "none"), BoundsOf()
    seen = split(plan, counts)
    assert seen.manifest is not None
    first = estimate(lower(seen), seen.plan, seen.manifest)
    problem = bounds.stage_problem(seen)
    assert problem is not None
    learnt = observed_problem(problem, seen, work_of_stages(first, seen.manifest), Room(math.inf, 1e12, math.inf))
    assert learnt is not None
    found = []
    for other in others:
        analysis = split(plan, other)
        assert analysis.manifest is not None
        whole = estimate(lower(analysis), analysis.plan, analysis.manifest)
        predicted = first.step_time + learnt.time(other) - learnt.time(counts)
        besides = [1e12 - moment.room for moments in learnt.moments for moment in moments]
        blocks = [count * moment.held[rank] for rank, count in enumerate(other) for moment in learnt.moments[rank]]
        predicted_bytes = max(map(float.__add__, besides, blocks))
        found.append((whole.step_time, predicted, whole.peak_active, predicted_bytes))
    return found


@pytest.mark.slow
def test_one_simulated_split_predicts_the_others():
    """The time after the last action is taken as constant: the optimizer's part of a block does not move with it."""
    for seconds, predicted, size, predicted_bytes in in_the_simulator(simulated, (3, 3), [(4, 2), (2, 4)]):
        assert predicted == pytest.approx(seconds, rel=0.03)
        assert predicted_bytes == pytest.approx(size, rel=0.005)
