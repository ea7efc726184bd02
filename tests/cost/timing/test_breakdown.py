"""Every second of a step is counted once: computation, communication, copies, host, or idle."""

from __future__ import annotations

import pytest

from legoai.cost.timing.breakdown import Breakdown, breakdown, collective_costs, module_costs, pattern_of
from legoai.cost.timing.timeline import Cost, Interval
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel


def kernel(start: float, end: float, *, op="aten.mm", phase="forward", module="layers.0.w", alone=None) -> Interval:
    record = Kernel(stream=0, op=op, inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0, attributes={},
                    module=module, phase=phase)  # fmt: skip
    cost = Cost(seconds=end - start if alone is None else alone, resource="compute", model="roofline")
    return Interval(record, cost, "stream 0", start, end)


def collective(start: float, end: float, *, axis="dp_shard", kind="all_gather", module="layers.0") -> Interval:
    record = Collective(work=0, stream=0, kind=kind, ranks=(0, 1), axis=axis, bytes=8, dtype="float32", module=module,
                        phase="forward")  # fmt: skip
    return Interval(record, Cost(seconds=end - start, resource="intra_host", model="analytical"), axis, start, end)


def copy(start: float, end: float) -> Interval:
    record = Copy(stream=1, direction="host_to_device", bytes=8, blocking=False, module="", phase="forward")
    return Interval(
        record, Cost(seconds=1.0, resource="host_to_device", model="measured table"), "stream 1", start, end
    )


def on_host(start: float, end: float) -> Interval:
    record = HostKernel(op="aten.add", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0, attributes={},
                        module="", phase="optimizer")  # fmt: skip
    return Interval(record, Cost(seconds=1.0, resource="host", model="roofline"), "host", start, end)


def parts(found: Breakdown) -> tuple[float, ...]:
    return found.compute, found.exposed, found.copies, found.host, found.idle


def test_perfect_overlap_exposes_nothing():
    found = breakdown([kernel(0, 10), collective(2, 8), copy(3, 5)], 10)
    assert parts(found) == (10, 0, 0, 0, 0)
    assert found.communication == 6


def test_no_overlap_exposes_everything():
    found = breakdown([kernel(0, 4), collective(4, 7), copy(7, 9), on_host(9, 11), kernel(12, 13)], 14)
    assert parts(found) == (5, 3, 2, 2, 2)


def test_parts_sum_to_the_step_under_any_overlap():
    intervals = [
        kernel(0, 3),
        collective(1, 6),
        collective(2, 8, axis="tp"),
        copy(5, 9),
        on_host(4, 10),
        kernel(11, 12),
    ]
    found = breakdown(intervals, 15)
    assert sum(parts(found)) == pytest.approx(15)
    assert parts(found) == (4, 5, 1, 1, 4)
    assert found.exposed_by_axis == {"dp_shard": 3, "tp": 2}


def test_recomputation_and_slowdown_are_included_in_computation():
    found = breakdown([kernel(0, 3, alone=2), kernel(3, 5, phase="recompute"), collective(0, 3)], 5)
    assert (found.recompute, found.slowed, found.by_phase) == (2, 1, {"forward": 3, "recompute": 2})


def test_kernels_are_grouped_by_kind():
    found = breakdown(
        [kernel(0, 4), kernel(4, 7, op="aten._scaled_dot_product_flash_attention"), kernel(7, 9, op="aten.silu"),
         kernel(9, 10, op="aten._fused_adamw_", phase="optimizer")], 10,
    )  # fmt: skip
    assert found.by_kind == {"matrix product": 4, "attention": 3, "elementwise": 2, "optimizer": 1}


def test_equal_modules_are_merged_and_sorted_by_time():
    found = module_costs(
        [kernel(0, 1, module="layers.0.w"), kernel(1, 3, module="layers.11.w", phase="recompute"),
         kernel(3, 8, module="output")],
    )  # fmt: skip
    assert [(item.pattern, item.modules, item.seconds, item.recompute) for item in found] == [
        ("output", 1, 5, 0),
        ("layers.*.w", 2, 3, 2),
    ]


def test_collectives_are_grouped_and_sorted_by_exposed_time():
    intervals = [kernel(0, 6), collective(0, 6, module="layers.0"), collective(6, 7, axis="tp", module="layers.1.w"),
                 collective(7, 9, axis="tp", module="layers.2.w")]  # fmt: skip
    found = collective_costs(intervals)
    assert [(item.axis, item.pattern, item.count, item.seconds, item.exposed) for item in found] == [
        ("tp", "layers.*.w", 2, 3, 3),
        ("dp_shard", "layers.*", 1, 6, 0),
    ]
    apart = collective_costs(intervals, lambda _, module: module)
    assert [(item.first, item.count) for item in apart] == [("layers.2.w", 1), ("layers.1.w", 1), ("layers.0", 1)]


def test_modules_with_different_causes_are_not_equal():
    intervals = [kernel(0, 1, module="layers.0.w"), kernel(1, 3, module="layers.1.w"),
                 kernel(3, 8, module="layers.1.w", phase="recompute"), kernel(8, 9, module="layers.2.w"),
                 kernel(9, 10, module="norms.0"), kernel(10, 12, module="norms.1")]  # fmt: skip
    found = module_costs(intervals, of_recomputation=lambda path: path[-3:] == "1.w")
    assert [(item.first, item.modules, item.seconds, item.recompute) for item in found] == [
        ("layers.1.w", 1, 7, 5),
        ("norms.0", 2, 3, 0),  # nothing recomputes
        ("layers.0.w", 2, 2, 0),
    ]
    [again] = found[0].recomputed
    assert (again.calls, again.of) == (1, 1)
    assert [item.first for item in module_costs(intervals, of_kernels=lambda path: path)] == [
        "layers.1.w", "norms.1", "layers.0.w", "layers.2.w", "norms.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("layers.3.attention.wq", "layers.*.attention.wq"),
        ("h.0", "h.*"),
        ("0.1.conv", "*.*.conv"),
        ("w1", "w1"),
        ("", ""),
    ],
)
def test_path_indices_become_stars(path: str, pattern: str):
    assert pattern_of(path) == pattern
