"""Times of kernels in traces of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.calibration.observed.kernels import KernelTimes, kernel_times, merged, overlaps
from legoai.cost.calibration.observed.trace_files import read_trace
from legoai.cost.kernels.kinds import Attention, Consecutive, Movement, Product
from support.simulation.traces import BACKWARD, GpuTrace

BF16, FP32 = "c10::BFloat16", "float"


def times(trace: GpuTrace, folder: Path) -> KernelTimes:
    return kernel_times(read_trace(trace.write(folder / "t.json")))


def micro(found: KernelTimes) -> dict[object, list[float]]:
    return {work: pytest.approx([1e6 * time for time in seconds], abs=0.05) for work, seconds in found.seconds.items()}


def test_product_times_are_grouped_by_shape_and_rate(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.call("aten::mm", [[64, 32], [32, 16]], [BF16, BF16], 7.5)
    trace.call("aten::mm", [[64, 32], [32, 16]], [BF16, BF16], 9.0, 2.0)  # a sum over k in pieces, and their sum
    trace.call("aten::addmm", [[16], [64, 32], [32, 16], [], []], [FP32, FP32, FP32, "Scalar", "Scalar"], 5.0,
               values=["", "", "", "1", "1"])  # fmt: skip
    trace.call("aten::bmm", [[8, 64, 32], [8, 32, 16]], [BF16, BF16], 6.0)
    trace.call("aten::mm", [[64, 32], [32, 16], [64, 16]], [BF16, BF16, BF16], 4.0)  # into `out`
    mm = Product(batch=1, m=64, n=16, k=32, rate="bf16", bytes=2 * (64 * 32 + 32 * 16 + 64 * 16))
    add = Product(batch=1, m=64, n=16, k=32, rate="fp32", bytes=4 * (16 + 64 * 32 + 32 * 16 + 64 * 16))
    bmm = Product(batch=8, m=64, n=16, k=32, rate="bf16", bytes=8 * mm.bytes)
    assert micro(times(trace, tmp_path)) == {mm: [7.5, 11.0, 4.0], add: [5.0], bmm: [6.0]}


def test_float8_products_have_the_float8_rate(tmp_path: Path) -> None:
    trace = GpuTrace()
    fp8 = "c10::Float8_e4m3fn"
    trace.call(
        "aten::_scaled_mm", [[64, 32], [32, 16], [64, 1], [1, 16], [], [], [], []],
        [fp8, fp8, FP32, FP32, "", "", "Scalar", "Scalar"], 3.0, values=["", "", "", "", "", "", "15", "True"],
    )  # fmt: skip
    trace.events[0]["args"]["Input Strides"][1] = [1, 32]
    (work,) = times(trace, tmp_path).seconds
    assert isinstance(work, Product) and (work.m, work.n, work.k, work.rate) == (64, 16, 32, "fp8")


@pytest.mark.parametrize("tf32", [True, False])
def test_fp32_convolutions_have_the_rate_that_the_device_has(tf32: bool, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.call(
        "aten::convolution", [[8, 16, 28, 28], [32, 16, 3, 3], [], [], [], [], [], [], []],
        [FP32, FP32, "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"], 3.0,
        values=["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
    )  # fmt: skip
    (work,) = kernel_times(read_trace(trace.write(tmp_path / "t.json")), tf32=tf32).seconds
    *conversion, product = work.parts if isinstance(work, Consecutive) else (work,)
    assert isinstance(product, Product) and (product.m, product.n, product.k) == (8 * 28 * 28, 32, 16 * 9)
    assert product.rate == ("tf32" if tf32 else "fp32") and len(conversion) == tf32


def test_attention_is_grouped_by_kernel_direction_and_mask(tmp_path: Path) -> None:
    trace = GpuTrace()
    heads = [2, 8, 128, 64]
    trace.call(
        "aten::_scaled_dot_product_flash_attention", [heads, heads, heads, [], [], [], []],
        [BF16, BF16, BF16, "Scalar", "Scalar", "Scalar", ""], 40.0, values=["", "", "", "0.", "True", "False", ""],
        inside=["aten::scaled_dot_product_attention"],
    )  # fmt: skip
    trace.call(
        "aten::_scaled_dot_product_flash_attention_backward",
        [heads, heads, heads, heads, heads, [2, 8, 128], [], [], [], [], [], [], [2], [], []],
        [BF16] * 5 + [FP32, "", "", "Scalar", "Scalar", "Scalar", "Scalar", "long int", "long int", ""], 90.0,
        values=[""] * 8 + ["128", "128", "0.", "True", "", "", ""], tid=BACKWARD,
        inside=["autograd::engine::evaluate_function: ScaledDotProductFlashAttentionBackward0"],
    )  # fmt: skip
    found = times(trace, tmp_path).seconds
    forward, backward = sorted(found, key=lambda work: getattr(work, "backward", None))
    assert isinstance(forward, Attention) and isinstance(backward, Attention)
    assert (forward.backward, forward.causal, forward.implementation, forward.heads) == (False, True, "flash2", 8)
    assert (backward.backward, backward.causal, backward.rate, backward.queries) == (True, True, "bf16", 128)
    assert found[forward] == pytest.approx([40e-6], abs=1e-8) and found[backward] == pytest.approx([90e-6], abs=1e-8)


def test_movement_is_grouped_by_kind_and_views_are_free(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.call("aten::view", [[64, 64], []], [FP32, "ScalarList"], values=["", "[4096]"])
    trace.call("aten::add", [[64, 64], [64, 64], []], [FP32, FP32, "Scalar"], 3.0, values=["", "", "1"])
    trace.call("aten::copy_", [[64, 64], [64, 64], []], [BF16, FP32, "Scalar"], 2.0, values=["", "", "False"])
    found = micro(times(trace, tmp_path))
    assert found == {
        Movement(kind="elementwise", bytes=3 * 4 * 4096): [3.0],
        Movement(kind="copy", bytes=6 * 4096, rate="bf16"): [2.0],
    }


def test_composite_operator_is_one_kernel_if_it_launches_itself(tmp_path: Path) -> None:
    shapes = [[8, 128], [], [128], []]
    types, values = [FP32, "ScalarList", FP32, "Scalar"], ["", "[128]", "", "1e-05"]
    trace = GpuTrace()
    trace.call("aten::_fused_rms_norm", shapes, types, 3.0, values=values, inside=["aten::rms_norm"])
    (work,) = times(trace, tmp_path).seconds
    assert isinstance(work, Movement) and work.kind == "normalisation"
    other = GpuTrace()
    other.call("aten::mul", [[8, 128], [128]], [FP32, FP32], 3.0, inside=["aten::_fused_rms_norm"])
    (work,) = times(other, tmp_path).seconds
    assert isinstance(work, Movement) and work.kind == "elementwise"


def test_kernels_overlapping_collectives_are_separate(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.collective("allreduce", (2**20, 2**20), 500.0, beside=True)
    trace.call("aten::mm", [[64, 32], [32, 16]], [BF16, BF16], 12.0)
    trace.clock += 1000
    trace.call("aten::mm", [[64, 32], [32, 16]], [BF16, BF16], 7.5)
    found = times(trace, tmp_path)
    (alone,), (beside,) = found.seconds.values(), found.beside.values()
    assert alone == pytest.approx([7.5e-6], abs=1e-8) and beside == pytest.approx([12e-6], abs=1e-8)


def test_kernel_without_a_launch_is_matched_by_external_id(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.call("aten::mm", [[64, 32], [32, 16]], [BF16, BF16], 7.5, external_only=True)
    assert list(micro(times(trace, tmp_path)).values()) == [[7.5]]


def test_ambiguous_operators_are_skipped_and_listed(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.call("aten::_to_copy", [[640]] + [[]] * 6, [FP32, "Scalar", "", "", "", "Scalar", ""], 2.0)  # to which dtype?
    trace.call("aten::_foreach_add_", [[], []], ["TensorList", "Scalar"], 3.0, values=["", "1"])
    trace.call("aten::cat", [[[640], [640]], []], ["TensorList", "Scalar"], 4.0, values=["", "0"])
    trace.call("aten::add", [[64, 64], [64, 64], []], [FP32, BF16, "Scalar"], 3.0, values=["", "", "1"])
    trace.call("triton_poi_fused_0", [[64]], [FP32], 5.0)
    found = times(trace, tmp_path)
    assert set(found.unknown) == {"aten::_to_copy", "aten::_foreach_add_", "aten::cat", "cutlass::Kernel"}
    assert len(found.seconds) == 1
    trace.events = [event for event in trace.events if event["name"] != "aten::add"]
    assert "aten::cat" not in times(trace, tmp_path).unknown, "a run of one dtype tells that of lists"


def test_traces_without_concrete_inputs_give_products_only(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.call("aten::mm", [[64, 32], [32, 16]], [FP32, FP32], 7.5)
    trace.call("aten::sum", [[64, 32], [], [], []], [FP32, "", "Scalar", ""], 3.0)
    for event in trace.events:
        for key in ("Concrete Inputs", "Input Strides"):
            event["args"].pop(key, None)
    found = times(trace, tmp_path)
    assert [type(work) for work in found.seconds] == [Product] and set(found.unknown) == {"aten::sum"}


def test_trace_names_never_execute_code(tmp_path: Path) -> None:
    trace = GpuTrace()
    path = tmp_path / "made"
    trace.call(
        "aten::from_file", [[], [], [], [], [], [], []], ["", "", "", "", "", "", ""], 2.0, values=[str(path)] * 7
    )
    trace.call("aten::__class__", [[2]], [FP32], 2.0)
    trace.call("os::system", [[2]], [FP32], 2.0, values=[f"touch {path}"])
    assert not times(trace, tmp_path).seconds and not path.exists()


def test_host_times_separate_python_and_dispatch(tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(3):
        trace.call("aten::mm", [[64, 32], [32, 16]], [BF16, BF16], 7.5)
    trace.call(
        "aten::mm",
        [[64, 32], [32, 16]],
        [BF16, BF16],
        7.5,
        tid=BACKWARD,
        inside=["autograd::engine::evaluate_function"],
    )
    trace.call(
        "aten::mm",
        [[64, 32], [32, 16]],
        [BF16, BF16],
        7.5,
        tid=BACKWARD,
        inside=["autograd::engine::evaluate_function"],
    )
    found = times(trace, tmp_path).host
    assert len(found["python"]) == 2 and len(found["dispatch"]) == 1
    assert found["python"] == pytest.approx([48.5e-6] * 2, abs=1e-7)


def test_intervals_merge_and_overlap() -> None:
    assert merged([(3, 4), (0, 1), (1, 2), (3.5, 6)]) == [(0, 2), (3, 6)]
    cases = {(2, 3): False, (2, 3.1): True, (5, 5.5): True, (6, 7): False, (-1, 0): False, (-1, 9): True}
    assert {one: overlaps(one, [(0, 2), (3, 6)]) for one in cases} == cases
