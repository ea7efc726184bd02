"""Modules of the FSDP units whose parameters are gathered, or whose gradients are reduced.

In a backward, FSDP gathers a unit's parameters while another unit computes, and reduces the gradients of the root after
those of all other units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from legoai.cost.simulated.device import Recorder
from legoai.runtime.torch_internals.patching import original, patched

_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"


@contextlib.contextmanager
def noted_units(recorder: Recorder, paths: Mapping[int, str]) -> Iterator[None]:
    """While entered, tell the recorder which unit's parameters or gradients are communicated.

    Args:
        recorder: of the trace.
        paths: of modules, by their identity.
    """

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(group: Any, *args: Any, **kwargs: Any) -> Any:
            before, recorder.unit = recorder.unit, paths.get(id(group.modules[0]))
            try:
                return function(group, *args, **kwargs)
            finally:
                recorder.unit = before

        return communicate

    with contextlib.ExitStack() as stack:
        for name in ("unshard", "post_backward"):
            path = f"{_GROUP}.{name}"
            stack.enter_context(patched(path, noting(original(path))))
        yield
