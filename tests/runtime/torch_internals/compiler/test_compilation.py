"""Effects of the patches of compilation; each test fails without the patches that name it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh

from legoai.cost.compilation import gpu, inductor
from legoai.cost.compilation.async_tp import as_with_nccl, symmetric_memory
from legoai.cost.compilation.modules import _CompiledModule, compilation
from legoai.cost.simulated.device import SIM, SimulationError
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import HostKernel, Kernel
from legoai.runtime.compiled import overlap_tensor_parallel
from legoai.runtime.recomputation.compiled import SIZE, compile_within
from legoai.runtime.torch_internals.compiler.graphs import FakeScriptObject
from legoai.runtime.torch_internals.compiler.inductor import DeviceProperties, config
from legoai.runtime.torch_internals.patching import original
from legoai.specs.cluster import Device, Processor, device, device_names
from support.simulation import simulated
from support.training import programs

SHAPE = (2, 32, programs.DIM)


def kernels(module: nn.Module, *, gpu: Device | None = None, shape: tuple[int, ...] = SHAPE) -> list:
    """The kernels of a compiled module's forward and backward on a simulated GPU."""
    return simulated.in_a_fork(_kernels, module, gpu or device("h100_sxm"), shape)


def _kernels(module: nn.Module, gpu: Device, shape: tuple[int, ...]) -> list:
    recorder = Capture()
    with (
        simulated_device(recorder, rank=0, world=1, kind="cuda") as fake,
        compilation(recorder, "cuda", gpu),
        fake,
        recorder.hooks(),
        Dispatch(recorder),
    ):
        module.to_empty(device=SIM)
        recorder.paths.update({id(inner): path for path, inner in module.named_modules()})
        recorder.next_batch()
        module.compile()
        assert isinstance(module._compiled_call_impl, _CompiledModule)
        module(torch.empty(shape, device=SIM, requires_grad=True)).sum().backward()
    return [item for item in recorder.records if isinstance(item, Kernel | HostKernel)]


def meta(kind: type[nn.Module], *args) -> nn.Module:
    with torch.device("meta"):
        return kind(*args)


def test_modules_are_compiled_for_the_simulated_device():
    found = kernels(meta(programs.FeedForward))
    assert any(item.op.startswith("fused(") for item in found)


def test_kernels_know_their_module():
    found = kernels(meta(programs.FeedForward))
    assert {item.module for item in found if item.op == "aten.mm" and item.phase == "forward"} == {"w1", "w2", "w3"}


