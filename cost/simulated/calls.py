"""Calls of Python autograd functions, which take the host time beside the operations that they issue.

Functions of DTensor convert tensors to and from DTensors, or redistribute them; that of FSDP is called in a unit's
forward. Of other functions those count that issue nothing, since the host time of an operation includes that of the
function that issues it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from legoai.cost.simulated.device import Recorder
from legoai.cost.trace.records import Call
from legoai.runtime.torch_internals.patching import original, patched

_FORWARD: Final = "torch.autograd.function:Function.apply"
_BACKWARD: Final = "torch.autograd.function:BackwardCFunction.apply"
_OF_PACKAGE: Final[dict[str, tuple[Call, Call | None]]] = {
    "torch.distributed.tensor.": ("conversion", "conversion backward"),
    "torch.distributed.fsdp.": ("unit", None),
}
"""Calls of the functions of a package: in forward and in backward, where they count."""


@contextlib.contextmanager
def counted_functions(recorder: Recorder) -> Iterator[None]:
    """While entered, tell the recorder of calls of Python autograd functions, and of their backward."""
    forward, backward = original(_FORWARD).__func__, original(_BACKWARD)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        known = _known(cls)
        if known is not None:
            recorder.call(known[0])
            return forward(cls, *args, **kwargs)
        before = recorder.issued
        result = forward(cls, *args, **kwargs)
        if recorder.issued == before:
            recorder.call("function")
        return result

    def apply_backward(self: Any, *args: Any) -> Any:
        known = _known(self._forward_cls)
        if known is not None:
            if known[1] is not None:
                recorder.call(known[1])
            return backward(self, *args)
        before, outer = recorder.issued, recorder.function
        recorder.function = True
        try:
            result = backward(self, *args)
        finally:
            recorder.function = outer
        if recorder.issued == before:
            recorder.call("function backward")
        return result

    with patched(_FORWARD, classmethod(apply)), patched(_BACKWARD, apply_backward):
        yield


def _known(function: type) -> tuple[Call, Call | None] | None:
    return next((calls for package, calls in _OF_PACKAGE.items() if function.__module__.startswith(package)), None)
