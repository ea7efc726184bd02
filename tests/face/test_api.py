"""The Python API: plans, diagnostics and programs without a command line."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import legoai
from legoai.cli import main
from legoai.dsl import open_rules
from legoai.dsl.lint import lint as lint_text
from legoai.lowering.verify import run as verify_room
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.specs.cluster import catalogue
from support import ROOT

TINY = ROOT / "plans" / "tiny.plan"


def test_load_returns_the_resolved_plan():
    plan = legoai.load(TINY)
    assert plan.name == "tiny"
    assert plan.mesh.world_size == 4
    assert plan.digest == legoai.load(str(TINY)).digest


def test_settings_and_variants_are_applied(tmp_path: Path):
    path = tmp_path / "x.plan"
    path.write_text(
        'plan x\nmodel llama3("tiny")\nlet n = 2\ncluster cpu(devices = n)\n'
        "batch (global = 8, micro = 1, seq_len = 64)\nmesh (dp_shard = n)\nfsdp on dp_shard { layers.* = unit }\n"
        "variant long { batch (global = 8, micro = 1, seq_len = 128) }\n",
        encoding="utf-8",
    )
    assert legoai.load(path, settings={"n": "4"}).mesh.dp_shard == 4
    assert legoai.load(path, variant="long").batch.seq_len == 128
    assert legoai.load(path, variant="long").variant == "long"


def test_plan_error_carries_diagnostics_and_prints_like_lint(tmp_path: Path):
    path = tmp_path / "x.plan"
    path.write_text("plan x\nmesh (tp = y)\n", encoding="utf-8")
    with pytest.raises(legoai.PlanError) as caught:
        legoai.load(path)
    codes = [item.code for item in caught.value.diagnostics]
    assert "LP209" in codes
    assert set(codes) <= {item.code for item in legoai.lint(path)}
    assert "2 | mesh (tp = y)" in str(caught.value)


def test_figures_of_devices_without_a_profile_are_a_plan_error(tmp_path: Path):
    device = (catalogue() / "h100_sxm.toml").read_text(encoding="utf-8").replace('"h100_sxm"', '"ours"')
    (tmp_path / "ours.toml").write_text(device, encoding="utf-8")
    path = tmp_path / "x.plan"
    path.write_text(
        'plan x\nmodel llama3("tiny")\ncluster profile("ours.toml", devices = 1)\n'
        "batch (global = 8, micro = auto in [1, 2] -> 1, seq_len = 64)\nminimize step_time\n",
        encoding="utf-8",
    )
    for command in (legoai.estimate, legoai.solve):
        with pytest.raises(legoai.PlanError, match=r"x\.plan:3:17") as caught:
            command(path)
        assert [item.code for item in caught.value.diagnostics] == ["LP315"]
    assert [item.code for item in legoai.lint(path)] == ["LP314"]
    assert legoai.lower(path).text


def test_missing_file_is_an_error_with_a_code(tmp_path: Path):
    with pytest.raises(legoai.PlanError, match="LP001"):
        legoai.load(tmp_path / "none.plan")
    assert [item.code for item in legoai.lint(tmp_path / "none.plan")] == ["LP001"]


def test_lower_returns_the_program_and_line_origins():
    program = legoai.lower(TINY)
    compile(program.text, "tiny.py", "exec")
    assert program.digest == legoai.load(TINY).digest
    spans = set(program.lines.values())
    assert {Path(span.file).name for span in spans} == {"tiny.plan"}
    assert legoai.lower(TINY).text == program.text


def test_plan_with_open_holes_raises_plan_error(tmp_path: Path):
    path = tmp_path / "x.plan"
    path.write_text(TINY.read_text(encoding="utf-8").replace("tp = 2)", "tp = auto in [1, 2])"), encoding="utf-8")
    with pytest.raises(legoai.PlanError, match="LP011"):
        legoai.lower(path)


def test_loading_a_plan_imports_no_torch():
    code = f"import sys, legoai\nlegoai.load({str(TINY)!r})\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_unknown_package_attribute_raises():
    assert set(legoai.__all__) <= {name for name in (*legoai.__all__,) if hasattr(legoai, name)}
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        legoai.laod  # noqa: B018


def test_dir_lists_the_api_without_importing_it():
    code = "import sys, legoai; print(*dir(legoai)); print('legoai.api' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    names, imported = done.stdout.splitlines()
    assert {"PlanError", "estimate", "lint", "load", "lower", "run", "verify"} <= set(names.split())
    assert imported == "False"


SMALL = """plan small

