"""Copies between device and host memory beside computation: one stream for each direction, and events between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from legoai.runtime.offloading import offload


class OnHost(NamedTuple):
    """A tensor in host memory.

    Attributes:
        tensor: page-locked where the device is a GPU.
        device: from which it was copied.
        copied: the end of the copy; None where it was synchronous.
    """

    tensor: torch.Tensor
    device: torch.device
    copied: Any


class Arriving(NamedTuple):
    """A tensor on the device that is still being copied.

    Attributes:
        tensor: to be read after ``copied``.
        copied: the end of the copy; None where it was synchronous.
    """

    tensor: torch.Tensor
    copied: Any


class HostCopies:
    """Copies of one rank. On a CPU they are synchronous: there are no streams, and all memory is the host's.

    Device memory belongs to the compute stream, which waits for the end of a copy before it uses memory that the copy
    has read or written. So the allocator may reuse memory as soon as the last reference is gone.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}

    def to_host(self, tensor: torch.Tensor) -> OnHost:
        """Begin to copy a tensor of the current stream; the caller keeps it alive until :meth:`wait_on_host`."""
        device = tensor.device
        if _is_host(device):
            return OnHost(_like(tensor, device).copy_(tensor), device, None)
        module, stream = self._stream("to host", device)
        with module.stream(stream):
            host = _like(tensor, offload.HOST).copy_(tensor, non_blocking=True)
        return OnHost(host, device, stream.record_event())

    def wait_on_host(self, made: OnHost, _: torch.Tensor) -> OnHost:
        """Make the current stream wait for the end of a copy, after which its source need not be kept alive."""
        _wait(made.copied, made.device)
        return made

    def to_device(self, made: OnHost) -> Arriving:
        """Begin to copy a tensor back, into memory that the current stream is done with."""
        host, device, _ = made
        arrived = _like(host, device)
        if _is_host(device):
            return Arriving(arrived.copy_(host), None)
        module, stream = self._stream("to device", device)
        with module.stream(stream):
            arrived.copy_(host, non_blocking=True)
        return Arriving(arrived, stream.record_event())

    def wait_on_device(self, made: Arriving) -> torch.Tensor:
        """Make the current stream wait for the end of a copy, and return the result."""
        _wait(made.copied, made.tensor.device)
        return made.tensor

    def _stream(self, direction: str, device: torch.device) -> tuple[Any, Any]:
        """Return the module of a device, and its stream for a direction, after the current stream's present work."""
        module = getattr(torch, device.type)
        if direction not in self._streams:
            self._streams[direction] = module.Stream()
        stream = self._streams[direction]
        stream.wait_stream(module.current_stream())
        return module, stream


def _is_host(device: torch.device) -> bool:
    return device.type == offload.HOST.type


def _wait(event: Any, device: torch.device) -> None:
    if event is not None:
        getattr(torch, device.type).current_stream().wait_event(event)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an empty tensor of the same strides, so that views of the one are views of the other."""
    pinned = device == offload.HOST and torch.cuda.is_available()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned)
