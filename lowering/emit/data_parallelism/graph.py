"""`fsdp … (backend = graph)`: the function that traces the step, or a pipeline stage, and its graph passes."""

from __future__ import annotations

from legoai.dsl.analysis.batch import pieces_of_sequence
from legoai.dsl.analysis.communication.comm import unit_buckets
from legoai.dsl.analysis.communication.compiler_buckets import compiler_rule
from legoai.dsl.analysis.communication.measured_profile import (
    digest_of_traced,
    is_measured,
    prefetches_within_memory,
)
from legoai.dsl.analysis.communication.timed_overlap import overlaps_by_time
from legoai.dsl.analysis.computation.checkpoint import kept_outputs
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.offload import offloads_some
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import keeps_between_micro_batches, reorders, supports, unshards_selectively
from legoai.dsl.analysis.stages.pipeline import is_staged, splits_backward
from legoai.dsl.analysis.training.optimizer import moments, muon_parameters
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.code import Group, Item, Line, Node, Note, call, quoted
from legoai.specs.directives.comm import ByBytes, Proactive

_PACKAGE = "legoai.lowering.graph"
_PROACTIVELY = "prefetch_proactively"
_BY_COMPILER = "schedule_overlap"
_BY_TIME = "overlap_by_time"
_ACTIVATIONS = "offload_activations"
_STATE = "offload_optimizer_state"
_SELECTIVELY = "unshard_selectively"
_PROFILE = "PROFILE"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `PASSES`, and `build_graph` where `build_stage` does not trace the stages of a pipeline."""
    fsdp = lowering.plan.fsdp
    assert fsdp is not None and not list(supports(lowering.analysis)), "see `supports` of the graph backend"
    passes = graph_passes(lowering)[: lowering.passes]
    for name, _ in passes:
        draft.imports.name(_PACKAGE, name)
    items = tuple(Item(_with_options(lowering, draft, name), note=note) for name, note in passes)
    if is_measured(lowering.analysis):
        draft.constants.append(_measured(lowering, draft))
    draft.constants.append(Line(Group("(", items, ")"), "PASSES = "))
    if is_staged(lowering.analysis):
        return
    for name in ("StepGraph", "rewritten", "trace_step"):
        draft.imports.name(_PACKAGE, name)
    options = {"profile": _PROFILE} if is_measured(lowering.analysis) else {}
    draft.step.traced = lowering.note(fsdp, "backend"), Line(call("rewritten", "graph", "PASSES", **options), "return ")
    if offloads_some(lowering.analysis, "optimizer"):
        assert lowering.plan.offload is not None
        note = lowering.note(lowering.plan.offload, "optimizer")
        draft.step.graph_arguments += [
            Item("training.optimizer", "optimizer=", note),
            Item("batch.is_last", "is_last="),
        ]
    draft.train_with("build_graph", "build_graph")


def stage(lowering: Lowering, draft: Draft, arrives: str, positions: Node) -> tuple[list[Line], str]:
    """Return the lines that trace a stage of a pipeline, and the name of the class that runs it.

    Args:
        lowering: of the plan.
        draft: that imports the names in use.
        arrives: the stage's input.
        positions: an example of token positions, which stages receive where their ranks hold shards of sequences.
    """
    fsdp = lowering.plan.fsdp
    assert fsdp is not None, "a graph has units"
    for name in ("rewritten", "trace_stage"):
        draft.imports.name(_PACKAGE, name)
    context = lowering.plan.context if pieces_of_sequence(lowering.plan) > 1 else None
    made = call(
        "trace_stage",
        "model",
        arrives,
        positions=None if context is None else "positions",
        device="device",
        splits_backward="True" if splits_backward(lowering.analysis) else None,
    )
    lines = [Line(made, "graph = ", lowering.note(fsdp, "backend"))]
    if context is not None:
        lines.insert(0, Line(positions, "positions = ", lowering.note(context)))
    return lines, draft.imports.name(f"{_PACKAGE}.step.stage", "GraphStage")


def _with_options(lowering: Lowering, draft: Draft, name: str) -> Node:
    """Return a pass as the program names it, with its options."""
    options: dict[str, Node] = {}
    if name in (_BY_COMPILER, _BY_TIME, _SELECTIVELY) and is_measured(lowering.analysis):
        options["milliseconds"] = _PROFILE
    elif name in (_BY_COMPILER, _BY_TIME):
        options["milliseconds"] = _times(lowering, draft)
    options |= _options(lowering, name)
    if not options:
        return name
    draft.imports.name("functools", "partial")
    return call("partial", name, **options)


def _options(lowering: Lowering, name: str) -> dict[str, str]:
    plan = lowering.plan
    if name == _PROACTIVELY:
        prefetch = plan.comm.prefetch if plan.comm is not None else None
        assert isinstance(prefetch, Proactive), "the pass is of its treatment"
        found = {"limit": str(prefetch.limit)}
        if prefetches_within_memory(lowering.analysis):
            found["memory"] = str(lowering.plan.memory_limit)
            found["moments"] = str(_kept_moments(lowering))
        return found
    if name == _SELECTIVELY or (name == _BY_TIME and lowering.plan.memory_limit is not None):
        return {"limit": str(lowering.plan.memory_limit), "moments": str(_kept_moments(lowering))}
    if name in (_ACTIVATIONS, _STATE):
        return _amount(lowering, is_state=name == _STATE)
    return {}


def _measured(lowering: Lowering, draft: Draft) -> Line:
    """Return the line of the profile that the first steps of a run measure."""
    assert lowering.plan.comm is not None, "the option is its own"
    draft.imports.name(_PACKAGE, "MeasuredProfile")
    options = {"traced": quoted(digest_of_traced(lowering.plan)), "moments": str(_kept_moments(lowering))}
    made = call("MeasuredProfile", _times(lowering, draft), **options)
    return Line(made, f"{_PROFILE} = ", lowering.note(lowering.plan.comm, "profile"))


def _kept_moments(lowering: Lowering) -> int:
    """Return how many values per element of a parameter the optimizer keeps."""
    return max(moments(lowering.analysis), int(bool(muon_parameters(lowering.analysis))))


def _times(lowering: Lowering, draft: Draft) -> Node:
    """Return the times of operators on the plan's cluster."""
    draft.imports.name("legoai.cost.node_times", "NodeTimes")
    use, device = lowering.plan.cluster, lowering.analysis.device
    assert device is not None and use.device != "profile", "a device of the catalogue"
    options = {"devices": str(use.devices_for(device, lowering.plan.mesh.world_size))}
    if use.hosts > 1:
        assert use.fabric is not None, "hosts have a fabric between them"
        options["hosts"] = str(use.hosts)
        options["fabric"] = quoted(use.fabric)
    return call("NodeTimes", quoted(use.device), **options)


