"""Predicted figures of a plan beside those that a run of it measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from legoai.cost import words
from legoai.cost.estimate import Estimate
from legoai.cost.profiles import profile as shipped
from legoai.runtime.metrics.records import RecordFile, read_records
from legoai.specs.directives.cluster import ClusterUse

_CPU: Final = "cpu"
"""The profile of the catalogue's CPU; one of a user's own may have the same name."""
_FIRST: Final = 3
"""First steps of a run that are not counted: they allocate, and compile."""
_FEWEST: Final = 3
"""Fewest steps that must remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Prediction for a step.

    Attributes:
        step_time_s: seconds.
        samples_per_step: samples of the global batch, such as sequences.
        tokens_per_step: of the global batch; None where samples have no text.
        unit: of the rates: `tokens` or `samples`.
        devices: of the mesh.
        model_flops: operations that the model asks for in a step; 0 where they are not known.
        peak_flops_per_s_per_device: of the device.
        profile: on which the figures are based.
        of_this_machine: False for the catalogue's CPU, which was measured on another machine.
        peak_memory_bytes: peak of active memory on rank 0; None on a CPU, where a run measures its whole process.
    """

    step_time_s: float
    samples_per_step: int
    tokens_per_step: int | None
    unit: str
    devices: int
    model_flops: float
    peak_flops_per_s_per_device: float
    profile: str
    of_this_machine: bool
    peak_memory_bytes: int | None

    @classmethod
    def of(cls, found: Estimate, samples: int) -> Predicted:
        """Return the figures of an estimate for a global batch of so many samples."""
        first = next((item for item in found.ranks if item.rank == 0), found.fullest)
        return cls(
            step_time_s=found.step_time,
            samples_per_step=samples,
            tokens_per_step=found.tokens_per_step if found.unit == "tokens" else None,
            unit=found.unit,
            devices=found.world_size,
            model_flops=found.model_flops or 0.0,
            peak_flops_per_s_per_device=found.peak_flops or 0.0,
            profile=found.machine.profile.name,
            of_this_machine=found.machine.profile.hash != shipped(_CPU).hash,
            peak_memory_bytes=None if found.machine.device.kind == "cpu" else first.memory.peak,
        )

    def is_of(self, step: Mapping[str, Any]) -> bool:
        """Whether a recorded step has the batch that was predicted; a smaller one is of a ramp."""
        seconds, length = float(step["seconds"]), int(step["tokens_per_sample"]) or 1
        samples = float(step["samples_per_second_per_device"]) * seconds * self.devices
        return math.isclose(samples * length, self._amount, rel_tol=1e-6)

    @property
    def _amount(self) -> int:
        """What the rates count in a step."""
        return self.samples_per_step if self.tokens_per_step is None else self.tokens_per_step

    def rate(self, seconds: float) -> float:
        """Return tokens or samples per second and device, given the seconds of a step."""
        return self._amount / seconds / self.devices

    def mfu(self, seconds: float) -> float:
        """Return model FLOP/s utilisation, given the seconds of a step; 0 where it is not known."""
        peak = self.peak_flops_per_s_per_device * self.devices
        return self.model_flops / seconds / peak if peak else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a run's steps.

    Attributes:
        steps: number of counted steps.
        step_time_s: the median of their seconds, without waiting for data.
        peak_memory_bytes: on rank 0 since the run began.
        smaller_steps: those that are not counted, since their batch is smaller than the predicted one.
    """

    steps: int
    step_time_s: float
    peak_memory_bytes: int
    smaller_steps: int = 0


def measured(metrics: Path, *, before: int = 0, predicted: Predicted | None = None) -> Measured | str | None:
    """Return the last run's measurements, or why too few of its steps have the predicted batch.

    None where it took too few steps of any batch, or there are no metrics.

    Args:
        metrics: `metrics.jsonl`.
        before: bytes of the file before the run.
        predicted: the prediction whose batch the counted steps must have; without it all are counted.
    """
    found = _steps(metrics, before)
    if len(found) < _FIRST + _FEWEST:
        return None
    counted = [event for event in found[_FIRST:] if predicted is None or predicted.is_of(event)]
    if len(counted) < _FEWEST:
        return (
            f"nothing measured is compared: of the steps behind the first {_FIRST}, {len(counted) or 'none'} had the "
            f"full batch, which is the predicted one, and a comparison needs {_FEWEST}"
        )
    return Measured(
        steps=len(counted),
        step_time_s=statistics.median(float(event["seconds"]) - float(event["data_seconds"]) for event in counted),
        peak_memory_bytes=int(found[-1]["peak_memory"]),
        smaller_steps=len(found) - _FIRST - len(counted),
    )


def _steps(metrics: Path, before: int) -> list[Mapping[str, Any]]:
    """Return the records of the last run's steps."""
    found: list[Mapping[str, Any]] = []
    for event in read_records(metrics, behind=before):
        if event.get("event") == "start":
            found = []
        elif event.get("event") == "step":
            found.append(event)
    return found


def compared(predicted: Predicted, run: Measured) -> Iterator[str]:
    """Yield the lines of a table of predicted and measured figures."""
    one, two = predicted.step_time_s, run.step_time_s
    rows = [
        ("step time", words.seconds(one), words.seconds(two), one / two - 1.0),
        (
            f"{predicted.unit}/s/device",
            f"{predicted.rate(one):,.0f}",
            f"{predicted.rate(two):,.0f}",
            two / one - 1.0,
        ),
    ]
    if predicted.mfu(one):
        rows.append(("MFU", words.share(predicted.mfu(one)), words.share(predicted.mfu(two)), two / one - 1.0))
    if predicted.peak_memory_bytes is not None:
        active, real = predicted.peak_memory_bytes, run.peak_memory_bytes
        rows.append(("peak active", words.size(active), words.size(real), active / real - 1.0))
    steps = f"{run.steps} steps of the full batch" if run.smaller_steps else f"{run.steps} steps"
    yield f"predicted beside measured, the median of {steps} behind the first {_FIRST}"
    yield f"  {'':<16}{'predicted':>12}{'measured':>12}" + (f"{'error':>9}" if predicted.of_this_machine else "")
    for name, said, seen, error in rows:
        yield f"  {name:<16}{said:>12}{seen:>12}" + (f"{error:>+9.1%}" if predicted.of_this_machine else "")
    if not predicted.of_this_machine:
        measure = f"`legoai calibrate --processes {predicted.devices}`"
        yield f"  profile `{predicted.profile}` was measured on another machine; {measure} measures this one"


def note(metrics: Path, predicted: Predicted, run: Measured) -> None:
    """Add predicted and measured figures to the metrics of the run."""
    event = {"event": "prediction", "predicted": asdict(predicted), "measured": asdict(run)}
    with RecordFile(metrics) as file:
        file.append(event)


def note_cluster(metrics: Path, use: ClusterUse, directory: Path) -> None:
    """Add the cluster of the plan to the metrics of a run that begins; a device file is given by its absolute path."""
    file = None if use.profile is None else str((directory / use.profile).resolve())
    event = {
        "event": "cluster", "device": use.device, "profile": file, "hosts": use.hosts, "devices": use.devices,
        "fabric": use.fabric,
    }  # fmt: skip
    with RecordFile(metrics) as log:
        log.append(event)
