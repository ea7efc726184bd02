"""`offload`: rules about what lives in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import replacement, written
from legoai.dsl.analysis.magnitudes.fragments import state_fragments
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.training.optimizer import keeps_state, moments, muon_parameters
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.comm import ByBytes
from legoai.specs.directives.offload import Offload
from legoai.specs.units import format_bytes, format_exactly

_FIELDS = ("optimizer", "parameters", "activations")


class OffloadOnCpu(Check):
    """Offloading from a device that is the host.

    It frees no memory. Under `backend = graph` activations and optimizer state are copied nonetheless, which takes
    memory and time.

    ## Example
    ```
    cluster cpu(devices = 4)
    offload (activations = all)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    offload (activations = all)
    ```
    """

    code = "LP671"
    slug = "offload-on-cpu"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        offload, device = analysis.plan.offload, analysis.device
        if offload is None or device is None or device.kind != "cpu":
            return
        for field in _FIELDS:
            if getattr(offload, field) == "none":
                continue
            what = f"offloading {field}"
            host = f"the memory of `{device.name}` is the host's"
            copied = field != "parameters" and is_traced(analysis)
            yield self.at(
                analysis.span_of(offload, field),
                f"{what} frees nothing: {host}, and `backend = graph` copies them there, which takes memory and time"
                if copied
                else f"{what} has no effect: {host}",
                label="copied within the host" if copied else "has no effect",
                others=[Label(analysis.span_of(analysis.plan.cluster, "device"), f"`{device.name}`")],
                fix=replacement(offload, field, "none"),
            )


class ParametersWithoutUnits(Check):
    """Offloaded parameters without units to bring them back.

    `CPUOffloadPolicy` belongs to an `fsdp` unit, which copies its shard to the device before it gathers it.

    ## Example
    ```
    mesh (dp_replicate = 32)
    replicate on dp_replicate
    offload (parameters = all)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    offload (parameters = all)
    ```
    """

    code = "LP672"
    slug = "offload-without-fsdp"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        offload = analysis.plan.offload
        if offload is None or analysis.plan.fsdp is not None or offload.parameters == "none":
            return
        yield self.at(
            analysis.span_of(offload, "parameters"),
            "parameters can be offloaded only where `fsdp` holds them in units",
            label="no unit brings them back",
            help=["add `fsdp`, or leave the option out"],
            fix=replacement(offload, "parameters", "none"),
        )


class OffloadNeedsGraph(Check):
    """Offloading by piece or by need under the eager backend.

    `adaptive` and `bytes(n)` place copies of activations or optimizer state between the operations of one
    traced graph (DeepCompile, Algorithm 2). The eager backend can offload all or nothing of them.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    offload (optimizer = adaptive)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    offload (optimizer = all)
    ```
    """

    code = "LP673"
    slug = "offload-needs-graph"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        offload, fsdp = analysis.plan.offload, analysis.plan.fsdp
        if offload is None or is_traced(analysis):
            return
        for field in ("optimizer", "parameters"):
            amount = getattr(offload, field)
            if not (isinstance(amount, ByBytes) or amount == "adaptive"):
                continue
            word = amount.name if isinstance(amount, ByBytes) else amount
            backend = Label(analysis.span_of(fsdp, "backend"), "the eager backend") if fsdp is not None else None
            yield self.at(
                analysis.span_of(offload, field),
                f"`{field} = {word}` needs one traced graph, and the plan runs eagerly",
                label="not without `backend = graph`",
                others=[backend] if backend is not None else [],
                help=["write `fsdp … (backend = graph)`, or offload `all` or `none`"],
                fix=replacement(offload, field, "all"),
            )


class AmountWithoutFragment(Check):
    """An amount of optimizer state that no parameter's state fits into.

    Under `backend = graph` the optimizer's state leaves the device in whole parameters: first the largest that fits
    into `bytes(n)`, and then those that fit into the rest.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard (backend = graph) { layers.* = unit }
    offload (optimizer = bytes(256B))
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard (backend = graph) { layers.* = unit }
    offload (optimizer = bytes(256MiB))
    ```
    """

    code = "LP677"
    slug = "offload-too-small"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        offload = analysis.plan.offload
        if offload is None or not isinstance(offload.optimizer, ByBytes) or not is_traced(analysis):
            return
        if analysis.manifest is None or not moments(analysis) or muon_parameters(analysis):
            return
        fragments, most = state_fragments(analysis), offload.optimizer.n
        smallest = min(fragments, key=lambda one: one.bytes)
        if smallest.bytes <= most:
            return
        every = sum(one.bytes for one in fragments)
        yield self.at(
            analysis.span_of(offload, "optimizer"),
            f"`optimizer = bytes({format_exactly(most, 'bytes')})` offloads nothing: the smallest state, that of "
            f"`{smallest.parameter}`, is {format_exactly(smallest.bytes, 'bytes')} on a rank",
            label="no parameter's state fits",
            help=[f"the state of all parameters is {format_bytes(every)} on a rank", "or leave `optimizer` out"],
        )


class UpdatedInPlace(Check):
    """Optimizer state that is to stay on the device while the parameters are in host memory.

    The optimizer updates parameters where they are, and its state is there too.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    offload (parameters = all, optimizer = none)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    offload (parameters = all)
    ```
    """

    code = "LP675"
    slug = "offload-without-optimizer"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        offload = analysis.plan.offload
        if offload is None or offload.parameters != "all":
            return
        if offload.optimizer == "none" and written(offload, "optimizer"):
            yield self.at(
                analysis.span_of(offload, "optimizer"),
                "the optimizer updates parameters where they are, and its state is there too",
                label="cannot be on the device",
                others=[Label(analysis.span_of(offload, "parameters"), "in host memory")],
                help=["leave `optimizer` out, or write `all`"],
                fix=replacement(offload, "optimizer", "all"),
            )


class OffloadOfNothing(Check):
    """An `offload` statement that offloads nothing, or an optimizer's state where the optimizer keeps none.

    `sgd` without `momentum` keeps no state.

    ## Example
    ```
    offload (optimizer = none)
    ```

    ## Use instead
    ```
    offload (activations = all)
    ```
    """

    code = "LP674"
    slug = "offload-of-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        offload = analysis.plan.offload
        if offload is None:
            return
        if any(getattr(offload, field) != "none" for field in _FIELDS):
            yield from self._no_state(analysis, offload)
            return
        field = next((field for field in _FIELDS if written(offload, field)), "keyword")
        yield self.at(
            analysis.span_of(offload, field),
            "nothing is offloaded: optimizer state, parameters and activations are all `none`",
            label="has no effect",
            help=["leave the statement out"],
        )

    def _no_state(self, analysis: Analysis, offload: Offload) -> Iterator[Diagnostic]:
        """Of a graph it is an error, and beside offloaded parameters the optimizer is in host memory anyway."""
        if offload.optimizer == "none" or offload.parameters != "none" or is_traced(analysis):
            return
        if analysis.manifest is None or keeps_state(analysis):
            return
        yield self.at(
            analysis.span_of(offload, "optimizer"),
            "`optimizer` of `offload` has no effect: `sgd` without `momentum` keeps no state",
            label="nothing to offload",
            others=[Label(analysis.span_of(analysis.plan.optimizer, "algorithm"), "keeps no state")],
            help=["leave `optimizer` out, or give `sgd` a `momentum`"],
        )
