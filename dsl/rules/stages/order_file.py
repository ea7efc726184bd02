"""`pipeline`: rules about an order of actions that is read from a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import pass_micro_batches
from legoai.dsl.analysis.stages.pipeline import order, order_text
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.training.batch import pass_label
from legoai.specs.directives.pipeline import OrderFile, Pipeline
from legoai.specs.units import counted

if TYPE_CHECKING:
    from legoai.dsl.analysis.stages.orders import Order


class OrderFileReadable(Check):
    """An order file that is missing or cannot be read.

    The file is what PyTorch's schedules write and read: a line for each rank, a cell such as `2F0` for each
    action. Linting reads it as text.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = csv("no_such_order.csv"))
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = 1F1B)
    ```
    """

    code = "LP512"
    slug = "order-file"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline = analysis.plan.pipeline
        if pipeline is None or not isinstance(pipeline.schedule, OrderFile):
            return
        schedule = pipeline.schedule
        place = analysis.span_of(schedule, "file")
        text, found = order_text(analysis), order(analysis)
        if isinstance(text, OSError | ValueError):
            reason = text.strerror if isinstance(text, OSError) and text.strerror else str(text)
            path = analysis.directory / schedule.file
            yield self.at(place, f"`{schedule.file}` cannot be read: {reason}", label=f"looked for {path}")
            return
        if isinstance(found, Exception):
            yield self.at(
                place,
                f"`{schedule.file}`, line {found.line}, cell {found.column}: {found.message}",
                label="cannot be read as an order",
                help=["a cell is empty, or a stage, an action and a micro batch: `2F0`, `0B3`, `1I2`, `1W2`"],
            )
            return
        assert found is not None
        mismatches = list(OrderFileFits.find(analysis, pipeline, found))
        yield from mismatches or OrderFileRuns.find(analysis, pipeline, found)


class OrderFileFits(Rule):
    """An order file for other numbers of ranks, stages or micro batches than the plan's."""

    code = "LP513"
    slug = "order-file-mismatch"

    @classmethod
    def find(cls, analysis: Analysis, pipeline: Pipeline, order: Order) -> Iterator[Diagnostic]:
        """A diagnostic for each number that differs."""
        assert isinstance(pipeline.schedule, OrderFile)
        place = analysis.span_of(pipeline.schedule, "file")
        plan = analysis.plan
        numbers = [
            ("rank", len(order.ranks), plan.mesh.pp, Label(analysis.span_of(plan.mesh, "pp"), f"`pp` = {plan.mesh.pp}"))
        ]
        if pipeline.stages is not None:
            stages = Label(analysis.span_of(pipeline, "stages"), "the plan's stages")
            numbers.append(("stage", order.stages, pipeline.stages, stages))
        count = pass_micro_batches(plan)
        if count is not None:
            numbers.append(("micro batch", order.micro_batches, count, pass_label(analysis)))
        for noun, held, wanted, other in numbers:
            if held != wanted:
                yield cls.at(
                    place,
                    f"`{pipeline.schedule.file}` orders {counted(held, noun)}, and the plan has {wanted}",
                    label=f"made for {counted(held, noun)}",
                    others=[other],
                )


class OrderFileRuns(Rule):
    """An order file that would wait for ever, or that does not compute every micro batch on every stage once."""

    code = "LP514"
    slug = "order-file-order"

    @classmethod
    def find(cls, analysis: Analysis, pipeline: Pipeline, order: Order) -> Iterator[Diagnostic]:
        """The first fault."""
        from legoai.dsl.analysis.stages.orders import order_faults

        assert isinstance(pipeline.schedule, OrderFile)
        for fault in order_faults(order, sharded=analysis.plan.fsdp is not None):
            yield cls.at(
                analysis.span_of(pipeline.schedule, "file"),
                f"`{pipeline.schedule.file}` cannot run: {fault}",
                label="not a valid order",
            )
