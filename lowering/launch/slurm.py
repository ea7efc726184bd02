"""Slurm batch script that starts a lowered program on all hosts of its plan."""

from __future__ import annotations

import shlex

from legoai.lowering.launch import launch_path
from legoai.lowering.launch.job import ENVIRONMENT, GRACE_SECONDS, Job


def text(job: Job) -> str:
    """Return the script, to be submitted from the folder where the plan was lowered: paths are relative to it.

    One task on each host starts torchrun, whose agents rendezvous on the first host. Arguments after the script's name
    on the command line of `sbatch` are passed to the trainer. Account, partition and time limit are options of `sbatch`
    itself.
    """
    gpus = f"\n#SBATCH --gpus-per-node={job.gpus}" if job.gpus else ""
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items())
    if job.factory:
        # A relative folder is relative to that of the submission, into which the script has changed.
        exports += f"\nexport PYTHONPATH={shlex.quote(job.directory.as_posix())}${{PYTHONPATH:+:$PYTHONPATH}}"
    torchrun = job.torchrun(id="$SLURM_JOB_ID", endpoint="$first:$port", program=shlex.quote(str(job.program)))
    return f"""\
#!/bin/bash
# {job.title()}
# Submit it from the folder where `legoai lower` ran:
#   sbatch {shlex.quote(str(launch_path("slurm", job.program)))} [OPTION OF THE TRAINER ...]
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.hosts}
#SBATCH --ntasks-per-node=1{gpus}
# --exclusive gives a job all cores of its hosts, but only the memory that it asks for; 0 asks for all of it.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@{GRACE_SECONDS}

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 20000))
{exports}

srun --kill-on-bad-exit=1 {torchrun}
"""
