"""Buckets made by torch's automatic scheduler from a traced step, and the plans that it supports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication.node_times import unpriced
from legoai.dsl.analysis.facts import following
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.comm import Bucket
from legoai.specs.span import Span

BY_COMPILER: Final = "compiler"
_STATEMENT: Final = "`bucket(compiler)`"
_OTHERWISE: Final = "write `bucket(module)`, and `reorder = true` to overlap it"
_OTHER_AXES: Final = {
    "cp": "blocks of keys that go around are added up in place, and the scheduler moves what it takes for independent",
    "ep": "how many rows an expert gets is known only when it runs, and the scheduler takes sizes",
}
"""Why an axis is not lowered beside the scheduler."""


def compiler_rule(analysis: Analysis) -> PathRule[Any] | None:
    """The rule of `comm` that leaves the collectives of a traced step to torch's scheduler."""
    rules = following(analysis, analysis.plan.comm, Bucket).values() if analysis.plan.fsdp is not None else ()
    return next((rule for rule in rules if rule.treatment.by == BY_COMPILER), None)


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """One rule for all units of a dense decoder that is traced whole, on devices of the catalogue."""
    rule = compiler_rule(analysis)
    if rule is None:
        return
    place = analysis.rule_span(rule)
    if not is_traced(analysis):
        why = "it schedules the graph of a step, and the eager backend has none"
        yield _refused(place, _STATEMENT, why, "write `backend = graph` in `fsdp`, or `bucket(module)`")
        return
    if is_staged(analysis):
        why = "a stage's collectives are of all micro batches in flight, and the scheduler sees one"
        yield _refused(place, f"{_STATEMENT} with stages", why)
    for check in (_units, _options, _mesh, _model, _prices):
        yield from check(analysis, rule)


def _refused(span: Span, what: str, why: str, *help: str) -> Unsupported:
    return Unsupported(span, f"{what} is not lowered: {why}", "not scheduled", help or (_OTHERWISE,))


def _units(analysis: Analysis, rule: PathRule[Any]) -> Iterator[Unsupported]:
    """Units that another rule of `comm` decides, or none: the scheduler moves all collectives of the graph."""
    rules = following(analysis, analysis.plan.comm, Bucket)
    whole = "the scheduler moves all collectives of a step"
    other = next((item for item in rules.values() if item is not rule), None)
    if other is not None:
        yield _refused(analysis.rule_span(other), f"a rule beside {_STATEMENT}", whole, "leave the rule out")
    units = fsdp_units(analysis)
    left = next((path for path in units if path and path not in rules), None)
    if left is not None:
        why = f"it does not name the unit `{left}`, and {whole}"
        yield _refused(analysis.rule_span(rule), _STATEMENT, why, f"let the rule match `{left}` too")
    never = next((path for path, unit in units.items() if unit.reshard == "never"), None)
    if never is not None:
        why = f"`{never or 'root'}` stays gathered for a whole step, and would share buckets with units that do not"
        yield _refused(analysis.rule_span(rule), _STATEMENT, why, "write `unit(reshard = after_backward)`")
    part = next((path for path, unit in units.items() if isinstance(unit.reshard, int)), None)
    if part is not None:
        why = f"`{part or 'root'}` is gathered again of parts, which the scheduler does not take for shards"
        yield _refused(analysis.rule_span(rule), _STATEMENT, why, "write `unit(reshard = after_forward)`")


def _options(analysis: Analysis, rule: PathRule[Any]) -> Iterator[Unsupported]:
    comm, offload = analysis.plan.comm, analysis.plan.offload
    assert comm is not None
    if comm.reorder:
        why = "the scheduler places every gather and reduction itself"
        yield _refused(analysis.span_of(comm, "reorder"), f"`reorder` beside {_STATEMENT}", why, "leave it out")
    if comm.prefetch != "implicit":
        why = "the scheduler gathers ahead by limits of its own"
        yield _refused(analysis.span_of(comm, "prefetch"), f"`prefetch` beside {_STATEMENT}", why, "leave it out")
    if comm.unshard != "by_unit":
        why = "what stays gathered would share buckets with what does not"
        yield _refused(analysis.span_of(comm, "unshard"), f"`unshard` beside {_STATEMENT}", why, "leave it out")
    for field in ("optimizer", "parameters", "activations"):
        if offload is not None and getattr(offload, field) != "none":
            yield _refused(
                analysis.span_of(offload, field),
                f"`{field}` of `offload` beside {_STATEMENT}",
                "the scheduler counts no copies to the host, which share the time that it gives to collectives",
            )


def _mesh(analysis: Analysis, rule: PathRule[Any]) -> Iterator[Unsupported]:
    mesh = analysis.plan.mesh
    for axis, why in _OTHER_AXES.items():
        if axis in mesh.used():
            yield _refused(analysis.span_of(mesh, axis), f"the axis `{axis}` beside {_STATEMENT}", why)


def _model(analysis: Analysis, rule: PathRule[Any]) -> Iterator[Unsupported]:
    modules = {} if analysis.manifest is None else analysis.manifest.modules
    if any(module.kind == "moe" for module in modules.values()) and "ep" not in analysis.plan.mesh.used():
        yield _refused(analysis.rule_span(rule), f"{_STATEMENT} with experts", _OTHER_AXES["ep"])


def _prices(analysis: Analysis, rule: PathRule[Any]) -> Iterator[Unsupported]:
    """Yield clusters whose speed a program does not know."""
    for span, what, why in unpriced(analysis):
        yield _refused(span, f"{what} beside {_STATEMENT}", f"{why}, from which the scheduler takes its times")
