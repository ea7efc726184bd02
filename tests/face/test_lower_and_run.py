"""`legoai lower` and `legoai run` make a program and start it."""

import ast
import errno
import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from legoai.cost.search.evaluation.evaluator import program_key
from legoai.lowering.program import Program
from legoai.runtime.errors import RunError
from legoai.runtime.launching.lock import locked
from legoai.specs.cluster import catalogue
from support.commands.command_line import (
    GOOD,
    called,
    here,  # noqa: F401
)


def test_lower_prints_valid_python(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "lower", "good.plan")
    assert (status, err) == (0, "")
    compile(out, "good.py", "exec")
    assert "fully_shard" in out
    status, nothing, err = called(capsys, "lower", "good.plan", "-o", "good.py")
    assert (status, nothing, err) == (0, "", "wrote good.py\n")
    assert Path("good.py").read_text(encoding="utf-8") == out.replace(" small.py\n", " good.py\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [("train.py", "train.py"), ("my run.py", "'my run.py'"), ('a"\\x.py', "'a\"\\x.py'"), ("a\\nb.py", None)],
)
def test_program_says_how_to_start_its_own_file(name: str, shown: str | None, capsys: pytest.CaptureFixture[str]):
    printed = called(capsys, "lower", "good.plan")[1]
    assert printed.splitlines()[3] == "Start it with: torchrun --nproc-per-node 4 small.py"
    Path("out").mkdir()
    assert called(capsys, "lower", "good.plan", "-o", f"out/{name}")[0] == 0
    text = Path("out", name).read_text(encoding="utf-8")
    said = str(ast.get_docstring(ast.parse(text))).splitlines()
    if shown is not None:
        assert said[3] == f"Start it with: torchrun --nproc-per-node 4 {shown}"
        assert shlex.split(said[3])[-1] == name
    assert len(text.splitlines()) == len(printed.splitlines()), "lines are those of the map"
    programs = [Program(text=one, plan_name="small", digest="", lines={}) for one in (text, printed)]
    assert len({program_key(one, None, "") for one in programs}) == 1


def test_step_graph_is_dumped_after_tracing_and_each_pass(capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "lower", "good.plan", "--dump-graphs", "graphs")[0] == 1, "the plan has no graph"
    few = GOOD.replace('"tiny"', '"tiny", n_layers = 2')
    traced = few.replace("on dp_shard", "on dp_shard (backend = graph)") + "comm (reorder = true)\nloss eager\n"
    Path("traced.plan").write_text(traced, encoding="utf-8")
    call = [sys.executable, "-m", "legoai", "lower", "traced.plan", "-o", "traced.py", "--dump-graphs", "graphs"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "wrote 5 graphs into graphs\nwrote traced.py\n")
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path("graphs").iterdir())}
    passes = ["deduplicate_unshards", "reshard_after_forward", "bucket_units", "overlap_communication"]
    assert list(texts) == [f"{number}_{name}.py" for number, name in enumerate(["trace", *passes])]
    for name, text in texts.items():
        compile(text, name, "exec")
        assert "# backward of layers.0.attention.wq\n" in text
        assert "Place(" not in text
    gathers = [text.count(" = torch.ops._c10d_functional.all_gather_into_tensor") for text in texts.values()]
    assert gathers[0] == gathers[1] < gathers[2] > gathers[3] == gathers[4]


def test_errors_stop_lowering_and_warnings_do_not(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "lower", "bad.plan", "-o", "bad.py")
    assert status == 1
    assert out == "", "what is piped elsewhere is a program or nothing"
    assert err.startswith("error[LP210]")
    assert err.endswith("legoai: bad.plan is not lowered: 1 error\n")
    assert not Path("bad.py").exists()
    assert called(capsys, "lower", "warned.plan")[0] == 0


def test_lint_and_lower_print_equal_unsupported_diagnostics(capsys: pytest.CaptureFixture[str]):
    Path("good.plan").write_text(GOOD + "comm (reorder = true)\n", encoding="utf-8")
    status, linted, _ = called(capsys, "lint", "good.plan")
    assert status == 1
    assert linted.startswith("error[LP010] not-lowered: `reorder = true` of `comm` is not lowered")
    status, nothing, lowered = called(capsys, "lower", "good.plan")
    assert (status, nothing) == (1, "")
    assert lowered == f"{linted}legoai: good.plan is not lowered: 1 error\n"


