"""Inductor's automatic scheduler of communication, which merges collectives and places their starts and waits.

Tried on torch 2.13.0, and on 2.12.0, which does not merge the collectives of parameters before scheduling. Importing it
imports inductor, which takes seconds, so only the pass that schedules does so, when it runs. By default the scheduler
gets operator times from the driver and NCCL's tuning, differently on each machine; here all times are given. Logging of
its own estimates, which would need a GPU as well, is disabled.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import fx
from torch._inductor.fx_passes import fsdp
from torch._inductor.fx_passes.overlap_scheduling import get_group_name, schedule_overlap_bucketing

from legoai.runtime.torch_internals.patching import patched

__all__ = ["schedule"]

_ESTIMATION: Final = "torch._inductor.fx_passes.overlap_scheduling:estimate_roofline_runtime_ms"
_LOGS: Final = (
    "torch._inductor.fx_passes.node_runtime_estimation:_log_compute_estimations",
    "torch._inductor.fx_passes.node_runtime_estimation:_log_collective_benchmarks",
)
_LARGE: Final = "pre_bucketing_fsdp_collectives_bucket_cap_mb"


def schedule(
    module: fx.GraphModule, milliseconds: Callable[[fx.Node, int | None], float | None], *, megabytes: float
) -> None:
    """Merge and move the collectives of a graph, in place, with the scheduler's defaults.

    Args:
        module: whose operators read only their arguments, and nothing else that others change.
        milliseconds: of a node, of a collective also with a buffer of so many bytes; None where it costs nothing.
        megabytes: of the buckets into which gathers and reductions of parameters are merged before all else.
    """
    options: dict[str, Any] = {_LARGE: megabytes}
    if _LARGE not in inspect.signature(schedule_overlap_bucketing).parameters:
        del options[_LARGE]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet(fsdp.logger))
        stack.enter_context(patched(_ESTIMATION, lambda node: 0.0))
        for path in _LOGS:
            stack.enter_context(patched(path, lambda *_, **__: None))
        try:
            schedule_overlap_bucketing(
                module,
                collective_bucketing=True,
                custom_runtime_estimation=milliseconds,
                compute_estimator="analytical",
                bucket_mode="custom_ops",
                **options,
            )
        finally:
            _forget()


def _forget() -> None:
    """Clear a cache of torch 2.13 that keeps the nodes of every graph alive."""
    clear = getattr(get_group_name, "cache_clear", None)
    if clear is not None:
        clear()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Limit a logger that reports its work on every rank to errors, while entered."""
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
