"""`require`: rules about bounds that are known without a simulation, from the device's peak and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.bounds import idle_share, logits_bytes, shortest_step
from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.units import format_bytes, format_fraction, format_seconds

_SLACK: Final = 0.9
"""What the bubble may differ from the schedule's own, since a step is more than forward and backward."""


class LogitsOverMemory(Check):
    """Logits of one micro batch that do not fit, on the device or into the memory budget.

    The number of logits is the tokens of a micro batch times the vocabulary, in the dtype of `param`; an eager loss
    also holds a copy in fp32 and their logarithms. Without a pipeline the parameters and the optimizer's state are on
    the same device. The stated size is a lower bound.

    ## Example
    ```
    batch (global = 1024, micro = 32, seq_len = 8192)
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    ```

    ## Use instead
    ```
    batch (global = 1024, micro = 1, seq_len = 8192)
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    ```
    """

    code = "LP713"
    slug = "logits-over-memory"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        logits = logits_bytes(analysis)
        if logits is None:
            return
        plan = analysis.plan
        state = state_bytes(analysis) if plan.mesh.pp == 1 else None
        beside = state.parameters + state.optimizer if state is not None else 0
        device = analysis.device
        capacity = device.capacity if device is not None else None
        parts = f"the logits of a micro batch take at least {format_bytes(logits)}"
        parts += f", and parameters with optimizer state {format_bytes(beside)}" if beside else ""
        help = ["use a smaller micro batch, more ranks of `cp`, `loss chunked(…)`, or shard the output on `tp`"]
        limits = [
            (item.bound, item.origin.written, f"`{item.metric}` cannot be {item.comparison} {format_bytes(item.bound)}")
            for item in plan.require
            if item.limits_memory
        ]
        place = analysis.span_of(plan.batch, "micro_batch")
        for bound, span, message in limits:
            if beside <= bound < logits + beside:
                yield self.at(
                    span, f"{message}: {parts}", label=f"at least {format_bytes(logits + beside)} are needed",
                    others=[Label(place, "tokens at once")], help=help,
                )  # fmt: skip
        if capacity is not None and beside <= capacity < logits + beside:
            assert device is not None
            yield self.at(
                place, f"{parts}, and `{device.name}` has {format_bytes(capacity)}", label="too many tokens at once",
                others=[Label(analysis.span_of(plan.cluster, "device"), f"has {format_bytes(capacity)}")], help=help,
            )  # fmt: skip


class FasterThanDevice(Check):
    """A budget for time or throughput that the devices cannot meet even at their peak rate.

    The linear layers alone take 6 operations for each parameter and token. Divided by the published peak of all devices
    that is less than any step takes.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    require step_time <= 100ms
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    require step_time <= 8s
    ```
    """

    code = "LP714"
    slug = "faster-than-device"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        asked = [item for item in plan.require if item.metric in ("step_time", "tokens_per_s")]
        least = shortest_step(analysis) if asked else None
        if least is None or least <= 0.0:
            return
        tokens = plan.batch.global_batch * plan.batch.length
        most = tokens / least / plan.mesh.world_size
        assert analysis.device is not None
        for item in asked:
            if item.metric == "step_time" and item.bounds_above and item.bound < least:
                why = f"a step takes at least {format_seconds(least)}"
            elif item.metric == "tokens_per_s" and item.bounds_below and item.bound > most:
                why = f"a device reaches at most {most:,.0f} tokens per second"
            else:
                continue
            bound = format_seconds(item.bound) if item.metric == "step_time" else f"{item.bound:g}"
            yield self.at(
                item.origin.written,
                f"`{item.metric}` cannot be {item.comparison} {bound}: at the peak rate of "
                f"{plan.mesh.world_size} `{analysis.device.name}` {why}",
                label="faster than the devices",
                others=[Label(analysis.span_of(plan.cluster, "device"), "computes no faster")],
                help=["half of the peak rate is a good step; use more devices, or ask for less"],
            )


class BubbleOverBudget(Check):
    """A budget for the bubble that the schedule cannot keep.

    Of p ranks with m micro batches and v stages on each rank, (p − 1) / (v·m + p − 1) of forward and backward is
    spent on filling and draining the pipeline (Narayanan et al. 2021, section 2.2).

    ## Example
    ```
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
    pipeline on pp (schedule = 1F1B)
    require bubble <= 5%
    ```

    ## Use instead
    ```
    batch (global = 512, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
    pipeline on pp (schedule = 1F1B)
    require bubble <= 5%
    ```
    """

    code = "LP715"
    slug = "bubble-over-budget"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline = analysis.plan.pipeline
        asked = [item for item in analysis.plan.require if item.metric == "bubble" and item.bounds_above]
        share = idle_share(analysis) if asked and pipeline is not None else None
        for item in asked:
            if share is not None and pipeline is not None and item.bound < share * _SLACK:
                yield self.at(
                    item.origin.written,
                    f"the bubble is about {format_fraction(round(share, 3))}, and the budget is "
                    f"{format_fraction(item.bound)}",
                    label="the schedule alone leaves the ranks waiting for longer",
                    others=[Label(analysis.span_of(pipeline, "schedule"), "fills and drains the pipeline")],
                    help=[
                        "use more micro batches, more stages on each rank, or a schedule that splits the backward pass"
                    ],
                )
