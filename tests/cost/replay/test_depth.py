"""A model of few equal blocks, repeated, has the trace of the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from legoai.cost import capture as capturing
from legoai.cost.replay.blocks import shorten
from legoai.cost.replay.building import piece_of
from legoai.cost.replay.file import load, save
from legoai.cost.replay.piece import Piece
from legoai.cost.replay.repeated_blocks import TAKEN, runs_of
from legoai.cost.trace.editing import EditableTrace
from legoai.cost.trace.records import Kernel, Mark, TensorType
from legoai.lowering.program import Program
from legoai.specs.cluster import device
from support import ROOT
from support.simulation.simulator import in_the_simulator
from support.texts import combinations
from support.texts.plans import lowered

LAYERS = 9
WHOLE = {name: one for name, one in combinations.COMBINATIONS.items() if "mesh (pp" not in one.body}
REPEATED = {
    "fsdp",
    "fsdp, resharded after backward",
    "fsdp, never resharded, reduced last",
    "fsdp, two ranks after forward",
    "fsdp in bf16, clipped",
    "fsdp, checkpointed",
    "fsdp, selectively checkpointed",
    "hybrid shards",
    "hybrid shards, reduced last, clipped",
    "tensor parallel",
    "tensor and sequence parallel",
    "fsdp and tensor parallel",
    "fsdp and tensor parallel, checkpointed",
    "context parallel, keys gathered",
    "context parallel, keys around the ring",
    "shards and context parallel",
}
"""Those whose blocks are known to be equal, and must not be taken one by one."""


def deep(name: str, layers: int = LAYERS, micro_batches: int = 5) -> tuple[Program, int]:
    """Return the program of a combination with more blocks and more micro batches, and its ranks."""
    one = combinations.COMBINATIONS[name]
    text = re.sub(r"n_layers = \d+", f"n_layers = {layers}", one.text)
    text = re.sub(r"batch \(global = \d+", f"batch (global = {micro_batches * one.data}", text)
    return lowered(text), one.world


def compared(programs: dict[tuple[int, int], Program], world: int) -> tuple[list[tuple[int, int]], bool]:
    """Compare replays of the first program's capture with full captures.

    Returns:
        The depths and micro batches of those that are not equal, and whether blocks were repeated.
    """
    (_, program), *_ = programs.items()
    piece = capturing.capture_piece(program, world=world)
    if not isinstance(piece, Piece):
        return (
            [] if piece is None or piece == capturing.capture(program, world=world, replay=False) else [(0, 0)]
        ), False
    different = []
    for (layers, micro_batches), other in programs.items():
        if micro_batches < piece.taken:
            continue
        trace = piece.trace({"layers": layers} if piece.containers else {}, micro_batches)
        assert trace.segmented
        if (piece.containers or other is program) and trace != capturing.capture(other, world=world, replay=False):
            different.append((layers, micro_batches))
    return different, bool(piece.containers)


def check(name: str, *others: tuple[int, int]) -> None:
    sizes = ((LAYERS, 5), *others)
    world = combinations.COMBINATIONS[name].world
    different, repeated = in_the_simulator(compared, {size: deep(name, *size)[0] for size in sizes}, world)
    assert different == []
    assert repeated or name not in REPEATED


@pytest.mark.slow
def test_replayed_blocks_equal_full_capture():
    check("fsdp and tensor parallel", (7, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "fsdp and tensor parallel"])
def test_replayed_blocks_equal_full_capture_in_every_combination(name):
    check(name, (6, 7), (12, 4))


@pytest.mark.slow
@settings(max_examples=4, derandomize=True)
@given(layers=st.integers(TAKEN, 14), micro_batches=st.integers(5, 9))
def test_one_capture_replays_all_depths_and_micro_batches(layers, micro_batches):
    check("fsdp, checkpointed", (layers, micro_batches))


HOST = """\
plan    host
model   llama3("tiny", n_layers = 8)
cluster h100_sxm(hosts = 1)
batch   (global = 32, micro = 1, seq_len = 128)
mesh    (dp_replicate = 2, dp_shard = 2, tp = 2)
shard standard on tp (sequence, loss_parallel)
fsdp blocks on dp_replicate, dp_shard { layers.* = unit(reshard = after_backward) }
offload (parameters = all)
optimizer sgd(lr = 1e-3)
clip    (norm = 1.0)
"""


def whole_and_short(text: str) -> bool:
    program, gpu = lowered(text), device("h100_sxm")
    whole = capturing.capture(program, world=8, gpu=gpu, replay=False)
    return whole == capturing.capture(program, world=8, gpu=gpu)


@pytest.mark.slow
def test_host_computation_over_all_blocks_is_replayed():
    """With parameters in host memory, the norm of all gradients is found there."""
    assert in_the_simulator(whole_and_short, HOST)


WORKED = {"llama3_8b_8": (1, 2), "llama3_70b_256": (4, 5), "mixtral_8x7b_64": (1, 2)}
"""Times the plan's own batch: a trace of fewer than three micro batches is one of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKED)
def test_worked_plans_are_replayed(name):
    sizes = {size: worked(name, *size) for size in zip((7, 6), WORKED[name], strict=True)}
    batches = {size: int(re.search(r"^MICRO_BATCHES = (\d+)", one.text, re.M)[1]) for size, one in sizes.items()}
    programs = {(layers, batches[layers, times]): one for (layers, times), one in sizes.items()}
    world = int(re.search(r"_(\d+)$", name)[1])
    assert in_the_simulator(compared, programs, world) == ([], True)


