"""Options of torch's configuration that hold for a run, private ones among them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.compiler.config
import torch.distributed as dist


def enable_async_tp() -> None:
    """Let inductor split tensor-parallel products into chunks that overlap their collectives; imports inductor."""
    from torch._inductor import config

    config._micro_pipeline_tp = True


def disable_async_tp() -> None:
    """Undo :func:`enable_async_tp`; where inductor was not imported nothing was set."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        config._micro_pipeline_tp = False  # type: ignore[attr-defined]


def enable_symmetric_memory(group: str) -> None:
    """Let the ranks of a group access each other's memory, which chunked products need."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(dist.distributed_c10d.GroupName(group))


def set_allocator(settings: str) -> None:
    """Set options of CUDA's caching allocator, in the form of `PYTORCH_ALLOC_CONF`, which then has no effect."""
    torch._C._accelerator_setAllocatorSettings(settings)


@contextlib.contextmanager
def tagged_compile_cache(tag: str) -> Iterator[None]:
    """Separate what is compiled while entered from what was compiled with another tag, on disk too.

    It is set for all threads, unlike by `config.patch`: backward graphs may be compiled in one of autograd's threads.
    """
    before = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{before} {tag}".strip()
    try:
        yield
    finally:
        torch.compiler.config.cache_key_tag = before
