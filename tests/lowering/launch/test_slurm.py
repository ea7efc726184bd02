"""Slurm batch script: it starts the program on every host, of which stubs of Slurm's commands simulate two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from legoai.cli import main
from legoai.lowering.launch.job import GRACE_SECONDS
from legoai.runtime.launching.torchrun import SHUTDOWN_SECONDS

PLAN = """plan small
model   llama3("tiny")
cluster {cluster}
batch   (global = 32, micro = 1, seq_len = 64)
mesh    (dp_shard = {ranks})
fsdp blocks on dp_shard
"""
FACTORY = """from torch import nn


def build():
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
"""
SRUN = """#!/bin/sh
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
"$@" & first=$!
"$@" || exit 1
wait $first
"""
"""Each of two tasks runs here."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(cluster: str, ranks: int) -> str:
    Path("small.plan").write_text(PLAN.format(cluster=cluster, ranks=ranks), encoding="utf-8")
    assert main(["lower", "small.plan", "-o", "small.py", "--launch", "slurm"]) == 0
    return Path("small.sbatch").read_text(encoding="utf-8")


def test_script_has_hosts_gpus_and_processes_of_the_plan():
    text = script("h100_sxm(hosts = 4, fabric = infiniband_ndr)", 32)
    for line in ("--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--job-name=small", "--exclusive", "--mem=0"):
        assert f"#SBATCH {line}\n" in text
    assert "--nnodes=4 --nproc-per-node=8" in text
    assert "--gpus-per-node" not in script("cpu(devices = 2)", 2)


def test_grace_period_covers_saving_on_shutdown():
    text = script("cpu(devices = 2)", 2)
    assert f"#SBATCH --signal=TERM@{GRACE_SECONDS}\n" in text
    assert f"\nexport TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SHUTDOWN_SECONDS}\n" in text
    assert GRACE_SECONDS > SHUTDOWN_SECONDS


def test_script_imports_the_factory_from_the_plans_folder(here: Path):
    folder = here / "of plans"
    folder.mkdir()
    (folder / "mine.py").write_text(FACTORY)
    plan = PLAN.format(cluster="cpu(devices = 2)", ranks=2).replace('llama3("tiny")', 'python("mine:build")')
    (folder / "small.plan").write_text(plan.replace("blocks ", ""), encoding="utf-8")
    assert main(["lower", "of plans/small.plan", "-o", "small.py", "--launch", "slurm"]) == 0
    exports = [line for line in Path("small.sbatch").read_text(encoding="utf-8").splitlines() if "PYTHONPATH" in line]
    code = "import sys; print(*sys.path, sep='\\n')"
    lines = ["set -eu", *exports, f'{sys.executable} -c "{code}"']
    environment = {**os.environ, "PYTHONPATH": "other"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=True)
    assert str(folder) in done.stdout.splitlines() and str(here / "other") in done.stdout.splitlines()


@pytest.mark.slow
def test_two_hosts_train_together(here: Path):
    script("cpu(hosts = 2, devices = 1, fabric = ethernet_100)", 2)
    commands = here / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\nsleep 0.2\necho other\n")):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    (here / "text.txt").write_text("some text to read " * 400, encoding="utf-8")
    environment = os.environ | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(here), "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_JOB_ID": str(os.getpid()),
        "XDG_CACHE_HOME": str(here / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(here / "small.sbatch"), "--steps", "2", "--data", "text.txt", "--out", "run"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    events = list(map(json.loads, (here / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
    assert events[0]["world"] == 2
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
