"""`pipeline`: stages of the model on different ranks, and the order in which micro batches pass them."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import AxisUse, Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Choice, Either, Integer, ListOf, ModulePath, Number, Text

SINGLE_STAGE = ("GPipe", "1F1B")
"""Schedules in which a rank holds one stage."""
MULTI_STAGE = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules in which a rank holds several stages."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute weight gradients separately from input gradients."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which a rank holds exactly two stages, the i-th from the front and the i-th from the back."""


class OrderFile(Treatment):
    """An order of actions read from a CSV file: a line for each rank, as PyTorch's schedules write and read them."""

    name: ClassVar[str] = "csv"

    file: str = option(Text("a quoted file name"), doc="The file, relative to the plan.")


class Even(Treatment):
    """Equal loads: blocks are shared out so that the stage with the most work has the least."""

    name: ClassVar[str] = "even"

    embedding: float = option(
        Number(minimum=0.0), doc="The work of the first stage besides its blocks, in blocks.", default=0.0
    )
    loss: float = option(
        Number(minimum=0.0), doc="The work of the last stage besides its blocks, in blocks.", default=0.0
    )


class Pipeline(Directive):
    """Pipeline parallelism: schedule, number of stages, where the model is split, and the number of micro batches."""

    keyword: ClassVar[str] = "pipeline"
    axis_use: ClassVar[AxisUse | None] = AxisUse(("pp",))

    schedule: str | OrderFile = option(
        Either((Choice(SINGLE_STAGE + MULTI_STAGE), Calls((OrderFile,)))),
        doc="The schedule class of `torch.distributed.pipelining`, or an order file.",
        default="1F1B",
    )
    stages: int | None = option(
        Integer(minimum=1),
        doc="Stages in all; by default one for each rank of `pp`, or two where the schedule wants several.",
        default=None,
    )
    split: str | Even | tuple[str | int, ...] = option(
        Either((Choice(("even",)), Calls((Even,)), ListOf(Either((ModulePath(), Integer(minimum=1)))))),
        doc="The first module of each stage but the first, the number of blocks of each stage, or `even` for equal "
        "numbers of blocks, with weights for the additional work of the first and the last stage. A path that reads as "
        'a number, as modules in nested `Sequential`s have, is quoted: `"1.1"`.',
        default="even",
    )
    microbatches: int | None = option(
        Integer(minimum=1),
        doc="Micro batches in one pass of the schedule; by default all that `batch` gives a rank in a step. The "
        "gradients of several passes add up.",
        default=None,
    )