def _amount(lowering: Lowering, *, is_state: bool) -> dict[str, str]:
    """Return the amount to offload: all, some bytes, or the excess over the memory limit."""
    offload = lowering.plan.offload
    assert offload is not None, "the pass is of its statement"
    amount = offload.optimizer if is_state else offload.activations
    found = {}
    if isinstance(amount, ByBytes):
        found["most"] = str(amount.n)
    elif amount == "adaptive":
        found["limit"] = str(lowering.plan.memory_limit)
    if (is_state and found) or (amount == "adaptive" and offload.optimizer != "adaptive"):
        found["moments"] = str(_kept_moments(lowering))
    return found


def note_of_kept(lowering: Lowering) -> Note:
    """Return the plan's line that keeps units unsharded from one micro batch to the next."""
    rules = (unit.rule for unit in fsdp_units(lowering.analysis).values() if unit.reshard == "never")
    rule = next(rules, None)
    if rule is not None:
        return rule_note(rule)
    assert lowering.plan.comm is not None, "no default keeps a unit"
    return lowering.note(lowering.plan.comm, "unshard")


def graph_passes(lowering: Lowering) -> list[tuple[str, Note]]:
    """Return the names of a plan's passes in order, each with the plan's line that requests it."""
    plan, analysis = lowering.plan, lowering.analysis
    assert plan.fsdp is not None
    of_units = lowering.note(plan.fsdp)
    found = [("deduplicate_unshards", of_units)]
    outputs = kept_outputs(analysis)
    if outputs is not None:
        found.append(("keep_activations", rule_note(outputs)))
    resharded = [unit for unit in fsdp_units(analysis).values() if unit.is_resharded_after_forward]
    if resharded:
        rule = resharded[0].rule
        found.append(("reshard_after_forward", of_units if rule is None else rule_note(rule)))
    scheduled, buckets = compiler_rule(analysis), unit_buckets(analysis)
    if scheduled is not None:
        found.append((_BY_COMPILER, rule_note(scheduled)))
    else:
        found.append(("bucket_units", Note(buckets[0].span) if buckets else of_units))
    if reorders(analysis):
        assert plan.comm is not None
        by_time = overlaps_by_time(analysis)
        found.append((_BY_TIME if by_time else "overlap_communication", lowering.note(plan.comm, "reorder")))
    offloaded = []
    if offloads_some(analysis, "activations"):
        assert plan.offload is not None
        offloaded.append((_ACTIVATIONS, lowering.note(plan.offload, "activations")))
    if offloads_some(analysis, "optimizer"):
        assert plan.offload is not None
        offloaded.append((_STATE, lowering.note(plan.offload, "optimizer")))
        if plan.offload.optimizer != "adaptive":  # the excess of activations depends on the state that is away
            offloaded.reverse()
    found += offloaded
    if reorders(analysis) and plan.comm is not None and isinstance(plan.comm.prefetch, Proactive):
        found.append((_PROACTIVELY, lowering.note(plan.comm, "prefetch")))
    if unshards_selectively(analysis):
        assert plan.comm is not None
        found.append((_SELECTIVELY, lowering.note(plan.comm, "unshard")))
    if keeps_between_micro_batches(analysis):
        found.append(("keep_unsharded", note_of_kept(lowering)))
    if compiled_modules(analysis):
        assert plan.compile is not None
        found.append(("compile_regions", lowering.note(plan.compile)))
    return found
