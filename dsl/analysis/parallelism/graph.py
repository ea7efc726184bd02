"""The graph backend of `fsdp`: which plans it traces, and the passes over the graph of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.computation.precision import batch_norms
from legoai.dsl.analysis.facts import is_within
from legoai.dsl.analysis.parallelism.experts import changed_experts, crosses_tp, distributed_experts, sharded_dim
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.mesh import replicating_axes, shard_ranks, sharded_axes
from legoai.dsl.analysis.parallelism.shard import placement
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import Declared
from legoai.specs.directives.checkpoint import Budget
from legoai.specs.directives.comm import Proactive
from legoai.specs.directives.loss import EagerLoss
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.precision import HighPrecision
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan
from legoai.specs.span import Span

EAGERLY: Final = "write `backend = eager`"

_OTHER_AXES: Final = "the graph has only collectives of shards, replicas, tensor, context and expert parallelism"


def is_traced(analysis: Analysis) -> bool:
    """Whether forward, loss, backward and communication of a step are one graph."""
    return traces(analysis.plan)


def traces(plan: Plan) -> bool:
    """As :func:`is_traced`, of a plan whose model may not be known yet."""
    return plan.fsdp is not None and bool(plan.fsdp.backend == "graph")


def reorders(analysis: Analysis) -> bool:
    """Whether gathers start ahead of the computation that hides them."""
    comm = analysis.plan.comm
    return comm is not None and bool(comm.reorder)


def unshards_selectively(analysis: Analysis) -> bool:
    """Whether units of a traced step stay gathered where memory allows it."""
    comm = analysis.plan.comm
    return comm is not None and bool(comm.unshard == "selective") and is_traced(analysis)


def keeps_between_micro_batches(analysis: Analysis) -> bool:
    """Whether a traced step may gather units once for all its micro batches."""
    if is_staged(analysis):
        return False
    if unshards_selectively(analysis) and micro_batches(analysis.plan) != 1:
        return True
    return any(unit.reshard == "never" for unit in fsdp_units(analysis).values())


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Supported are shards, replicas, `tp`, `cp`, `ep`, a model of tokens and one loss; other lines are reported."""
    if not is_traced(analysis):
        return
    yield from _mesh(analysis)
    if is_staged(analysis):
        yield from _stages(analysis)
    yield from _model(analysis)
    yield from _units(analysis)
    yield from _statements(analysis)
    yield from _numbers(analysis)


def _not_traced(span: Span, what: str, why: str, *help: str) -> Unsupported:
    return Unsupported(
        span, f"{what} is not lowered beside `backend = graph`: {why}", "not in the graph", (*help, EAGERLY)
    )


def _mesh(analysis: Analysis) -> Iterator[Unsupported]:
    plan = analysis.plan
    assert plan.fsdp is not None
    traced = {*sharded_axes(analysis), *replicating_axes(analysis), "tp", "cp", "ep", "pp"}
    for axis in plan.mesh.used():
        if axis not in traced:
            yield _not_traced(analysis.span_of(plan.mesh, axis), f"the axis `{axis}`", _OTHER_AXES)
    if shard_ranks(analysis) == 1:
        yield _not_traced(
            analysis.span_of(plan.fsdp, "backend"),
            "one rank",
            "there is nothing to gather",
            "write `dp_shard = 2` or more",
        )


