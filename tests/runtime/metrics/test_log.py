"""Lines of the terminal, and records of `metrics.jsonl`."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.metrics.log import METRICS, MetricsLog, StepRecord, check_metrics, is_validated, step_line
from legoai.runtime.metrics.records import read_records
from legoai.runtime.metrics.tensorboard import TensorBoard


def record(step: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=0.75,
        lr=3e-4,
        samples_per_second_per_device=12345.6 / 64,
        tokens_per_sample=64,
        seconds=0.5,
        data_seconds=0.001,
        peak_memory=3 * 1024**3,
        epoch=0.1,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_step_line_shows_all_figures():
    assert step_line(record(7), steps=100) == (
        "step   7/100  loss 2.5000  grad norm 0.750  lr 3.00e-04  12,346 tokens/s/device  "
        "step 0.500 s  data 0.001 s  peak 3.00 GiB"
    )


def test_step_line_shows_mfu_if_known():
    line = step_line(dataclasses.replace(record(7), mfu=0.3821), steps=100)
    assert "12,346 tokens/s/device  MFU 38.2%  step 0.500 s" in line


def test_terminal_shows_first_every_nth_and_last_step():
    out = io.StringIO()
    log = MetricsLog(None, header={}, every=4, steps=10, stream=out)
    for step in range(1, 11):
        log.step(record(step))
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["step  1", "step  4", "step  8", "step 10"]


def test_colour_requires_a_terminal_without_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def shown(out: io.StringIO) -> bool:
        MetricsLog(None, header={}, every=1, steps=1, stream=out).step(record(1))
        return "\x1b[" in out.getvalue()

    assert shown(Terminal()) and not shown(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shown(Terminal())


def test_every_step_is_one_json_object_even_for_nan_loss(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    for start in (1, 3):
        with MetricsLog(path, header={"plan": "p"}, every=0, steps=4, silent=True) as log:
            log.step(record(start))
            log.step(record(start + 1, loss=float("nan")))
    records = [json.loads(line, parse_constant=lambda name: 1 / 0) for line in path.read_text().splitlines()]
    assert [record["event"] for record in records] == ["start", "step", "step"] * 2
    assert [record["loss"] for record in records if record["event"] == "step"] == [2.5, "nan"] * 2


def test_importing_the_runtime_does_not_import_torch():
    code = "import sys; from legoai.runtime import launch, RunError, RunOptions; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"


def test_closed_terminal_ends_the_lines_and_not_the_run(tmp_path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with MetricsLog(tmp_path / "metrics.jsonl", header={}, every=1, steps=2, stream=Closed()) as log:
        for step in (1, 2):
            log.step(record(step))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [item.get("step") for item in records] == [None, 1, 2]


def test_full_disk_ends_the_records_and_not_the_run(tmp_path, monkeypatch):
    """A disk takes two bytes of a record, then none; later it takes all again."""
    room: list[int | None] = [None]
    write = io.FileIO.write

    class Disk(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if room[0] is None:
                return write(self, data)
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken, room[0] = write(self, data[: room[0]]), 0
            return taken

    out, path = io.StringIO(), tmp_path / "metrics.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, buffering: Disk(path, mode))
        log = MetricsLog(path, header={}, every=0, steps=9, stream=out)
    with log:
        for step, left in enumerate((None, 2, 0, None, 0, None), start=1):
            room[0] = left
            log.step(record(step))
    lines = path.read_text().splitlines()
    assert lines[2] == '{"'
    assert [json.loads(line).get("step") for line in (*lines[:2], *lines[3:])] == [None, 1, 4, 6]
    assert (
        out.getvalue().splitlines()
        == [f"warning: {path} takes no records: No space left on device; the training goes on"] * 2
    )


def test_record_begins_a_line_behind_one_of_a_killed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "st')
    with MetricsLog(path, header={}, every=0, steps=1, silent=True):
        pass
    assert path.read_text().splitlines() == ['{"event": "st', '{"event": "start"}']


def test_damaged_lines_are_no_records(tmp_path):
    path, kept = tmp_path / METRICS, ['{"event": "start"}', '{"event": "end", "step": 2}']
    damaged = ["[" * 200_000, '{"a":' * 200_000, '{"event": "st', "[1]", "\x00\xff"]
    path.write_text("\n".join([kept[0], *damaged, kept[1]]) + "\n")
    assert list(read_records(path)) == [json.loads(line) for line in kept]


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere/file")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _full(path: Path) -> None:
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("make", [_folder, _pipe, _dangling, _loop, _full])
def test_metrics_that_take_no_records_are_refused(tmp_path, make: Callable[[Path], None]):
    make(tmp_path / METRICS)
    assert list(read_records(tmp_path / METRICS)) == []
    with pytest.raises(RunError, match=r"metrics\.jsonl takes no records: ") as caught:
        check_metrics(tmp_path)
    assert caught.value.code == RunErrorCode.FOLDER_NOT_WRITABLE
    assert caught.value.help == "remove it, or choose another --out"


def test_board_that_takes_no_figures_is_left(tmp_path):
    class Full(TensorBoard):
        def step(self, values: Mapping[str, Any]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    out = io.StringIO()
    with MetricsLog(None, header={}, every=0, steps=2, board=Full(tmp_path), stream=out) as log:
        for step in (1, 2):
            log.step(record(step))
    assert out.getvalue() == (
        "warning: TensorBoard takes no figures: No space left on device; the training goes on without it\n"
    )


def test_validation_counts_since_its_step_was_last_taken(tmp_path: Path):
    assert is_validated(tmp_path, 2) is None
    seen = []
    events = ["start", "step", "validation", "checkpoint", "step", "step", "resume"]
    for event, step in zip(events, [None, 2, 2, 2, 3, 2, 2], strict=True):
        with (tmp_path / METRICS).open("a") as file:
            file.write(json.dumps({"event": event, "step": step}) + "\n")
        seen.append(is_validated(tmp_path, 2))
    assert seen == [None, False, True, True, True, False, False]
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"event": "validation", "step": 2, "lo')
    assert is_validated(tmp_path, 2) is False, "it was written in part"
