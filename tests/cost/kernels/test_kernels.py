"""Kernel models: the work of each kernel, and its time by roofline, table and forest."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legoai.cost.kernels.forest import Forest
from legoai.cost.kernels.kinds import Attention, Movement, Product
from legoai.cost.kernels.roofline import AttentionCurve, MovementCurve, ProductCurve
from legoai.cost.kernels.table import Table
from legoai.cost.kernels.work import kind_of, work_of
from legoai.cost.machine.kernel_time import NoModelError, estimate, knows_narrow_rates, seconds_of
from legoai.cost.profiles import profile
from legoai.cost.trace.records import Kernel, TensorType
from legoai.specs.dtypes import ITEM_BYTES


def kernel(op: str, inputs: list[tuple[tuple[int, ...], str]], output: tuple[tuple[int, ...], str], **attributes):
    tensors = tuple(TensorType(*item) for item in inputs)
    out = TensorType(*output)
    size = [math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in (*tensors, out)]
    return Kernel(
        stream=0, op=op, inputs=tensors, outputs=(out,), flops=int(attributes.pop("flops", 0)),
        bytes_read=sum(size[:-1]), bytes_written=size[-1], attributes=attributes, module="", phase="forward",
    )  # fmt: skip


def product(m: int, n: int, k: int, rate: str = "bf16", batch: int = 1) -> Product:
    return Product(batch=batch, m=m, n=n, k=k, rate=rate, bytes=2 * batch * (m * k + k * n + m * n))


def attention(**changes) -> Attention:
    values = {
        "batch": 1, "heads": 16, "key_heads": 16, "queries": 4096, "keys": 4096, "head_dim": 128, "value_dim": 128,
        "causal": True, "backward": False, "rate": "bf16", "implementation": "flash2", "bytes": 2**26,
    }  # fmt: skip
    return Attention(**{**values, **changes})


def test_dtype_sizes_equal_torch() -> None:
    for name, size in ITEM_BYTES.items():
        dtype = getattr(torch, name, None)
        assert dtype is None or dtype.itemsize == size, name


@pytest.mark.parametrize(
    ("op", "inputs", "output", "expected"),
    [
        ("aten.mm", [((8, 32), "bfloat16"), ((32, 4), "bfloat16")], ((8, 4), "bfloat16"), (1, 8, 4, 32, "bf16")),
        ("aten.addmm.default", [((4,), "float32"), ((8, 32), "float32"), ((32, 4), "float32")], ((8, 4), "float32"),
         (1, 8, 4, 32, "fp32")),
        ("aten.addmm_", [((8, 4), "bfloat16"), ((8, 32), "bfloat16"), ((32, 4), "bfloat16")], ((8, 4), "bfloat16"),
         (1, 8, 4, 32, "bf16")),
        ("aten::bmm", [((3, 8, 32), "float16"), ((3, 32, 4), "float16")], ((3, 8, 4), "float16"),
         (3, 8, 4, 32, "fp16")),
        ("aten._scaled_mm", [((8, 32), "float8_e4m3fn"), ((32, 4), "float8_e5m2")], ((8, 4), "bfloat16"),
         (1, 8, 4, 32, "fp8")),
        ("aten._grouped_mm", [((80, 32), "bfloat16"), ((10, 32, 4), "bfloat16")], ((80, 4), "bfloat16"),
         (10, 8, 4, 32, "bf16")),
    ],
)  # fmt: skip
def test_products_are_read_from_operators(op, inputs, output, expected) -> None:
    work = work_of(kernel(op, inputs, output))
    assert isinstance(work, Product)
    assert (work.batch, work.m, work.n, work.k, work.rate) == expected


def test_convolution_is_an_implicit_matrix_product() -> None:
    flops = 2 * (4 * 14 * 14) * 8 * (3 * 3 * 3)
    work = work_of(
        kernel(
            "aten.convolution", [((4, 3, 16, 16), "float32"), ((8, 3, 3, 3), "float32")],
            ((4, 8, 14, 14), "float32"), flops=flops,
        )
    )  # fmt: skip
    assert isinstance(work, Product)
    assert (work.m, work.n, work.k) == (4 * 14 * 14, 8, 27)
    assert work.flops == flops


def test_fp32_products_do_not_use_tf32() -> None:
    single = kernel("aten.mm", [((8, 32), "float32"), ((32, 4), "float32")], ((8, 4), "float32"))
    rates = [work.rate for work in (work_of(single), work_of(single, tf32=True)) if isinstance(work, Product)]
    assert rates == ["fp32", "fp32"]
    assert not torch.backends.cuda.matmul.allow_tf32


def test_attention_flops_follow_the_flash_attention_papers() -> None:
    forward = attention(causal=False)
    assert forward.flops == 4 * 16 * 4096**2 * 128
    assert attention(causal=False, backward=True).flops == 2.5 * forward.flops
    assert attention().flops == pytest.approx(forward.flops / 2)


@pytest.mark.parametrize("queries", [1, 3, 8])
def test_causal_flops_equal_brute_force(queries: int) -> None:
    keys = 8
    seen = sum(key <= query + keys - queries for query in range(queries) for key in range(keys))
    share = attention(queries=queries, keys=keys).flops / attention(queries=queries, keys=keys, causal=False).flops
    assert share == pytest.approx(seen / (queries * keys), abs=1 / keys)


def test_attention_is_read_from_its_operator_in_both_directions() -> None:
    shape = (2, 8, 512, 64)
    keys = (2, 2, 512, 64)
    forward = kernel(
        "aten._scaled_dot_product_flash_attention", [(shape, "bfloat16"), (keys, "bfloat16"), (keys, "bfloat16")],
        (shape, "bfloat16"), causal=True,
    )  # fmt: skip
    backward = kernel(
        "aten._scaled_dot_product_flash_attention_backward",
        [(shape, "bfloat16"), (shape, "bfloat16"), (keys, "bfloat16"), (keys, "bfloat16")], (shape, "bfloat16"),
        is_causal=True,
    )  # fmt: skip
    for item, back in ((forward, False), (backward, True)):
        work = work_of(item)
        assert isinstance(work, Attention)
        assert (work.heads, work.key_heads, work.queries, work.causal, work.backward) == (8, 2, 512, True, back)


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.add", "elementwise"), ("aten._fused_adamw_", "optimizer"),
        ("aten.native_layer_norm", "normalisation"), ("aten._fused_rms_norm", "normalisation"),
        ("aten._log_softmax", "softmax"), ("aten.embedding_dense_backward", "embedding"), ("aten.sum", "reduction"),
        ("aten._to_copy", "copy"), ("aten.cat", "copy"), ("aten.zeros", "fill"), ("aten.nll_loss_forward", "loss"),
        ("aten._foreach_copy_", "copy"), ("aten._foreach_norm", "reduction"), ("aten._foreach_max", "reduction"),
        ("aten._foreach_zero_", "fill"), ("aten._foreach_mul_", "elementwise"), ("aten._foreach_lerp_", "elementwise"),
        ("aten._foreach_addcdiv_", "elementwise"), ("aten._foreach_sqrt", "elementwise"),
        ("fused(aten.mul, aten.sum)", "reduction"), ("fused(aten._to_copy, aten.mul)", "elementwise"),
    ],
)  # fmt: skip
def test_operators_are_classified(op: str, kind: str) -> None:
    assert kind_of(op) == kind
    work = work_of(kernel(op, [((8, 32), "float32")], ((8, 32), "float32")))
    assert isinstance(work, Movement)
    assert (work.form == "foreach") == ("_foreach_" in op)


def test_forest_predicts_the_mean_of_its_trees() -> None:
    forest = Forest.read(
        {
            "names": ["x"], "roots": [0, 3], "feature": [0, -1, -1, -1], "threshold": [1.0, 0, 0, 0],
            "left": [1, 0, 0, 0], "right": [2, 0, 0, 0], "value": [0, 10.0, 20.0, 40.0], "low": [0.0], "high": [4.0],
        }
    )  # fmt: skip
    assert forest.predict([0.5]) == (10 + 40) / 2
    assert forest.predict([2.0]) == (20 + 40) / 2
    assert forest.covers([4.5], margin=1.0)
    assert not forest.covers([4.5])


def test_forest_with_a_cycle_is_refused() -> None:
    document = {
        "names": ["x"], "roots": [0], "feature": [0, -1], "threshold": [1.0, 0], "left": [0, 0], "right": [1, 0],
        "value": [0, 1.0], "low": [0.0], "high": [1.0],
    }  # fmt: skip
    with pytest.raises(ValueError, match="leads nowhere"):
        Forest.read(document)


def test_table_returns_measurements_and_nothing_far_away() -> None:
    table = Table(points=((0.0, 0.0), (1.0, 0.0)), ratios=(0.1, 0.5), reach=0.6)
    assert table.lookup((0.0, 0.0)) == pytest.approx(0.1)
    assert 0.1 < (table.lookup((0.5, 0.0)) or 0) < 0.5
    assert table.lookup((0.0, 3.0)) is None


def test_waves_and_tiles_are_quantised() -> None:
    curve = ProductCurve(
        peak=1e12, bandwidth=1e30, efficiency=1.0, sustained=None, floor=0.0, processors=10,
        tiles=((128, 128, 1.0),), split=10**9,
    )  # fmt: skip
    full, over = (product(128 * tiles, 128, 512) for tiles in (10, 11))
    assert curve.waste(full) == 1.0
    assert curve.seconds(over) == pytest.approx(2 * curve.seconds(full))
    assert curve.waste(product(100, 128, 512)) == pytest.approx(10 * 1.28)


def test_lower_clock_slows_compute_bound_kernels() -> None:
    curve = ProductCurve(
        peak=1e12, bandwidth=1e9, efficiency=0.8, sustained=0.6, floor=1e-6, processors=1, tiles=((1, 1, 1.0),),
        split=10**9,
    )  # fmt: skip
    bound = Product(batch=1, m=10, n=10, k=10, rate="bf16", bytes=10**6)
    assert curve.slowed(bound) == 1.0
    free = Product(batch=1, m=1000, n=1000, k=1000, rate="bf16", bytes=1)
    assert curve.slowed(free) == pytest.approx((1e-6 + 2e9 / 0.6e12) / (1e-6 + 2e9 / 0.8e12))


def test_sustained_product_rates_equal_published_long_runs() -> None:
    # torchao's share of the peak of Meta's H100 at 500 W. Azure's tables after 10,000 warm-ups are of products alone;
    # in a training step memory-bound kernels need less power, and leave products a higher clock.
    large = product(16384, 8192, 16384)
    rates = {name: large.flops / seconds_of(large, profile(name))[0] for name in ("h100_sxm", "h100_sxm96")}
    assert rates["h100_sxm96"] == pytest.approx(0.6 * 989.4e12, rel=0.05)
    assert 1.0 < rates["h100_sxm"] / (1382.2 / 1978.9 * 989.4e12) < 1.1


def test_memory_efficient_attention_is_slower_than_flash_as_published() -> None:
    # Forward and backward of 2048 tokens, width 128, causal, on an A100: 82 and 155 TFLOP/s in the figures of
    # FlashAttention-2's paper.
    rates = {}
    for implementation in ("efficient", "flash2"):
        both = [
            attention(batch=8, queries=2048, keys=2048, backward=back, implementation=implementation)
            for back in (False, True)
        ]
        seconds = sum(seconds_of(work, profile("a100_sxm80"))[0] for work in both)
        rates[implementation] = sum(work.flops for work in both) / seconds / 1e12
    assert rates == pytest.approx({"efficient": 82, "flash2": 155}, rel=0.07)


def test_attention_implementation_comes_from_the_operator_name() -> None:
    heads = ((1, 8, 64, 128), "bfloat16")
    for name, implementation in (("flash", "flash2"), ("efficient", "efficient"), ("cudnn", "cudnn")):
        work = work_of(kernel(f"aten._scaled_dot_product_{name}_attention", [heads] * 3, heads))
        assert isinstance(work, Attention)
        assert work.implementation == implementation
        assert (work.heads, work.queries) == (8, 64)
    packed = work_of(kernel("aten._efficient_attention_forward", [heads] * 3, heads))
    assert isinstance(packed, Attention)
    assert (packed.heads, packed.queries) == (64, 8)


def test_movement_curve_is_continuous() -> None:
    curve = MovementCurve(rate=1e12, floor=0, first=1e4, second=1e7, slope_first=0.0, slope_second=0.5)
    for elbow in (1e4, 1e7):
        assert curve.seconds(elbow * 0.9999) == pytest.approx(curve.seconds(elbow * 1.0001), rel=1e-3)
    assert curve.seconds(1e8) == pytest.approx(1e-4)
    assert curve.seconds(10) == curve.seconds(1000)


def test_attention_efficiency_is_interpolated_between_widths() -> None:
    limits = {(64, True): (0.3, 0.0, 0.0), (128, True): (0.4, 0.0, 0.0)}
    curve = AttentionCurve(peak=1e15, bandwidth=1e30, floor=0, processors=1, limits=limits)
    shares = [curve.efficiency(attention(head_dim=width, value_dim=width)) for width in (32, 64, 96, 128, 256)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.3)
    assert shares[-1] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "work", "teraflops", "within"),
    [
        # cuBLASLt, https://github.com/Azure/AI-benchmarking-guide.
        ("a100_sxm80", product(8192, 8192, 8192), 253.7, 0.07),
        ("h100_sxm", product(16384, 16384, 16384, "fp8"), 1377.3, 0.07),
    ],
)
def test_estimates_agree_with_published_measurements(name, work, teraflops, within) -> None:
    seconds, _ = seconds_of(work, profile(name))
    assert work.flops / seconds / 1e12 == pytest.approx(teraflops, rel=within)


@pytest.mark.parametrize(("name", "width", "teraflops"), [
    ("h100_sxm", 128, 327.9), ("h200", 128, 329.3), ("a100_sxm80", 64, 179.5),
])  # fmt: skip
def test_attention_agrees_with_published_measurements_of_both_directions(name, width, teraflops) -> None:
    # FlashAttention-2 of Azure's tables, batch 2, 8192 tokens, not used in a fit. That both directions are meant shows
    # in what stands beside it: standard attention at 161.5 and 46.0 TFLOP/s is that of the paper's combined figures.
    works = [
        attention(batch=2, heads=2048 // width, key_heads=2048 // width, queries=8192, keys=8192, head_dim=width,
                  value_dim=width, causal=False, backward=back)
        for back in (False, True)
    ]  # fmt: skip
    constants = {key: value for key, value in profile(name).constants.items() if key != "attention_slowdown"}
    alone = replace(profile(name), constants=constants, answers={})
    seconds = sum(seconds_of(work, alone)[0] for work in works)
    assert sum(work.flops for work in works) / seconds == pytest.approx(teraflops * 1e12, rel=0.05)


@pytest.mark.parametrize(
    ("n", "operands", "result", "teraflops"),
    # Products of a sweep on an A100 that are in no fit: `torch.mm` of 27,648 by 4,096 rows and columns.
    [(256, 16, 16, 227.2), (258, 4, 4, 116.6), (386, 4, 4, 120.5), (500, 8, 8, 163.0), (504, 16, 16, 232.3)],
)
def test_unaligned_products_agree_with_published_measurements(n, operands, result, teraflops) -> None:
    work = replace(product(27648, n, 4096), operands_aligned=operands, result_aligned=result)
    seconds, _ = seconds_of(work, profile("a100_sxm80"))
    assert work.flops / seconds / 1e12 == pytest.approx(teraflops, rel=0.12)


def test_products_are_slower_the_less_they_are_aligned() -> None:
    for name in ("a100_sxm80", "h100_sxm", "h100_sxm96", "h200"):
        whole = product(8192, 50256, 4096)
        rates = [
            seconds_of(replace(whole, operands_aligned=operands, result_aligned=result), profile(name))[0]
            for operands, result in ((16, 16), (4, 16), (16, 4), (16, 2), (2, 16))
        ]
        assert rates == sorted(rates)
        assert rates[0] < 0.8 * rates[1]
        # A small product waits for its memory, and is hardly slower.
        small = product(4096, 64, 64)
        slower = seconds_of(replace(small, operands_aligned=2), profile(name))[0]
        assert slower < seconds_of(small, profile(name))[0] + 2e-6


def test_observed_unaligned_products_take_what_they_took() -> None:
    h100, work = profile("h100_sxm"), replace(product(8192, 50256, 4096), operands_aligned=2)
    model = h100.products["bf16"]
    point = [math.log2(value) for value in (1, 8192, 50256, 4096)]
    table = Table(points=(tuple(point),), ratios=(0.0,), reach=1.0)
    seen = replace(h100, products={"bf16": replace(model, observed=table)}, answers={})
    assert seconds_of(work, seen) == (model.curve.seconds(work), "measured table")


def test_unaligned_products_are_as_fast_as_others_where_nothing_was_measured() -> None:
    whole = product(8192, 50256, 4096)
    assert not knows_narrow_rates(profile("b200"))
    assert seconds_of(replace(whole, operands_aligned=2), profile("b200")) == seconds_of(whole, profile("b200"))


def test_long_attention_is_slower_in_a_step_at_the_power_limit() -> None:
    h100 = profile("h100_sxm")
    slower = h100.constant("attention_slowdown")
    alone = replace(
        h100, constants={key: one for key, one in h100.constants.items() if key != "attention_slowdown"}, answers={}
    )
    for heads, queries, factor in ((8, 1024, 1.0), (32, 8192, slower)):
        work = attention(batch=2, heads=heads, key_heads=heads, queries=queries, keys=queries)
        assert seconds_of(work, h100)[0] == pytest.approx(factor * seconds_of(work, alone)[0]), queries
    assert slower > 1.1


@pytest.mark.parametrize(
    ("op", "inputs", "output", "form"),
    [
        ("aten.add", [((8, 64), "bfloat16"), ((8, 64), "bfloat16")], ((8, 64), "bfloat16"), ""),
        ("aten.add", [((8, 64), "float32"), ((8, 64), "bfloat16")], ((8, 64), "float32"), "unvectorised"),
        ("aten.mul", [((8, 64), "float32"), ((1, 64), "float32")], ((8, 64), "float32"), "unvectorised"),
        ("aten.mul", [((8, 64), "float32"), ((), "float32")], ((8, 64), "float32"), ""),
        ("aten._to_copy", [((8, 64), "float32")], ((8, 64), "bfloat16"), ""),
        ("aten._to_copy", [((8, 64), "bfloat16")], ((8, 64), "float32"), "unvectorised"),
        ("aten._log_softmax", [((8, 64), "float32")], ((8, 64), "float32"), ""),
        ("aten._log_softmax_backward_data", [((8, 64), "float32")] * 2, ((8, 64), "float32"), "backward"),
        ("aten._log_softmax", [((8, 32000), "float32")], ((8, 32000), "float32"), "long"),
        ("aten._log_softmax_backward_data", [((8, 32000), "float32")] * 2, ((8, 32000), "float32"), "long backward"),
        ("aten.native_dropout_backward", [((8, 64), "bfloat16"), ((8, 64), "bool")], ((8, 64), "bfloat16"), ""),
        ("aten._fused_rms_norm_backward", [((8, 64), "bfloat16")] * 2, ((8, 64), "bfloat16"), "backward"),
        ("aten.silu_backward", [((8, 64), "bfloat16")] * 2, ((8, 64), "bfloat16"), ""),
        ("fused(aten.mul, aten.silu)", [((8, 64), "bfloat16")] * 2, ((8, 64), "bfloat16"), "fused"),
    ],
)
def test_form_of_memory_bound_kernels(op, inputs, output, form) -> None:
    work = work_of(kernel(op, inputs, output))
    assert isinstance(work, Movement)
    assert work.form == form


def test_measured_kernels_of_steps_agree_with_the_profile() -> None:
    # Kernels in the steps of eighteen plans, as the profiler measured them on an H100.
    document = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "gpu_steps.json").read_text("utf-8"))
    types = {"c10::BFloat16": "bfloat16", "float": "float32"}
    known = {
        "aten::silu": 1, "aten::silu_backward": 2, "aten::gelu_backward": 2, "aten::_log_softmax": 1,
        "aten::_log_softmax_backward_data": 2,
    }  # fmt: skip
    ratios: dict[str, list[float]] = {}
    for row in document["rows"]:
        for item in row["kernels"]:
            if item["op"] in known and item["us"] > 20:
                count = known[item["op"]]
                shapes, dtypes = json.loads(item["shapes"])[:count], json.loads(item["types"])[:count]
                operands = [(tuple(shape), types[dtype]) for shape, dtype in zip(shapes, dtypes, strict=True)]
                record = kernel(item["op"].replace("::", "."), operands, operands[0])
                seconds, _ = estimate(record, profile("h100_sxm"))
                ratios.setdefault(item["op"], []).append(seconds / item["us"] * 1e6)
    assert set(ratios) == set(known)
    for op, found in ratios.items():
        assert statistics.median(found) == pytest.approx(1.0, abs=0.05), op


def test_estimates_name_their_model() -> None:
    h100 = profile("h100_sxm")
    assert seconds_of(product(2048, 2048, 2048), h100)[1] == "measured table"
    assert seconds_of(product(3000, 3000, 3000), h100)[1] == "learned"
    assert seconds_of(product(65536, 65536, 65536), h100)[1] == "roofline"
    assert seconds_of(product(2048, 2048, 2048), profile("h200"))[1] == "measured table, derived"


def test_more_work_takes_longer_at_training_shapes() -> None:
    for name in ("h100_sxm", "a100_sxm80", "b200"):
        times = [seconds_of(product(m, 4096, 4096), profile(name))[0] for m in (4096, 8192, 16384, 32768)]
        assert times == sorted(times), name


def test_missing_rate_of_a_device_is_refused() -> None:
    with pytest.raises(NoModelError, match=r"a100_sxm80 has no rate for matrix products of fp8"):
        seconds_of(product(1024, 1024, 1024, "fp8"), profile("a100_sxm80"))


def test_a_cast_to_float8_costs_its_bytes() -> None:
    cast = kernel("aten._to_copy", [((8192, 8192), "bfloat16")], ((8192, 8192), "float8_e4m3fn"))
    seconds, _ = estimate(cast, profile("h100_sxm"))
    assert seconds == pytest.approx(3 * 8192**2 / 2.9e12, rel=0.05)


def test_movement_is_bounded_by_bandwidth() -> None:
    for name in ("h100_sxm", "a100_sxm80", "h200", "b200"):
        datasheet = {"h100_sxm": 3.35e12, "a100_sxm80": 2.039e12, "h200": 4.8e12, "b200": 7.672e12}[name]
        seconds, _ = seconds_of(Movement(kind="elementwise", bytes=2**30), profile(name))
        assert 0.7 * datasheet < 2**30 / seconds < datasheet


@pytest.mark.parametrize("name", ["a100_sxm80", "h100_sxm", "h200", "b200"])
def test_no_product_is_faster_than_an_elementwise_kernel_of_as_many_bytes(name: str):
    device = profile(name)
    for m, n, k in ((802816, 256, 64), (200704, 128, 512), (131072, 8, 4096)):
        moved = 2 * (m * k + k * n + m * n)
        product = seconds_of(Product(batch=1, m=m, n=n, k=k, rate="bf16", bytes=moved), device)[0]
        stream = seconds_of(Movement(kind="elementwise", bytes=moved), device)[0]
        assert stream <= product < 1.2 * stream