def test_open_hole_is_a_lowering_diagnostic(capsys: pytest.CaptureFixture[str]):
    Path("good.plan").write_text(GOOD.replace("(dp_shard = 4)", "(dp_shard = auto in [2, 4])"), encoding="utf-8")
    status, _, err = called(capsys, "lower", "good.plan")
    assert status == 1
    assert "error[LP011] undecided-hole" in err


def test_an_error_in_a_variant_does_not_stop_the_plan_itself(capsys: pytest.CaptureFixture[str]):
    Path("good.plan").write_text(GOOD + "variant odd {\n  mesh (dp_shard = 3)\n}\n", encoding="utf-8")
    assert called(capsys, "lint", "good.plan")[0] == 1
    assert called(capsys, "lower", "good.plan")[0] == 0
    assert called(capsys, "lower", "good.plan", "--variant", "odd")[0] == 1


def test_run_writes_and_launches_the_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    calls = []

    def launch(program: Path, *, nproc: int, arguments: list[str], directory: Path | None, text: str) -> int:
        assert directory is None and program.read_text(encoding="utf-8") == text  # it imports nothing from there
        calls.append((program, nproc, arguments))
        return 7

    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", launch)
    Path("good.plan").write_text(
        GOOD + "variant two {\n  batch (global = 32, micro = 4, seq_len = 64)\n}\n", encoding="utf-8"
    )
    status, out, err = called(capsys, "run", "good.plan", "--no-prediction", "--", "--steps", "3", "--out", "elsewhere")
    assert (status, out) == (7, "")
    assert err == "legoai: wrote elsewhere/small.py; starting it in 4 processes\n"
    assert called(capsys, "run", "good.plan", "--nproc", "4", "--variant", "two")[0] == 7
    assert calls == [
        (Path("elsewhere/small.py"), 4, ["--out", "runs/small", "--steps", "3", "--out", "elsewhere"]),
        (Path("runs/small-two/small.py"), 4, ["--out", "runs/small-two"]),
    ]
    lowered = called(capsys, "lower", "good.plan")[1]
    assert Path("elsewhere/small.py").read_text(encoding="utf-8") == lowered and not Path("runs/small").exists()
    assert called(capsys, "run", "bad.plan")[0] == 1
    for argument, said in (("--stepz", "unrecognized arguments: --stepz"), ("--keep=x", "'x' is not a whole number")):
        status, _, err = called(capsys, "run", "good.plan", "--", argument)
        assert status == 2 and err.count(said) == err.count("usage:") == 1
    status, _, err = called(capsys, "run", "good.plan", "--steps", "3")
    assert status == 2 and "unrecognized arguments: --steps 3; options of the trainer stand behind ` -- `" in err
    status, out, _ = called(capsys, "run", "good.plan", "--", "--help")
    assert status == 0 and "--load-weights FOLDER" in out and out.startswith("usage: legoai run good.plan -- ")
    assert len(calls) == 2


