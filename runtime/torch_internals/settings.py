"""Private options of torch's configuration, which hold for the rest of a run."""

from __future__ import annotations

import sys


def enable_async_tp() -> None:
    """Let inductor split tensor-parallel products into pieces beside their collectives; imports inductor."""
    from torch._inductor import config

    config._micro_pipeline_tp = True


def disable_async_tp() -> None:
    """Undo :func:`enable_async_tp`; where inductor was not imported nothing was set."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        config._micro_pipeline_tp = False  # type: ignore[attr-defined]


def enable_symmetric_memory(group: str) -> None:
    """Let the ranks of a group read each other's memory, which pieces of products need."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group)
