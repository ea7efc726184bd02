"""`require`, `minimize`, `maximize`: rules about budgets that cannot be met, or that exclude nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import each_rule
from legoai.dsl.analysis.magnitudes.state import StateBytes, state_bytes
from legoai.dsl.analysis.training.loss import pieces_of_last_layer
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.checkpoint import KeepAll
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.loss import ChunkedLoss
from legoai.specs.directives.require import METRICS, Objective, Requirement
from legoai.specs.units import format_bytes, format_exactly


def _bound(item: Requirement) -> str:
    """The bound as a plan writes it; whoever follows an advice wants no other one."""
    return format_exactly(item.bound, item.dimension)


class BudgetsAgree(Check):
    """Two budgets that no plan can keep together.

    ## Example
    ```
    require peak_memory <= 10GiB
    require peak_memory >= 20GiB
    ```

    ## Use instead
    ```
    require peak_memory <= 20GiB
    ```
    """

    code = "LP701"
    slug = "contradictory-budgets"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        items = analysis.plan.require
        for index, second in enumerate(items):
            for first in items[:index]:
                if (first.metric, first.dimension) != (second.metric, second.dimension):
                    continue
                if _exclude(first, second) or _exclude(second, first):
                    yield self.at(
                        second.origin.written,
                        f"`{second.metric}` cannot be both {first.limit} and {second.limit}",
                        label="contradicts the other budget",
                        others=[Label(first.origin.written, "the other budget")],
                    )


def _exclude(upper: Requirement, lower: Requirement) -> bool:
    """Whether no number keeps both, ``upper`` read as a bound from above and ``lower`` as one from below."""
    if not (upper.bounds_above and lower.bounds_below):
        return False
    strict = "<" in (upper.comparison, lower.comparison) or ">" in (upper.comparison, lower.comparison)
    return upper.bound < lower.bound or (strict and upper.bound == lower.bound)


class BudgetBeyondDevice(Check):
    """A memory budget that is larger than the device's memory.

    The budget allows more than the device holds: training could run out of memory within the budget.

    ## Example
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    require peak_memory <= 90GiB
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    require peak_memory <= 72GiB
    ```
    """

    code = "LP702"
    slug = "budget-beyond-device"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        capacity = _capacity(analysis)
        for item in analysis.plan.require:
            if item.limits_memory and capacity is not None and item.bound > capacity:
                assert analysis.device is not None
                yield self.at(
                    item.origin.written,
                    f"`{analysis.device.name}` has {format_bytes(capacity)}, less than the budget of {_bound(item)}",
                    label="allows what the device cannot hold",
                    others=[Label(analysis.span_of(analysis.plan.cluster, "device"), f"`{analysis.device.name}`")],
                    help=["leave some room for the allocator and for communication buffers"],
                )


def _capacity(analysis: Analysis) -> int | None:
    return analysis.device.capacity if analysis.device is not None else None


class StateOverBudget(Check):
    """A memory budget that parameters, gradients and optimizer state alone exceed.

    All of them exist when the optimizer updates, whatever is done about activations. The stated size is a lower bound
    for the fullest device; the diagnostic lists the size of each part.

    ## Example
    ```
    model llama3("70b")
    mesh (dp_shard = 16, dp_replicate = 2)
    fsdp on dp_replicate, dp_shard { layers.* = unit }
    require peak_memory <= 60GiB
    ```

    ## Use instead
    ```
    model llama3("70b")
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    require peak_memory <= 60GiB
    ```
    """

    code = "LP703"
    slug = "state-over-budget"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        budgets = [item for item in analysis.plan.require if item.limits_memory]
        state = state_bytes(analysis) if budgets else None
        for item in budgets:
            if state is not None and state.total > item.bound:
                yield self.at(
                    item.origin.written,
                    f"`{item.metric}` cannot be {item.limit}: {_parts(state)} of the fullest device are "
                    f"at least {format_bytes(state.total)}",
                    label=f"at least {format_bytes(state.total)} are needed",
                    others=[Label(analysis.span_of(analysis.plan.mesh), "the mesh over which they are sharded")],
                    help=["shard over more ranks, offload the optimizer state, or raise the budget"],
                )


def _parts(state: StateBytes) -> str:
    parts = [("parameters", state.parameters), ("gradients", state.gradients), ("optimizer state", state.optimizer)]
    words = [f"{name} ({format_bytes(size)})" for name, size in parts if size]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


class StateOverDevice(Check):
    """A model whose parameters, gradients and optimizer state alone exceed the device's memory.

    All of them exist when the optimizer updates. The stated size is a lower bound for the fullest device.

    ## Example
    ```
    model llama3("70b")
    mesh (dp_shard = 8, dp_replicate = 4)
    fsdp on dp_replicate, dp_shard { layers.* = unit }
    ```

    ## Use instead
    ```
    model llama3("70b")
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    ```
    """

    code = "LP704"
    slug = "state-over-device"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        capacity = _capacity(analysis)
        state = state_bytes(analysis) if capacity is not None else None
        if state is None or capacity is None or state.total <= capacity:
            return
        assert analysis.device is not None
        yield self.at(
            analysis.span_of(analysis.plan.mesh),
            f"the model cannot be trained on this mesh: {_parts(state)} of the fullest device are at least "
            f"{format_bytes(state.total)}, and `{analysis.device.name}` has {format_bytes(capacity)}",
            label="shards too little",
            others=[Label(analysis.span_of(analysis.plan.cluster, "device"), f"has {format_bytes(capacity)}")],
            help=["shard over more ranks (`fsdp`, `pp`, `tp`), or offload the optimizer state"],
        )


class ObjectiveDirection(Check):
    """An objective that asks for the worst plan.

    ## Example
    ```
    maximize step_time
    ```

    ## Use instead
    ```
    minimize step_time
    ```
    """

    code = "LP705"
    slug = "objective-direction"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        objective = analysis.plan.objective
        if objective is None:
            return
        right = "minimize" if METRICS[objective.metric].better == "less" else "maximize"
        if objective.direction != right:
            better = METRICS[objective.metric].better
            yield self.at(
                objective.origin.written,
                f"`{objective.direction} {objective.metric}` asks for the worst plan: {better} is better",
                label=f"{better} is better",
                help=[f"write `{right} {objective.metric}`"],
            )


class RequireDirection(Check):
    """A budget that asks for a bad figure.

    ## Example
    ```
    require step_time >= 1s
    ```

    ## Use instead
    ```
    require step_time <= 10s
    ```
    """

    code = "LP706"
    slug = "require-direction"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for item in analysis.plan.require:
            less = METRICS[item.metric].better == "less"
            if not (item.bounds_above if less else item.bounds_below):
                turned = item.comparison.translate(str.maketrans("<>", "><"))
                yield self.at(
                    item.origin.written,
                    f"`{item.metric} {item.limit}` forbids plans that are better: "
                    f"{METRICS[item.metric].better} is better",
                    label="the wrong way round",
                    help=[f"write `{item.metric} {turned} {_bound(item)}`"],
                )


class ImpossibleBudget(Check):
    """A budget that no plan can meet.

    A step takes some time and memory, and a share of a step is at most all of it. MFU has no such limit: by convention
    the model's operations count attention without its mask, and the peak is the one without float8.

    ## Example
    ```
    require step_time <= 0s
    ```

    ## Use instead
    ```
    require step_time <= 10s
    ```
    """

    code = "LP707"
    slug = "impossible-budget"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for item in analysis.plan.require:
            strict = item.comparison == "<"
            if item.bounds_above and (item.bound < 0 or (item.bound == 0 and (strict or item.metric in _POSITIVE))):
                reason = f"it is {'more than 0' if item.metric in _POSITIVE else 'at least 0'}"
            elif _is_share(item) and item.bounds_below and _above_one(item):
                reason = "it is a share, of at most 100%"
            else:
                continue
            yield self.at(
                item.origin.written,
                f"`{item.metric}` cannot be {item.limit}: {reason}",
                label="no plan keeps this",
            )


_POSITIVE: Final = ("peak_memory", "reserved_memory", "step_time", "mfu", "tokens_per_s")
"""Figures that are greater than zero in every training."""


def _is_share(item: Requirement) -> bool:
    """Whether a figure is at most 1."""
    return item.dimension == "fraction" and item.metric != "mfu"


def _above_one(item: Requirement) -> bool:
    return item.bound > 1 or (item.bound == 1 and item.comparison == ">")


class TrivialBudget(Check):
    """A budget that every plan keeps.

    ## Example
    ```
    require exposed_comm <= 100%
    ```

    ## Use instead
    ```
    require exposed_comm <= 10%
    ```
    """

    code = "LP708"
    slug = "trivial-budget"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for item in analysis.plan.require:
            above = (
                not item.bounds_below
                and _is_share(item)
                and (item.bound > 1 or (item.bound, item.comparison) == (1, "<="))
            )
            below = not item.bounds_above and (
                item.bound < 0 or (item.bound == 0 and (item.comparison == ">=" or item.metric in _POSITIVE))
            )
            if above or below:
                yield self.at(
                    item.origin.written,
                    f"every plan keeps `{item.metric} {item.limit}`",
                    label="limits nothing",
                    help=["give a bound that can be missed, or leave the line out"],
                )


class FigureIsZero(Check):
    """A budget or objective for a figure that is zero in this plan.

    Without a pipeline there is no bubble, without `checkpoint` and `loss chunked` nothing is recomputed, and one device
    has no one to talk to.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    require bubble <= 10%
    ```

    ## Use instead
    ```
    batch (global = 512, micro = 1, seq_len = 8192)
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    pipeline on pp (schedule = 1F1B)
    require bubble <= 10%
    ```
    """

    code = "LP709"
    slug = "figure-is-zero"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        asked: list[Requirement | Objective] = list(plan.require)
        if plan.objective is not None:
            asked.append(plan.objective)
        for item in asked:
            if item.metric == "bubble" and plan.pipeline is None:
                why = "the plan has no pipeline"
            elif item.metric == "recompute" and not _recomputes(analysis):
                why = "nothing is recomputed"
            elif item.metric == "exposed_comm" and plan.mesh.world_size == 1:
                why = "there is one device"
            else:
                continue
            what = "the budget limits" if isinstance(item, Requirement) else "the objective decides"
            yield self.at(item.origin.written, f"`{item.metric}` is always 0 here: {why}", label=f"{what} nothing")


def _recomputes(analysis: Analysis) -> bool:
    checkpoint, form = analysis.plan.checkpoint, analysis.plan.loss.form
    if checkpoint is not None and any(not isinstance(rule.treatment, KeepAll) for rule in each_rule(checkpoint)):
        return True
    # The loss of each piece, from its logits.
    return isinstance(form, Hole) or (isinstance(form, ChunkedLoss) and pieces_of_last_layer(form) == 1)


class ExactBudget(Check):
    """A budget that requires one exact figure.

    Only this figure passes, to the last byte or the last digit of a time. Any change of the plan, of torch or of LegoAI
    may change it, also where the plan becomes better.

    ## Example
    ```
    require step_time == 1s
    ```

    ## Use instead
    ```
    require step_time <= 10s
    ```
    """

    code = "LP710"
    slug = "exact-budget"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for item in analysis.plan.require:
            if item.comparison == "==" and item.bound != 0:
                comparison = "<=" if METRICS[item.metric].better == "less" else ">="
                yield self.at(
                    item.origin.written,
                    f"`{item.metric}` passes only if it is exactly {_bound(item)}: any change of the plan, of torch or "
                    "of LegoAI may change it",
                    label="no other figure passes",
                    help=[f"write `{item.metric} {comparison} {_bound(item)}`"],
                )
