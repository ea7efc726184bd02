"""`legoai import`: the output file, the messages, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legoai.cli import main

CONFIG = '[job]\ndump_folder = "out"\n[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nsteps = 1000\n'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "llama-8b.toml"
    path.write_text(CONFIG)
    return path


def test_plan_is_printed_and_messages_go_to_stderr(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["import", "llama-8b.toml", "--cluster", "h100_sxm(hosts = 2, fabric = infiniband_ndr)"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# From llama-8b.toml, a TorchTitan config, as TorchTitan of January 2026")
    assert "\nplan llama_8b\n" in out
    assert "cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)" in out
    assert "mesh (dp_shard = 16)" in out
    assert "without effect on the plan: job.dump_folder: " in err
    assert "one unit of `norm` and `output`" in err
    assert "taken to be" not in err
    Path("made.plan").write_text(out)
    assert main(["lint", "made.plan"]) == 0
    assert main(["fmt", "--check", "made.plan"]) == 0


@pytest.mark.parametrize(
    ("degrees", "cluster"),
    [
        ("", "h100_sxm"),
        ("data_parallel_shard_degree = 2", "h100_sxm(devices = 2)"),
        ("data_parallel_shard_degree = 32", "h100_sxm(hosts = 4, fabric = infiniband_ndr)"),
        ("tensor_parallel_degree = 4", "h100_sxm"),
    ],
)
def test_missing_device_count_follows_the_degrees(
    config: Path, capsys: pytest.CaptureFixture[str], degrees: str, cluster: str
):
    config.write_text(f'{CONFIG}[parallelism]\n{degrees}\n[activation_checkpoint]\nmode = "full"\n')
    main(["import", "llama-8b.toml"])
    out, err = capsys.readouterr()
    assert f"cluster {cluster}\n" in out
    assert f"taken to be `{cluster}`; name them with --cluster" in err


def test_output_file_is_replaced_only_with_force(config: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["import", "llama-8b.toml", "--cluster", "h100_sxm", "-o", "mine.plan", "-q"]
    assert main(arguments) == 0
    assert Path("mine.plan").read_text().splitlines()[1] == "plan mine"
    Path("mine.plan").write_text("kept")
    assert main(arguments) == 2
    assert "mine.plan is there already; --force replaces it" in capsys.readouterr().err
    assert Path("mine.plan").read_text() == "kept"
    assert main([*arguments, "--force", "--name", "named"]) == 0
    assert Path("mine.plan").read_text().splitlines()[1] == "plan named"
    assert sorted(path.name for path in Path().iterdir()) == ["llama-8b.toml", "mine.plan"]


def test_json_has_the_plan_and_untranslated_options(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text(CONFIG + "[optimizer]\nearly_step_in_backward = true\n")
    assert main(["import", "llama-8b.toml", "--cluster", "h100_sxm", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert "\nplan llama_8b\n" in found["plan"]
    assert [(item["option"], item["value"], item["changes"]) for item in found["untranslated"]] == [
        ("job.dump_folder", "out", False),
        ("optimizer.early_step_in_backward", True, True),
    ]
    assert [item["code"] for item in found["diagnostics"]] == ["LP024"]
    assert found["diagnostics"][0]["label"]["start"]["line"] == 9


@pytest.mark.parametrize(
    ("text", "code"),
    [("[training", "LP021"), ("[training]\nsteps = -1", "LP023"),
     ('[model]\nname = "flux"', "LP025")],
)  # fmt: skip
def test_failed_import_writes_no_plan(config: Path, capsys: pytest.CaptureFixture[str], text: str, code: str):
    config.write_text(text)
    assert main(["import", "llama-8b.toml", "--cluster", "h100_sxm", "-o", "mine.plan"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"error[{code}]" in err
    assert "llama-8b.toml:" in err
    assert not Path("mine.plan").exists()
    assert main(["explain", code]) == 0


def test_unknown_options_are_skipped_with_status_1(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text(f"{CONFIG}[[more]]\nx = 1979-05-27\n")
    assert main(["import", "llama-8b.toml", "--cluster", "h100_sxm"]) == 1
    out, err = capsys.readouterr()
    assert "\nplan llama_8b\n" in out
    assert "warning[LP022]" in err
    assert main(["import", "llama-8b.toml", "--cluster", "h100_sxm", "--json"]) == 1
    assert "1979-05-27" in json.loads(capsys.readouterr().out)["untranslated"][-1]["value"][0]["x"]


def test_plan_with_errors_is_printed_with_diagnostics(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text('[model]\nflavor = "405B"\n')
    assert main(["import", "llama-8b.toml", "--cluster", "h100_sxm"]) == 1
    out, err = capsys.readouterr()
    assert 'model   llama3("405b"' in out
    assert "cannot be trained on this mesh" in err
    assert "llama_8b.plan:" in err


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("h100_sxm(hosts = 2)", "2 hosts need a fabric between them"),
        ("h100", "`h100` is not a legal value here; expected a device: `a100_sxm40`, "),
        ("h100", "; did you mean `h100_sxm`?\n"),
        ("h100_sxm\nmesh (tp = 2)", "a cluster is named as in a plan"),
        ("h100_sxm(devices = auto in [4, 8])", "the plan is made for a number of devices"),
        ("h100_sxm # all", "a cluster is named as in a plan"),
        ("", "a cluster is named as in a plan"),
    ],
)
def test_invalid_cluster_is_wrong_usage(config: Path, capsys: pytest.CaptureFixture[str], cluster: str, message: str):
    assert main(["import", "llama-8b.toml", "--cluster", cluster]) == 2
    assert message in capsys.readouterr().err


def test_unreadable_files_and_invalid_names_are_errors(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["import", "other.toml"]) == 1
    assert "LP001" in capsys.readouterr().err
    assert main(["import", "llama-8b.toml", "--name", "8b"]) == 2
    config.rename("8b.toml")
    assert main(["import", "8b.toml", "--cluster", "h100_sxm", "-q"]) == 0
    assert "\nplan plan_8b\n" in capsys.readouterr().out


def test_json_of_an_unreadable_config_has_no_plan(capsys: pytest.CaptureFixture[str]):
    status = main(["import", "missing.toml", "--json"])
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (status, err) == (1, "")
    assert (document["plan"], document["version"], document["untranslated"]) == (None, None, [])
    assert [item["code"] for item in document["diagnostics"]] == ["LP001"]


RUNS = """\
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer
from .base import steps


