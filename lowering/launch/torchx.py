"""Component of TorchX that starts a lowered program on all hosts of its plan, by any scheduler that TorchX has."""

from __future__ import annotations

import shlex

from legoai.lowering.emit.code import in_docstring, quoted
from legoai.lowering.launch import launch_path
from legoai.lowering.launch.job import ENVIRONMENT, Job


def text(job: Job) -> str:
    """Return the component: a Python file whose function calls TorchX's `dist.ddp` with what the plan decides.

    TorchX starts torchrun with its own arguments. Its last release is 0.7.0 of July 2024, with which this was tried.
    """
    file = launch_path("torchx", job.program).as_posix()
    component = in_docstring(shlex.quote(f"{file}:train"))
    factory = f", and the module {in_docstring(job.factory)} beside the program" if job.factory else ""
    return f'''\
"""{job.title()}

A component of TorchX. Start it from the folder where `legoai lower` ran, with a scheduler of TorchX, and options of the
trainer behind `--`:

    torchx run -s SCHEDULER {component} --image IMAGE -- --steps 1000

The working folder and the image must have the program, torchrun and legoai{factory}.
All hosts must be able to write the folder of the run.
"""

from typing import Optional

from torchx import specs
from torchx.components import dist


def train(
    *arguments: str, image: str, h: Optional[str] = None, cpu: int = -1, memMB: int = -1, max_retries: int = 0
) -> specs.AppDef:
    """Train the plan {job.name}.

    Args:
        arguments: options of the trainer
        image: of a container; a folder for local schedulers
        h: a named resource, in place of cpu, memMB and the plan's GPUs
        cpu: cores of a host; by default no limit
        memMB: memory of a host in MB; by default no limit
        max_retries: the scheduler's, after a failure
    """
    return dist.ddp(
        *arguments,
        script={quoted(job.program.as_posix())},
        name={quoted(f"/{job.name}")},
        image=image,
        h=h,
        j="{job.hosts}x{job.processes}",
        gpu={job.gpus},
        cpu=cpu,
        memMB=memMB,
        env={{{", ".join(f"{quoted(name)}: {quoted(value)}" for name, value in ENVIRONMENT.items())}}},
        max_retries=max_retries,
    )
'''
