"""Passes over the graph of a step: their effect on gathers, waits and scatters, and their contracts."""

from __future__ import annotations

import operator
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import fx

from legoai.lowering.graph import (
    StepGraph,
    bucket_units,
    compile_module,
    compile_regions,
    deduplicate_unshards,
    keep_activations,
    keep_unsharded,
    offload_activations,
    offload_optimizer_state,
    overlap_by_time,
    overlap_communication,
    prefetch_proactively,
    reshard_after_forward,
    rewritten,
    schedule_overlap,
    unshard_selectively,
)
from legoai.lowering.graph.contracts import PASSES, ContractError, check
from legoai.lowering.graph.passes.memory import held
from legoai.lowering.graph.passes.overlap_by_time import latest_starts, served
from legoai.lowering.graph.passes.prefetch import units_ahead
from legoai.lowering.graph.passes.schedule_overlap import forget_order, order_changes
from legoai.lowering.graph.step.operators import GATHERS, SCATTERS, SUM_OVER_REPLICAS, WAIT
from legoai.lowering.graph.step.places import Place, place_of, set_place
from legoai.lowering.graph.step.readable import readable
from legoai.lowering.graph.step.values import shows
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY, after_each_pass
from support.texts.plans import HEAD, lowered

TIED = HEAD.replace('"tiny"', '"tiny", tie_embeddings = true')
ALL = (
    deduplicate_unshards,
    keep_activations,
    reshard_after_forward,
    bucket_units,
    schedule_overlap,
    overlap_communication,
    overlap_by_time,
    offload_activations,
    offload_optimizer_state,
    prefetch_proactively,
    unshard_selectively,
    keep_unsharded,
    compile_regions,
)
SLOW = pytest.mark.slow
TOGETHER = tuple(rewrite for rewrite in ALL if rewrite not in (schedule_overlap, overlap_by_time))
"""Torch's scheduler takes the place of buckets and of their reordering, and times that of prefetching."""


def communication(graph: StepGraph) -> str:
    """A line for each collective and wait, and for the computation between them."""
    lines: list[str] = []
    for node in graph.graph.nodes:
        place = place_of(node)
        if place is None:
            continue
        if node.target in (*GATHERS, *SCATTERS, WAIT):
            kind = "wait" if node.target is WAIT else "gather" if node.target in GATHERS else "scatter"
            value = node.meta["val"]
            size = "" if kind == "wait" else f"{value.nbytes:,} B {str(value.dtype).removeprefix('torch.')}"
            lines.append(f"{place.phase:9} {kind:8} {place.module:24} {size}".rstrip())
        elif not place.makes and not shows(node):
            line = f"{place.phase:9} {'':8} {'.'.join(place.module.split('.')[:2]) or 'root'}"
            if not lines or lines[-1] != line:
                lines.append(line)
    return "\n".join(lines)


def counts(graph: StepGraph) -> str:
    nodes: list[fx.Node] = list(graph.graph.nodes)
    gathers = [node for node in nodes if node.target in GATHERS]
    backward = [node for node in gathers if place_of(node).phase != "forward"]
    return f"{len(gathers) - len(backward)} {len(backward)} {sum(node.target in SCATTERS for node in nodes)}"