def worked(name: str, layers: int, times: int) -> Program:
    """Return the program of a worked plan with the given number of blocks and multiple of its micro batches."""
    text = (ROOT / "plans" / f"{name}.plan").read_text()
    text = re.sub(r"(model\s+\w+\(\"\w+\")", rf"\1, n_layers = {layers}", text)
    return lowered(re.sub(r"\(global = ", f"(global = {times} * ", text))


UNEVEN = {
    "every second checkpointed": ("layers.* = every(2)", 12, [2]),
    "every third checkpointed, and two blocks over": ("layers.* = every(3)", 20, [3]),
    "some checkpointed, others not": ("layers.{0..6} = full", 14, [1, 1]),
    "the first otherwise than the others": ("layers.0 = full, layers.{1..9} = none", 10, [1]),
    "the first checkpointed, the others selectively": (
        "layers.* = first(7, full, others = selective([attention]))",
        14,
        [1, 1],
    ),
    "some checkpointed, then every second": ("layers.{0..5} = full, layers.{6..17} = every(2)", 18, [1, 2]),
}
"""Rules of `checkpoint`, blocks, and the periods of the runs of repeated blocks."""


@pytest.mark.slow
def test_first_micro_batch_with_all_gathers_is_distinguished():
    one = combinations.COMBINATIONS["fsdp"]
    rules = "fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }"
    text = re.sub(r"n_layers = \d+", "n_layers = 8", re.sub(r"^fsdp .*$", rules, one.text, flags=re.M))
    assert rules in text
    program = lowered(re.sub(r"batch \(global = \d+", f"batch (global = {5 * one.data}", text))
    assert in_the_simulator(compared, {(8, 5): program}, one.world) == ([], True)


PREFETCHED = {
    "two ahead": ("comm (prefetch = units(2, 2))", 12, 1),
    "three ahead and one back": ("comm (prefetch = units(3, 1))", 13, 1),
    "two back, every second checkpointed": ("comm (prefetch = units(1, 2))\ncheckpoint { layers.* = every(2) }", 18, 2),
}
"""Statements, blocks, and the period of the run of repeated blocks."""


@pytest.mark.slow
@pytest.mark.parametrize("under", ["fsdp", "fsdp and tensor parallel"])
@pytest.mark.parametrize("name", PREFETCHED)
def test_blocks_with_explicit_prefetch_are_replayed(name, under):
    statements, layers, period = PREFETCHED[name]
    text, world = long(under, layers)
    program = lowered(f"{text}\n{statements}\n")
    assert in_the_simulator(unevenly_composed, program, world) == ([period], True)


