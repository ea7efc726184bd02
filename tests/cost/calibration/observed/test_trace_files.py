"""Reading of the profiler's traces, whole and damaged."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from legoai.cost.calibration.observed import trace_files
from legoai.cost.calibration.observed.trace_files import TraceError, read_trace
from support.simulation.traces import A100, GpuTrace

MM = ("aten::mm", [[64, 32], [32, 16]], ["c10::BFloat16", "c10::BFloat16"])


def small() -> GpuTrace:
    trace = GpuTrace(rank=1, world=4, groups=[("0", range(4)), ("1", (1, 3))])
    trace.call(*MM, 7.5)
    trace.collective("allreduce", (1024, 1024), 30.0, group=("1", (1, 3)))
    return trace


@pytest.mark.parametrize("name", ["step-3-rank-1.json", "step-3-rank-1.json.gz"])
@pytest.mark.parametrize("chunk", [7, 2**20])
def test_trace_is_read_with_any_chunk_size(
    name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "_CHUNK", chunk)
    found = read_trace(small().write(tmp_path / name))
    assert (found.rank, found.world, found.on_device) == (1, 4, True)
    assert found.groups == (("0", (0, 1, 2, 3)), ("1", (1, 3)))
    assert found.device == A100
    assert [call.name for call in found.calls] == ["aten::mm", "record_param_comms"]
    assert [kernel.end - kernel.start for kernel in found.kernels] == pytest.approx([7.5, 30.0], abs=1e-2)
    assert [kernel.collective is not None for kernel in found.kernels] == [False, True]
    assert {launch.correlation for launch in found.launches} == {kernel.correlation for kernel in found.kernels}


def test_unknown_events_and_broken_fields_are_skipped(tmp_path: Path) -> None:
    trace = small()
    whole = len(read_trace(trace.write(tmp_path / "a.json")).calls)
    trace.events += [
        {"ph": "M", "name": "process_name", "pid": 0},
        {"ph": "X", "cat": "cpu_op", "name": "without a time"},
        {"ph": "X", "cat": "cpu_op", "name": "odd", "ts": "now", "dur": 1, "args": 3},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "ts": 1,
            "dur": 1,
            "args": {"Input Dims": [3], "Input type": [3]},
        },
        {"ph": "f", "id": 1, "ts": 3.0, "cat": "ac2g", "name": "ac2g"},
    ]
    text = (
        trace.text().replace('"dur": 7.5', '"dur": 7.5, "odd": NaN').replace('traceEvents": [', 'traceEvents": [ 17,')
    )
    (tmp_path / "b.json").write_text(text)
    found = read_trace(tmp_path / "b.json")
    assert len(found.calls) == whole + 1 and found.calls[-1].arguments is None


def test_truncated_trace_is_refused_with_a_remedy(tmp_path: Path) -> None:
    text = small().text()
    for at in (len(text) // 3, len(text) // 2, text.index('"traceName"') - 10):
        (tmp_path / "cut.json").write_text(text[:at])
        with pytest.raises(TraceError, match=r"ends in the middle.*profile a step again"):
            read_trace(tmp_path / "cut.json")
    raw = gzip.compress(text.encode())
    (tmp_path / "cut.json.gz").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(TraceError, match=r"is incomplete.*profile a step again"):
        read_trace(tmp_path / "cut.json.gz")
    (tmp_path / "flipped.json.gz").write_bytes(raw[:40] + b"\x00\xff\x00" + raw[43:])
    with pytest.raises(TraceError):
        read_trace(tmp_path / "flipped.json.gz")


def test_damaged_trace_stops_the_reader_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "_CHUNK", 64)
    monkeypatch.setattr(trace_files, "_LONGEST", 4096)
    text = small().text().replace('"cat": "cpu_op"', '"cat" "cpu_op"', 1) + " " * 10_000
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(TraceError, match=r"is damaged"):
        read_trace(tmp_path / "bad.json")


@pytest.mark.parametrize("place", ['"deviceProperties"', '"traceEvents"'])
def test_deeply_nested_trace_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(f'{{{place}: {"[" * 100_000}, "traceEvents": [')
    with pytest.raises(TraceError, match=r"is damaged: maximum recursion depth"):
        read_trace(tmp_path / "deep.json")


def test_trace_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-3.json").symlink_to("/dev/null")
    with pytest.raises(TraceError, match=r"cannot be read: it is no regular file"):
        read_trace(tmp_path / "step-3.json")


@pytest.mark.parametrize("field", ["cat", "pid", "tid"])
@pytest.mark.parametrize("value", [[0], {}])
def test_event_without_a_category_or_thread_is_refused(field: str, value: object, tmp_path: Path) -> None:
    trace = small()
    next(event for event in trace.events if event["cat"] == "cpu_op")[field] = value
    with pytest.raises(TraceError, match=r"is damaged.*profile a step again"):
        read_trace(trace.write(tmp_path / "odd.json"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no `traceEvents`"),
        ("\x80\x02}q\x00.", "no `traceEvents`"),
        ("[]", "no `traceEvents`"),
        (json.dumps({"traceEvents": []}), "no operators"),
        (json.dumps([{"traceEvents": []}]), "no JSON"),
        (json.dumps({"traceEvents": [{"ph": "X", "cat": "gpu", "name": "x", "ts": 1, "dur": 1}]}), "no operators"),
    ],
)
def test_file_that_is_no_trace_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=re.escape(said)):
        read_trace(tmp_path / "other.json")


def test_trace_without_shapes_requires_collectives(tmp_path: Path) -> None:
    without = GpuTrace(shapes=False)
    without.call(*MM, 7.5)
    with pytest.raises(TraceError, match=r"no shapes of operands.*--profile-step N"):
        read_trace(without.write(tmp_path / "a.json"))
    without.collective("allreduce", (1024, 1024), 30.0)
    assert len(read_trace(without.write(tmp_path / "b.json")).kernels) == 2
