"""Slurm batch script that starts a lowered program on all hosts of its plan."""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import Final

import legoai
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import hosts_and_processes

_SAVING_SECONDS: Final = 180
"""Seconds before a job's time limit at which ranks are signalled to finish their step, save and exit."""


def batch_script(analysis: Analysis, program: PurePath) -> str:
    """Return the script, to be submitted from the folder relative to which the program is named.

    One task on each host starts torchrun, whose agents rendezvous on the first host. Arguments after the script's name
    on the command line of `sbatch` are passed to the trainer.

    Args:
        analysis: of the plan, whose mesh is decided.
        program: the program's file, as seen from the folder of submission.
    """
    plan, device = analysis.plan, analysis.device
    hosts, each = hosts_and_processes(plan)
    gpus = f"\n#SBATCH --gpus-per-node={each}" if device is not None and device.kind == "cuda" else ""
    return f"""\
#!/bin/bash
# {plan.name} on {hosts} {"host" if hosts == 1 else "hosts"}: written by legoai {legoai.__version__}.
# Submit it from this folder: sbatch SCRIPT [OPTION OF THE TRAINER ...]
#SBATCH --job-name={plan.name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1{gpus}
#SBATCH --exclusive
#SBATCH --signal=TERM@{_SAVING_SECONDS}

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 20000))

srun --kill-on-bad-exit=1 torchrun \\
    --nnodes={hosts} --nproc-per-node={each} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:$port" \\
    {shlex.quote(str(program))} "$@"
"""
