"""Stages of a pipeline: their number, modules and ranks, the order of their actions, and what crosses between them.

A stage of a built-in model runs the modules that it holds. One of a model that others wrote runs the whole forward,
with placeholders for the modules of other stages (see :mod:`legoai.dsl.analysis.chain`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis, fact
from legoai.dsl.analysis.checkpoint import recomputed_modules
from legoai.dsl.analysis.compile import compiled_modules
from legoai.dsl.analysis.facts import holders, name_of
from legoai.dsl.analysis.shard import shard_on_tp
from legoai.dsl.analysis.split_points import SplitPoints
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.pipeline import SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, Even, OrderFile, Pipeline
from legoai.specs.models.reads import Tokens
from legoai.specs.record import Record

if TYPE_CHECKING:
    from legoai.dsl.analysis.chain import CannotFollow
    from legoai.dsl.analysis.orders import Order, OrderError
    from legoai.dsl.analysis.tensors import Tensor


def is_staged(analysis: Analysis) -> bool:
    """Whether the model is split into stages that lie on different ranks."""
    return analysis.plan.pipeline is not None and analysis.plan.mesh.pp > 1


def has_placeholders(analysis: Analysis) -> bool:
    """Whether placeholders stand for the modules of other stages; built-in models pass over what is missing."""
    return is_staged(analysis) and analysis.plan.model.family in FOREIGN


@fact
def order_text(analysis: Analysis) -> str | OSError | ValueError | None:
    """The text of the order file, or why it cannot be read; None where the plan names no such file."""
    from legoai.dsl.analysis.orders import LARGEST_FILE

    pipeline = analysis.plan.pipeline
    if pipeline is None or not isinstance(pipeline.schedule, OrderFile):
        return None
    path = analysis.directory / pipeline.schedule.file
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            return ValueError("it is larger than 64 MiB")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ValueError("it is not UTF-8 text")
    except (OSError, ValueError) as error:
        return error


@fact
def order(analysis: Analysis) -> Order | OrderError | None:
    """The order that the plan's file holds, or what is wrong with its text; None where there is no text."""
    from legoai.dsl.analysis.orders import OrderError, read_order

    text = order_text(analysis)
    try:
        return read_order(text) if isinstance(text, str) else None
    except OrderError as error:
        return error


def _valid_order(analysis: Analysis) -> Order | None:
    found = order(analysis)
    return None if isinstance(found, Exception) else found


def splits_backward(analysis: Analysis) -> bool:
    """Whether the schedule computes the gradient of a stage's weights apart from that of its input."""
    pipeline = analysis.plan.pipeline
    if pipeline is None or not isinstance(pipeline.schedule, OrderFile):
        return pipeline is not None and pipeline.schedule in SPLIT_BACKWARD
    found = _valid_order(analysis)
    return found is not None and found.splits_backward


@fact
def stage_count(analysis: Analysis) -> int | None:
    """The number of stages: the plan's, or what the schedule or the order file has; None where there is none."""
    pipeline = analysis.plan.pipeline
    if pipeline is None or pipeline.stages is not None:
        return None if pipeline is None else pipeline.stages
    if isinstance(pipeline.schedule, OrderFile):
        found = _valid_order(analysis)
        return None if found is None else found.stages
    return analysis.plan.mesh.pp * (1 if pipeline.schedule in SINGLE_STAGE else 2)


