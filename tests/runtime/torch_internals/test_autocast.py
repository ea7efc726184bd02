"""Autocast of the device type that is simulated; each test fails without the patches that name it."""

from __future__ import annotations

import pytest
import torch

from legoai.cost.simulated.device import SIM, Recorder
from legoai.cost.simulated.operators.autocast import autocast_rules
from legoai.cost.simulated.process import simulated_device
from support.simulation import simulated


class Nothing(Recorder):
    def record(self, record) -> None: ...


def simulate(function, kind: str = "cuda"):
    """Call a function with a kind of simulated device; returns what it returns."""
    return simulated.in_a_fork(_simulate, function, kind)


def _simulate(function, kind: str):
    with simulated_device(Nothing(), rank=0, world=1, kind=kind) as fake, autocast_rules(kind), fake:
        return function()


def product() -> str:
    """The dtype of a product of fp32 on the simulated device, by its name, which a pipe takes."""
    x = torch.empty(4, 4, device=SIM)
    return str((x @ x).dtype)


def of_cuda() -> list[str]:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = [product()]
        with torch.autocast("cuda", enabled=False):
            found.append(product())
    return [*found, product()]


@pytest.mark.filterwarnings("error")
def test_autocast_of_cuda_is_on():
    assert simulate(of_cuda) == ["torch.bfloat16", "torch.float32", "torch.float32"]


def states() -> list[object]:
    found: list[object] = [torch.get_autocast_dtype("cuda") == torch.float16]
    with torch.autocast(SIM, dtype=torch.bfloat16):
        found += [torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")]
        found += [str(torch.get_autocast_dtype("cuda")), str(torch.get_autocast_gpu_dtype())]
    return [*found, torch.is_autocast_enabled("cuda")]


def test_state_of_cuda_is_that_of_the_simulated_gpu():
    assert simulate(states) == [True, True, True, False, "torch.bfloat16", "torch.bfloat16", False]


class Widened(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x + x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad + grad


def widened() -> str:
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        return str(Widened.apply(torch.empty(4, device=SIM, dtype=torch.bfloat16)).dtype)


def test_inputs_are_cast_for_cuda():
    assert simulate(widened) == "torch.float32"


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast.*:FutureWarning")
@pytest.mark.filterwarnings("error")
def test_every_spelling_of_autocast_of_cuda_is_that_of_the_gpu():
    def spelled() -> list[str]:
        found = []
        for made in (torch.amp.autocast("cuda"), torch.cuda.amp.autocast(), torch.autocast("cuda", torch.float16)):
            with made:
                found.append(product())
            found.append(made(product)())
        torch.set_autocast_enabled(True)
        return [*found, product()]

    assert simulate(spelled) == ["torch.float16"] * 7


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_of_the_cpu_is_that_of_a_simulated_cpu():
    def of_each() -> list[str]:
        found = []
        for kind in ("cpu", "cuda", SIM):
            with torch.autocast(kind):
                found.append(product())
        return found

    assert simulate(of_each, "cpu") == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
    assert simulate(of_each)[0] == "torch.float32"
