"""Gradient buffers of FSDP units, and the units of recorded collectives."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Allocate, Categorise, Collective
from legoai.runtime.torch_internals.distributed.units import summed_in_other_type, unsharded_gradients
from support.simulation.simulated import in_a_fork

BF16, FP32 = torch.bfloat16, torch.float32


def summed(param: torch.dtype | None, reduce: torch.dtype | None) -> list[torch.dtype | None]:
    """Gradient buffers after two backward passes without reduction: as computed, and its sum."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("fake", rank=0, world_size=2)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (2,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce),
    )
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    gradients = [getattr(owner, name) for owner, name in unsharded_gradients(summed_in_other_type(model))]
    return [None if gradient is None else gradient.dtype for gradient in gradients]


@pytest.mark.parametrize(
    ("param", "reduce", "kept"),
    [
        (BF16, FP32, [None, FP32]),
        (None, BF16, [None, BF16]),
        (BF16, None, []),
        (BF16, BF16, []),
        (None, FP32, []),
        (None, None, []),
    ],
)
def test_gradient_accumulation_dtype_follows_the_reduction_dtype(param, reduce, kept):
    assert in_a_fork(summed, param, reduce) == kept


def recorded() -> list[tuple[str, str, str]]:
    """Collectives of a step of three units and their root, which has a parameter too."""
    recorder = Capture()
    with simulated_device(recorder, rank=0, world=2, kind="cuda") as fake:
        recorder.mesh = mesh = init_device_mesh(SIM, (2,), mesh_dim_names=("dp",))
        with fake, recorder.hooks(), Dispatch(recorder):
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False, device=SIM) for _ in range(4)))
            for unit in (*model[:3], model):
                fully_shard(unit, mesh=mesh, reshard_after_forward=unit in (model[0], model[2]))
            recorder.paths.update({id(module): path for path, module in model.named_modules()})
            recorder.next_batch()
            model(torch.ones(2, 4, device=SIM)).sum().backward()
    moved = [item for item in recorder.records if isinstance(item, Collective)]
    return [(item.kind, item.phase, item.module) for item in moved]


def test_collectives_of_parameters_name_their_unit():
    """`0` is gathered ahead, `1` and the root stay gathered; the end reduces units whose input has no gradient."""
    found = in_a_fork(recorded)
    assert [module for _, phase, module in found if phase == "forward"] == ["", "0", "1", "2"]
    again = [module for kind, phase, module in found if phase == "backward" and kind == "all_gather"]
    reduced = [module for kind, phase, module in found if phase == "backward" and kind == "reduce_scatter"]
    assert (again, reduced) == (["2", "0"], ["2", "1", "", "0"])


def kept_pieces() -> tuple[list[tuple[int, str, str]], list[tuple[str, tuple[int, ...], str]]]:
    """What a step of two units of 16 parameters keeps over two of four ranks, and its gathers by axis and ranks."""
    recorder = Capture()
    with simulated_device(recorder, rank=0, world=4, kind="cuda") as fake:
        recorder.mesh = mesh = init_device_mesh(SIM, (4,), mesh_dim_names=("dp",))
        with fake, recorder.hooks(), Dispatch(recorder):
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False, device=SIM) for _ in range(2)))
            for unit in model:
                fully_shard(unit, mesh=mesh, reshard_after_forward=2)
            fully_shard(model, mesh=mesh)
            recorder.paths.update({id(module): path for path, module in model.named_modules()})
            recorder.next_batch()
            model(torch.ones(2, 4, device=SIM)).sum().backward()
    sizes = {item.storage: item.bytes for item in recorder.records if isinstance(item, Allocate)}
    kept = [item for item in recorder.records if isinstance(item, Categorise) and item.module]
    gathers = [item for item in recorder.records if isinstance(item, Collective) and item.kind == "all_gather"]
    return (
        [(sizes[item.storage], item.category, item.module) for item in kept if item.category == "unsharded_parameter"],
        [(item.axis, item.ranks, item.module) for item in gathers],
    )


def test_pieces_kept_after_forward_are_parameters_of_their_unit():
    kept, gathers = in_a_fork(kept_pieces)
    # Half of 16 parameters of 4 bytes; the backward gathers these over the two ranks, which are part of the axis.
    assert {size for size, _, _ in kept} == {32}
    assert [module for _, _, module in kept] == ["0", "1"]
    assert gathers == [("dp", (0, 1, 2, 3), "0"), ("dp", (0, 1, 2, 3), "1"), ("dp", (0, 1), "1"), ("dp", (0, 1), "0")]
