"""Metrics of a run as scalars for TensorBoard, by torch's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from legoai.runtime.errors import RunError, RunErrorCode

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_SCALARS: Final = {
    "loss": "loss",
    "grad_norm": "gradient/norm",
    "lr": "learning rate",
    "tokens_per_second_per_device": "speed/tokens per second and device",
    "samples_per_second_per_device": "speed/samples per second and device",
    "mfu": "speed/model FLOPs utilization",
    "seconds": "speed/seconds of a step",
    "data_seconds": "speed/seconds of waiting for data",
    "peak_memory": "memory/peak bytes of rank 0",
}
"""Names of a step's figures, and their tags in TensorBoard."""


class TensorBoard:
    """Writes the figures of steps and validations into a folder for `tensorboard --logdir`.

    Records of an earlier run are hidden from the first step that this run takes, since a training that resumes at its
    newest checkpoint repeats these steps.

    Args:
        folder: for the event files; created with the first step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def step(self, values: Mapping[str, Any]) -> None:
        """Write the figures of a step, of its record."""
        writer = self._at(values["step"])
        for name, title in _SCALARS.items():
            if name in values:
                writer.add_scalar(title, values[name], values["step"])

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Write a validation's loss; other events have no figures."""
        if name == "validation":
            # A run that resumes may begin with the validation of a step whose own figures it does not write again.
            writer = self._at(values["step"] + 1)
            writer.add_scalar("loss of validation", values["loss"], values["step"])

    def close(self) -> None:
        """Flush remaining records."""
        if self._writer is not None:
            self._writer.close()

    def _at(self, step: int) -> Any:
        """Return the writer; the first call hides the records of an earlier run from a step on."""
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        return self._writer


def check_installed() -> None:
    """Check that the package `tensorboard` is installed.

    Raises:
        RunError: it is not.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise RunError(
            RunErrorCode.NO_TENSORBOARD,
            f"--tensorboard needs the package `tensorboard`, and importing it fails: {error}",
            help="`pip install 'legoai[tensorboard]'` installs it",
        ) from None