def test_run_prints_prediction_and_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def launch(program: Path, **_: object) -> int:
        metrics = Path("runs/small/metrics.jsonl")
        values = {"seconds": 0.5, "data_seconds": 0.0, "peak_memory": 1, "tokens_per_sample": 64}
        step = json.dumps({"event": "step", **values, "samples_per_second_per_device": 16 / 0.5 / 4})
        metrics.write_text("\n".join([json.dumps({"event": "start"}), *[step] * 8, ""]), encoding="utf-8")
        return 0

    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", launch)
    status, out, err = called(capsys, "run", "good.plan")
    assert (status, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith("legoai: predicted: ") and lines[0].endswith(" tokens/s/device")
    assert lines[2].startswith("predicted beside measured, the median of 5 steps")
    assert [line.split()[0] for line in lines[4:7]] == ["step", "tokens/s/device", "MFU"]
    added = json.loads(Path("runs/small/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert added["event"] == "prediction" and added["measured"]["step_time_s"] == 0.5
    assert "predicted" not in called(capsys, "run", "good.plan", "--", "--device", "cuda")[2]


def test_run_of_devices_without_a_profile_predicts_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", lambda program, **_: 0)
    device = (catalogue() / "cpu.toml").read_text(encoding="utf-8").replace('"cpu"', '"ours"', 1)
    Path("ours.toml").write_text(device, encoding="utf-8")
    text = GOOD.replace("cluster cpu(", 'cluster profile("ours.toml", ') + "require step_time <= 1us\n"
    Path("ours.plan").write_text(text, encoding="utf-8")
    status, _, err = called(capfd, "run", "ours.plan")
    assert status == 0
    assert "legoai: nothing is predicted: the profile of `ours`, ours.json.gz, is missing beside ours.toml" in err
    assert called(capfd, "run", "ours.plan", "--no-prediction")[0] == 0


@pytest.mark.parametrize("own", [True, False])
def test_run_reports_a_failed_prediction_and_goes_on(
    own: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object, **__: object) -> None:
        raise KeyError("layers.0")

    monkeypatch.setattr(import_module("legoai.cost.estimate"), "estimate", fails)
    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", lambda program, **_: 7)
    Path("class.py").write_text(FACTORY.replace("import helper\n", ""))
    Path("mine.plan").write_text(ALONE.format(name="mine", factory="class"))
    status, _, err = called(capfd, "run", "good.plan" if own else "mine.plan")
    assert status == 7 and "KeyError: " in err and "legoai: nothing is predicted: " in err
    assert ("This is a mistake in LegoAI, not in the plan." in err) == own
    assert "Traceback" not in err
    monkeypatch.setenv("LEGOAI_DEBUG", "1")
    assert ("Traceback" in called(capfd, "run", "good.plan" if own else "mine.plan")[2]) == own


def test_run_in_another_number_of_processes_is_refused(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "run", "good.plan", "--nproc", "3")
    assert (status, out) == (2, "")
    assert "needs 4 processes, and --nproc is 3" in err
    assert "help: --nproc 4, or" in err
    assert not Path("runs").exists()


def test_run_records_the_cluster_of_the_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", lambda program, **_: 0)
    assert called(capsys, "run", "good.plan", "--no-prediction")[0] == 0
    (line,) = Path("runs/small/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "event": "cluster", "device": "cpu", "profile": None, "hosts": 1, "devices": 4, "fabric": None,
    }  # fmt: skip


def test_program_name_must_not_shadow_a_needed_module(capsys: pytest.CaptureFixture[str]):
    Path("my_model.py").write_text(FACTORY.replace("import helper\n", ""))
    Path("mine.plan").write_text(ALONE.format(name="mine", factory="my_model"))
    before = Path("my_model.py").read_text()
    taken = [("good.plan", name) for name in ("random", "torch", "legoai", "numpy", "sympy")]
    Path("there").mkdir()
    for plan, name in (*taken, ("mine.plan", "types"), ("mine.plan", "there/my_model")):
        status, _, err = called(capsys, "lower", plan, "-o", f"{name}.py")
        assert status == 2 and "choose another name" in err and f"`{Path(name).name}`" in err
    assert "my_model.py is a file that mine.plan names" in called(capsys, "lower", "mine.plan", "-o", "my_model.py")[2]
    assert Path("my_model.py").read_text() == before and not Path("random.py").exists()
    assert called(capsys, "lower", "mine.plan", "-o", "mine.py")[0] == 0
    Path("mine.plan").write_text(ALONE.format(name="torch", factory="my_model"))
    assert " torch_program.py\n" in called(capsys, "lower", "mine.plan")[1], "its header suggests another name"


def test_program_apart_from_its_factory_says_how_to_find_it(capsys: pytest.CaptureFixture[str]):
    Path("class.py").write_text(FACTORY.replace("import helper\n", ""))
    Path("mine.plan").write_text(ALONE.format(name="mine", factory="class"))
    Path("there").mkdir()
    assert "PYTHONPATH" not in called(capsys, "lower", "mine.plan", "-o", "mine.py")[2]
    status, _, err = called(capsys, "lower", "mine.plan", "-o", "there/mine.py")
    assert (status, f"from {Path.cwd()}: start it with this folder on PYTHONPATH\n" in err) == (0, True)
    text = Path("there/mine.py").read_text()
    assert "\nThe module class has to be in its folder, or on PYTHONPATH.\n" in text
    compile(text, "mine.py", "exec")
    assert '    return import_module("class").build(' in text


def test_folder_stays_locked_while_a_step_is_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def predict(*_: object) -> None:
        with pytest.raises(RunError, match="another run"), locked(Path("runs/small")):
            pass

    monkeypatch.setattr(import_module("legoai.commands.run"), "_prediction", predict)
    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", lambda program, **_: 0)
    assert called(capsys, "run", "good.plan")[0] == 0
    with locked(Path("runs/small")):
        pass


def test_second_run_is_refused_before_the_ranks_of_the_first_lock_the_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It leaves the program and the metrics as they are."""

    def launch(program: Path, **_: object) -> int:
        before = {file.name: file.read_bytes() for file in Path("runs/small").iterdir()}
        status, _, err = called(capsys, "run", "good.plan", "--no-prediction")
        assert status == 1 and "error[RUN005]: another run" in err
        assert {file.name: file.read_bytes() for file in Path("runs/small").iterdir()} == before
        with locked(Path("runs/small")):  # as the ranks do
            launched.append(program)
        return 0

    launched: list[Path] = []
    monkeypatch.setattr(import_module("legoai.runtime.launching.torchrun"), "launch", launch)
    assert called(capsys, "run", "good.plan", "--no-prediction")[0] == 0
    assert launched
    assert Path("runs/small/metrics.jsonl").read_text(encoding="utf-8").count('"event": "cluster"') == 1


def test_run_refuses_a_folder_in_use(capsys: pytest.CaptureFixture[str]):
    with locked(Path("runs/small")):
        status, _, err = called(capsys, "run", "good.plan")
    assert status == 1 and err.startswith(f"error[RUN005]: another run (process {os.getpid()} on ")
    assert not Path("runs/small/small.py").exists()
    Path("runs").rename("elsewhere")
    Path("runs").write_text("")
    status, _, err = called(capsys, "run", "good.plan")
    assert status == 1 and err.startswith("error[RUN006]: --out runs/small: nothing can be written there")
    assert err.count("\n") == 2


def test_run_refuses_metrics_that_cannot_be_written(capsys: pytest.CaptureFixture[str]):
    Path("runs/small").mkdir(parents=True)
    os.mkfifo("runs/small/metrics.jsonl")
    status, _, err = called(capsys, "run", "good.plan")
    assert (status, err) == (
        1,
        "error[RUN006]: runs/small/metrics.jsonl takes no records: it is no regular file\n"
        "  help: remove it, or choose another --out\n",
    )


def test_run_under_a_limit_of_file_sizes_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def write(path: Path, text: str) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))

    monkeypatch.setattr(import_module("legoai.lowering.start"), "replace_file", write)
    status, _, err = called(capsys, "run", "good.plan")
    assert status == 1 and "error[RUN006]: runs/small/small.py cannot be written: File too large" in err
    assert "help: raise the limit of a file's size (`ulimit -f`), or choose another --out" in err


def test_run_refuses_a_plan_of_several_hosts(capsys: pytest.CaptureFixture[str]):
    text = GOOD.replace("cpu(devices = 4)", "cpu(hosts = 2, devices = 2, fabric = ethernet_100)")
    Path("good.plan").write_text(text, encoding="utf-8")
    status, out, err = called(capsys, "run", "good.plan")
    assert (status, out) == (2, "")
    assert "the plan is for 2 hosts" in err
    assert not Path("runs").exists()


FACTORY = """
import helper
from torch import nn


class Net(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def build(dim):
    return Net(dim)
"""
ALONE = """plan {name}

model   python("{factory}:build", dim = 16)
cluster cpu
batch   (global = 2, micro = 2, seq_len = 16)
mesh    (dp_shard = 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "my_model"])
def test_factory_beside_the_plan_is_imported_without_shadowing(tmp_path: Path, name: str):
    """The plan has the name of a Python module or of its factory, and so have files beside it."""
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "my_model.py").write_text(FACTORY)
    for file in ("helper.py", "types.py", "random.py", "code.py"):
        (folder / file).write_text("" if file == "helper.py" else "raise RuntimeError('not this one')\n")
    (folder / "a.plan").write_text(ALONE.format(name=name, factory="my_model"))
    (tmp_path / "text.txt").write_text("some text to read " * 40)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    place, file = (tmp_path, "plans/a.plan") if name == "random" else (folder, "a.plan")
    command = [sys.executable, "-P", "-m", "legoai", "run", file, "--", "--steps", "1", "--data"]
    command.append(str(tmp_path / "text.txt"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=place, env=environment)
    assert done.returncode == 0, done.stderr
    assert "finished step 1" in done.stderr
