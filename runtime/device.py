"""Device of a run: its type, streams, memory and process groups.

Everything that differs between a CPU, a GPU and a simulated device is behind `Device`; no other file of the
runtime names a device type.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.host_memory import keep_freed_memory
from legoai.runtime.torch_internals.distributed.random_numbers import distribute_random_numbers
from legoai.runtime.torch_internals.settings import set_allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of this rank.

    Attributes:
        type: the device type that `init_device_mesh` takes: `cpu`, `cuda`, or the name of a registered
            backend.
        index: this rank's device on its host; ignored on a CPU.
        holds_values: False for a simulated device, whose tensors have shapes only: parameters are then allocated, but
            not initialised.
    """

    type: str
    index: int = 0
    holds_values: bool = True

    @classmethod
    def choose(cls, name: str, *, planned: str | None = None) -> Device:
        """Return the device that `--device NAME` means on this host.

        Args:
            name: of a device type, or `auto`: what the plan is for, or else a GPU where there is one.
            planned: the device type that the plan is for.

        Raises:
            RunError: there is no such device type, or it is not available, or this host has fewer devices of it than
                local ranks.
        """
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if name == "auto":
            if planned == "cuda" and not torch.cuda.is_available():
                raise RunError(
                    RunErrorCode.DEVICE,
                    "the plan is for GPUs, and this torch finds none",
                    help="pass --device cpu to run it on the CPU all the same",
                )
            name = planned or ("cuda" if torch.cuda.is_available() else "cpu")
        if name == "cpu":
            return cls(type="cpu")
        if name == "cuda" and not torch.cuda.is_available():
            raise RunError(RunErrorCode.DEVICE, "--device cuda: this torch finds no GPU", help="use --device cpu")
        count = _count(name)
        if index >= count:
            raise RunError(
                RunErrorCode.DEVICE,
                f"local rank {index} has no device of its own: this host has {count} {name} devices",
                help=f"start torchrun with --nproc-per-node {count}, or use --device cpu",
            )
        return cls(type=name, index=index)

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank's tensors."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def collective_backend(self) -> str:
        """The process group backend: gloo for a CPU; for a GPU NCCL, and gloo for CPU tensors."""
        return {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}.get(self.type, "gloo")

    def activate(self, *, allocator_settings: str = "") -> None:
        """Make this the current device of the process; on a CPU, keep freed memory in the process.

        Args:
            allocator_settings: of a GPU's caching allocator, applied before its first allocation.
        """
        if self.type == "cpu":
            keep_freed_memory()
            return
        if self.type == "cuda" and allocator_settings:
            set_allocator(allocator_settings)
        self._module().set_device(self.index)

    def synchronize(self) -> None:
        """Wait until all that was started on the device has finished."""
        if self.type != "cpu":
            self._module().synchronize()

    def random_state(self) -> torch.Tensor:
        """Return the state of the device's default random generator."""
        return torch.get_rng_state() if self.type == "cpu" else self._module().get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's default random generator."""
        if self.type == "cpu":
            torch.set_rng_state(state)
        else:
            self._module().set_rng_state(state)

    def distribute_random_numbers(self, mesh: DeviceMesh) -> None:
        """Let each shard of a DTensor draw its own part of the random numbers, from the seeds that the ranks have.

        DTensor cannot do so on a CPU, where each shard draws as a tensor of its own would.
        """
        if self.type != "cpu":
            distribute_random_numbers(mesh, has_state=self.holds_values)

    def reset_peak_memory(self) -> None:
        """Start a new measurement of `peak_memory`."""
        reset = getattr(self._module(), "reset_peak_memory_stats", None) if self.type != "cpu" else None
        if reset is not None:
            reset()

    def peak_memory(self) -> int:
        """Return the peak in bytes: allocated by tensors on a GPU; resident memory of the process on a CPU."""
        if self.type == "cpu":
            import resource
            import sys

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
        return int(self._module().max_memory_allocated())

    def name(self) -> str:
        """Return the vendor's name of the device."""
        if self.type == "cpu":
            return processor_name()
        found = getattr(self._module(), "get_device_name", None)
        return self.type if found is None else str(found(self.index))

    def _module(self) -> Any:
        return torch.get_device_module(self.type)


def _count(name: str) -> int:
    """Return the number of this host's devices of a type.

    Raises:
        RunError: torch does not have the type, or finds no device of it.
    """
    try:
        kind = torch.device(name).type
        count = int(torch.get_device_module(name).device_count())
    except (RuntimeError, AttributeError):  # no type, or one without devices to run on, such as `meta`
        raise RunError(
            RunErrorCode.DEVICE, f"--device {name}: torch has no such device", help="use auto, cpu or cuda"
        ) from None
    if kind != name:
        raise RunError(
            RunErrorCode.DEVICE,
            f"--device {name} names one device, and each rank has its own",
            help=f"use --device {kind}",
        )
    if not count:
        raise RunError(RunErrorCode.DEVICE, f"--device {name}: this torch finds none", help="use --device cpu")
    return count


def processor_name() -> str:
    """Return the processor as the operating system names it, and its architecture where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - a virtual file
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