def uneven(name: str, under: str) -> tuple[Program, list[int]]:
    rules, layers, periods = UNEVEN[name]
    text, _ = long(under, layers)
    return lowered(f"{text}\ncheckpoint {{ {rules} }}\n"), periods


def long(under: str, layers: int) -> tuple[str, int]:
    one = combinations.COMBINATIONS[under]
    text = re.sub(r"n_layers = \d+", f"n_layers = {layers}", one.text)
    return re.sub(r"batch \(global = \d+", f"batch (global = {3 * one.data}", text), one.world


def unevenly_composed(program: Program, world: int) -> tuple[list[int], bool]:
    piece = capturing.capture_piece(program, world=world)
    assert isinstance(piece, Piece)
    whole = capturing.capture(program, world=world, replay=False)
    return [one.period for one in piece.containers], load(save(piece)).trace() == piece.trace() == whole


@pytest.mark.slow
def test_blocks_of_several_classes_are_replayed(name="every second checkpointed", under="fsdp"):
    program, periods = uneven(name, under)
    world = combinations.COMBINATIONS[under].world
    assert in_the_simulator(unevenly_composed, program, world) == (periods, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN)
def test_blocks_of_several_classes_are_replayed_in_every_order(name):
    test_blocks_of_several_classes_are_replayed(name, "fsdp and tensor parallel")


@pytest.mark.slow
def test_first_units_with_other_treatment_are_replayed():
    text, world = long("fsdp", 14)
    rule = "fsdp on dp_shard { layers.* = first(7, unit, others = unit(reshard = after_backward)), root = unit }"
    text = re.sub(r"^fsdp .*$", rule, text, flags=re.M)
    assert rule in text
    program = lowered(f"{text}\ncheckpoint {{ layers.* = first(7, full) }}\n")
    assert in_the_simulator(unevenly_composed, program, world) == ([1, 1], True)


@pytest.mark.slow
def test_one_capture_replays_other_group_lengths():
    programs = [uneven_at(length) for length in (7, 12)]
    assert in_the_simulator(followed, *programs, combinations.COMBINATIONS["fsdp"].world)


def uneven_at(length: int) -> Program:
    text, _ = long("fsdp", 20)
    return lowered(f"{text}\ncheckpoint {{ layers.* = first({length}, full) }}\n")


def followed(program: Program, other: Program, world: int) -> bool:
    """Whether the trace of a program follows from the piece of another, whose runs have other lengths."""
    piece = capturing.capture_piece(program, world=world)
    assert isinstance(piece, Piece)
    depths = piece.depths_of({"layers": (12, 8)})
    assert depths is not None and piece.depths_of({"layers": (20,)}) is None
    return piece.trace(depths) == capturing.capture(other, world=world, replay=False)


@given(st.lists(st.integers(0, 2), max_size=60))
def test_repeated_groups_are_periodic_and_disjoint(classes):
    covered = 0
    for run in runs_of(classes):
        assert covered <= run.start and run.stop <= len(classes) and run.groups > TAKEN
        covered = run.stop
        own = classes[run.start : run.stop]
        assert own == own[: run.period] * run.groups
        assert [classes[place] for place in run.kept] == own[: run.period] * TAKEN


def test_repeated_groups_skip_the_most_blocks():
    assert [(run.start, run.groups, run.period) for run in runs_of([0] * 4 + [1] * 8 + [2, 3] * 9)] == [
        (4, 8, 1),
        (12, 9, 2),
    ]
    assert list(runs_of([0, 1] * 5)) == [] == list(runs_of([0] * TAKEN))


