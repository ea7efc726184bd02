"""Metrics of a run, on the terminal, in `metrics.jsonl`, and for TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from legoai.runtime.durable import not_writable
from legoai.runtime.metrics.records import RecordFile, read_records
from legoai.runtime.metrics.tensorboard import TensorBoard
from legoai.specs.terminal import may_color
from legoai.specs.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Figures of one optimizer step.

    Attributes:
        step: counted from 1.
        loss: mean over the tokens of the global batch, in nats.
        grad_norm: the 2-norm of the whole gradient before clipping.
        lr: the learning rate that the step used.
        samples_per_second_per_device: samples of the global batch / (seconds * devices).
        tokens_per_sample: of a sequence, or of each text of a sample; 0 where a sample has no text.
        mfu: model FLOPs utilization: FLOPs of the model divided by those of the plan's device at its peak; None where
            either is not known, or the training is not on a GPU.
        seconds: of the step on rank 0, data wait included.
        data_seconds: rank 0's wait for its micro batches.
        peak_memory: bytes on rank 0 since the run started, as `Device.peak_memory` counts them.
        epoch: passes over the corpus so far.
        skipped: whether the update was skipped because loss or gradient was not finite.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples_per_second_per_device: float
    tokens_per_sample: int
    seconds: float
    data_seconds: float
    peak_memory: int
    epoch: float
    skipped: bool = False
    mfu: float | None = None

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens of the global batch / (seconds * devices); 0 where samples have no text."""
        return self.samples_per_second_per_device * self.tokens_per_sample


METRICS: Final = "metrics.jsonl"
"""The file of the records in a run's folder."""


def check_metrics(folder: Path) -> None:
    """Check, before anything that takes long, that the metrics of a run can be written into its folder.

    Raises:
        RunError: they cannot.
    """
    path = folder / METRICS
    try:
        RecordFile(path).close()
    except OSError as error:
        raise not_writable(f"{path} takes no records", error, "remove it, or choose another --out") from error


def is_validated(folder: Path, step: int) -> bool | None:
    """Whether the run in a folder has validated a step since it has taken it, the last time if it went back.

    None where no record says that it has taken the step, as beside a checkpoint that was copied alone.
    """
    found = None
    for record in read_records(folder / METRICS):
        if record.get("step") == step and record.get("event") in ("step", "validation"):
            found = record["event"] == "validation"
    return found


class MetricsLog:
    """Writes a record per step to `metrics.jsonl`, and a line for every n-th to the terminal.

    Ranks other than 0 have a silent one. The first record of every run in the file names the plan. A resumed run
    appends. A disk that takes no more records, as a full one, does not end the training: a warning says so, and later
    records are written as soon as it takes them.

    Args:
        path: of the JSONL file; None writes none.
        header: the first record.
        every: steps between two lines on the terminal; 0 for none.
        steps: the last step, for the line.
        silent: shows nothing on the terminal, as ranks other than 0 do.
        board: further receiver of the figures, or None.
        stream: the terminal.

    Raises:
        OSError: the file cannot be written from the beginning.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        header: dict[str, Any],
        every: int,
        steps: int,
        silent: bool = False,
        board: TensorBoard | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._every = every
        self._steps = steps
        self._silent = silent
        self._board = board
        self._file = None if path is None else RecordFile(path)
        self._fails = False
        if self._file is not None:
            self._file.append({"event": "start", **header})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._show(lambda board: board.close())

    def step(self, record: StepRecord) -> None:
        """Write the record, and show it when it is an n-th or the last."""
        tokens = {"tokens_per_second_per_device": record.tokens_per_second_per_device}
        values = asdict(record) | (tokens if record.tokens_per_sample else {})
        if record.mfu is None:
            del values["mfu"]
        self._write({"event": "step", **values})
        self._show(lambda board: board.step(values))
        if self._every and (record.step % self._every == 0 or record.step in (1, self._steps)):
            self.say(step_line(record, steps=self._steps, color=may_color(self._stream)))

    def event(self, name: str, **values: Any) -> None:
        """Write something other than a step: a validation, a checkpoint, the end."""
        self._write({"event": name, **values})
        self._show(lambda board: board.event(name, values))

    def say(self, line: str) -> None:
        """Show a line on the terminal; a terminal or pipe that is closed ends the lines, and not the training."""
        if not self._silent:
            self._print(line)

    def warn(self, line: str) -> None:
        """Show a warning that concerns this rank alone, also on ranks that are silent."""
        self._print(f"warning: {line}")

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except OSError:
            self._silent = True

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.append(record)
            self._fails = False
        except OSError as error:
            if not self._fails:
                self.say(f"warning: {self._file.path} takes no records: {error.strerror}; the training goes on")
            self._fails = True

    def _show(self, do: Callable[[TensorBoard], None]) -> None:
        """Do something with the board; one that fails is left, as its writer does not recover."""
        if self._board is None:
            return
        try:
            do(self._board)
        except OSError as error:
            self._board = None
            self.say(f"warning: TensorBoard takes no figures: {error.strerror}; the training goes on without it")


def step_line(record: StepRecord, *, steps: int, color: bool = False) -> str:
    """Return the line that the terminal shows for a step."""
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if color else ("", "", "")
    width = len(str(steps))
    rate, unit = record.tokens_per_second_per_device, "tokens"
    if not record.tokens_per_sample:
        rate, unit = record.samples_per_second_per_device, "samples"
    mfu = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    text = (
        f"step {record.step:>{width}}/{steps}  {bold}loss {record.loss:.4f}{plain}  grad norm {record.grad_norm:.3f}  "
        f"lr {record.lr:.2e}  {rate:,.{0 if rate >= 100 else 2}f} {unit}/s/device  {mfu}"
        f"{dim}step {record.seconds:.3f} s  data {record.data_seconds:.3f} s  "
        f"peak {record.peak_memory / GIB:.2f} GiB{plain}"
    )
    return f"{text}  update skipped" if record.skipped else text
