"""Job that starts a program with torchrun on each host of its plan: the facts that all kinds of launch share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import legoai
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.file_names import factory_module
from legoai.lowering.program import Program, hosts_and_processes
from legoai.runtime.launching.torchrun import SHUTDOWN_SECONDS

GRACE_SECONDS: Final = SHUTDOWN_SECONDS + 60
"""Seconds from SIGTERM until a scheduler kills a job: ranks finish their step and save, then their agent reports."""

ENVIRONMENT: Final[Mapping[str, str]] = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS)}
"""Environment of torchrun on each host.

Without it, torchrun kills ranks 30 seconds after SIGTERM. Allocator, compiler and Flight Recorder are set up by the
program itself, so that it is the same however it is started.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and the hosts on which it runs.

    Attributes:
        name: the plan's.
        hosts: their number; each starts torchrun once.
        processes: on each host, one per device.
        gpus: GPUs of each host that the program uses; 0 for a cluster of CPUs.
        program: the program's file, as seen from the folder where it was written.
        text: of the program.
        factory: the module of the model's Python factory, which the program imports; empty without one.
        directory: the plan's, from which a factory is imported, as seen from the folder where it was lowered.
    """

    name: str
    hosts: int
    processes: int
    gpus: int
    program: Path
    text: str
    factory: str = ""
    directory: Path = Path()

    @classmethod
    def of(cls, analysis: Analysis, program: Program, path: Path) -> Self:
        """Return the job of a lowered plan, whose mesh is decided."""
        plan, device = analysis.plan, analysis.device
        hosts, each = hosts_and_processes(plan)
        return cls(
            name=plan.name,
            hosts=hosts,
            processes=each,
            gpus=each if device is not None and device.kind == "cuda" else 0,
            program=path,
            text=program.text,
            factory=factory_module(plan),
            directory=analysis.directory,
        )

    def title(self) -> str:
        """The first line of a file: what it starts, and what has written it."""
        hosts = f"{self.hosts} {'host' if self.hosts == 1 else 'hosts'}"
        return f"{self.name} on {hosts}: written by legoai {legoai.__version__}."

    def torchrun(self, *, id: str, endpoint: str, program: str, options: tuple[str, ...] = ()) -> str:
        """The command of each host, for a shell, whose arguments are passed to the trainer.

        The agents rendezvous at ``endpoint``, where one of them serves.
        """
        lines = (
            "torchrun",
            f"--nnodes={self.hosts} --nproc-per-node={self.processes}",
            f'--rdzv-backend=c10d --rdzv-id="{id}" --rdzv-endpoint="{endpoint}"',
            *options,
            f'{program} "$@"',
        )
        return " \\\n    ".join(lines)