def most_stages(analysis: Analysis) -> int:
    """The number of stages; where the schedule is a hole, as many as it may come to have.

    Raises:
        Undecided: that is not known.
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
def split_points(analysis: Analysis) -> SplitPoints:
    """The modules with which a stage of the model can begin."""
    assert analysis.manifest is not None
    return SplitPoints(analysis.manifest)


@fact
def first_modules(analysis: Analysis) -> tuple[str, ...] | None:
    """The first module of each stage but the first; None where the plan does not make its number of stages."""
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
    """The numbers of blocks of the stages, where the plan gives some; None where it names modules or shares evenly."""
    split = pipeline.split
    if isinstance(split, str | Even) or not any(isinstance(item, int) for item in split):
        return None
    return tuple(item for item in split if isinstance(item, int))


class Cuts(Record, kw_only=True):
    """The model as it is cut into stages.

    Attributes:
        stages: the modules of each stage, in the model's order; behind them those that every stage computes.
        starts: the module of each stage but the first that takes what crosses.
        width: features of what crosses, the last dim.
    """

    stages: tuple[tuple[str, ...], ...]
    starts: tuple[str, ...]
    width: int


@fact
def cuts(analysis: Analysis) -> Cuts | CannotFollow | None:
    """The stages, or why the model cannot be cut; None where the plan makes none, or the model reads no tokens."""
    points, manifest = first_modules(analysis), analysis.manifest
    if points is None or manifest is None:
        return None
    if analysis.plan.model.family not in FOREIGN:
        if not isinstance(manifest.reads, Tokens):
            return None
        held = split_points(analysis).stages(points, len(points) + 1)
        width = analysis.plan.model.source().config().dim
        return Cuts(stages=held, starts=tuple(stage[0] for stage in held[1:]), width=int(width))
    if not points:  # one stage, which a rule of the pipeline reports
        return None
    from legoai.dsl.analysis.chain import CannotFollow, Chain

    try:
        chain = Chain(manifest)
        held = chain.stages(points, len(points) + 1)
        found = list(chain.cuts(held))
        return Cuts(stages=held, starts=tuple(cut.start for cut in found), width=chain.width(found))
    except CannotFollow as error:
        return error


def stage_of(analysis: Analysis, path: str) -> int | None:
    """The stage that holds the module; None for a module around stages, and where the plan makes no stages."""
    points = first_modules(analysis)
    if points is None:
        return None
    known = split_points(analysis)
    start = known.holder(path)
    return None if start is None else sum(known.position[point] <= known.position[start] for point in points)


@fact
def stages_of_ranks(analysis: Analysis) -> tuple[tuple[int, ...], ...]:
    """The stages that each rank of `pp` holds: dealt in turn, or forth and back, or as the order file says.

    None are dealt where there are more ranks or stages than modules with which a stage can begin.
    """
    pipeline, ranks, count = analysis.plan.pipeline, analysis.plan.mesh.pp, stage_count(analysis)
    if pipeline is None or count is None or max(ranks, count) > len(split_points(analysis).starts):
        return ()
    found = _valid_order(analysis)
    if found is not None:
        return tuple(tuple(sorted({action.stage for cell in cells for action in cell})) for cells in found.ranks)
    if pipeline.schedule in V_SHAPED:
        return tuple((rank, count - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, count, ranks)) for rank in range(ranks))


@fact
def crossing_shapes(analysis: Analysis) -> dict[str, tuple[int, ...] | None]:
    """The local shape of what each stage but the first takes, by its first module.

    None is the shape of what is not known to be one plain tensor of even pieces. Without stages there are no shapes.
    """
    found = cuts(analysis)
    if not isinstance(found, Cuts):
        return {}
    batch, mesh, layouts = analysis.plan.batch, analysis.plan.mesh, analysis.layouts
    whole = (batch.micro_batch, batch.length // mesh.cp, found.width)
    if layouts is None:
        return dict.fromkeys(found.starts, whole)
    return {start: _local(whole, layouts.arrived.get(start), mesh.tp) for start in found.starts}


def _local(whole: tuple[int, ...], arrived: Tensor | None, ranks: int) -> tuple[int, ...] | None:
    """The part of a tensor that one rank of `tp` holds; None where it is not a plain tensor of that shape."""
    if arrived is None or arrived.wrapped or arrived.moved or arrived.state not in ("replicate", "shard"):
        return None
    if arrived.state == "replicate":
        return whole
    dim = arrived.cut
    if dim is None or not 0 <= dim < len(whole) or whole[dim] % ranks:
        return None
    return tuple(size // ranks if index == dim else size for index, size in enumerate(whole))


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Models that read tokens, one layout of what crosses between stages, and treatments inside of one stage."""
    pipeline, manifest = analysis.plan.pipeline, analysis.manifest
    if pipeline is None or manifest is None or not is_staged(analysis):
        return
    if not isinstance(manifest.reads, Tokens):
        yield Unsupported(
            analysis.place(pipeline),
            "stages send what a sequence of tokens becomes, and the model reads something else",
            label="not lowered for this model",
            help=("use `fsdp` or `shard on tp`",),
        )
        return
    uneven = next((held for held in stages_of_ranks(analysis) if len(held) != len(stages_of_ranks(analysis)[0])), None)
    if uneven is not None and isinstance(pipeline.schedule, OrderFile):
        yield Unsupported(
            analysis.place(pipeline.schedule, "file"),
            f"`{pipeline.schedule.file}` lays unequal numbers of stages on the ranks of `pp`",
            label="not lowered",
        )
    spanning = list(_treatments_of_several_stages(analysis))
    yield from spanning
    shapes = {} if spanning else crossing_shapes(analysis)
    for path, shape in shapes.items():
        if shape is None or shape != next(iter(shapes.values())):
            yield Unsupported(
                analysis.place(pipeline, "split"),
                f"what arrives at `{path}` is "
                + ("not known to be one plain tensor of even pieces" if shape is None else "laid out unlike the rest")
                + " under `shard on tp`",
                label="no stage can begin there",
                help=(
                    "split before a block whose input is replicated, or sharded on the sequence; behind a norm in "
                    "pieces of the sequence, write `sequence(local = true)`",
                ),
            )
            return


def _treatments_of_several_stages(analysis: Analysis) -> Iterator[Unsupported]:
    """Treatments of modules of which each stage has a part.

    A placeholder gives another tensor in every call, so that what holds one can be neither recomputed nor compiled.
    """
    shard = shard_on_tp(analysis)
    rule = None if shard is None else analysis.assigned(shard).by_path.get("")
    if rule is not None:
        yield Unsupported(
            analysis.rule_span(rule),
            "a style of `root` cannot hold for every stage of a pipeline",
            label="every stage is a root",
            help=("name the module that takes the input or gives the output",),
        )
    if not has_placeholders(analysis):
        return
    around = {above for start in split_points(analysis).starts for above in holders(start)}
    recomputed, compiled = recomputed_modules(analysis), compiled_modules(analysis)
    for found in ({path: rule for path, rule in recomputed.items() if path}, compiled):  # no plan recomputes the root
        for path, rule in found.items():
            if path in around:
                yield Unsupported(
                    analysis.rule_span(rule),
                    f"`{name_of(path)}` holds modules of other stages, so that no stage can treat it as a whole",
                    label="every stage has a part of it",
                    help=("name the blocks instead",),
                )
