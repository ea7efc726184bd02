"""A model of few equal blocks, repeated, has the trace of the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from legoai.cost import capture as capturing
from legoai.cost.replay.blocks import TAKEN, shorten
from legoai.cost.replay.depth import lengthen
from legoai.cost.trace.editing import EditableTrace
from legoai.cost.trace.records import Kernel, Mark, TensorType
from legoai.cost.trace.trace import records_of
from legoai.lowering.program import Program
from support import combinations, simulated
from support.plans import lowered

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
    "host memory for parameters and activations",
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


def deep(name: str) -> tuple[Program, int]:
    """Return the program of a combination with more blocks and more micro batches, and its ranks."""
    one = combinations.COMBINATIONS[name]
    text = re.sub(r"n_layers = \d+", f"n_layers = {LAYERS}", one.text)
    text = re.sub(r"batch \(global = \d+", f"batch (global = {4 * one.data}", text)
    return lowered(text), one.world


def both(program: Program, world: int) -> tuple[bool, int]:
    """Return whether the traces with and without repetition are equal, and how often blocks were repeated."""
    counted = []

    def count(*args, **kwargs):
        found = lengthen(*args, **kwargs)
        counted.append(found is not None)
        return found

    capturing.lengthen = count
    short = capturing.capture(program, world=world)
    if any(counted):
        assert short.segmented and len(short.items) < 0.75 * len(short.records)
    return short == capturing.capture(program, world=world, replay=False), sum(counted)


def check(name: str) -> None:
    equal, repeated = simulated.in_a_fork(both, *deep(name))
    assert equal
    assert repeated or name not in REPEATED


def test_repeated_blocks_are_as_if_they_had_been_taken():
    check("fsdp and tensor parallel")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "fsdp and tensor parallel"])
def test_repeated_blocks_are_as_if_they_had_been_taken_in_every_combination(name):
    check(name)


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


def test_blocks_that_differ_in_their_place_alone_are_left_out():
    model = stack(Block(index) for index in range(12))
    (repeated,) = shorten(model, ["blocks"])
    assert len(model.blocks) == len(repeated.kept) == TAKEN
    assert repeated.names == tuple(map(str, range(12))) and repeated.missing == 12 - TAKEN
    assert [block.index for block in model.blocks] == [0, 1, 2, 10, 11]


def test_blocks_that_the_program_treats_differently_are_kept():
    model = stack(Block(index) for index in range(12))
    assert shorten(model, []) == [] and len(model.blocks) == 12


@pytest.mark.parametrize(
    "odd", [Block(6, width=5), Block(6, rate=0.2), nn.Linear(4, 4), Block(5), Block(6).requires_grad_(False)]
)
def test_one_block_that_differs_keeps_all(odd):
    model = stack(odd if index == 6 else Block(index) for index in range(12))
    assert shorten(model, ["blocks"]) == [] and len(model.blocks) == 12


def test_few_blocks_are_kept():
    model = stack(Block(index) for index in range(TAKEN))
    assert shorten(model, ["blocks"]) == [] and len(model.blocks) == TAKEN


def of_blocks(sizes: list[int]) -> EditableTrace:
    """Return a forward through blocks whose kernels read so many bytes."""
    records = [Mark("step 1"), Mark("micro batch 0")]
    for index, size in enumerate(sizes):
        kernel = Kernel(
            stream=0, op="aten.mm", inputs=(TensorType((size,), "uint8"),), outputs=(), flops=0, bytes_read=size,
            bytes_written=0, attributes={}, module=f"blocks.{index}", phase="forward",
        )  # fmt: skip
        records += [Mark(f"forward blocks.{index}"), kernel, Mark(f"end blocks.{index}")]
    return EditableTrace.of([*records, Mark("end step 1")])


def test_edges_may_differ_and_the_middle_may_not():
    model = stack(Block(index) for index in range(7))
    (repeated,) = shorten(model, ["blocks"])
    found = lengthen(of_blocks([1, 2, 2, 2, 3]), repeated)
    assert found is not None and tuple(records_of(found.finished())) == of_blocks([1, 2, 2, 2, 2, 2, 3]).finished()
    assert lengthen(of_blocks([1, 1, 2, 2, 2]), repeated) is None
