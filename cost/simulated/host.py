"""Host memory of a program on the simulated device.

Tensors on the host are fake as those on the device are. They count for no memory of the device; copies between the two
and the operators that run on the host are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from legoai.cost.simulated.device import SIM, Kind
from legoai.runtime import offload


@contextlib.contextmanager
def host_memory(kind: Kind) -> Iterator[None]:
    """Let host memory be page-locked where a program asks for it, and be the device's own where the device is a cpu."""
    pin = torch.ops.aten._pin_memory.default
    before = fake_impls.op_implementations_dict[pin]
    home = offload.HOST

    def pinned(mode: FakeTensorMode, function: Any, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    fake_impls.op_implementations_dict[pin] = pinned
    if kind == "cpu":
        offload.HOST = torch.device(SIM, 0)
    try:
        yield
    finally:
        fake_impls.op_implementations_dict[pin] = before
        offload.HOST = home