def test_changes_to_skipped_blocks_have_no_effect():
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleDict({str(index): Block(index) for index in range(14)})
    [run] = shorten(model, {"blocks": [0, 1] * 7})
    assert run.kept == ("0", "1", "2", "3", "4", "5", "10", "11", "12", "13") and run.missing == 2
    for index in range(14):
        model.blocks[str(index)] = nn.Sequential(model.blocks[str(index)])
        model.blocks[str(index)].linear = nn.Identity()
    assert list(model.blocks) == list(run.kept)
    assert all(isinstance(one, nn.Sequential) and isinstance(one[0], Block) for one in model.blocks.values())


def test_replay_to_fewer_blocks_or_micro_batches_is_refused():
    assert in_the_simulator(refused, *deep("fsdp")) == [
        "the trace of 2 micro batches cannot be composed from that of 3",
        "the trace of fewer than 5 blocks cannot be composed from that of more",
        "blocks: no run of repeated blocks",
    ]


def refused(program: Program, world: int) -> list[str]:
    piece = capturing.capture_piece(program, world=world)
    found = []
    for depths, micro_batches in (({}, 2), ({"layers": 4}, 4), ({"blocks": 9}, 4)):
        try:
            piece.trace(depths, micro_batches)
        except ValueError as error:
            found.append(str(error))
    return found


class Block(nn.Module):
    def __init__(self, index: int, width: int = 4, rate: float = 0.1) -> None:
        super().__init__()
        self.index = index
        self.rate = rate
        self.linear = nn.Linear(width, width)


def stack(blocks: Iterator[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(blocks)
    return model


def test_blocks_differing_only_by_index_are_skipped():
    model = stack(Block(index) for index in range(12))
    (repeated,) = shorten(model, {"blocks": [0] * len(model.blocks)})
    assert len(model.blocks) == len(repeated.kept) == TAKEN
    assert repeated.names == tuple(map(str, range(12))) and repeated.missing == 12 - TAKEN
    assert [block.index for block in model.blocks] == [0, 1, 2, 10, 11]


def test_blocks_with_different_treatments_are_all_captured():
    model = stack(Block(index) for index in range(12))
    assert shorten(model, {}) == [] and len(model.blocks) == 12


@pytest.mark.parametrize(
    "odd", [Block(6, width=5), Block(6, rate=0.2), nn.Linear(4, 4), Block(5), Block(6).requires_grad_(False)]
)
def test_one_differing_block_prevents_skipping(odd):
    model = stack(odd if index == 6 else Block(index) for index in range(12))
    assert shorten(model, {"blocks": [0] * len(model.blocks)}) == [] and len(model.blocks) == 12


def test_few_blocks_are_all_captured():
    model = stack(Block(index) for index in range(TAKEN))
    assert shorten(model, {"blocks": [0] * len(model.blocks)}) == [] and len(model.blocks) == TAKEN


def of_blocks(sizes: list[int]) -> EditableTrace:
    """Return a forward through blocks whose kernels read the given numbers of bytes."""
    records = [Mark("step 1"), Mark("micro batch 0")]
    for index, size in enumerate(sizes):
        kernel = Kernel(
            stream=0, op="aten.mm", inputs=(TensorType((size,), "uint8"),), outputs=(), flops=0, bytes_read=size,
            bytes_written=0, attributes={}, module=f"blocks.{index}", phase="forward",
        )  # fmt: skip
        records += [Mark(f"forward blocks.{index}"), kernel, Mark(f"end blocks.{index}")]
    return EditableTrace.of([*records, Mark("end step 1")])


def test_only_edge_blocks_may_differ():
    model = stack(Block(index) for index in range(7))
    runs = shorten(model, {"blocks": [0] * len(model.blocks)})
    piece = piece_of(of_blocks([1, 2, 2, 2, 3]), runs, rank=0, world=1, wanted=0)
    assert piece is not None and piece.trace().records == of_blocks([1, 2, 2, 2, 2, 2, 3]).finished()
    assert piece.trace({"blocks": 5}).records == of_blocks([1, 2, 2, 2, 3]).finished()
    assert piece_of(of_blocks([1, 1, 2, 2, 2]), runs, rank=0, world=1, wanted=0) is None
