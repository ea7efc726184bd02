"""Masks of dropout on DTensors: each data rank has its own, and recomputation draws those of forward again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, _dispatch, _random
from torch.utils.checkpoint import checkpoint

from legoai.cost.capture import capture
from legoai.cost.trace.records import Kernel
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.distributed.random_numbers import forget_random_numbers
from support.simulation.simulated import in_a_fork
from support.training import programs


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[list[int]]:
    """Let DTensor's random operators go as on a GPU, with the state of the CPU's generator, which has no offset.

    Yields the sizes of what is broadcast.
    """
    broadcast, sizes = dist.broadcast, []

    def on_a_gpu(self: object, device: torch.device) -> None:
        self._device, self._device_handle, self._use_distribute_region = torch.device("cuda"), object(), True

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(tensor.numel())
        return broadcast(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_random._RNGStateTracker, "__init__", on_a_gpu)
        patch.setattr(_random, "_resolve_device", lambda device_mesh: torch.device("cuda"))
        patch.setattr(_random.OffsetBasedRNGTracker, "_get_device_state", lambda self: torch.get_rng_state())
        patch.setattr(
            _random.OffsetBasedRNGTracker, "_set_device_state", lambda self, state: torch.set_rng_state(state)
        )
        patch.setattr(_random.OffsetBasedRNGTracker, "_distribute_region", lambda *_, **__: contextlib.nullcontext())
        patch.setattr(_dispatch, "is_rng_supported_mesh", lambda mesh: True)
        patch.setattr(dist, "broadcast", counted)
        yield sizes
    forget_random_numbers()


def drawn(*, distributed: bool) -> tuple[list[list[float]], int]:
    """The masks of a step of this data rank, in forward and in recomputation, and the number of broadcasts."""
    mesh, masks = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), []
    x = DTensor.from_local(torch.ones(64, requires_grad=True), mesh["tp"], [Shard(0)])

    def dropped(x: DTensor) -> DTensor:
        out = nn.functional.dropout(x, 0.5)
        masks.append(out.to_local().tolist())
        return out.sin()

    with as_on_a_gpu() as sizes:
        if distributed:
            Device(type="cuda").distribute_random_numbers(mesh)
        torch.manual_seed(dist.get_rank())
        checkpoint(dropped, x, use_reentrant=False).to_local().sum().backward()
    return masks, len(sizes)


def test_ranks_draw_by_their_own_seeds_and_exchange_nothing(gloo):
    (first, broadcasts), (second, _) = gloo(2)(drawn, distributed=True)
    assert not broadcasts
    assert first[0] != second[0]
    assert first[0] == first[1] and second[0] == second[1]


def test_dtensor_alone_gives_all_ranks_the_state_of_the_first(gloo):
    """What `distribute_random_numbers` prevents; if it no longer happens, that is no longer needed."""
    (first, broadcasts), (second, _) = gloo(2)(drawn, distributed=False)
    assert broadcasts == 1
    assert first[0] == second[0]
    assert second[0] != second[1], "the gradient of another mask"


def test_cpu_has_no_offsets():
    Device(type="cpu").distribute_random_numbers(None)
    assert _random._rng_tracker is None


def _simulated_dropout() -> tuple[int, bool]:
    alone = programs.trainer(tp=2, global_batch=4)

    def parallelize(model: nn.Module, mesh: object) -> nn.Module:
        model = alone.parallelize(model, mesh)
        model.norm = nn.Sequential(model.norm, nn.Dropout(0.1))
        return model

    trace = capture(dataclasses.replace(alone, parallelize=parallelize), world=2, replay=False)
    step = trace.between(trace.steps[-1])
    count = sum(isinstance(item, Kernel) and item.op == "aten.native_dropout" for item in step)
    return count, _random._rng_tracker is None


def test_dropout_of_dtensors_is_simulated():
    assert in_a_fork(_simulated_dropout) == (2, True)
