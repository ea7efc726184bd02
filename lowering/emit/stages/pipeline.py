"""`pipeline`: the stages and their ranks, and the schedule in which micro batches pass them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from legoai.dsl.analysis.batch import pass_micro_batches
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.precision import has_policy
from legoai.dsl.analysis.parallelism.crossings import Cuts, crossing_shapes, cuts, tokens_of_rank
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.orders import Order
from legoai.dsl.analysis.stages.pipeline import has_placeholders, is_staged, order, splits_backward, stages_of_ranks
from legoai.dsl.analysis.training.loss import layer_of_loss
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Function, Line, Node, call, dictionary, literal, quoted, sequence
from legoai.lowering.emit.computation.precision import DTYPES
from legoai.lowering.emit.data_parallelism import graph
from legoai.lowering.emit.step import COUNT
from legoai.specs.directives.pipeline import SINGLE_STAGE, OrderFile, Pipeline
from legoai.specs.models.manifests.shapes import sizes_of

_PIECE = 100
"""Characters of an order in one string literal of the program."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add the stages, `build_stage` and `build_schedule`."""
    analysis, pipeline = lowering.analysis, lowering.plan.pipeline
    if pipeline is None or not is_staged(analysis):
        return
    found, shapes = cuts(analysis), set(crossing_shapes(analysis).values())
    assert isinstance(found, Cuts), "a plan without errors can be cut into its stages"
    assert len(shapes) == 1, "what crosses has one layout"
    [hidden] = shapes
    assert hidden is not None, "what crosses has a known layout"
    draft.constants.append(
        Line(
            sequence([sequence([quoted(path) for path in stage]) for stage in found.stages]),
            "STAGES = ",
            lowering.note(pipeline, "split"),
        )
    )
    draft.constants.append(
        Line(
            sequence([literal(held) for held in stages_of_ranks(analysis)]),
            "STAGES_OF_RANK = ",
            lowering.note(pipeline, "schedule"),
        )
    )
    microbatches = pass_micro_batches(lowering.plan)
    assert microbatches is not None, "the batch of a plan without errors divides"
    sizes = tokens_of_rank(analysis)
    given = hidden if layer_of_loss(lowering.analysis) is not None else sizes_of(found.logits, sizes)
    _add_build_stage(lowering, draft, pipeline, hidden, given)
    results = [(path, literal(sizes_of(shape, sizes)), None) for path, shape in found.results.items()]
    _add_build_schedule(lowering, draft, pipeline, microbatches)
    placeholders = has_placeholders(analysis)
    made = call(
        draft.imports.name("legoai.runtime", "Pipeline"),
        stages="STAGES",
        stages_of_rank="STAGES_OF_RANK",
        microbatches=literal(microbatches),
        build_stage="build_stage",
        build_schedule="build_schedule",
        placeholders="True" if placeholders else None,
        results=dictionary(results) if results else None,
        dtype=_dtype(lowering) if placeholders else None,
    )
    draft.train_with("pipeline", made, lowering.note(pipeline))
    draft.step.pass_size = microbatches


def _dtype(lowering: Lowering) -> str:
    """Return the dtype of what crosses: the policy's compute dtype, or else that of the stored residual stream.

    Blocks of other authors may return another one, such as that of autocast, which stages with placeholders cast to it.
    """
    precision = lowering.plan.precision
    if not has_policy(lowering.analysis):
        return DTYPES[precision.master]
    return DTYPES[precision.output or precision.param]


def _add_build_stage(
    lowering: Lowering, draft: Draft, pipeline: Pipeline, hidden: tuple[int, ...], result: tuple[int, ...]
) -> None:
    """Add `build_stage`.

    Args:
        lowering: of the plan.
        draft: of the program.
        pipeline: the statement.
        hidden: shape of what crosses between stages.
        result: shape of what the last stage returns, which nobody receives.
    """
    tokens = tokens_of_rank(lowering.analysis)
    note, dtype = lowering.note(lowering.plan.batch), _dtype(lowering)

    def empty(shape: Sequence[object], dtype: str, **options: str) -> Node:
        return call("torch.empty", literal(tuple(shape)), dtype=dtype, device='"meta"', **options)

    draft.imports.module("torch")
    kind = draft.imports.name("torch.distributed.pipelining", "PipelineStage")
    arrives, traced, run = "tokens if index == 0 else hidden", list[Line](), "model"
    if is_traced(lowering.analysis):
        traced, kind = graph.stage(lowering, draft, arrives, empty(tokens[1:], "torch.int64"))
        run = "rewritten(graph, PASSES)"
    elif splits_backward(lowering.analysis) and recomputed_modules(lowering.analysis):
        kind = draft.imports.name("legoai.runtime", "RecomputingStage")
    made = call(
        kind,
        run,
        "index",
        "len(STAGES)",
        "device",
        input_args=arrives,
        output_args="hidden" if result == hidden else "logits if index == len(STAGES) - 1 else hidden",
        group='mesh.get_group("pp")',
    )
    draft.later_functions.append(
        Function(
            "build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: torch.device) -> PipelineStage",
            (
                Line(empty(tokens, "torch.int64"), "tokens = ", note),
                Line(empty(hidden, dtype, requires_grad="True"), "hidden = ", note),
                *([] if result == hidden else [Line(empty(result, dtype, requires_grad="True"), "logits = ", note)]),
                *traced,
                Line(made, "return ", lowering.note(pipeline)),
            ),
        )
    )


def _add_build_schedule(lowering: Lowering, draft: Draft, pipeline: Pipeline, microbatches: int) -> None:
    note = lowering.note(pipeline, "schedule")
    options: dict[str, Node] = {
        "n_microbatches": literal(microbatches),
        "loss_fn": "share",
        "scale_grads": "False",
    }
    if isinstance(pipeline.schedule, OrderFile):
        found = order(lowering.analysis)
        assert isinstance(found, Order), "the order file of a plan without errors can be read"
        draft.constants.append(Line(_written(found), "ORDER = ", note))
        made = call(draft.imports.name("legoai.runtime", "ordered_schedule"), "ORDER", "stages", **options)
        result = draft.imports.name("legoai.runtime", "PipelineSchedule")
    else:
        result = draft.imports.name("torch.distributed.pipelining", f"Schedule{pipeline.schedule}")
        made = call(result, "stages[0]" if pipeline.schedule in SINGLE_STAGE else "stages", **options)
    loss, divided = (draft.imports.name("legoai.runtime", name) for name in ("LossFunction", "divided"))
    draft.later_functions.append(
        Function(
            f"build_schedule(stages: list[PipelineStage], loss: {loss}) -> {result}",
            (Line(call(divided, "loss", by=COUNT), "share = "), Line(made, "return ", note)),
        )
    )


def _written(order: Order) -> Node:
    """Return the order as text: for each rank its actions, in string literals that fit on a line."""
    rows = []
    for cells in order.ranks:
        texts = [
            str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))})OVERLAP_F_B" for cell in cells if cell
        ]
        pieces = textwrap.wrap(" ".join(texts), _PIECE, break_long_words=False, break_on_hyphens=False)
        rows.append(sequence([quoted(piece) for piece in pieces]))
    return sequence(rows)
