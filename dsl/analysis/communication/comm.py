"""Collectives of `fsdp` as `comm` schedules them: units that share one, units gathered ahead, when gradients reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import passes
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.compiler_buckets import compiler_rule
from legoai.dsl.analysis.communication.compiler_buckets import supports as supports_compiler
from legoai.dsl.analysis.communication.measured_profile import supports as supports_profile
from legoai.dsl.analysis.communication.timed_overlap import supports as supports_times
from legoai.dsl.analysis.computation.precision import has_policy
from legoai.dsl.analysis.facts import below, following, grouped, is_within
from legoai.dsl.analysis.memory_limit import how_to_limit
from legoai.dsl.analysis.parallelism.buckets import ModuleBucket, counted, fill, local_numel
from legoai.dsl.analysis.parallelism.experts import distributed_experts, sharded_dim
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule, name_of
from legoai.specs.directives.comm import Bucket, ByBytes, Units
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.record import Record

_GRAPH_ONLY = "it moves collectives inside one traced graph, which the eager backend does not have"


class UnitKind(Record):
    """Properties that units must share to share their collectives."""

    reshard: Any
    """As :attr:`legoai.dsl.analysis.parallelism.fsdp.FsdpUnit.reshard`."""
    cut: int | None
    """The dim along which experts of `ep` are sharded over the ranks that hold the same ones; None otherwise."""


@fact
def unit_kinds(analysis: Analysis) -> dict[str, UnitKind]:
    """Return every unit by path in the model's order; experts on `ep` are units of their own.

    Where no rule makes a unit of experts, they reshard like the enclosing unit.
    """
    assert analysis.manifest is not None
    units = fsdp_units(analysis)
    kinds = {path: UnitKind(unit.reshard, None) for path, unit in units.items()}
    for path in distributed_experts(analysis) if units else ():
        around = units[path] if path in units else units[owner(analysis, path)]
        kinds[path] = UnitKind(around.reshard, sharded_dim(analysis, path))
    return {path: kinds[path] for path in analysis.manifest.modules if path in kinds}


def reduces_last(analysis: Analysis) -> bool:
    """Whether gradients are reduced after the last micro batch only, by the plan and not by a pipeline."""
    comm = analysis.plan.comm
    return comm is not None and comm.reduce == "last_micro_batch" and has_policy(analysis) and not is_staged(analysis)


@fact
def bucket_rules(analysis: Analysis) -> tuple[tuple[PathRule[Any], list[str]], ...]:
    """Return the rules of `comm` that affect units, with the modules that they match."""
    if analysis.plan.fsdp is None or analysis.manifest is None:
        return ()
    units = fsdp_units(analysis)
    matched = grouped(following(analysis, analysis.plan.comm, Bucket).items())
    return tuple((rule, paths) for rule, paths in matched if _holds_a_unit(paths, units))


def _holds_a_unit(paths: list[str], units: dict[str, Any]) -> bool:
    return any(is_within(unit, path) for path in paths for unit in units)


@fact
def unit_buckets(analysis: Analysis) -> tuple[ModuleBucket, ...]:
    """Units that share their collectives, by the rules of `comm`; without those that are alone in their bucket."""
    return tuple(
        ModuleBucket(together, rule.origin.span)
        for rule, paths in bucket_rules(analysis)
        for together in buckets_of(analysis, rule, paths)
        if len(together) > 1
    )


def buckets_of(analysis: Analysis, rule: PathRule[Any], paths: list[str]) -> list[tuple[str, ...]]:
    """The modules that a rule of `comm` matches, as it puts them into buckets."""
    by = rule.treatment.by
    if by == "group":
        return [tuple(paths)]
    if isinstance(by, ByBytes):
        size = DTYPE_BYTES[analysis.plan.precision.param]
        return fill([(path, local_numel(analysis, path) * size) for path in paths], by.n)
    if isinstance(by, tuple):
        return counted(paths, by)
    return [(path,) for path in paths]


def prefetching_units(analysis: Analysis) -> tuple[str, ...]:
    """Return the units for which prefetching is set explicitly, in model order; for a bucket the first."""
    later = {path for bucket in unit_buckets(analysis) for path in bucket.paths[1:]}
    return tuple(path for path in unit_kinds(analysis) if path and path not in later)


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Supported are, with FSDP2's hooks, prefetching by count and buckets of whole units; with a graph, more.

    Without `fsdp` nothing is gathered, and `comm` has no effect, for which there is a separate warning.
    """
    comm, plan = analysis.plan.comm, analysis.plan
    if comm is None:
        return
    if comm.reduce == "last_micro_batch" and has_policy(analysis) and is_staged(analysis) and passes(plan) != 1:
        why = f"a pipeline reduces after each of its {passes(plan)} passes in a step"
        yield _option(analysis, "reduce", why)
    if plan.fsdp is None:
        return
    yield from supports_compiler(analysis)
    if compiler_rule(analysis) is None:
        yield from supports_times(analysis)
    yield from supports_profile(analysis)
    yield from _of_a_graph(analysis) if is_traced(analysis) else _of_hooks(analysis)
    if analysis.manifest is not None:
        uneven = list(_buckets(analysis))
        yield from uneven
        if isinstance(comm.prefetch, Units) and not uneven and not is_traced(analysis):
            yield from _prefetch(analysis, comm.prefetch)