def test_each_pass_moves_communication_as_in_the_golden_text(request: pytest.FixtureRequest):
    found = in_the_simulator(after_each_pass, lowered(HEAD + BODY).text, communication)
    text = "\n\n".join(f"# {name}\n{shown}" for name, shown in found.items()) + "\n"
    path = Path(__file__).parent / "communication.txt"
    if request.config.getoption("--update-programs"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "body", "expected"),
    [
        # 39 parameters: 3 of the model, which stay gathered, and 9 of each of 4 blocks.
        pytest.param(HEAD, BODY, ["39 0 39", "39 0 39", "39 36 39", "5 4 5", "5 4 5"], id="units", marks=SLOW),
        # The embedding is tied to the output: gathered and reduced for each of its readers, until that is mended.
        pytest.param(TIED, BODY, ["39 0 39", "38 0 38", "38 36 38", "5 4 5", "5 4 5"], id="tied", marks=SLOW),
        # Recomputation reads its parameters again.
        pytest.param(
            HEAD,
            BODY + "checkpoint { layers.* = full }\n",
            ["39 36 39", "39 0 39", "39 36 39", "5 4 5", "5 4 5"],
            id="checkpointed",
            marks=SLOW,
        ),
        pytest.param(
            HEAD,
            BODY + "checkpoint { layers.* = selective([matmul]) }\n",
            ["39 36 39", "39 0 39", "39 0 39", "39 36 39", "5 4 5", "5 4 5"],
            id="operators kept",
        ),
        pytest.param(
            HEAD,
            BODY.replace("unit }", "unit(reshard = after_backward) }"),
            ["39 0 39", "39 0 39", "5 0 5", "5 0 5"],
            id="kept after forward",
            marks=SLOW,
        ),
        pytest.param(
            HEAD,
            BODY.replace("(reorder = true)", "{ layers.{0..2} = bucket(group) }"),
            ["39 0 39", "39 0 39", "39 36 39", "3 2 3"],
            id="joined units",
            marks=SLOW,
        ),
        pytest.param(
            HEAD,
            BODY.replace("(reorder = true)", "(reorder = true) { layers.* = bucket([1, 2, 1]) }"),
            ["39 0 39", "39 0 39", "39 36 39", "4 3 4", "4 3 4"],
            id="counted units",
            marks=SLOW,
        ),
    ],
)
def test_gather_and_scatter_counts_after_each_pass(head: str, body: str, expected: list[str]):
    assert list(in_the_simulator(after_each_pass, lowered(head + body).text, counts).values()) == expected


def of_both_graphs(graph: StepGraph) -> str:
    """The gathers and reductions of the first micro batch of a step, and those of the others."""
    modules = (graph.module, graph.later or graph.module)
    kinds = (GATHERS, SCATTERS)
    return " ".join(str(sum(node.target in kind for node in item.graph.nodes)) for item in modules for kind in kinds)


@pytest.mark.slow
def test_later_micro_batches_reuse_gathered_units():
    kept = "layers.{0..2} = unit(reshard = never), layers.3 = unit }"
    found = in_the_simulator(
        after_each_pass, lowered(HEAD + BODY.replace("layers.* = unit }", kept)).text, of_both_graphs
    )
    assert list(found)[-1] == "keep_unsharded"
    assert found["overlap_communication"] == "6 5 6 5"  # the root, four layers, and the last again for backward
    assert found["keep_unsharded"] == "6 5 3 5"