def llama3_8b() -> Trainer.Config:
    config = Trainer.Config(model_spec=model_registry("8B"), optimizer=default_adamw())
    steps(config)
    return config


def llama3_70b() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("70B"), optimizer=default_adamw())
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.py").write_text("def steps(config):\n    config.training.steps = 700\n    config.training.stepz = 1\n")
    Path("my_runs.py").write_text(RUNS)
    return tmp_path


def test_function_of_a_python_file_becomes_a_plan(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["import", "my_runs.py", "--config", "llama3_8b", "--set", "compile.enable=true"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("# From `llama3_8b` of my_runs.py, a TorchTitan config, as TorchTitan of August 2026")
    assert "\nplan llama3_8b\n" in out
    assert "compile   { layers.* = inductor }" in out
    assert "steps = 700)" in out
    # The line is that of the file that it is in.
    assert "base.py:3:5" in err
    assert "config.training.stepz = 1" in err
    assert "LP022" in err


def test_function_of_a_python_file_is_named(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["import", "my_runs.py"]) == 1
    assert "`my_runs.py` has 2 configs: name one with --config" in capsys.readouterr().err
    assert main(["import", "my_runs.py", "--config", "llama3_80b"]) == 1
    assert "llama3_8b" in capsys.readouterr().err
    Path("llama.toml").write_text(CONFIG)
    assert main(["import", "llama.toml", "--config", "llama3_8b"]) == 2
    assert "--config names a function of a Python file" in capsys.readouterr().err


def test_options_of_a_command_line_replace_those_of_the_file(config: Path, capsys: pytest.CaptureFixture[str]):
    settings = ["--set", "training.steps=700", "--set", "training.batch_size=2", "--set", "compile.components=model"]
    assert main(["import", "llama-8b.toml", *settings, "--set=compile.enable=true"]) == 0
    out = capsys.readouterr().out
    assert "micro = 2" in out
    assert "steps = 700)" in out
    assert "compile   { layers.* = inductor }" in out
    assert main(["import", "llama-8b.toml", "--set", "training.steps=some"]) == 1
    err = capsys.readouterr().err
    assert '`training.steps` takes a whole number, not `"some"`' in err
    assert "--> --set training.steps:1:1" in err and "1 | training.steps=some" in err
    assert main(["import", "llama-8b.toml", "--set", "training.steps"]) == 2
    assert "expected OPTION=VALUE" in capsys.readouterr().err
