"""Plan lines that cause a step's time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legoai.cost.estimate import RankEstimate
from legoai.cost.report.parts import BUBBLE, COPIES, HOST
from legoai.cost.timing.breakdown import CollectiveCost, ModuleCost, collective_costs, module_costs
from legoai.cost.trace.records import LOSS, Collective, Phase
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import of_innermost
from legoai.dsl.analysis.parallelism.experts import axes_of_experts
from legoai.dsl.analysis.training.optimizer import muon_parameters
from legoai.dsl.reporting.explain import place
from legoai.specs.directives.base import Directive, PathRule
from legoai.specs.directives.mesh import DATA_AXES
from legoai.specs.span import Origin

_DATA: frozenset[str] = frozenset({*DATA_AXES, "cp"})


@dataclass(frozen=True, slots=True)
class Cause:
    """A statement or rule of a plan, with its position."""

    words: str
    origin: Origin

    @property
    def place(self) -> str:
        """File and line; `default` where no one wrote it."""
        return place(self.origin)


@dataclass(frozen=True, slots=True)
class _Tables:
    """What the modules and the collectives of a rank take."""

    modules: tuple[ModuleCost, ...]
    collectives: tuple[CollectiveCost, ...]


class Causes:
    """Maps costs to the lines of a plan whose model is known."""

    def __init__(self, analysis: Analysis) -> None:
        assert analysis.manifest is not None
        self.analysis = analysis
        self.plan = analysis.plan
        self._tables: dict[int, tuple[RankEstimate, _Tables]] = {}

    def modules(self, rank: RankEstimate) -> tuple[ModuleCost, ...]:
        """Return the time of a rank's modules, the most expensive first; equal ones with the same causes together."""
        return self._tables_of(rank).modules

    def collectives(self, rank: RankEstimate) -> tuple[CollectiveCost, ...]:
        """Return the time of a rank's collectives in the same way, the most exposed first, then the longest."""
        return self._tables_of(rank).collectives

    def _tables_of(self, rank: RankEstimate) -> _Tables:
        found = self._tables.get(id(rank))
        if found is None:
            modules = module_costs(
                rank.intervals, of_kernels=self._of_other_kernels, of_recomputation=self.of_recomputation
            )
            tables = _Tables(modules, collective_costs(rank.intervals, self.of_record))
            found = self._tables[id(rank)] = rank, tables  # a rank that is held keeps its identity
        return found[1]

    def of_collective(self, cost: CollectiveCost) -> Cause | None:
        """Return the statement that makes ranks communicate; None where no statement does."""
        return self._of_communication(cost.axis, cost.kind, cost.phase, cost.first, of_parameters=cost.of_parameters)

    def of_record(self, record: Collective, module: str) -> Cause | None:
        """As :meth:`of_collective`, for one collective of a module."""
        return self._of_communication(
            record.axis, record.kind, record.phase, module, of_parameters=record.of_parameters
        )

    def _of_communication(
        self, axis: str, kind: str, phase: Phase, module: str, *, of_parameters: bool
    ) -> Cause | None:
        """As :meth:`of_collective`, for collectives of a module."""
        plan, axes = self.plan, frozenset(axis.split("+"))
        if phase == "optimizer" and kind == "all_reduce" and plan.clip is not None:
            return self._statement(plan.clip, "clip")
        if phase == "optimizer" and kind != "all_reduce" and not of_parameters and muon_parameters(self.analysis):
            return self._statement(plan.optimizer, "optimizer")
        if "pp" in axes and plan.pipeline is not None:
            return self._statement(plan.pipeline, "pipeline on pp")
        if axes == {"tp"}:
            return self._sharded("tp", module)
        if axes == {"ep"}:
            return self._sharded("ep", module)
        if axes == {"cp"} and plan.context is not None and not of_parameters:
            return self._statement(plan.context, "context on cp")
        of_experts = axes_of_experts(self.analysis) if plan.mesh.ep > 1 and plan.fsdp is not None else ()
        if axes <= _DATA.union(of_experts) and plan.fsdp is not None:
            return self._nearest(plan.fsdp, _title(plan.fsdp), module)
        if axes <= _DATA and plan.replicate is not None:
            return self._statement(plan.replicate, _title(plan.replicate))
        return None

    def of_segments(self) -> Cause:
        """Return the statement that decides how the allocator reserves memory."""
        assert self.plan.allocator is not None
        return self._statement(self.plan.allocator, "allocator")

    def of_part(self, part: str) -> Cause | None:
        """Return the statement that causes a part of the step that no module and no collective has, if one does."""
        plan = self.plan
        if part == BUBBLE and plan.pipeline is not None:
            return Cause("pipeline on pp", plan.pipeline.origin("schedule"))
        if part in (COPIES, HOST) and plan.offload is not None:
            return self._statement(plan.offload, "offload")
        return None

    def of_module(self, cost: ModuleCost) -> tuple[Cause, ...]:
        """Return the statements that decide the time of a module's kernels, and their recomputation."""
        found = self.of_kernel(cost.op, cost.first, cost.phase)
        if not cost.recompute or (self.plan.checkpoint is None and cost.first != LOSS):
            return (found,)
        return found, self.of_recomputation(cost.first)

    def of_recomputation(self, module: str) -> Cause:
        """Return the rule by which a module recomputes; else the statement that decides the memory of activations."""
        if module == LOSS:  # whose chunks are recomputed
            return self._statement(self.plan.loss, "loss")
        rule = of_innermost(module, recomputed_modules(self.analysis))
        if rule is not None:
            return _of_rule("checkpoint", rule)
        checkpoint = self.plan.checkpoint
        return self.of_memory("activation") if checkpoint is None else self._statement(checkpoint, "checkpoint")

    def of_kernel(self, op: str, module: str, phase: Phase) -> Cause:
        """Return the statement that decides the time of an operator of a module: in most cases, the model itself."""
        plan = self.plan
        if phase == "optimizer" and not module:
            return self._statement(plan.optimizer, "optimizer")
        if module == LOSS and plan.loss.origin("keyword").span is not None:
            return self._statement(plan.loss, "loss")
        if "attention" in op and plan.attention.origin("keyword").span is not None:
            return self._statement(plan.attention, "attention")
        return self._of_other_kernels(module)

    def _of_other_kernels(self, module: str) -> Cause:
        """Return the statement that decides the time of a module's operators for which no statement of theirs does."""
        plan = self.plan
        for axis in ("tp", "ep"):
            shard = plan.shard_on(axis)
            if shard is not None:
                rule = of_innermost(module, self._rules(shard))
                if rule is not None:
                    return _of_rule(f"shard on {axis}", rule)
        if plan.precision.rules:
            rule = of_innermost(module, self._rules(plan.precision))
            if rule is not None:
                return _of_rule("precision", rule)
        return self._statement(plan.model, "model")

    def of_memory(self, category: str, module: str = "") -> Cause:
        """Return the statement that decides the memory of a category."""
        plan = self.plan
        if category == "activation":
            if plan.checkpoint is not None:
                return self._nearest(plan.checkpoint, "checkpoint", module)
            return self._statement(plan.batch, "batch")
        if category == "other":
            return self._statement(plan.model, "model")
        if category in ("input", "temporary"):
            return self._statement(plan.batch, "batch")
        if category == "optimizer_state":
            return self._statement(plan.optimizer, "optimizer")
        if plan.fsdp is not None:
            return self._nearest(plan.fsdp, _title(plan.fsdp), module)
        return self._statement(plan.model, "model")

    def _sharded(self, axis: str, module: str) -> Cause | None:
        shard = self.plan.shard_on(axis)
        return None if shard is None else self._nearest(shard, f"shard on {axis}", module)

    def _nearest(self, directive: Directive, title: str, module: str) -> Cause:
        """Return the rule of the module or of its closest ancestor; else the statement."""
        rule = of_innermost(module, self._rules(directive))
        return self._statement(directive, title) if rule is None else _of_rule(title, rule)

    def _rules(self, directive: Directive) -> Mapping[str, PathRule[Any]]:
        rules: Mapping[str, PathRule[Any]] = self.analysis.assigned(directive).by_path
        return rules

    def _statement(self, directive: Directive, title: str) -> Cause:
        return Cause(title, directive.origin("keyword"))


def _title(directive: Directive) -> str:
    axes = ", ".join(getattr(directive, "axes", ()))
    return f"{directive.keyword} on {axes}" if axes else directive.keyword


def _of_rule(title: str, rule: PathRule[Any]) -> Cause:
    return Cause(f"{title}: {rule.path}", rule.origin)
