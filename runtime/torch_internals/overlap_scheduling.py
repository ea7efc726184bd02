"""Inductor's automatic scheduler of communication: which collectives are merged, when each starts and is waited for.

Tried on torch 2.13.0, and on 2.12.0, which does not merge the collectives of parameters before it schedules. Importing
it imports inductor, which takes seconds: only the pass that schedules does, when it runs. Left to itself the scheduler
asks the driver and NCCL's tuning for the times of operators, differently on each machine; here all of them are given.
What it logs of its own estimates would ask for a GPU as well.
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
        module: whose operators read what their arguments say, of any name, and nothing else that others change.
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
    """Empty a cache of torch 2.13 that keeps the nodes of every graph."""
    clear = getattr(get_group_name, "cache_clear", None)
    if clear is not None:
        clear()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Let a logger that tells of its work on every rank speak only of what goes wrong, while entered."""
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
