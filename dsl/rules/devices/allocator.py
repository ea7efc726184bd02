"""`allocator`: rules about the device's memory allocator."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class AllocatorOnCpu(Check):
    """Settings of an allocator that the device does not use.

    ## Example
    ```
    cluster cpu(devices = 4)
    allocator (expandable_segments = true)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    allocator (expandable_segments = true)
    ```
    """

    code = "LP676"
    slug = "allocator-on-cpu"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        allocator, device = analysis.plan.allocator, analysis.device
        if allocator is not None and device is not None and device.kind == "cpu":
            yield self.at(
                analysis.span_of(allocator, "keyword"),
                f"`allocator` has no effect: memory of `{device.name}` comes from the host's allocator",
                label="has no effect",
                others=[Label(analysis.span_of(analysis.plan.cluster, "device"), f"`{device.name}`")],
                help=("leave it out",),
            )