def over_replicas(graph: StepGraph) -> str:
    """Reductions over replicas, and the number that overlap computation."""
    nodes: list[fx.Node] = list(graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    sums = [node for node in nodes if node.target is SUM_OVER_REPLICAS]
    hidden = 0
    for node in sums:
        [wait] = node.users
        between = nodes[place[node] + 1 : place[wait]]
        hidden += any(getattr(item.target, "__name__", "").startswith("mm") for item in between)
    return f"{len(sums)} {hidden}"


@pytest.mark.slow
def test_bucketed_replica_reduction_overlaps_computation():
    body = BODY.replace("dp_shard = 2", "dp_replicate = 2, dp_shard = 2").replace(
        "on dp_shard", "on dp_replicate, dp_shard"
    )
    found = in_the_simulator(after_each_pass, lowered(HEAD + body).text, over_replicas, 4)
    assert list(found.values()) == ["39 0", "39 0", "39 0", "5 0", "5 2"]  # behind three, no layer computes


def buckets_of_torch(text: str, megabytes: float) -> dict[str, str]:
    """Communication of a step whose first buckets of torch's scheduler have the given megabytes."""
    place = "legoai.lowering.graph.passes.schedule_overlap"
    with mock.patch(f"{place}._LEAST", megabytes), mock.patch(f"{place}._MOST", megabytes):
        return after_each_pass(text, communication)


@pytest.mark.slow
def test_torch_scheduler_hides_communication_of_each_pass():
    plan = BODY.replace("(reorder = true)", "{ layers.* = bucket(compiler) }")
    found = in_the_simulator(buckets_of_torch, lowered(HEAD + plan).text, 0.5)
    lines = [line.split() for line in found["schedule_overlap"].splitlines()]
    assert [phase for phase, *_ in lines] == sorted((phase for phase, *_ in lines), reverse=True), "forward comes first"
    kinds = [(phase, kind) for phase, kind, *_ in lines]
    gathers, again, scatters = (
        kinds.count(kind) for kind in (("forward", "gather"), ("backward", "gather"), ("backward", "scatter"))
    )
    assert 1 < gathers < 39 and 1 < again < 36 and 1 < scatters < 39
    following = [after for before, after in pairwise(kinds) if before == ("backward", "scatter")]
    assert any(kind not in ("gather", "scatter", "wait") for _, kind in following), "what computes beside a reduction"
    traced = [line.split() for line in found["reshard_after_forward"].splitlines()]
    assert sent(lines) == sent(traced)


def sent(lines: list[list[str]]) -> dict[tuple[str, str], int]:
    """The bytes that each phase gathers and reduces."""
    found: Counter[tuple[str, str]] = Counter()
    for phase, kind, *rest in lines:
        if kind in ("gather", "scatter"):
            found[phase, kind] += int(rest[-3].replace(",", ""))
    return found


@pytest.mark.parametrize(("late", "expected"), [(False, ["add_", "exp", "neg"]), (True, ["exp", "neg", "add_"])])
def test_in_place_mutation_keeps_its_order_among_readers(late: bool, expected: list[str]):
    """Without order constraints the scheduler would move the reader before or after the mutation."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(torch.ops.aten.mul.Tensor, (given, 2))
    shown = graph.call_function(torch.ops.aten.view.default, (made, [4]))
    calls = {
        "add_": lambda: graph.call_function(torch.ops.aten.add_.Tensor, (shown, 1)),
        "exp": lambda: graph.call_function(torch.ops.aten.exp.default, (made,)),
        "neg": lambda: graph.call_function(torch.ops.aten.neg.default, (shown,)),
    }
    nodes = {name: calls[name]() for name in expected}
    graph.output(list(nodes.values()))
    before = [(node.args, node.kwargs) for node in graph.nodes]
    order_changes(graph)
    behind = {name: set(node.kwargs.get("behind", ())) for name, node in nodes.items()}
    readers = {nodes["exp"], nodes["neg"]}
    assert behind["add_"] == (readers if late else set())
    assert behind["exp"] == behind["neg"] == (set() if late else {nodes["add_"]})
    forget_order(graph)
    assert [(node.args, node.kwargs) for node in graph.nodes] == before


def test_passes_are_listed_in_contract_order():
    assert tuple(contract.rewrite for contract in PASSES) == ALL
    check(TOGETHER)
    check(())


def regions(graph: StepGraph) -> str:
    """The collectives and waits of a graph in their order, and its regions with the function that each calls."""
    lines = []
    for node in graph.graph.nodes:
        if node.target in (*GATHERS, *SCATTERS, WAIT):
            lines.append("wait" if node.target is WAIT else "gather" if node.target in GATHERS else "scatter")
        elif node.op == "call_module":
            lines.append(f"{place_of(node).phase} of {place_of(node).module}: {node.target}")
    return "\n".join(lines)


@pytest.mark.slow
def test_regions_between_collectives_compile_once_for_equal_blocks():
    compiled = f"{BODY}compile {{ layers.* = aot_eager }}\n"
    found = in_the_simulator(after_each_pass, lowered(HEAD + compiled).text, regions)
    before, after = found["overlap_communication"].splitlines(), found["compile_regions"].splitlines()
    assert [line for line in after if ":" not in line] == before
    block = [f"forward of layers.{index}: layers_0_forward" for index in range(4)]
    block += [f"backward of layers.{index}: layers_3_backward" for index in reversed(range(4))]
    assert [line for line in after if ":" in line] == block


def test_tensors_changed_in_place_elsewhere_stay_outside_regions():
    graph = fx.Graph()
    given = graph.placeholder("given")
    values = [given]
    for target, argument, module in (
        (torch.ops.aten.mul.Tensor, 2, "one"),
        (torch.ops.aten.add.Tensor, 1, "one"),
        (torch.ops.aten.neg.default, None, "one"),
        (torch.ops.aten.exp.default, None, "two"),
        (torch.ops.aten.add_.Tensor, 1, "two"),
        (torch.ops.aten.mul.Tensor, 3, "two"),
        (torch.ops.aten.sin.default, None, "two"),
    ):
        source = values[2] if target is torch.ops.aten.add_.Tensor else values[-1]  # the sum of `one`
        values.append(graph.call_function(target, (source,) if argument is None else (source, argument)))
        set_place(values[-1], Place(module, "forward"))
    graph.output([values[2], *values[-2:]])
    with FakeTensorMode():
        for node in values:
            node.meta["val"] = torch.empty(4)
    model = torch.nn.ModuleDict({"one": torch.nn.Identity(), "two": torch.nn.Identity()})
    for part in model.values():
        compile_module(part, backend="aot_eager")
    step = StepGraph(model, fx.GraphModule({}, graph), parameters=(), units=())
    tensor = torch.arange(4.0)
    expected = step.module(tensor)
    compile_regions(step)
    alone = [node.target for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert alone == [node.target for node in values[1:6]]
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["two_forward"]
    for value, wanted in zip(step.module(tensor), expected, strict=True):
        assert torch.equal(value, wanted)
    shown, _, region = readable(step).partition("# two_forward\n")
    assert "self.two_forward(" in shown and "aten.sin" in region and "aten.sin" not in shown


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((reshard_after_forward,), "reshard_after_forward needs a graph that is gathered once"),
        ((deduplicate_unshards, overlap_communication), "overlap_communication needs a graph that is bucketed"),
        (
            (deduplicate_unshards, bucket_units, reshard_after_forward),
            "reshard_after_forward comes before it is bucketed",
        ),
        ((*TOGETHER[:-4], overlap_communication), "overlap_communication comes before it is overlapped"),
        ((*TOGETHER[:4], schedule_overlap), "schedule_overlap comes before it is bucketed"),
        ((*TOGETHER[:5], overlap_by_time), "overlap_by_time comes before it is overlapped"),
        (
            (*TOGETHER[:5], prefetch_proactively, offload_activations),
            "offload_activations comes before it is prefetched",
        ),
    ],
)
def test_pass_with_a_missing_predecessor_is_refused(passes: tuple, message: str):
    graph = StepGraph(torch.nn.Module(), fx.GraphModule({}, fx.Graph()), parameters=(), units=())
    with pytest.raises(ContractError, match=message):
        rewritten(graph, passes)


def outstanding(graph: StepGraph) -> str:
    """The most bytes that forward and backward gather ahead of a unit that computes, and the order of the waits."""
    ahead, peaks, issued, waited = 0, {"forward": 0, "backward": 0}, [], []
    for node in graph.graph.nodes:
        if node.target in GATHERS:
            ahead += node.meta["val"].nbytes
            issued.append(node)
        elif node.target is WAIT and node.args[0].target in GATHERS:
            ahead -= node.args[0].meta["val"].nbytes
            waited.append(node.args[0])
            phase = "forward" if place_of(node).phase == "forward" else "backward"
        elif issued and (place := place_of(node)) is not None and not place.makes and not shows(node):
            phase = "forward" if place.phase == "forward" else "backward"
            peaks[phase] = max(peaks[phase], ahead)
    assert issued == waited, "gathers are waited for in their order"
    return f"{peaks['forward']} {peaks['backward']}"


@pytest.mark.slow
def test_gathers_start_ahead_as_the_limit_allows():
    block = 2 * 32_768 + 2 * 16_384 + 3 * 98_304 + 2 * 256  # bytes in bf16, as communication.txt shows them
    found = {}
    for limit in (1, block, 2 * block + 1, 100 * block):
        body = BODY.replace("reorder = true", f"reorder = true, prefetch = proactive(limit = {limit}B)")
        found[limit] = in_the_simulator(after_each_pass, lowered(HEAD + body).text, outstanding)["prefetch_proactively"]
    ahead = {1: 0, block: 1, 2 * block + 1: 2, 100 * block: 4}
    assert found == {limit: f"{count * block} {count * block}" for limit, count in ahead.items()}


@pytest.mark.parametrize("first", [-1, 0])
def test_units_ahead_equal_brute_force(first: int):
    for seed in range(200):
        chosen = random.Random(seed)
        sizes, limit = [chosen.randint(1, 9) for _ in range(chosen.randint(1, 8))], chosen.randint(0, 30)
        wanted = [
            next(unit for unit in range(first, index + 1) if sum(sizes[unit + 1 : index + 1]) <= limit)
            for index in range(len(sizes))
        ]
        assert units_ahead(sizes, limit, first=first) == wanted


def ended(waits: list[float], starts: list[float], taken: list[float], there: list[float], times: list[float]) -> bool:
    """Whether all gathers end before their waits, among reductions that start when they are there."""
    sent = sorted(
        [(start, 0, index, taken[index]) for index, start in enumerate(starts)]
        + [(start, 1, index, times[index]) for index, start in enumerate(there)]
    )
    now, late = float("-inf"), False
    for start, kind, index, time in sent:
        now = max(now, start) + time
        late |= kind == 0 and now > waits[index] + 1e-9
    return not late


def test_gathers_start_as_late_as_possible_without_delay():
    for seed in range(300):
        chosen = random.Random(seed)
        there = sorted(chosen.uniform(0, 30) for _ in range(chosen.randint(0, 5)))
        times = [chosen.uniform(0.1, 4) for _ in there]
        waits = sorted(chosen.uniform(10, 40) for _ in range(chosen.randint(1, 5)))
        taken = [chosen.uniform(0.1, 4) for _ in waits]
        starts = latest_starts(waits, taken, served(there, times))
        assert starts == sorted(starts)
        assert ended(waits, starts, taken, there, times)
        later = [start + 0.01 for start in starts]
        assert there or not ended(waits, later, taken, there, times)


def milliseconds(node: fx.Node) -> float:
    """Times by which ten operators compute while a unit is gathered or reduced."""
    return 8.0 if node.target in (*GATHERS, *SCATTERS) else float(node.target is not WAIT and not shows(node))


def ahead_and_held(graph: StepGraph) -> str:
    """By a limit of memory: the operators that compute during each gather and reduction, and the bytes that live."""
    if len(graph.graph.find_nodes(op="call_function", target=GATHERS[0])) > 30:
        return "no buckets yet"
    lines = [str(max(held(graph, 0)))]
    for limit in (None, 1):
        moved = graph.copied()
        overlap_by_time(moved, milliseconds=milliseconds, limit=limit)
        moved.graph.lint()
        nodes = list(moved.graph.nodes)
        place = {node: index for index, node in enumerate(nodes)}
        waits = [node for node in nodes if node.target is WAIT and node.args[0].target in (*GATHERS, *SCATTERS)]
        between = [nodes[place[wait.args[0]] + 1 : place[wait]] for wait in waits]
        counts = [sum(not shows(node) and not place_of(node).makes for node in part) for part in between]
        lines.append(f"{' '.join(map(str, counts))} of {max(held(moved, 0))}")
    return "\n".join(lines)


@pytest.mark.slow
def test_timed_prefetch_spans_buckets_within_the_memory_limit():
    body = BODY.replace("{ layers.* = unit }", "{ layers.* = unit, {norm, output} = unit }")
    shown = in_the_simulator(after_each_pass, lowered(HEAD + body).text, ahead_and_held)["bucket_units"]
    before, (free, high), (bound, low) = (line.split(" of ") for line in shown.splitlines())
    # Of forward the embedding, four blocks, the norm and the output, of backward the same again but for the embedding;
    # each that stands behind enough of them computes beside as many operators as its time allows.
    assert free == "0 1 12 12 12 15 12 5 8 21 21 14 12 1 12 1 12 1 1 0"
    assert bound == "0 1 12 12 12 15 12 5 8 21 21 14 12 1 0 1 0 1 1 0"
    assert int(low) <= int(*before) < int(high)