model   llama3("tiny", n_layers = 1)
cluster cpu
batch   (global = 2, micro = 2, seq_len = 16)
mesh    (dp_shard = 1)
"""

SCRIPT = """
import random
import numpy, torch
import legoai
from legoai.cli import main
from legoai.dsl import open_rules
from legoai.dsl.lint import lint as lint_text

verdict = legoai.verify("small.plan", steps=1)
print(verdict.equal, verdict.samples)

random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
wanted = random.random(), float(numpy.random.rand()), float(torch.rand(()))
random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
found = legoai.estimate("small.plan", profile="h100_sxm")
print(found.step_time > 0, (random.random(), float(numpy.random.rand()), float(torch.rand(()))) == wanted)
"""
RUNNING = """
import legoai
print(legoai.run("small.plan", arguments=["--steps", "1", "--data", "small.plan", "--log-every", "0"]))
"""


@pytest.mark.parametrize(
    ("script", "printed"), [(SCRIPT, ["True 2", "True True"]), pytest.param(RUNNING, ["0"], marks=pytest.mark.slow)]
)
def test_verify_estimate_and_run_are_functions(script: str, printed: list[str], tmp_path: Path):
    (tmp_path / "small.plan").write_text(SMALL, encoding="utf-8")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.splitlines() == printed, done.stderr
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-1").is_dir() is (script == RUNNING)


@pytest.mark.slow
def test_what_ranks_refuse_raises_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.plan").write_text(SMALL, encoding="utf-8")
    with pytest.raises(RunError) as caught:
        legoai.run("small.plan", nproc=1, arguments=["--out", "small.plan"])
    assert caught.value.code == "RUN006"


@pytest.mark.parametrize("arguments", [["--steps", "none"], ["--stepz", "3"], ["--help"]])
def test_arguments_that_the_trainer_refuses_raise_a_run_error(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.plan").write_text(SMALL, encoding="utf-8")
    with pytest.raises(RunError, match=arguments[0]) as caught:
        legoai.run("small.plan", arguments=arguments)
    assert caught.value.code == RunErrorCode.WRONG_OPTION
    assert capsys.readouterr() == ("", "")


def test_run_outside_the_main_thread_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.plan").write_text(SMALL, encoding="utf-8")
    with ThreadPoolExecutor(1) as pool, pytest.raises(RunError, match="in the main thread only") as caught:
        pool.submit(legoai.run, "small.plan", arguments=["--steps", "1"]).result()
    assert caught.value.code == RunErrorCode.NOT_MAIN_THREAD
    assert [path.name for path in tmp_path.iterdir()] == ["small.plan"]


DROPPING = """
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(F.dropout(self.embed(tokens), 0.5, self.training))
"""


def test_verify_leaves_out_the_dropout_that_a_forward_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "dropping.py").write_text(DROPPING, encoding="utf-8")
    path = tmp_path / "small.plan"
    path.write_text(SMALL.replace('llama3("tiny", n_layers = 1)', 'python("dropping:Net")'), encoding="utf-8")
    monkeypatch.setattr(verify_room, "run", lambda *given, **options: given)
    [prepared] = legoai.verify(path)
    [job, _] = verify_room.jobs_of(prepared, directory=tmp_path, steps=1, folder=tmp_path).values()
    assert job.drawing == ("",)


def test_solve_refuses_errors_of_the_rules_that_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "open.plan"
    path.write_text(SMALL.replace("micro = 2", "micro = auto in [1, 2]"), encoding="utf-8")
    wrong = lint_text(SMALL.replace("micro = 2", "micro = 3"), "open.plan", directory=tmp_path)
    monkeypatch.setattr(open_rules, "with_open_rules", lambda *given, **options: wrong)
    codes = [item.code for item in wrong.diagnostics if item.severity == "error"]
    with pytest.raises(legoai.PlanError) as caught:
        legoai.solve(path)
    assert [item.code for item in caught.value.diagnostics] == codes != []
    assert main(["solve", str(path)]) == 1
    assert f"error[{codes[0]}]" in capsys.readouterr().err
