"""Calls of a program's preparation have the outputs of the fake tensor mode, and later simulations look them up."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from legoai.cost.capture import capture
from legoai.cost.simulated.device import SIM, Kind
from legoai.cost.simulated.operators import propagation, results
from legoai.cost.simulated.preparation import Preparation
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Record
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.patching import patched_attribute
from support.marks import slow_but
from support.simulation import simulated
from support.simulation.simulator import in_the_simulator


def metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device.type


def prepared(*, fast: bool) -> tuple[bool, list[object]]:
    """Whether shards of a parameter on the meta device are fake, and the metadata of what is made of it."""
    held = Capture(kernels=("cuda", "9.0"))
    weight = nn.Parameter(torch.empty(8, 6, dtype=torch.bfloat16, device="meta").t())
    with simulated_device(held, rank=0, world=1, kind="cuda") as fake, fake:
        with Preparation(held.kernels) if fast else contextlib.nullcontext():
            shard = weight.detach().narrow(0, 2, 4)
            padded = shard.new_zeros(7, 3)
            moved = nn.Parameter(torch.empty_like(weight, device=SIM))
            halves = moved.t().view(-1).chunk(2)
        assert isinstance(moved, FakeTensor) and moved.requires_grad and moved.fake_mode is fake
        assert {one.untyped_storage()._cdata for one in halves} == {moved.untyped_storage()._cdata}
        return isinstance(shard, FakeTensor), [metadata(one) for one in (shard, padded, moved, *halves)]


def test_preparation_gives_the_tensors_of_the_fake_mode():
    fake, wanted = in_the_simulator(prepared, fast=False)
    still_fake, found = in_the_simulator(prepared, fast=True)
    assert fake and not still_fake
    assert found == wanted == in_the_simulator(prepared, fast=True)[1]


def made_while_off() -> bool:
    """Whether tensors of a graph that is traced are fake."""
    held = Capture()
    with simulated_device(held, rank=0, world=1, kind="cuda") as fake, fake, Preparation(None) as mode, mode.off():
        return isinstance(torch.empty(2, 3, device="meta").t(), FakeTensor)


def test_a_mode_that_is_off_makes_fake_tensors():
    assert in_the_simulator(made_while_off)


def answered(kind: Kind) -> tuple[bool, list[int], list[int], list[int]]:
    """Whether two simulations record the same, what is known after each, and what is left where less is kept."""
    name = "fsdp and tensor parallel"
    caches = results._answers_on, propagation._known_on
    for cache in caches:
        cache.cache_clear()

    def simulate() -> tuple[Sequence[Record], list[int]]:
        records = capture(simulated.trainer_of(name), world=simulated.world_of(name), kind=kind).records
        return records, [len(cache((kind, None))) for cache in caches]

    (first, after_first), (second, after_second) = simulate(), simulate()
    with patched_attribute(results, "_MOST_ANSWERS", 0), patched_attribute(propagation, "_MOST_KNOWN", 0):
        left = [len(results.Results((kind, None)).answers)]
        propagation.known_metadata(lambda *_: None, (kind, None))
        left.append(len(propagation._known_on((kind, None))))
    return first == second, after_first, after_second, left


@pytest.mark.parametrize("kind", slow_but(["cpu", "cuda"], "cuda"))
def test_a_second_simulation_finds_the_answers_of_the_first(kind: Kind):
    equal, after_first, after_second, left = in_the_simulator(answered, kind)
    assert equal
    assert after_first == after_second
    assert all(after_first)
    assert left == [0, 0]