def _of_hooks(analysis: Analysis) -> Iterator[Unsupported]:
    comm = analysis.plan.comm
    assert comm is not None
    if comm.reorder:
        yield _option(analysis, "reorder", _GRAPH_ONLY)
    if comm.unshard != "by_unit":
        yield _option(analysis, "unshard", _GRAPH_ONLY)
    if not isinstance(comm.prefetch, Units) and comm.prefetch != "implicit":
        yield _option(analysis, "prefetch", f"{_GRAPH_ONLY}; `units(…)` is lowered")


def _of_a_graph(analysis: Analysis) -> Iterator[Unsupported]:
    comm = analysis.plan.comm
    assert comm is not None
    if comm.unshard == "selective" and not is_staged(analysis):
        yield from _selectively(analysis)
    if compiler_rule(analysis) is not None:
        pass  # `compiler_buckets` checks its options
    elif isinstance(comm.prefetch, Units):
        yield _option(analysis, "prefetch", "a pass gathers ahead by memory, as `proactive(limit = 4GiB)` says")
    elif comm.prefetch != "implicit" and not comm.reorder:
        why = "it moves gathers where `reorder = true` does"
        yield _option(analysis, "prefetch", why, "or write `reorder = true` beside it")
    if comm.reduce == "last_micro_batch":
        yield _option(analysis, "reduce", "the graph of a micro batch reduces its gradients")


def _selectively(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield what a graph's memory curve lacks to decide which units can stay gathered."""
    if analysis.plan.memory_limit is None:
        yield _option(
            analysis,
            "unshard",
            "without a limit of active memory it is not known what can stay gathered",
            how_to_limit(analysis.plan),
        )
    elif any(isinstance(unit.reshard, int) for unit in fsdp_units(analysis).values()):
        yield _option(
            analysis,
            "unshard",
            "a unit that reshards to some of its ranks is gathered again for backward",
            "write `reshard = after_forward` in `fsdp`",
        )
    elif distributed_experts(analysis):
        yield _option(
            analysis,
            "unshard",
            "how many rows experts on `ep` take is only known in a step, and with it what memory is left",
            "`layers.* = unit(reshard = auto)` in `fsdp` lets `legoai solve` choose",
        )


def _option(analysis: Analysis, field: str, why: str, *help: str) -> Unsupported:
    comm = analysis.plan.comm
    assert comm is not None
    return Unsupported(
        analysis.span_of(comm, field),
        f"`{field} = {name_of(getattr(comm, field))}` of `comm` is not lowered: {why}",
        "not in this program",
        (f"leave `{field}` out, or write `{name_of(comm.option(field).default)}`", *help),
    )


def _buckets(analysis: Analysis) -> Iterator[Unsupported]:
    for rule, paths in bucket_rules(analysis):
        why = _not_whole(analysis, paths)
        if why is not None:
            yield Unsupported(
                analysis.rule_span(rule), why, "a bucket is of whole units", ("make the modules units of `fsdp`",)
            )
        else:
            yield from _joined(analysis, rule, paths)


def _not_whole(analysis: Analysis, paths: list[str]) -> str | None:
    """Return why a bucket cannot be made of the modules; None where each is a unit without nested ones."""
    kinds = unit_kinds(analysis)
    for path in paths:
        if path == "":
            return "`root` is gathered before all other units, and shares no bucket"
        if path not in kinds:
            return f"`{path}` is no unit of `fsdp`, and FSDP2 gathers whole units"
        inside = next((unit for unit in kinds if below(unit, path)), None)
        if inside is not None:
            return f"`{inside}` is a unit inside of `{path}`, and is gathered by itself"
    return None


def _joined(analysis: Analysis, rule: PathRule[Any], paths: list[str]) -> Iterator[Unsupported]:
    kinds = unit_kinds(analysis)
    for together in buckets_of(analysis, rule, paths):
        unlike = next((path for path in together if kinds[path] != kinds[together[0]]), None)
        if unlike is not None:
            yield Unsupported(
                analysis.rule_span(rule),
                f"`{together[0]}` and `{unlike}` reshard differently, and would be freed together",
                "one bucket for both",
                ("give their units in `fsdp` the same `reshard`",),
            )
            return
        if len(together) > 1 and is_staged(analysis):
            yield Unsupported(
                analysis.rule_span(rule),
                "a bucket of several units is not lowered under a pipeline: they may lie on different stages",
                help=("write `bucket(module)`",),
            )
            return


def _prefetch(analysis: Analysis, ahead: Units) -> Iterator[Unsupported]:
    if is_staged(analysis):
        yield _option(analysis, "prefetch", "a stage of a pipeline gathers its units once for all micro batches")
        return
    if ahead.backward == 0:
        yield _option(analysis, "prefetch", "FSDP2 gathers at least one unit ahead in the backward pass")
        return
    chain = prefetching_units(analysis)
    nested = next((path for path in chain if any(path.startswith(f"{unit}.") for unit in chain)), None)
    if nested is not None:
        yield _option(analysis, "prefetch", f"the unit `{nested}` lies inside of another")
