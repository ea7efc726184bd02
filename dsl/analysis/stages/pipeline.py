"""Stages of a pipeline: their number, modules and ranks, and the order of their actions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from legoai.dsl.analysis.caching import Facts, fact
from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.specs.directives.base import Staged, has_hole
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.pipeline import SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, Even, OrderFile, Pipeline
from legoai.specs.files import MOST_DATA, read_file

if TYPE_CHECKING:
    from legoai.dsl.analysis.stages.orders import Order, OrderError


def is_staged(analysis: Facts) -> bool:
    """Whether the model is split into stages that lie on different ranks."""
    return analysis.plan.pipeline is not None and analysis.plan.mesh.pp > 1


def treats_stages_apart(analysis: Facts) -> bool:
    """Whether a rule has different treatments per stage, so that a block's treatment depends on the split."""
    rules = (rule for directive in analysis.plan.directives() for rule in directive.rules)
    return any(isinstance(rule.treatment, Staged) for rule in rules)


def has_placeholders(analysis: Facts) -> bool:
    """Whether placeholders replace the modules of other stages; built-in models skip missing modules."""
    return is_staged(analysis) and analysis.plan.model.family in FOREIGN


@fact
def order_text(analysis: Facts) -> str | OSError | ValueError | None:
    """The text of the order file, or why it cannot be read; None where the plan names no such file."""
    pipeline = analysis.plan.pipeline
    if pipeline is None or not isinstance(pipeline.schedule, OrderFile):
        return None
    path = analysis.directory / pipeline.schedule.file
    try:
        return read_file(path, MOST_DATA).decode("utf-8")
    except UnicodeDecodeError:
        return ValueError("it is not UTF-8 text")
    except (OSError, ValueError) as error:
        return error


@fact
def order(analysis: Facts) -> Order | OrderError | None:
    """Return the order in the plan's file, or the error in its text; None where there is no text."""
    from legoai.dsl.analysis.stages.orders import OrderError, read_order

    text = order_text(analysis)
    try:
        return read_order(text) if isinstance(text, str) else None
    except OrderError as error:
        return error


def _valid_order(analysis: Facts) -> Order | None:
    found = order(analysis)
    return None if isinstance(found, Exception) else found


def splits_backward(analysis: Facts) -> bool:
    """Whether the schedule computes weight gradients separately from input gradients."""
    pipeline = analysis.plan.pipeline
    if pipeline is None:
        return False
    if not isinstance(pipeline.schedule, OrderFile):
        return pipeline.schedule in SPLIT_BACKWARD and is_staged(analysis)
    found = _valid_order(analysis)
    return found is not None and found.splits_backward and is_staged(analysis)


@fact
def stage_count(analysis: Facts) -> int | None:
    """Return the number of stages: the plan's, or that of the schedule or the order file; None where there is none."""
    pipeline = analysis.plan.pipeline
    if pipeline is None or pipeline.stages is not None:
        return None if pipeline is None else pipeline.stages
    if isinstance(pipeline.schedule, OrderFile):
        found = _valid_order(analysis)
        return None if found is None else found.stages
    return analysis.plan.mesh.pp * (1 if pipeline.schedule in SINGLE_STAGE else 2)


def most_stages(analysis: Facts) -> int:
    """Return the number of stages; where the schedule is a hole, the largest possible one.

    Raises:
        Undecided: it is not known.
    """
    pipeline, ranks = analysis.plan.pipeline, analysis.plan.mesh.pp
    if pipeline is None or ranks == 1:
        return 1
    if pipeline.stages is None and isinstance(pipeline.schedule, Hole):
        if any(isinstance(one, OrderFile) for one in pipeline.schedule.domain or ()):
            raise Undecided("a file of actions may have any number of stages")
        return 2 * ranks  # each of torch's schedules has one stage on each rank, or two
    return stage_count(analysis) or ranks


@fact
def split_points(analysis: Facts) -> SplitPoints:
    """The modules with which a stage of the model can begin."""
    assert analysis.manifest is not None
    return SplitPoints(analysis.manifest)


