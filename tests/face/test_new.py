"""First plans of models on clusters, as `legoai new` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legoai.cli import main
from legoai.dsl.first_plan import first_plan
from legoai.dsl.lint import lint
from support.commands.command_line import called

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 128}
HOSTS = "h100_sxm(hosts = 8, fabric = infiniband_ndr)"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def statements(text: str) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line and line[0].isalpha()}


def test_plan_of_a_model_is_clean_and_open_where_solve_decides(capsys: pytest.CaptureFixture[str]):
    status, _, err = called(capsys, "new", 'llama3("8b")', "--seq-len", "8192", "-o", "mine.plan")
    assert status == 0 and "wrote mine.plan" in err and "the batch is taken to be 128 samples a step" in err
    text = Path("mine.plan").read_text(encoding="utf-8")
    found = statements(text)
    assert found["plan"] == "plan mine" and found["batch"] == "batch (global = 128, micro = auto, seq_len = 8192)"
    assert found["mesh"] == "mesh (dp_shard = rest, tp = auto)"
    assert found["shard"] == "shard standard on tp (sequence, loss_parallel)"
    assert found["fsdp"] == "fsdp blocks on dp_shard { layers.* = unit(reshard = auto) }"
    assert found["checkpoint"] == "checkpoint { layers.* = auto }" and found["loss"] == "loss auto"
    assert not lint(text, "mine.plan", directory=Path()).diagnostics
    assert called(capsys, "fmt", "--check", "mine.plan")[0] == 0
    assert called(capsys, "new", 'llama3("8b")', "-o", "mine.plan")[0] == 2, "a file that is there is kept"


@pytest.mark.parametrize(
    ("model", "cluster", "mesh", "more"),
    [
        ('llama3("70b")', HOSTS, "pp = auto, dp_replicate = auto, dp_shard = rest, tp = auto", {"pipeline", "fsdp"}),
        (
            'mixtral("8x7b")',
            HOSTS,
            "pp = auto, dp_replicate = auto, dp_shard = rest, tp = auto, ep = auto",
            {"pipeline"},
        ),
        ('llama3("tiny")', "cpu(devices = 4)", "dp_shard = rest, tp = auto", {"fsdp"}),
        ('llama3("1b")', "h100_sxm(devices = 1)", None, {"checkpoint"}),
        ('gpt2("xl")', "h100_sxm", "dp_shard = rest, tp = auto", {"fsdp"}),
    ],
)
def test_parallelism_is_what_model_and_devices_allow(model: str, cluster: str, mesh: str | None, more: set[str]):
    found = first_plan(model, cluster, name="mine", directory=Path())
    assert found.text is not None and found.diagnostics == ()
    stated = statements(found.text)
    assert stated.get("mesh") == (mesh and f"mesh ({mesh})") and more <= stated.keys()
    assert ("precision" in stated) is not cluster.startswith("cpu")


def test_long_sequences_may_be_divided():
    found = first_plan('llama3("8b", max_seq_len = 131072)', "h100_sxm", name="mine", directory=Path(), seq_len=131072)
    assert found.text is not None
    assert statements(found.text)["mesh"] == "mesh (dp_shard = rest, cp = auto, tp = auto)"
    assert statements(found.text)["context"] == "context on cp"


def test_config_is_named_from_the_plan_and_what_it_does_not_allow_is_told(capsys: pytest.CaptureFixture[str]):
    Path("config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    Path("plans").mkdir()
    status, _, err = called(capsys, "new", "config.json", "-o", "plans/own.plan")
    text = Path("plans/own.plan").read_text(encoding="utf-8")
    assert status == 0 and 'huggingface("../config.json")' in text and "seq_len = 128)" in text
    assert statements(text)["mesh"] == "mesh (dp_shard = rest)" and "transformer.h.* = unit(reshard = auto)" in text
    assert "without tensor parallelism: the model has no standard layout on `tp`" in err
    assert not lint(text, "own.plan", directory=Path("plans")).diagnostics


def test_factory_is_announced_and_has_units_of_its_own(capsys: pytest.CaptureFixture[str]):
    Path("net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    layers = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))\n"
        "    return nn.Sequential(nn.Embedding(16, 8), nn.Sequential(*layers), nn.Linear(8, 16))\n",
        encoding="utf-8",
    )
    status, out, err = called(capsys, "new", "net:build", "--seq-len", "16", "--batch", "64")
    assert status == 0 and "runs the model factory" in err
    assert statements(out)["plan"] == "plan build" and "1.*  = unit(reshard = auto)\n  root = unit" in out
    assert not lint(out, "build.plan", directory=Path()).diagnostics


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (['llama3("9b")'], 1, "LP212"),
        (['llama3("405b")'], 1, "LP704"),
        (['llama3("8b")', "--seq-len", "9999999"], 1, "LP60"),
        (['llama3("8b")\nbatch (global = 1)'], 2, "a model is named as in a plan"),
        (["llama3"], 2, "a model is named as in a plan"),
        (["none.json"], 2, "there is no file none.json"),
        (['llama3("8b")', "--cluster", "h100"], 2, "did you mean `h100_sxm`"),
        (['llama3("8b")', "--cluster", "h100_sxm(hosts = auto in [1, 2])"], 2, "name it"),
        (['llama3("8b")', "--batch", "0"], 2, "expected a number from 1 on"),
        (['llama3("8b")', "--name", "8b"], 2, "a plan's name is a word"),
        (['llama3("8b")', "--force"], 2, "--force replaces"),
    ],
)
def test_what_cannot_be_a_plan_is_told(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    try:
        found = main(["new", *arguments, "-o", "mine.plan"] if "--force" not in arguments else ["new", *arguments])
    except SystemExit as stop:
        found = stop.code
    captured = capsys.readouterr()
    assert found == status and captured.out == "" and said in captured.err
    assert not Path("mine.plan").exists()
