"""Products in float8 are captured with their casts and scales, and take the float8 rate of the device."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from torch import nn

from legoai.cost.capture import capture, capture_piece
from legoai.cost.compilation import inductor  # noqa: F401 (imported once, before the processes that need it)
from legoai.cost.kernels.kinds import Product
from legoai.cost.kernels.work import work_of
from legoai.cost.machine import kernel_time
from legoai.cost.profiles import profile
from legoai.cost.replay.piece import Piece
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Collective, Kernel
from legoai.cost.trace.trace import Trace
from legoai.specs.cluster import device
from support.simulation import simulated
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered
from support.training import programs

ROWS, WIDTH = 8192, 4096
LIMIT = 448.0
"""The largest finite number of `float8_e4m3fn` (Micikevicius et al. 2022, table 1)."""


class Float8(nn.Module):
    """The forward of a linear layer with one dynamic scale for each tensor, without a library."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (a, scale_a), (b, scale_b) = cast(x), cast(self.weight)
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = LIMIT / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn), scale.reciprocal()


def forward(compiled: bool) -> list[Kernel]:
    recorder = Capture()
    with simulated.compiling(recorder), torch.no_grad():
        layer = Float8()
        if compiled:
            layer.compile(fullgraph=True)
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
        with Dispatch(recorder):
            layer(x)
    return [item for item in recorder.records if isinstance(item, Kernel)]


def test_a_product_in_float8_takes_the_float8_rate():
    found = in_the_simulator(forward, False)
    (product,) = [item for item in found if item.op == "aten._scaled_mm"]
    assert product.flops == 2 * ROWS * WIDTH * WIDTH
    assert product.bytes_read == ROWS * WIDTH + WIDTH * WIDTH + 8
    assert product.bytes_written == 2 * ROWS * WIDTH
    work = work_of(product)
    assert isinstance(work, Product) and work.rate == "fp8"
    half = dataclasses.replace(
        product,
        op="aten.mm",
        inputs=tuple(dataclasses.replace(item, dtype="bfloat16") for item in product.inputs[:2]),
    )
    h100 = profile("h100_sxm")
    assert kernel_time.estimate(product, h100)[0] < 0.7 * kernel_time.estimate(half, h100)[0]


@pytest.mark.slow
def test_compilation_fuses_float8_casts_into_one_pass():
    eager, compiled = (in_the_simulator(forward, compiled) for compiled in (False, True))

    def moved(items: list[Kernel]) -> int:
        return sum(item.bytes_read + item.bytes_written for item in items if item.op != "aten._scaled_mm")

    # Each tensor is read for its maximum, and read again and written in one byte: 2 + 2 + 1 bytes a number.
    least = 5 * (ROWS * WIDTH + WIDTH * WIDTH)
    assert least <= moved(compiled) < 1.01 * least
    # One operator after another: abs (2 + 2), max (2), to fp32 (2 + 4), times (4 + 4), clamp (4 + 4), cast (4 + 1).
    assert moved(eager) == pytest.approx(33 / 5 * least, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "float8", "half"), [("tensorwise", 3, 0), ("rowwise", 3, 0), ("rowwise_with_gw_hp", 2, 1)]
)
def test_layers_of_torchao_are_captured(recipe, float8, half):
    """Forward and two products of backward, of which `rowwise_with_gw_hp` keeps that for the weight in bf16."""
    pytest.importorskip("torchao")
    layer = "layers.0.feed_forward.w1"
    found = [item for item in traced(recipe).records if isinstance(item, Kernel) and item.module == layer]
    products = Counter(item.op for item in found if item.flops)
    assert products["aten._scaled_mm"] == 2 * float8  # in two steps
    assert products["aten.mm"] == 2 * half
    scales = {len(item.inputs[2].shape) for item in found if item.op == "aten._scaled_mm"}
    assert (scales == {0}) == (recipe == "tensorwise")


@functools.cache
def traced(recipe: str) -> Trace:
    return in_the_simulator(_traced, recipe)