@fact
def first_modules(analysis: Facts) -> tuple[str, ...] | None:
    """Return the first module of each stage but the first; None where the plan cannot be divided into its stages."""
    pipeline, count = analysis.plan.pipeline, stage_count(analysis)
    if pipeline is None or count is None or analysis.manifest is None:
        return None
    known, split = split_points(analysis), pipeline.split
    if isinstance(split, str | Even):
        weights = {} if isinstance(split, str) else {"embedding": split.embedding, "loss": split.loss}
        return known.even(count, **weights) if count <= len(known.blocks) else None
    counts = block_counts(pipeline)
    if counts is not None:
        fit = len(counts) == len(split) == count and sum(counts) == len(known.blocks)
        return known.counted(counts) if fit else None
    points = tuple(str(point) for point in split)
    positions = [0, *(known.position.get(point, 0) for point in points)]
    rises = all(after > before for before, after in pairwise(positions))
    return points if rises and len(points) == count - 1 else None


def block_counts(pipeline: Pipeline) -> tuple[int, ...] | None:
    """Return the numbers of blocks per stage, where the plan gives them; None for named modules or an even split.

    Raises:
        Undecided: a number or a module is a hole.
    """
    split = pipeline.split
    if isinstance(split, str | Even):
        return None
    if any(isinstance(item, Hole) for item in split):
        raise Undecided("a stage of the split is not decided yet")
    if not any(isinstance(item, int) for item in split):
        return None
    return tuple(item for item in split if isinstance(item, int))


def stage_of(analysis: Facts, path: str) -> int | None:
    """Return the stage of a module; None for a module outside the stages, and where the plan makes no stages."""
    points = first_modules(analysis)
    if points is None:
        return None
    known = split_points(analysis)
    start = known.holder(path)
    return None if start is None else stages_between(analysis, points)[known.position[start]]


def lie_apart(analysis: Facts, paths: Iterable[str]) -> bool:
    """Whether some modules lie on different stages, whatever becomes of an open split.

    So do the first and the last module of a model, on any two stages or more.

    Raises:
        Undecided: the number of stages is a hole.
    """
    pipeline, count = analysis.plan.pipeline, stage_count(analysis)
    if pipeline is None or count is None or not has_hole(pipeline.split):
        return len({stage_of(analysis, path) for path in paths} - {None}) > 1
    known = split_points(analysis)
    found = {known.position[start] for path in paths if (start := known.holder(path)) is not None}
    between = max(found) - min(found) if found else 0
    # Stages begin between the two where there are more of them than modules elsewhere with which one can begin.
    return between > 0 and count - 1 > len(known.starts) - 1 - between


def stages_between(analysis: Facts, points: tuple[str, ...]) -> list[int]:
    """The stages of the modules with which a stage can begin, in order, where it does so at some of them."""

    def stages() -> list[int]:
        known = split_points(analysis)
        first = {known.position[point] for point in points}
        return list(accumulate(int(place in first) for place in range(len(known.starts))))

    return analysis.once((stages_between, points), stages)


@fact
def stages_of_ranks(analysis: Facts) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank of `pp`: assigned in turn, in V shape, or by the order file.

    None where there are more ranks or stages than modules with which a stage can begin, where a V does not have two
    stages on each rank, and where the order file gives no order, or that of another number of stages.
    """
    pipeline, ranks, count = analysis.plan.pipeline, analysis.plan.mesh.pp, stage_count(analysis)
    if pipeline is None or count is None or max(ranks, count) > len(split_points(analysis).starts):
        return ()
    if isinstance(pipeline.schedule, OrderFile):
        found = _valid_order(analysis)
        if found is None or found.stages != count:
            return ()
        return tuple(tuple(sorted({action.stage for cell in cells for action in cell})) for cells in found.ranks)
    if pipeline.schedule in V_SHAPED:
        return tuple((rank, count - 1 - rank) for rank in range(ranks)) if count == 2 * ranks else ()
    return tuple(tuple(range(rank, count, ranks)) for rank in range(ranks))
