"""Files with which cluster schedulers start a lowered program on all hosts of its plan."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from legoai.lowering.launch.job import Job

KINDS: Final[dict[str, str]] = {"slurm": ".sbatch", "k8s": ".yaml", "torchx": "_torchx.py"}
"""For each kind of launch, the ending of its file's name."""

_MODULES: Final = {"slurm": "slurm", "k8s": "kubernetes", "torchx": "torchx"}


class LaunchError(ValueError):
    """A program that a kind of launch cannot start."""


def launch_path(kind: str, program: Path) -> Path:
    """Return the file of a kind of launch: beside the program, with its name."""
    return program.with_name(f"{program.stem}{KINDS[kind]}")


def launch_text(kind: str, job: Job) -> str:
    """Return the content of that file.

    Raises:
        LaunchError: this kind of launch cannot start this program.
    """
    module = import_module(f"legoai.lowering.launch.{_MODULES[kind]}")
    return cast("Callable[[Job], str]", module.text)(job)
