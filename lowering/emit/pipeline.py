"""`pipeline`: which modules does each stage hold, on which rank, and in which order do micro batches pass them?"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from legoai.dsl.analysis.chain import CannotFollow, Chain
from legoai.dsl.analysis.layout import Propagation
from legoai.dsl.analysis.orders import LARGEST_FILE, Order, OrderError, order_faults, read_order
from legoai.dsl.analysis.split_points import SplitPoints
from legoai.dsl.analysis.tensors import Tensor
from legoai.lowering.emit.base import Draft, Lowering, rule_span
from legoai.lowering.emit.code import Function, Line, Node, call, literal, quoted, sequence
from legoai.lowering.emit.precision import DTYPES
from legoai.lowering.emit.shard import tensor_parallel
from legoai.lowering.emit.stages import has_stand_ins
from legoai.specs.directives.pipeline import SINGLE_STAGE, V_SHAPED, OrderFile, Pipeline
from legoai.specs.models.reads import Tokens

_PIECE = 100
"""Characters of an order in one string of the program."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add the stages, `build_stage` and `build_schedule`."""
    pipeline, ranks = lowering.plan.pipeline, lowering.plan.mesh.pp
    if pipeline is None:
        if ranks > 1:
            lowering.refuse(
                lowering.place(lowering.plan.mesh, "pp"),
                f"`pp` = {ranks}, and no statement says how the model is split into stages",
                label="these ranks would have no stage",
                help=["add `pipeline on pp`"],
            )
        return
    if ranks == 1:
        lowering.refuse(
            lowering.place(pipeline),
            "`pp` = 1: there are no ranks over which stages could be laid out",
            label="no effect in this plan",
            help=["leave the statement out, or give `pp` more ranks"],
        )
        return
    if not isinstance(lowering.manifest.reads, Tokens):
        lowering.refuse(
            lowering.place(pipeline),
            "stages send what a sequence of tokens becomes, and the model reads something else",
            label="not lowered for this model",
            help=["use `fsdp` or `shard on tp`"],
        )
        return
    order = _order(lowering, pipeline) if isinstance(pipeline.schedule, OrderFile) else None
    if isinstance(pipeline.schedule, OrderFile) and order is None:
        return
    count = _stage_count(pipeline, ranks, order)
    stages = _stages(lowering, pipeline, count)
    if stages is None:
        return
    crossing = _crossing(lowering, pipeline, stages)
    hidden = None if crossing is None else _hidden(lowering, pipeline, *crossing)
    if hidden is None or _refused(lowering, pipeline, stages):
        return
    draft.constants.append(
        Line(
            sequence([sequence([quoted(path) for path in stage]) for stage in stages]),
            "STAGES = ",
            lowering.note(pipeline, "split"),
        )
    )
    draft.constants.append(
        Line(
            sequence([literal(held) for held in _stages_of_ranks(pipeline, ranks, count, order)]),
            "STAGES_OF_RANK = ",
            lowering.note(pipeline, "schedule"),
        )
    )
    microbatches = _microbatches(lowering, pipeline)
    _add_build_stage(lowering, draft, pipeline, hidden)
    _add_build_schedule(lowering, draft, pipeline, order, microbatches)
    made = call(
        draft.imports.name("legoai.runtime", "Pipeline"),
        stages="STAGES",
        stages_of_rank="STAGES_OF_RANK",
        microbatches=literal(microbatches),
        build_stage="build_stage",
        build_schedule="build_schedule",
        stand_ins="True" if has_stand_ins(lowering) else None,
    )
    draft.train_with("pipeline", made, lowering.note(pipeline))


def _stage_count(pipeline: Pipeline, ranks: int, order: Order | None) -> int:
    if order is not None:
        return order.stages
    if pipeline.stages is not None:
        return pipeline.stages
    return ranks * (1 if pipeline.schedule in SINGLE_STAGE else 2)


def _stages(lowering: Lowering, pipeline: Pipeline, count: int) -> tuple[tuple[str, ...], ...] | None:
    """The modules of each stage; None where the plan's split is not possible, which is a lint error as well."""
    known = SplitPoints(lowering.manifest)
    ranks = lowering.plan.mesh.pp
    even = isinstance(pipeline.split, str)
    if count % ranks or (even and count > len(known.blocks)):
        lowering.refuse(
            lowering.place(pipeline, "stages"),
            f"{count} stages cannot be laid out over {ranks} ranks and {len(known.blocks)} blocks",
            label="stages that do not fit",
        )
        return None
    points = () if even else tuple(pipeline.split)
    places = [known.position.get(point, 0) for point in points]
    if not even and (len(points) != count - 1 or 0 in places or places != sorted(set(places))):
        lowering.refuse(
            lowering.place(pipeline, "split"),
            f"the split points do not make {count} stages, each of its own modules and in the model's order",
            label="no such split",
        )
        return None
    if not has_stand_ins(lowering):
        return known.stages(pipeline.split, count)
    try:
        return Chain(lowering.manifest).stages(pipeline.split, count)
    except CannotFollow as error:
        _refuse_cut(lowering, pipeline, error)
        return None


