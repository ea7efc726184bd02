"""`legoai cost`, `check` and `graph`: their output streams, and their exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legoai.commands import cost
from legoai.cost.report import chrome, page, terminal
from legoai.specs.cluster import catalogue
from support.commands.command_line import called, started
from support.commands.forked_commands import forked

ROOT = Path(__file__).parents[2]
PLAN = """plan small

model   llama3("tiny")
cluster h100_sxm
batch   (global = 16, micro = 2, seq_len = 128)
mesh    (dp_shard = 8)

fsdp on dp_shard { layers.* = unit }

require peak_memory <= 72GiB
require mfu >= 90%
require step_time <= 10us  # legoai: ignore[LP711]

variant replicas {
  mesh (dp_replicate = 2, dp_shard = 4)
  fsdp on dp_replicate, dp_shard { layers.* = unit }
  require exposed_comm <= 0.1%
}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder with a plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEGOAI_DEBUG", raising=False)
    Path("small.plan").write_text(PLAN, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_expandable_segments_reserve_less_at_equal_step_time(here: Path):
    text = (ROOT / "plans" / "llama3_8b_8.plan").read_text(encoding="utf-8")
    Path("small.plan").write_text(text, encoding="utf-8")
    Path("grown.plan").write_text(f"{text}allocator (expandable_segments = true)\n", encoding="utf-8")
    [small, grown] = (json.loads(forked("cost", name, "--json").stdout) for name in ("small.plan", "grown.plan"))
    line = len(text.splitlines()) + 1
    assert f"in expandable segments, grown.plan:{line}" in forked("cost", "grown.plan").stdout
    assert grown["step_time_s"] == small["step_time_s"]
    active, reserved = "peak_active_bytes", "peak_reserved_bytes"
    assert grown["memory"][active] == small["memory"][active]
    assert grown["memory"][active] < grown["memory"][reserved] < small["memory"][reserved]


@pytest.mark.slow
def test_cost_prints_json_alone_and_writes_a_page_and_a_trace(here: Path):
    done = started("cost", "small.plan", "--json", "--html", "small.html", "--trace", "small.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["name"] == "small"
    assert sorted(done.stderr.splitlines()) == ["wrote small.html", "wrote small.json"]
    assert json.loads(Path("small.json").read_text(encoding="utf-8"))["traceEvents"]
    assert Path("small.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in here.rglob("*") if path.is_file()) == ["small.html", "small.json", "small.plan"]


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_page_or_trace_is_alone_on_standard_output(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cost, "estimated", lambda *_, **__: None)
    for module, name in ((page, "page"), (chrome, "chrome_trace"), (terminal, "terminal")):
        monkeypatch.setattr(module, name, lambda *_, name=name: f"{name}\n")
    other, file = {"--html": "--trace", "--trace": "--html"}[option], Path("other")
    found = called(capsys, "cost", "small.plan", option, "-", other, str(file))
    results = {"--html": "page\n", "--trace": "chrome_trace\n"}
    assert found == (0, results[option], "wrote other\nterminal\n")
    assert file.read_text(encoding="utf-8") == results[other]
    assert not Path("-").exists()


@pytest.mark.parametrize("second", [["--json"], ["--trace", "-"]])
def test_two_results_do_not_share_standard_output(second: list[str], capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "cost", "small.plan", "--html", "-", *second)
    assert (status, out) == (2, "")
    assert "both write to standard output" in err


def test_check_reports_violated_requirements_of_a_plan_and_its_variants():
    done = forked("check", "small.plan", "--format", "json")
    assert done.returncode == 1, done.stderr
    found = [item for item in json.loads(done.stdout)["diagnostics"] if item["code"] == "LP711"]
    by_line = {item["label"]["start"]["line"]: item for item in found}
    lines = PLAN.split("\n")
    mfu = 1 + lines.index("require mfu >= 90%")
    variant = 1 + lines.index("  require exposed_comm <= 0.1%")
    assert set(by_line) == {mfu, variant}  # the third is accepted in the plan, the first is ok
    assert "this is so in the variant `replicas`" in by_line[variant]["help"]
    assert "small.plan: step " in done.stderr and "small.plan, variant replicas: step " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("1 plan: 2 errors")


@pytest.mark.slow
def test_check_of_a_plan_whose_requirements_are_ok_is_silent_on_standard_output():
    text = PLAN.partition("require mfu")[0]
    Path("good.plan").write_text(text.replace("plan small", "plan good"), encoding="utf-8")
    done = forked("check", "good.plan", "--format", "concise")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "1 of 1 requirement ok" in done.stderr


def test_a_plan_with_errors_is_neither_costed_nor_checked(capsys: pytest.CaptureFixture[str]):
    Path("bad.plan").write_text(PLAN.replace("layers.*", "layrs.*"), encoding="utf-8")
    for command in ("cost", "check", "graph"):
        status, out, err = called(capsys, command, "bad.plan")
        assert status == 1, command
        assert "layrs" in (out if command == "check" else err)
        assert "step " not in err


def test_no_choice_of_codes_lets_check_pass_a_plan_that_it_does_not_simulate(capsys: pytest.CaptureFixture[str]):
    Path("odd.plan").write_text(PLAN.replace("mesh    (", "mesh    (tp = 3, "), encoding="utf-8")
    assert called(capsys, "lint", "odd.plan", "--select", "LP9")[0] == 0
    for chosen in (["--select", "LP9"], ["--ignore", "LP"]):
        status, out, err = called(capsys, "check", "odd.plan", *chosen)
        assert (status, "step " in err) == (1, False)
        assert "error[LP3" in out


def test_cost_and_check_report_open_holes(capsys: pytest.CaptureFixture[str]):
    Path("hole.plan").write_text(PLAN.replace("micro = 2", "micro = auto in [1, 2]"), encoding="utf-8")
    for command in ("cost", "check"):
        status, out, err = called(capsys, command, "hole.plan")
        assert (status, "LP011" in out, "LP011" in err) == (1, command == "check", command == "cost"), command


def test_cost_error_is_status_2_with_a_reason(capsys: pytest.CaptureFixture[str]):
    for command in ("cost", "check"):
        status, out, err = called(capsys, command, "small.plan", "--profile", "none.toml")
        assert (status, out) == (2, ""), command
        assert "small.plan cannot be costed: " in err and "none.toml" in err
    status, _, err = called(capsys, "cost", "small.plan", "--rank", "8")
    assert (status, "no rank 8" in err) == (2, True)


UNMEASURED = PLAN.replace("cluster h100_sxm", 'cluster profile("ours.toml")')


@pytest.fixture
def unmeasured(here: Path) -> Path:
    """A plan whose device file has no profile: the profile's path."""
    device = (catalogue() / "h100_sxm.toml").read_text(encoding="utf-8").replace('"h100_sxm"', '"ours"')
    Path("ours.toml").write_text(device, encoding="utf-8")
    Path("ours.plan").write_text(UNMEASURED, encoding="utf-8")
    return here / "ours.json.gz"


FIGURES = (
    ("cost", "ours.plan"),
    ("check", "ours.plan"),
    ("solve", "hole.plan"),
    ("graph", "--what", "timeline", "ours.plan"),
)


def test_figures_of_devices_without_a_profile_are_an_error(unmeasured: Path, capsys: pytest.CaptureFixture[str]):
    Path("hole.plan").write_text(UNMEASURED.replace("micro = 2", "micro = auto in [1, 2]"), encoding="utf-8")
    contents = {
        None: "is missing beside ours.toml",
        b"junk": "is neither compressed nor JSON",
        b'{"format": 1}': "is no complete profile",
    }
    for content, message in contents.items():
        if content is not None:
            unmeasured.write_bytes(content)
        for command in FIGURES:
            status, out, err = called(capsys, *command)
            shown = out if command[0] == "check" else err
            assert (status, shown.count("error[LP315]"), message in shown) == (1, 1, True), (command, shown)
            assert ".plan:4:17" in shown and "`legoai calibrate -o ours.toml`" in shown
            assert "LP314" not in out + err


def test_check_reports_missing_figures_whatever_is_suppressed(unmeasured: Path, capsys: pytest.CaptureFixture[str]):
    text = UNMEASURED.replace('.toml")', '.toml")  # legoai: ignore[LP315, LP314]')
    Path("ours.plan").write_text(text, encoding="utf-8")
    Path("pyproject.toml").write_text('[tool.legoai]\nignore = ["LP3"]\nselect = ["LP7"]\n', encoding="utf-8")
    for more in ((), ("--ignore", "LP315"), ("--select", "LP7")):
        status, out, _ = called(capsys, "check", "ours.plan", *more)
        assert (status, "error[LP315]" in out) == (1, True), more


def test_plans_without_figures_are_lowered_and_drawn(unmeasured: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "lint", "ours.plan", "--select", "LP3")
    assert (status, "warning[LP314]" in out, "LP315" in out) == (0, True, False)
    assert called(capsys, "lower", "ours.plan")[0] == 0
    assert called(capsys, "graph", "ours.plan")[0] == 0
    status, out, err = called(capsys, "cost", "ours.plan", "--profile", "ours.toml")
    assert (status, "ours.json.gz, is missing beside ours.toml" in err) == (2, True)


@pytest.mark.parametrize("more", [(), ("--profile", "h100_sxm")], ids=["own devices", "other devices"])
def test_figures_of_a_fabric_without_figures_are_an_error(
    here: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
):
    text = PLAN.replace("h100_sxm", "cpu(devices = 4, hosts = 2, fabric = loopback)")
    Path("ours.plan").write_text(text, encoding="utf-8")
    Path("hole.plan").write_text(text.replace("micro = 2", "micro = auto in [1, 2]"), encoding="utf-8")
    for command in FIGURES:
        status, out, err = called(capsys, *command, *more)
        shown, other = (out, err) if command[0] == "check" else (err, out)
        assert (status, shown.count("error[LP315]"), "LP314" in out + err) == (1, 1, False), (command, shown)
        assert ".plan:4:" in shown and "the speed of the fabric `loopback`" in shown and "LP315" not in other
    for option in ("fabric = auto in [infiniband_ndr, loopback]", "hosts = auto in [1, 2]"):
        name = option.partition(" ")[0]
        open_text = re.sub(rf"{name} = \w+", option, text)
        Path("open.plan").write_text(open_text, encoding="utf-8")
        status, _, err = called(capsys, "solve", "open.plan", *more)
        assert (status, err.count("error[LP315]")) == (1, 1), err
    status, out, _ = called(capsys, "lint", "ours.plan", "--select", "LP3")
    assert (status, "warning[LP314]" in out, "LP315" in out) == (0, True, False)
    assert called(capsys, "lower", "ours.plan")[0] == 0
    assert called(capsys, "graph", "ours.plan", *more)[0] == (2 if more else 0)


UNSIMULATED = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x.masked_scatter(x > 1, x[x > 1].sqrt()))
"""


def test_figures_of_models_that_are_not_simulated_are_an_error(here: Path, capsys: pytest.CaptureFixture[str]):
    Path("masked_net.py").write_text(UNSIMULATED, encoding="utf-8")
    text = PLAN.replace('llama3("tiny")', 'python("masked_net:Net")').replace("layers.* =", "root =")
    Path("ours.plan").write_text(text, encoding="utf-8")
    Path("hole.plan").write_text(text.replace("micro = 2", "micro = auto in [1, 2]"), encoding="utf-8")
    for command in (*FIGURES, ("cost", "--profile", "h200", "ours.plan")):
        status, out, err = called(capsys, *command)
        shown = out if command[0] == "check" else err
        assert (status, shown.count("error[LP718]")) == (1, 1), (command, shown)
        assert "let forward read no values" in shown and "LP717" not in out + err
    status, out, _ = called(capsys, "lint", "ours.plan", "--select", "LP7")
    assert (status, "warning[LP717]" in out, "LP718" in out) == (0, True, False)
    assert called(capsys, "lower", "ours.plan")[0] == 0


def test_other_devices_need_no_profile_of_the_plan(unmeasured: Path):
    found = forked("check", "ours.plan", "--profile", "h100_sxm", "--ignore", "LP711")
    assert (found.returncode, "LP31" in found.stdout) == (0, False), found.stdout
    assert "ours.plan: step " in found.stderr


def test_check_continues_after_an_unreadable_file(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "check", "missing.plan", "small.plan", "--profile", "none.toml")
    assert status == 2
    assert "LP001" in out and "small.plan cannot be costed" in err


def test_the_mesh_is_drawn_without_simulating(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "graph", "small.plan")
    assert status == 0
    assert out.startswith("<svg") and "8 ranks on 1 host" in out
    status, _, err = called(capsys, "graph", "small.plan", "-o", "mesh.svg")
    assert (status, err, Path("mesh.svg").read_text(encoding="utf-8")) == (0, "wrote mesh.svg\n", out)


def test_graph_of_a_missing_pipeline_is_an_error_of_the_plan(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "graph", "small.plan", "--what", "pipeline")
    assert (status, out) == (1, "")
    assert "error[LP015] no-pipeline" in err and "`--what timeline`" in err


def test_unwritable_output_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    Path("taken").write_text("", encoding="utf-8")
    status, _, err = called(capsys, "graph", "small.plan", "-o", "taken/mesh.svg")
    assert (status, "there is no folder `taken`" in err) == (2, True)


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name == "nt", reason="signals of POSIX")
def test_interrupt_exits_quietly():
    process = subprocess.Popen(
        [sys.executable, "-m", "legoai", "cost", "small.plan", "--html", "small.html"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        for _ in range(600 if maps.exists() else 15):  # until torch is being read; then the step will be simulated
            if maps.exists() and "libtorch_cpu" in maps.read_text(encoding="utf-8"):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"", b"")
    assert not Path("small.html").exists()


@pytest.mark.parametrize("argv", [("cost", "--passes"), ("graph", "--what", "step")])
def test_passes_of_a_plan_without_a_graph_are_an_error(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    command, *options = argv
    status, out, err = called(capsys, command, "small.plan", *options)
    assert (status, out) == (1, "")
    assert "error[LP014] no-step-graph" in err and "write `backend = graph`" in err


def test_passes_with_html_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    status, _, err = called(capsys, "cost", "small.plan", "--passes", "--html", "small.html")
    assert (status, "--html is of one simulation" in err) == (2, True)


def test_lines_option_requires_json_alone(capsys: pytest.CaptureFixture[str]):
    for argv in (("cost", "good.plan", "--lines"), ("cost", "good.plan", "--json", "--lines", "--passes")):
        status, out, err = called(capsys, *argv)
        assert (status, out) == (2, "")
        assert "--lines adds to --json" in err
