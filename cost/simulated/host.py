"""Host memory of a program on the simulated device.

Tensors on the host are fake, like those on the device. They take no device memory. Copies between host and device, and
operators that run on the host, are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from legoai.cost.simulated.device import SIM, Kind
from legoai.runtime.offloading import offload
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from legoai.runtime.torch_internals.patching import patched_attribute, patched_item


@contextlib.contextmanager
def host_memory(kind: Kind) -> Iterator[None]:
    """Support page-locked host memory; on a CPU, treat host memory as the device's own."""
    pin = torch.ops.aten._pin_memory.default

    def pinned(mode: FakeTensorMode, function: Any, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    home = torch.device(SIM, 0) if kind == "cpu" else offload.HOST
    with (
        patched_item("torch._subclasses.fake_impls:op_implementations_dict", pin, pinned),
        patched_attribute(offload, "HOST", home),
    ):
        yield