def _refuse_cut(lowering: Lowering, pipeline: Pipeline, error: CannotFollow) -> None:
    lowering.refuse(
        lowering.place(pipeline, "split"),
        f"`{lowering.plan.model.family}(…)` cannot be split like this: {error}",
        label="no such split",
    )


def _crossing(
    lowering: Lowering, pipeline: Pipeline, stages: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], int] | None:
    """The module that each stage but the first begins with, and the features that it takes; None where refused."""
    if not has_stand_ins(lowering):
        return tuple(stage[0] for stage in stages[1:]), int(lowering.plan.model.source().config().dim)
    try:
        cuts = list(Chain(lowering.manifest).cuts(stages))
        return tuple(cut.start for cut in cuts), Chain.width(cuts)
    except CannotFollow as error:
        _refuse_cut(lowering, pipeline, error)
        return None


def _refused(lowering: Lowering, pipeline: Pipeline, stages: tuple[tuple[str, ...], ...]) -> bool:
    """Whether the model, or what else the plan says, cannot be split like this."""
    before = len(lowering.diagnostics)
    stage_of = {path: index for index, stage in enumerate(stages) for path in stage}
    known = SplitPoints(lowering.manifest)
    for tied in lowering.manifest.tied_parameters:
        holders = {stage_of.get(known.holder(path.rpartition(".")[0]) or "") for path in tied}
        if len(holders) > 1:
            lowering.refuse(
                lowering.place(pipeline),
                f"{' and '.join(f'`{path}`' for path in tied)} are one parameter, and lie on different stages",
                label="this would untie them",
                help=[
                    "give each place a parameter of its own: `tie_embeddings = false`, or `tie_word_embeddings = "
                    "false` of a Hugging Face config"
                ],
            )
    if has_stand_ins(lowering):
        _refuse_holders(lowering, known)
    shard = tensor_parallel(lowering)
    rule = lowering.assignment(shard).get("") if shard is not None else None
    if rule is not None:
        lowering.refuse(
            rule_span(rule),
            "a style of `root` cannot hold for every stage of a pipeline",
            label="every stage is a root",
            help=["name the module that takes the input or gives the output"],
        )
    return len(lowering.diagnostics) > before


def _refuse_holders(lowering: Lowering, known: SplitPoints) -> None:
    """Refuse to recompute or compile what holds stand-ins, which give another tensor in every call."""
    for directive in (lowering.plan.checkpoint, lowering.plan.compile):
        for path, rule in () if directive is None else lowering.assignment(directive).items():
            holds = known.holder(path) is None and any(start.startswith(f"{path}.") for start in known.starts)
            if (path == "" or holds) and rule.treatment.name != "none":
                lowering.refuse(
                    rule_span(rule),
                    f"`{path or 'root'}` holds modules of other stages, so that no stage can treat it as a whole",
                    label="every stage has a part of it",
                    help=["name the blocks instead"],
                )


def _stages_of_ranks(pipeline: Pipeline, ranks: int, count: int, order: Order | None) -> list[tuple[int, ...]]:
    """The stages that each rank holds: dealt in turn, or forth and back, or as the order says."""
    if order is not None:
        return [tuple(sorted({action.stage for cell in cells for action in cell})) for cells in order.ranks]
    if pipeline.schedule in V_SHAPED:
        return [(rank, count - 1 - rank) for rank in range(ranks)]
    return [tuple(range(rank, count, ranks)) for rank in range(ranks)]


def _microbatches(lowering: Lowering, pipeline: Pipeline) -> int:
    """Micro batches in one pass of the schedule."""
    batch = lowering.plan.batch
    given = batch.global_batch // (batch.micro_batch * lowering.plan.mesh.data_parallel)
    count = given if pipeline.microbatches is None else pipeline.microbatches
    if count == 0 or given % count:
        lowering.refuse(
            lowering.place(pipeline, "microbatches"),
            f"`batch` gives each rank {given} micro batches, which is no multiple of {count}",
            label="passes that do not come out even",
        )
    return count


