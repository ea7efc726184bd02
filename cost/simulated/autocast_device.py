"""Device type of autocast in a simulation: that of the device which is simulated stands for the simulated device.

Models name the device on which they run, most often `torch.autocast("cuda")`, while their tensors are on the simulated
device. Without a GPU in this process torch would turn such an autocast off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from legoai.cost.simulated.device import SIM, Kind
from legoai.runtime.torch_internals.patching import original, patched

_OF_A_DEVICE_TYPE: Final = (
    "torch:is_autocast_enabled",
    "torch:set_autocast_enabled",
    "torch:get_autocast_dtype",
    "torch:set_autocast_dtype",
)
"""Functions that `torch.autocast` calls with its device type as the first argument."""
_CAST: Final = "torch.amp.autocast_mode:_cast"


@contextlib.contextmanager
def autocast_device(kind: Kind) -> Iterator[None]:
    """Let autocast of the device type that is simulated be that of the simulated device, with its default dtype.

    Args:
        kind: of the simulated device. Autocast of the other kind does what torch does here, with no tensor of the
            simulated device.
    """
    before = torch.get_autocast_dtype(SIM)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_dtype, SIM, before)
        torch.set_autocast_dtype(SIM, torch.get_autocast_dtype(kind))
        for path in _OF_A_DEVICE_TYPE:
            stack.enter_context(patched(path, _renamed(original(path), 0, kind)))
        stack.enter_context(patched("torch:get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda")))
        stack.enter_context(patched(_CAST, _renamed(original(_CAST), 1, kind)))
        if kind == "cuda":
            stack.enter_context(patched("torch.cuda.amp.common:amp_definitely_not_available", lambda: False))
            stack.enter_context(patched("torch.cuda:is_bf16_supported", lambda including_emulation=True: True))
        yield


def _renamed(function: Any, place: int, kind: Kind) -> Any:
    """Return a function of torch that takes the device type of a kind for that of the simulated device.

    Args:
        function: of torch.
        place: of its argument that is the device type; where that is the first and is left out, it is CUDA's.
        kind: of the simulated device.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if place == 0 and not kwargs and not (args and isinstance(args[0], str)):
            args = ("cuda", *args)
        if len(args) > place and args[place] == kind:
            args = (*args[:place], SIM, *args[place + 1 :])
        elif kwargs.get("device_type") == kind:
            kwargs["device_type"] = SIM
        return function(*args, **kwargs)

    return call