def _traced(recipe: str) -> Trace:
    from legoai.runtime import convert_to_float8

    made = programs.trainer(dtype=torch.bfloat16, global_batch=2)

    def parallelize(model, mesh):
        for layer in model.layers.values():
            convert_to_float8(layer, ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"], recipe=recipe)
        return model

    return capture(dataclasses.replace(made, parallelize=parallelize), world=1)


GATHERED = """\
plan    gathered
model   llama3("tiny", n_layers = 6, dim = 256, hidden_dim = 768, n_heads = 8, n_kv_heads = 4, vocab_size = 512)
cluster h100_sxm(hosts = 1)
batch   (global = 24, micro = 1, seq_len = 256)
{mesh}
fsdp blocks on dp_shard
precision {{
  layers.*.attention.{{wq, wk, wv, wo}} = float8(gather = [{gather}])
  layers.*.feed_forward.{{w1, w2, w3}}  = float8(gather = [{gather}])
}}
"""
SHARDS = "mesh (dp_shard = 8)"
BOTH = "mesh (dp_shard = 4, tp = 2)\nshard standard on tp (sequence, loss_parallel)"
COMPILED = "compile { layers.* = inductor }\ncheckpoint { layers.* = full }"
WEIGHTS = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 768
"""Numbers of a block's linear layers; its norms have 512."""


def sent(mesh: str, gather: str) -> Counter[tuple[str, str, str]]:
    """Bytes of the collectives of a block, by kind, axis and dtype."""
    text = GATHERED.format(mesh=mesh, gather=gather).replace("global = 24", "global = 8")
    trace = in_the_simulator(capture, lowered(text), world=8, gpu=device("h100_sxm"))
    found: Counter[tuple[str, str, str]] = Counter()
    for item in trace.records:
        if isinstance(item, Collective) and item.module.startswith("layers.3"):
            found[item.kind, item.axis, item.dtype] += item.bytes
    return found


@pytest.mark.slow
def test_float8_all_gathers_have_half_the_bytes():
    pytest.importorskip("torchao")
    plain, both = (sent(BOTH, gather) for gather in ("", "weights, activations"))
    gathers = plain["all_gather", "dp_shard", "bfloat16"] / (2 * (WEIGHTS / 2 + 512))
    assert both["all_gather", "dp_shard", "uint8"] == gathers * (WEIGHTS / 2 + 2 * 512)
    assert both["reduce_scatter", "dp_shard", "float32"] == plain["reduce_scatter", "dp_shard", "float32"]
    on_tp = "all_gather", "tp"
    # The block's inputs in forward, and the gradients of its outputs in backward.
    assert both[*on_tp, "float8_e4m3fn"] == both[*on_tp, "float8_e5m2"] == plain[*on_tp, "bfloat16"] / 4
    assert both[*on_tp, "bfloat16"] == 0


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (SHARDS, "checkpoint { layers.* = budget(50%) }"),
        (BOTH, "offload (activations = all)"),
        (BOTH, COMPILED),
    ],
)
@pytest.mark.slow
def test_float8_scales_grow_with_the_number_of_blocks(mesh: str, more: str):
    """One vector has the scales of all layers, so that it and the collective of it depend on the number of blocks.

    What is saved or recomputed of tensors that consist of numbers and a scale is the same in each capture.
    """
    pytest.importorskip("torchao")
    gather = "weights" if mesh == SHARDS else "weights, activations"
    blocks, equal = in_the_simulator(_whole_and_short, GATHERED.format(mesh=mesh, gather=gather) + more)
    assert blocks
    assert equal


def _whole_and_short(text: str) -> tuple[bool, bool]:
    program, gpu = lowered(text), device("h100_sxm")
    piece = capture_piece(program, world=8, gpu=gpu)
    assert isinstance(piece, Piece)
    return bool(piece.containers), piece.trace() == capture(program, world=8, gpu=gpu, replay=False)
