"""Files beside a plan that have the names of libraries: none is run, as the plan names no factory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.marks import slow_but

LIBRARIES = ("torch", "numpy", "sympy", "filelock", "triton", "transformers", "pulp", "pydantic")
CONFIG = Path(__file__).parents[1] / "support" / "huggingface" / "llama.json"
PLAN = """plan small

model   {model}
cluster cpu(devices = 1)
batch   (global = 4, micro = {micro}, seq_len = 32)
require step_time <= 60min
"""


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder of plans with a file for each library, which leaves a mark where it runs."""
    folder = tmp_path / "strangers"
    folder.mkdir()
    for name in LIBRARIES:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\nraise ImportError('shadowed')\n"
        (folder / f"{name}.py").write_text(text)
    (folder / "built_in.plan").write_text(PLAN.format(model='llama3("tiny")', micro=4))
    (folder / "open.plan").write_text(PLAN.format(model='llama3("tiny")', micro="auto in [2, 4]"))
    fields = json.loads(CONFIG.read_text()) | {"vocab_size": 96, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "config.plan").write_text(PLAN.format(model='huggingface("config.json")', micro=4))
    return folder


@pytest.mark.parametrize(
    "case",
    slow_but(("lint config", "check built_in", "cost config", "solve open", "verify built_in"), "check built_in"),
)
def test_no_file_beside_a_plan_replaces_a_library(case: str, strangers: Path, tmp_path: Path) -> None:
    command, plan = case.split()
    if plan == "config":
        pytest.importorskip("transformers")
    arguments = ["-o", str(tmp_path / "solved.plan")] if command == "solve" else []
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "legoai", command, str(strangers / f"{plan}.plan"), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
        )
    finally:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stderr
