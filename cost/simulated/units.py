"""Modules of the FSDP units whose parameters are gathered or kept, or whose gradients are reduced.

In a backward, FSDP gathers a unit's parameters while another unit computes, and reduces the gradients of the root after
those of all other units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from legoai.cost.simulated.device import Recorder
from legoai.cost.trace.records import Categorise
from legoai.runtime.torch_internals.distributed.units import kept_after_forward
from legoai.runtime.torch_internals.patching import original, patched

_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_KEEPING: Final = "_to_sharded_post_forward"


@contextlib.contextmanager
def noted_units(
    recorder: Recorder, paths: Mapping[int, str], number_of: Callable[[torch.Tensor], int | None]
) -> Iterator[None]:
    """While entered, tell the recorder which unit's parameters or gradients are communicated, and what a unit keeps.

    Args:
        recorder: of the trace.
        paths: of modules, by their identity.
        number_of: returns the number of a tensor's storage, if it has one.
    """

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(group: Any, *args: Any, **kwargs: Any) -> Any:
            before, recorder.unit = recorder.unit, paths.get(id(group.modules[0]))
            try:
                return function(group, *args, **kwargs)
            finally:
                recorder.unit = before

        return communicate

    def keep(group: Any) -> None:
        resharded(group)
        for kept in kept_after_forward(group):
            number = number_of(kept)
            if number is not None:
                recorder.record(Categorise(number, "unsharded_parameter", paths.get(id(group.modules[0]), "")))

    with contextlib.ExitStack() as stack:
        resharded = original(f"{_GROUP}.{_KEEPING}")
        stack.enter_context(patched(f"{_GROUP}.{_KEEPING}", keep))
        for name in ("unshard", "post_backward"):
            path = f"{_GROUP}.{name}"
            stack.enter_context(patched(path, noting(original(path))))
        yield
