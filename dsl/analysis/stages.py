"""How many stages a pipeline has, and the order file that it may come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.specs.directives.pipeline import SINGLE_STAGE, OrderFile, Pipeline

if TYPE_CHECKING:
    from legoai.dsl.analysis.orders import Order


def order_of(analysis: Analysis, pipeline: Pipeline) -> Order | None:
    """The order that the plan's file holds; None where there is no such file, or where it cannot be read."""
    from legoai.dsl.analysis.orders import OrderError, read_order

    if not isinstance(pipeline.schedule, OrderFile):
        return None
    text = order_text(analysis, pipeline.schedule)
    try:
        return None if isinstance(text, OSError | ValueError) else read_order(text)
    except OrderError:
        return None


def order_text(analysis: Analysis, schedule: OrderFile) -> str | OSError | ValueError:
    """The file's text, or why it cannot be had."""
    from legoai.dsl.analysis.orders import LARGEST_FILE

    path = analysis.directory / schedule.file
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            return ValueError("it is larger than 64 MiB")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ValueError("it is not UTF-8 text")
    except (OSError, ValueError) as error:
        return error


def stage_count(analysis: Analysis, pipeline: Pipeline) -> int | None:
    """The number of stages: the plan's, or what the schedule or the order file has; None if that cannot be read."""
    if pipeline.stages is not None:
        return pipeline.stages
    if isinstance(pipeline.schedule, OrderFile):
        order = order_of(analysis, pipeline)
        return order.stages if order is not None else None
    return analysis.plan.mesh.pp * (1 if pipeline.schedule in SINGLE_STAGE else 2)
