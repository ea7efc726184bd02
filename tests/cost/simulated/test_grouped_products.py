"""Grouped products on devices without a grouped kernel: the operators that PyTorch runs on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from legoai.cost.capture import capture
from legoai.cost.compilation.modules import compilation
from legoai.cost.estimate import estimate
from legoai.cost.simulated.device import SIM, SimulationError
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.operators import grouped_products
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Copy, Kernel
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.specs.cluster import device as catalogue_device
from support.marks import slow_but, some_slow
from support.simulation.simulator import in_the_simulator
from support.texts.drawn_plans import CONFIGS

GROUPS, ROWS, K, COLUMNS = 4, 32, 8, 16


def operands(form: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Arguments of a form of the product: `2d` is ragged, `3d` a stack."""

    def made(*shape: int) -> torch.Tensor:
        return torch.arange(1.0, torch.Size(shape).numel() + 1, device=device, dtype=torch.float32).sin().view(shape)

    ends = torch.arange(1, GROUPS + 1, dtype=torch.int32, device=device)
    left, right, step = {
        "2d 3d": (made(ROWS, K), made(GROUPS, K, COLUMNS), ROWS // GROUPS),
        "3d 2d": (made(GROUPS, ROWS, K), made(K, COLUMNS * GROUPS), COLUMNS),
        "2d 2d": (made(COLUMNS, K * GROUPS), made(K * GROUPS, ROWS), K),
        "3d 3d": (made(GROUPS, ROWS, K), made(GROUPS, K, COLUMNS), 0),
    }[form]
    return left.to(dtype), right.to(dtype), ends * step if step else None


@pytest.mark.parametrize("form", ["2d 3d", "3d 2d", "2d 2d", "3d 3d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_equal_pytorch(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grouped_products, "read_from_device", lambda _: None)
    left, right, ends = operands(form, "cpu", dtype)
    ours, wanted = grouped_products.products(left, right, ends), torch._grouped_mm(left, right, offs=ends)
    assert ours.dtype == wanted.dtype
    torch.testing.assert_close(ours, wanted)


def test_unaligned_strides_are_refused_as_in_pytorch():
    left, right = torch.zeros(GROUPS, 2, 6), torch.zeros(GROUPS, 6, 8)
    for multiply in (torch._grouped_mm, grouped_products.products):
        with pytest.raises(RuntimeError, match="16 bytes"):
            multiply(left, right)


def experts(device: str) -> None:
    """Forward and backward of one product of each expert."""
    x = torch.zeros(ROWS, K, device=device, requires_grad=True)
    weight = torch.zeros(GROUPS, COLUMNS, K, device=device, requires_grad=True)
    ends = (ROWS // GROUPS) * torch.arange(1, GROUPS + 1, dtype=torch.int32, device=device)
    F.grouped_mm(x, weight.transpose(-2, -1), offs=ends).square().sum().backward()


def recorded() -> tuple[list[tuple[tuple[int, ...], ...]], int]:
    """The operands of the products that a simulation records, and how often it reads from the device."""
    held = Capture()
    with simulated_device(held, rank=0, world=1, kind="cuda") as fake, fake, Dispatch(held):
        experts(SIM)
    products = [item for item in held.records if isinstance(item, Kernel) and item.op == "aten.mm"]
    assert all(item.flops == 2 * ROWS // GROUPS * K * COLUMNS for item in products)
    shapes = [tuple(tensor.shape for tensor in item.inputs[:2]) for item in products]
    return shapes, sum(isinstance(item, Copy) for item in held.records)


def test_fp32_experts_are_one_product_each():
    ours, reads = in_the_simulator(recorded)
    experts("cpu")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        experts("cpu")
    real = [tuple(map(tuple, event.input_shapes[:2])) for event in seen.events() if event.name == "aten::mm"]
    assert sorted(ours) == sorted(real)
    assert len(ours) == 3 * GROUPS
    assert reads == 3


def model_flops(family: str, body: str) -> float:
    text = (
        f'plan fp32\nmodel huggingface("{family}.json")\ncluster h100_sxm(devices = 1)\n'
        f"batch (global = 2, micro = 1, seq_len = 32)\noptimizer adamw(lr = 1e-2)\n{body}"
    )
    linted = lint(text, "fp32.plan", directory=CONFIGS)
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    analysis = linted.analysis
    return estimate(lower(analysis), analysis.plan, analysis.manifest, directory=CONFIGS).model_flops


@pytest.mark.parametrize("family", slow_but(["mixtral", "qwen3_moe", "deepseek_v3"]))
def test_transformers_mixtures_have_equal_flops_in_fp32_and_bf16(family: str):
    exact, lower = (in_the_simulator(model_flops, family, body) for body in ("", "precision (master = bf16)\n"))
    assert exact == lower > 0


def compiled_experts() -> None:
    from legoai.specs.models.huggingface import build

    held = Capture()
    with simulated_device(held, rank=0, world=1, kind="cuda") as fake, compilation(held, "cuda"), fake:
        with torch.device(SIM):
            model = build(CONFIGS / "qwen3_moe.json")
        block = model.get_submodule("model.layers.0.mlp")
        block.compile(backend="aot_eager")
        block(torch.zeros(1, 8, 32, device=SIM))


def test_compiled_fp32_experts_are_refused_with_a_message():
    with pytest.raises(SimulationError, match="compiled experts multiply one after the other"):
        in_the_simulator(compiled_experts)


@pytest.mark.parametrize(
    ("device", "kernel"), [("a100_sxm80", False), ("h100_sxm", True), ("h200", True), ("b200", True), ("cpu", False)]
)
def test_hopper_and_blackwell_have_a_grouped_kernel(device: str, kernel: bool):
    found = catalogue_device(device)
    assert grouped_products.has_grouped_kernel(found.kind, found) is kernel


def products_of(device: str, body: str) -> tuple[int, int]:
    """Products by themselves and grouped ones, as they are recorded, of two blocks of four experts."""
    text = (
        'plan experts\nmodel mixtral("8x7b", n_layers = 2, dim = 64, n_heads = 2, n_kv_heads = 2, hidden_dim = 64, '
        f"vocab_size = 64, n_experts = 4, max_seq_len = 32)\ncluster {device}(devices = 1)\n"
        f"batch (global = 1, micro = 1, seq_len = 32)\noptimizer adamw(lr = 1e-2)\n{body}"
    )
    linted = lint(text, "experts.plan", directory=CONFIGS)
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    program = lower(linted.analysis)
    trace = capture(program, world=1, gpu=catalogue_device(device), replay=False)
    second = trace.steps[-1]
    ops = [item.op for item in trace.records[second.start : second.stop] if isinstance(item, Kernel)]
    return ops.count("aten.mm"), ops.count("aten._grouped_mm")


COMPILED = "compile { layers.* = inductor }\n"


@pytest.mark.parametrize("body", some_slow(("", COMPILED), COMPILED))
def test_a100_experts_are_one_product_each(body: str):
    body = f"precision (master = bf16)\n{body}"
    on_h100, on_a100 = (in_the_simulator(products_of, device, body) for device in ("h100_sxm", "a100_sxm80"))
    assert on_h100[1] == 2 * 3 * 3  # of each block three, each with two in backward
    assert on_a100 == (on_h100[0] + 4 * on_h100[1], 0)