class _Boundaries(Propagation):
    """Remembers how the first argument of each module arrives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrived: dict[str, Tensor] = {}

    def _call(self, path: str, arguments: Sequence[Tensor]) -> Tensor:
        if arguments:
            self.arrived[path] = arguments[0]
        return super()._call(path, arguments)


def _hidden(lowering: Lowering, pipeline: Pipeline, starts: tuple[str, ...], width: int) -> tuple[int, ...] | None:
    """The shape of what a stage sends to the next, on one rank; None where that is not known, which is refused."""
    batch, mesh = lowering.plan.batch, lowering.plan.mesh
    whole = (batch.micro_batch, batch.length // mesh.cp, width)
    shard = tensor_parallel(lowering)
    if shard is None:
        return whole
    boundaries = _Boundaries(lowering.manifest, lowering.assignment(shard))
    boundaries.run()
    shapes = {start: _local(whole, boundaries.arrived.get(start), mesh.tp) for start in starts}
    for path, shape in shapes.items():
        if shape is None or shape != shapes[starts[0]]:
            lowering.refuse(
                lowering.place(pipeline, "split"),
                f"what arrives at `{path}` is "
                + ("not known to be one plain tensor of even pieces" if shape is None else "laid out unlike the rest")
                + " under `shard on tp`",
                label="no stage can begin there",
                help=["split before a block whose input is replicated, or sharded on the sequence"],
            )
            return None
    return shapes[starts[0]]


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


def _dtype(lowering: Lowering) -> str:
    """Of what a stage sends: what units with a policy compute in, or else that of the residual stream, as stored."""
    precision = lowering.plan.precision
    if lowering.plan.fsdp is None and lowering.plan.replicate is None:
        return DTYPES[precision.master]
    return DTYPES[precision.output or precision.param]


def _add_build_stage(lowering: Lowering, draft: Draft, pipeline: Pipeline, hidden: tuple[int, ...]) -> None:
    batch, mesh = lowering.plan.batch, lowering.plan.mesh
    tokens = (batch.micro_batch, batch.length // mesh.cp)
    logits = (*tokens, lowering.manifest.vocab_size)
    note, dtype = lowering.note(batch), _dtype(lowering)

    def empty(shape: Sequence[object], dtype: str, **options: str) -> Node:
        return call("torch.empty", literal(tuple(shape)), dtype=dtype, device='"meta"', **options)

    draft.imports.module("torch")
    draft.imports.name("torch.distributed.pipelining", "PipelineStage")
    made = call(
        "PipelineStage",
        "model",
        "index",
        "len(STAGES)",
        "device",
        input_args="tokens if index == 0 else hidden",
        output_args="logits if index == len(STAGES) - 1 else hidden",
        group='mesh.get_group("pp")',
    )
    draft.later_functions.append(
        Function(
            "build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: torch.device) -> PipelineStage",
            (
                Line(empty(tokens, "torch.int64"), "tokens = ", note),
                Line(empty(hidden, dtype, requires_grad="True"), "hidden = ", note),
                Line(empty(logits, dtype, requires_grad="True"), "logits = ", note),
                Line(made, "return ", lowering.note(pipeline)),
            ),
        )
    )


def _add_build_schedule(
    lowering: Lowering, draft: Draft, pipeline: Pipeline, order: Order | None, microbatches: int
) -> None:
    note = lowering.note(pipeline, "schedule")
    options: dict[str, Node] = {
        "n_microbatches": literal(microbatches),
        "loss_fn": "loss",
        "scale_grads": "False",
    }
    if order is not None:
        draft.constants.append(Line(_written(order), "ORDER = ", note))
        made = call(draft.imports.name("legoai.runtime", "ordered_schedule"), "ORDER", "stages", **options)
        result = draft.imports.name("legoai.runtime", "PipelineSchedule")
    else:
        result = draft.imports.name("torch.distributed.pipelining", f"Schedule{pipeline.schedule}")
        made = call(result, "stages[0]" if pipeline.schedule in SINGLE_STAGE else "stages", **options)
    loss = draft.imports.name("legoai.runtime", "LossFunction")
    draft.later_functions.append(
        Function(
            f"build_schedule(stages: list[PipelineStage], loss: {loss}) -> {result}",
            (Line(made, "return ", note),),
        )
    )


def _order(lowering: Lowering, pipeline: Pipeline) -> Order | None:
    """The order that the plan's file holds; None where it cannot be had, which is a lint error as well."""
    schedule = pipeline.schedule
    assert isinstance(schedule, OrderFile)
    path = lowering.analysis.directory / schedule.file
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError("it is larger than 64 MiB")
        order = read_order(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.message if isinstance(error, OrderError) else getattr(error, "strerror", None) or str(error)
        lowering.refuse(
            lowering.place(schedule, "file"), f"`{schedule.file}` cannot be read: {reason}", label="no order of actions"
        )
        return None
    given = _microbatches(lowering, pipeline)
    if len(order.ranks) != lowering.plan.mesh.pp or order.micro_batches != given:
        lowering.refuse(
            lowering.place(schedule, "file"),
            f"`{schedule.file}` orders {order.micro_batches} micro batches on {len(order.ranks)} ranks, and the plan "
            f"has {given} on {lowering.plan.mesh.pp}",
            label="made for another plan",
        )
        return None
    for fault in order_faults(order, sharded=lowering.plan.fsdp is not None):
        lowering.refuse(
            lowering.place(schedule, "file"), f"`{schedule.file}` cannot run: {fault}", label="not a valid order"
        )
        return None
    return order


def _written(order: Order) -> Node:
    """The order as text: for each rank its actions, in pieces that fit on a line."""
    rows = []
    for cells in order.ranks:
        texts = [
            str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))})OVERLAP_F_B" for cell in cells if cell
        ]
        pieces = textwrap.wrap(" ".join(texts), _PIECE, break_long_words=False, break_on_hyphens=False)
        rows.append(sequence([quoted(piece) for piece in pieces]))
    return sequence(rows)