def _stages(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield what a schedule does not support with stages that are graphs."""
    plan = analysis.plan
    assert plan.pipeline is not None
    for path, unit in fsdp_units(analysis).items():
        if isinstance(unit.reshard, int):
            assert unit.rule is not None, "a default is one of the others"
            yield _not_traced(
                unit.rule.origin.span or analysis.start,
                f"`reshard = {unit.reshard}` of `{path or 'root'}` with stages",
                "each micro batch in flight would hold parts of its own",
                "write `after_forward` or `after_backward`",
            )
            break
    for field in ("optimizer", "activations"):
        if plan.offload is not None and getattr(plan.offload, field) != "none":
            yield _not_traced(
                analysis.span_of(plan.offload, field),
                f"`{field}` of `offload` with stages",
                "its copies to the host run beside one micro batch, and several are in flight",
                "recompute activations with `checkpoint` instead",
            )
    if plan.comm is not None and isinstance(plan.comm.prefetch, Proactive) and plan.memory_limit is not None:
        yield _not_traced(
            analysis.span_of(plan.comm, "prefetch"),
            "`prefetch = proactive` with stages and `require peak_memory`",
            "how many micro batches are in flight is not known to the pass that gathers ahead as memory allows",
            "leave `prefetch` out, or `require peak_memory`, and let `limit` alone bound what is gathered ahead",
        )
    if unshards_selectively(analysis):
        assert plan.comm is not None
        yield _not_traced(
            analysis.span_of(plan.comm, "unshard"),
            "`unshard = selective` with stages",
            "how many micro batches are in flight is not known to the pass that keeps units as memory allows",
            "write `unit(reshard = after_backward)` for units that shall stay for all micro batches of a pass",
        )


def _model(analysis: Analysis) -> Iterator[Unsupported]:
    plan, manifest = analysis.plan, analysis.manifest
    place = analysis.span_of(plan.model, "family")
    if manifest is None:
        return
    if (found := next(_of_model(manifest), None)) is not None:
        yield _not_traced(place, *found)
        return
    experts = distributed_experts(analysis)
    for path, rule in experts.items():
        if plan.model.family in FOREIGN:
            yield _not_traced(
                analysis.rule_span(rule),
                f"`{path}` on `ep`",
                "how many rows each rank computes is known in a step only",
            )
            return
        if crosses_tp(analysis):
            yield _not_traced(
                analysis.rule_span(rule), f"`across_tp` of `{path}`", "`ep` groups ranks that shard units there",
                "leave `across_tp` out, and give the mixture whole tokens",
            )  # fmt: skip
            return
        if sharded_dim(analysis, path) == 1:
            yield _not_traced(
                analysis.rule_span(rule), f"`{path}` in shards of dim 1", "a unit is cut on dim 0",
                "choose a smaller `ep` or fewer ranks, which then share the experts evenly",
            )  # fmt: skip
            return
    for name, shape in manifest.parameters():
        if name.rpartition(".")[0] not in experts and placement(analysis, name).dim == 0 and shape[0] % plan.mesh.tp:
            yield _not_traced(
                analysis.span_of(plan.mesh, "tp"),
                f"`tp = {plan.mesh.tp}`",
                f"it does not divide dim 0 of `{name}`, and the graphs of its ranks would differ",
            )
            return


def _of_model(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield what a model has that one graph of a step has not, with the reason."""
    if not manifest.reads_tokens:
        yield "a model that reads no tokens", "only models of token ids are known to have one graph"
    if norms := batch_norms(manifest):
        yield f"batch normalisation (`{norms[0]}`)", "its results may have other strides in a run than in the trace"
    if manifest.shared_modules:
        first, other, *_ = manifest.shared_modules[0]
        yield f"one module with parameters at `{first}` and `{other}`", "a unit is gathered at one place"
    if manifest.flow_error is not None:
        yield "a model whose forward cannot be followed", manifest.flow_error
    if manifest.step_changes is not None:
        yield "this model", manifest.step_changes


def _random(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield recomputed modules that draw random numbers: in a graph, recomputation would draw others."""
    modules = {} if analysis.manifest is None else analysis.manifest.modules
    for path, rule in recomputed_modules(analysis).items():
        drawing = next((name for name, item in modules.items() if item.random and is_within(name, path)), None)
        if drawing is not None:
            yield _not_traced(
                analysis.rule_span(rule),
                f"`{rule.treatment.name}` of `{path or 'root'}`",
                f"`{drawing}` draws random numbers, and would draw others in the recomputation",
                "set the model's dropout to 0",
                "or leave these modules out",
            )
            return


def _units(analysis: Analysis) -> Iterator[Unsupported]:
    for path, unit in fsdp_units(analysis).items():
        if isinstance(unit.reshard, int) and distributed_experts(analysis):
            assert unit.rule is not None, "a default is one of the two"
            yield _not_traced(
                unit.rule.origin.span or analysis.start,
                f"`reshard = {unit.reshard}` of `{path or 'root'}` with experts on `ep`",
                "experts are in shards over other ranks",
                "write `after_forward`, `after_backward` or `never`",
            )
            return


def _statements(analysis: Analysis) -> Iterator[Unsupported]:
    plan = analysis.plan
    yield from _random(analysis)
    yield from _budgets(analysis)
    yield from _compiled(analysis)
    if plan.offload is not None and plan.offload.parameters != "none":
        yield _not_traced(
            analysis.span_of(plan.offload, "parameters"),
            "`parameters` of `offload`",
            "the optimizer updates shards where they are, and the graph takes and gives those on the device",
            "offload the optimizer's state (`offload (optimizer = all)`)",
        )
    if not isinstance(plan.loss.form, EagerLoss):
        yield _not_traced(
            analysis.span_of(plan.loss, "form"), f"`loss {plan.loss.form.name}`", "the loss is traced as it is",
            "write `loss eager`",
        )  # fmt: skip


def _compiled(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield compiled experts whose row counts the host reads: nothing of these alone would be compiled."""
    modules = {} if analysis.manifest is None else analysis.manifest.modules
    for path, rule in compiled_modules(analysis).items():
        if path not in modules or modules[path].kind != "experts":
            continue
        if path in changed_experts(analysis) or analysis.plan.precision.param != "bf16":
            yield _not_traced(
                analysis.rule_span(rule),
                f"`{rule.treatment.name}` of `{path}`",
                "how many rows its experts take is only known in a step, so that they run operator by operator",
                "compile the block, whose other modules are compiled, or the attention",
            )
            return


def _holds_experts(analysis: Analysis, path: str) -> bool:
    modules = {} if analysis.manifest is None else analysis.manifest.modules
    return any(module.kind == "moe" and is_within(name, path) for name, module in modules.items())


def _budgets(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield budgets of modules that contain experts."""
    for path, rule in recomputed_modules(analysis).items():
        if isinstance(rule.treatment, Budget) and _holds_experts(analysis, path):
            yield _not_traced(
                analysis.rule_span(rule),
                f"`budget` of `{path}`",
                "how many rows its experts take is only known in a step, and with it what their operators cost",
                "write `selective([…])` or `full`",
            )
            return


def _numbers(analysis: Analysis) -> Iterator[Unsupported]:
    plan = analysis.plan
    if plan.batch.ramp is not None:
        yield _not_traced(
            analysis.span_of(plan.batch, "ramp"), "`ramp`", "the graph divides by one number of micro batches"
        )
    precision: Declared = plan.precision
    if plan.precision.reduce == "fp16":
        yield _not_traced(
            analysis.span_of(precision, "reduce"), "`reduce = fp16`", "the sum over ranks could overflow",
            "write `reduce = fp32`",
        )  # fmt: skip
    for rule in plan.precision.rules:
        if not isinstance(rule.treatment, HighPrecision):
            yield _not_traced(
                rule.origin.span or analysis.start, f"`{rule.treatment.name}`", "its layers are not known to be traced"
            )
