"""Tensors that cross between the stages of a pipeline, and treatments that a stage cannot apply to a part of a module.

A stage of a built-in model runs the modules that it holds. A stage of another model runs the full forward, with
placeholders for the modules of other stages (see :mod:`legoai.dsl.analysis.stages.chain`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import pieces_of_sequence
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import holders, name_of
from legoai.dsl.analysis.parallelism.shard import shard_on_tp
from legoai.dsl.analysis.stages.pipeline import (
    first_modules,
    has_placeholders,
    is_staged,
    split_points,
    stages_of_ranks,
)
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.pipeline import OrderFile
from legoai.specs.models.manifests.shapes import SAMPLES, TOKENS, Length, Shape, sizes_of
from legoai.specs.record import Record

if TYPE_CHECKING:
    from legoai.dsl.analysis.layouts.tensors import Tensor
    from legoai.dsl.analysis.stages.chain import CannotFollow


class Cuts(Record, kw_only=True):
    """The model divided into stages.

    Attributes:
        stages: the modules of each stage, in the model's order, followed by those that every stage computes.
        starts: for each stage but the first, the module that reads the crossing tensor.
        shape: of the crossing tensor, in samples and tokens of a rank.
        logits: shape of the model's result, likewise.
        results: shapes of modules of earlier stages whose results are laid out otherwise than the crossing tensor.
    """

    stages: tuple[tuple[str, ...], ...]
    starts: tuple[str, ...]
    shape: Shape
    logits: Shape
    results: Mapping[str, Shape]


@fact
def cuts(analysis: Analysis) -> Cuts | CannotFollow | None:
    """Return the stages, or why the model cannot be divided; None without stages, or for other inputs than tokens."""
    points, manifest = first_modules(analysis), analysis.manifest
    if points is None or manifest is None or manifest.reads is None or not manifest.reads_tokens:
        return None  # where it is not known what the model reads, no shapes of its modules are noted
    if analysis.plan.model.family not in FOREIGN:
        held = split_points(analysis).stages(points, len(points) + 1)
        dim, vocabulary = analysis.plan.model.source().config().dim, manifest.vocab_size
        assert vocabulary is not None, "a built-in model that reads tokens has a vocabulary"
        hidden, logits = ((SAMPLES, TOKENS, Length(features)) for features in (dim, vocabulary))
        return Cuts(stages=held, starts=tuple(stage[0] for stage in held[1:]), shape=hidden, logits=logits, results={})
    if not points:  # one stage, which a rule of the pipeline reports
        return None
    from legoai.dsl.analysis.stages.chain import CannotFollow, Chain

    try:
        chain = Chain(manifest)
        held = chain.stages(points, len(points) + 1)
        found = list(chain.cuts(held))
        shape = chain.shape(found)
        return Cuts(
            stages=held,
            starts=tuple(cut.start for cut in found),
            shape=shape,
            logits=chain.logits(),
            results=chain.results(held, shape, sharded=shard_on_tp(analysis) is not None),
        )
    except CannotFollow as error:
        return error


@fact
def crossing_shapes(analysis: Analysis) -> dict[str, tuple[int, ...] | None]:
    """Return the local shape of the input of each stage but the first, by its first module.

    A shape is None where the input is not known to be one plain, evenly sharded tensor. Without stages there are no
    shapes.
    """
    found = cuts(analysis)
    if not isinstance(found, Cuts):
        return {}
    whole, layouts = sizes_of(found.shape, tokens_of_rank(analysis)), analysis.layouts
    if layouts is None:
        return dict.fromkeys(found.starts, whole)
    return {start: _local(whole, layouts.arrived.get(start), analysis.plan.mesh.tp) for start in found.starts}


def tokens_of_rank(analysis: Analysis) -> tuple[int, int]:
    """Return the samples of a micro batch, and the tokens of each on one rank."""
    batch = analysis.plan.batch
    return batch.micro_batch, batch.length // pieces_of_sequence(analysis.plan)


def _local(whole: tuple[int, ...], arrived: Tensor | None, ranks: int) -> tuple[int, ...] | None:
    """Return the part of a tensor on one rank of `tp`; None where it is not a plain tensor of that shape."""
    if arrived is None or arrived.wrapped or arrived.moved or arrived.state not in ("replicate", "shard"):
        return None
    if arrived.state == "replicate":
        return whole
    dim = arrived.cut
    if dim is None or not 0 <= dim < len(whole) or whole[dim] % ranks:
        return None
    return tuple(size // ranks if index == dim else size for index, size in enumerate(whole))


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield violations: models that read no tokens, different layouts between stages, treatments across stages."""
    pipeline, manifest = analysis.plan.pipeline, analysis.manifest
    if pipeline is None or manifest is None or not is_staged(analysis):
        return
    if not manifest.reads_tokens:
        yield Unsupported(
            analysis.span_of(pipeline),
            "stages send what a sequence of tokens becomes, and the model reads something else",
            label="not lowered for this model",
            help=("use `fsdp` or `shard on tp`",),
        )
        return
    uneven = next((held for held in stages_of_ranks(analysis) if len(held) != len(stages_of_ranks(analysis)[0])), None)
    if uneven is not None and isinstance(pipeline.schedule, OrderFile):
        yield Unsupported(
            analysis.span_of(pipeline.schedule, "file"),
            f"`{pipeline.schedule.file}` lays unequal numbers of stages on the ranks of `pp`",
            label="not lowered",
        )
    spanning = list(_treatments_of_several_stages(analysis))
    yield from spanning
    shapes = {} if spanning else crossing_shapes(analysis)
    for path, shape in shapes.items():
        if shape is None or shape != next(iter(shapes.values())):
            yield Unsupported(
                analysis.span_of(pipeline, "split"),
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
    """Yield treatments of modules of which each stage has a part.

    A placeholder returns another tensor in every call, so a module that contains one can be neither recomputed nor
    compiled.
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