class Attention(nn.Module):
    """Attention, whose kernel may drop out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


class Checkpointed(nn.Module):
    """Attention that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = programs.checkpoint_wrapper(Attention())
        self.last = nn.Linear(programs.DIM, programs.DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


def test_random_operators_are_recomputed_without_a_generator():
    found = [item for item in kernels(meta(Checkpointed)) if "attention" in item.op]
    assert [item.phase for item in found if "backward" not in item.op] == ["forward", "backward"]


class Half(nn.Module):
    """A checkpointed product and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(programs.DIM, programs.DIM, bias=False)
        self.inner = programs.checkpoint_wrapper(nn.Sequential(first, nn.SiLU()))
        self.last = nn.Linear(programs.DIM, programs.DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.last(self.inner(x)))


def test_checkpoints_tag_only_their_own_operators():
    products = [item.phase for item in kernels(meta(Half)) if item.op == "aten.mm"]
    # Of the product outside, forward and two gradients; of the one inside, its forward a second time.
    assert (products.count("forward"), products.count("backward")) == (2, 5)
    assert not torch.fx.traceback.current_meta


class Masked(nn.Module):
    """Copies into a view, and computes with the inverse of a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(SHAPE[1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
        out = torch.zeros_like(x)
        out[..., :4].copy_(x[..., :4])
        return torch.where(~mask, out, x)


def test_inductor_schedules_without_a_gpu():
    assert kernels(meta(Masked))


class Total(nn.Module):
    """One sum over many elements, which inductor splits over the multiprocessors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def _properties(name: str) -> tuple[DeviceProperties, DeviceProperties]:
    seen = []
    with inductor._as_on("cuda", device(name)):
        seen.append(DeviceProperties.create(torch.device("cuda:0")))
    return seen[0], gpu.properties_of(device(name))


@pytest.mark.parametrize(
    ("name", "multiprocessors", "capability"),
    [
        ("a100_sxm40", 108, 80),
        ("a100_sxm80", 108, 80),
        ("h100_sxm", 132, 90),
        ("h100_sxm96", 132, 90),
        ("h200", 132, 90),
        ("b200", 148, 100),
    ],
)
def test_inductor_gets_the_properties_of_the_device(name, multiprocessors, capability):
    seen, expected = _properties(name)
    assert seen == expected == DeviceProperties(
        type="cuda", index=0, multi_processor_count=multiprocessors, cc=capability, major=capability // 10,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    )  # fmt: skip


def test_every_gpu_of_the_catalogue_can_compile():
    found = [gpu.properties_of(device(name)) for name in device_names() if device(name).kind == "cuda"]
    assert len(found) >= 5 and all(item.multi_processor_count > 0 for item in found)


def test_long_reduction_is_split_by_device_multiprocessors():
    # Inductor cuts a sum into pieces so that each multiprocessor has some, and adds these in a second kernel.
    parts = {}
    for name in ("a100_sxm80", "b200"):
        first, *_ = [item for item in kernels(Total(), gpu=device(name), shape=(1 << 26,)) if item.phase == "forward"]
        parts[name] = first.bytes_written
    assert parts["a100_sxm80"] != parts["b200"]


def test_device_without_a_capability_is_refused():
    def mine(**stated) -> Device:
        known = device("h100_sxm")
        values = {name: getattr(known, name) for name in Device.fields_}
        return Device(**{**values, "name": "mine", "processor": Processor(source="none", **stated)})

    with pytest.raises(SimulationError, match=r"compute capability of mine.*processor\.compute_capability"):
        gpu.properties_of(mine())
    with pytest.raises(SimulationError, match=r"multiprocessors of mine.*processor\.multiprocessors"):
        gpu.properties_of(mine(compute_capability="8.9"))
    with pytest.raises(SimulationError, match="needs the plan to name the GPU"):
        gpu.properties_of(None)


def test_products_are_fused_with_their_collectives():
    before = torch.distributed.is_nccl_available()
    with as_with_nccl():
        assert torch.distributed.is_nccl_available()
        turned = _symmetric_memory.make_contiguous_for_perm(torch.ones(2, 3), [1, 0])
        assert turned.is_meta and turned.stride() == (1, 2)
    assert torch.distributed.is_nccl_available() == before


def test_device_meshes_have_no_size_within_a_budget():
    mesh = torch.fx.Graph().placeholder("mesh")
    mesh.meta["val"] = FakeScriptObject(object(), "Mesh", None)
    with pytest.raises(RuntimeError, match=r"size|metadata"):
        original(SIZE)(mesh)
    with compile_within(0.5, by="knapsack").applied():
        assert original(SIZE)(mesh) == 0


def asynchronous() -> list[bool]:
    """Of two simulations, whose groups have the same names."""
    return [*_asynchronous(), *_asynchronous()]


def _asynchronous() -> list[bool]:
    with simulated_device(Capture(), rank=0, world=2, kind="cuda"):
        mesh = init_device_mesh(SIM, (2,), mesh_dim_names=("tp",))
        name = mesh.get_group().group_name
        with symmetric_memory():
            overlap_tensor_parallel(mesh)
            inside = [config._micro_pipeline_tp, _symmetric_memory.is_symm_mem_enabled_for_group(name)]
        return [*inside, config._micro_pipeline_tp, _symmetric_memory.is_symm_mem_enabled_for_group(name)]


def test_symmetric_memory_state_is_reset():
    assert simulated.in_a_fork(asynchronous) == [True, True, False, False] * 2
