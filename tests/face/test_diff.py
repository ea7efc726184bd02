"""`legoai diff`: files and git revisions, attribution of costs, output, and exit statuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from legoai.cost.differences import CannotCompareError
from legoai.cost.profiles import shipped_file
from legoai.dsl.differences.checkpoints import optimizer_state
from legoai.dsl.lint import lint
from legoai.runtime.checkpoint.checkpoint import OPTIMIZER, loadable_state
from legoai.specs.cluster import catalogue
from support.commands.command_line import GOOD, called, here, started

__all__ = ["here"]

SMALL = """\
plan small

model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 8, micro = 4, seq_len = 64)
mesh    (dp_shard = 2)

fsdp on dp_shard { layers.* = unit }
checkpoint { layers.* = none }
schedule cosine(warmup = 2, steps = 10)
"""
OTHER = SMALL.replace("micro = 4", "micro = 2").replace("= none", "= full").replace("warmup = 2", "warmup = 3")
WIDE = (
    OTHER.replace("devices = 2", "devices = 4")
    .replace("dp_shard = 2", "dp_shard = 4")
    .replace("micro = 2", "micro = 1")
)
FIGURES = ("step_time_s", "peak_active_bytes", "peak_reserved_bytes", "exposed_communication_s")


@pytest.fixture
def repository(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of a plan that extends another; the folder of the plans is not the repository's root."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    plans = here / "repository" / "plans"
    plans.mkdir(parents=True)
    git(plans.parent, "init", "-q", "-b", "main")
    (plans / "base.plan").write_text(SMALL.replace("small", "base"), encoding="utf-8")
    (plans / "small.plan").write_text('plan small\nextends "base.plan"\nsteps 5\n', encoding="utf-8")
    commit(plans.parent, "first")
    (plans / "base.plan").write_text(OTHER.replace("small", "base"), encoding="utf-8")
    commit(plans.parent, "second")
    monkeypatch.chdir(plans)
    return plans


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def differences(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    status, out, err = called(capsys, "diff", "--json", *arguments)
    assert "legoai:" not in err
    return status, json.loads(out)


def subjects(found: dict) -> list[str]:
    return [item["subject"] for item in found["changes"]]


def test_cost_parts_and_interaction_sum_to_the_difference(capsys: pytest.CaptureFixture[str]):
    Path("a.plan").write_text(SMALL, encoding="utf-8")
    Path("b.plan").write_text(WIDE, encoding="utf-8")
    status, found = differences(capsys, "a.plan", "b.plan")
    assert (status, found["format_version"], found["different"]) == (1, 1, True)
    cost = found["cost"]
    parts = [[found["changes"][index]["subject"] for index in part["changes"]] for part in cost["parts"]]
    assert parts == [
        ["cluster devices", "batch micro", "mesh dp_shard"],
        ["checkpoint layers.*"],
        ["schedule warmup"],
    ]
    assert [part["simulated"] for part in cost["parts"]] == [True, True, False]
    assert set(cost["parts"][2]["effect"].values()) == {0.0}
    for name in FIGURES:
        whole = cost["whole"][name]
        assert whole == cost["after"][name] - cost["before"][name]
        added = math.fsum([*(part["effect"][name] for part in cost["parts"]), cost["interaction"][name]])
        assert added == pytest.approx(whole, rel=1e-12, abs=1e-15)
        assert name == "exposed_communication_s" or whole != 0.0
    assert cost["programs"] == 4

    # A part is what the whole of that plan alone is.
    Path("c.plan").write_text(SMALL.replace("= none", "= full"), encoding="utf-8")
    _, alone = differences(capsys, "a.plan", "c.plan")
    assert alone["cost"]["whole"] == cost["parts"][1]["effect"]
    assert set(alone["cost"]["interaction"].values()) == {0.0}

    status, out, _ = called(capsys, "diff", "a.plan", "b.plan")
    assert status == 1
    assert "  cluster devices + batch micro + mesh dp_shard" in out
    assert "  interaction" in out
    assert "cost nothing: schedule warmup" in out
    assert "changes in one line can only be made together" in out
    # Cached simulations need no torch.
    Path("a.plan").write_text(f"# another line\n{SMALL}", encoding="utf-8")
    again = without_modules(("torch",), "diff", "a.plan", "b.plan")
    assert again.returncode == 1
    assert again.stdout.partition("cost of a step")[2] == out.partition("cost of a step")[2]
    status, out, _ = called(capsys, "diff", "a.plan", "b.plan", "--format", "github")
    assert status == 1
    assert out.startswith("**`a.plan` → `b.plan`**: step time ")
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| `cluster devices: 2 → 4`<br>`batch micro: 4 → 1`<br>`mesh dp_shard: 2 → 4` |")


def test_text_of_plans_stays_code_in_a_comment(capsys: pytest.CaptureFixture[str]):
    plain = SMALL + 'data (source = "corpus.txt")\n'
    Path("a|`x`\n@team.plan").write_text(plain, encoding="utf-8")
    Path("b.plan").write_text(plain.replace("corpus.txt", "x`` <img src=q> \\\\|`"), encoding="utf-8")
    _, out, _ = called(capsys, "diff", "--no-cost", "a|`x`\n@team.plan", "b.plan", "--format", "github")
    lines = out.splitlines()
    places = [f"{name}:{SMALL.count(chr(10)) + 1}" for name in (r"a\|`x`␊@team.plan", "b.plan")]
    change = r'data source: "corpus.txt" → "x`` <img src=q> \\ \|`"'
    assert lines[4] == f"| ```{change}``` | ``{' → '.join(places)}`` |"


def test_git_revisions_are_compared(repository: Path, capsys: pytest.CaptureFixture[str]):
    expected = ["batch micro", "checkpoint layers.*", "schedule warmup"]
    for named in (
        ["HEAD~1:plans/small.plan", "HEAD:plans/small.plan"],
        ["HEAD~1:./small.plan", "small.plan"],
        ["HEAD~1", "--", "small.plan"],
        ["HEAD~1..HEAD", "--", "small.plan"],
        ["HEAD~1..", "--", "./small.plan"],
        ["HEAD~1...main", "--", "small.plan"],
    ):
        status, found = differences(capsys, "--no-cost", *named)
        assert (status, subjects(found)) == (1, expected), named
        assert found["changes"][0]["before_at"]["file"] == "HEAD~1:plans/base.plan" or "..." in named[0]
        assert found["changes"][0]["before_at"]["line"] == 5
    assert called(capsys, "diff", "HEAD", "--", "small.plan")[:2] == (
        0,
        "HEAD:plans/small.plan → small.plan: no difference\n",
    )
    (repository / "base.plan").write_text(SMALL.replace("small", "base"), encoding="utf-8")
    assert called(capsys, "diff", "HEAD~1", "--", "plan.small")[0] == 0
    assert called(capsys, "diff", "HEAD", "--", "small.plan", "--no-cost")[0] == 2  # options stand before `--`


def test_named_files_are_read_from_the_revision(repository: Path, capsys: pytest.CaptureFixture[str]):
    order = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    text = SMALL.replace("fsdp on dp_shard { layers.* = unit }", 'pipeline on pp (schedule = csv("order.csv"))')
    text = text.replace("dp_shard = 2", "pp = 2").replace("n_layers = 1", "n_layers = 2")
    (repository / "small.plan").write_text(text, encoding="utf-8")
    (repository / "order.csv").write_text(order, encoding="utf-8")
    commit(repository.parent, "an order")
    (repository / "order.csv").write_text(order.replace("1F0,1B0,1F1", "1F0,1F1,1B0"), encoding="utf-8")
    status, found = differences(capsys, "--no-cost", "HEAD", "--", "small.plan")
    assert (status, subjects(found)) == (1, ['file "order.csv"'])
    assert found["changes"][0]["before_at"]["file"] == "HEAD:plans/small.plan"
    git(repository.parent, "checkout", "-q", "--", "plans/order.csv")
    assert called(capsys, "diff", "--no-cost", "HEAD", "--", "small.plan")[0] == 0


LINKS = {
    "plans/link.plan": "base.plan",
    "plans/folder": "../real",
    "real/twice.plan": "../plans/link.plan",
    "plans/circle.plan": "round.plan",
    "plans/round.plan": "circle.plan",
    "plans/out.plan": "/tmp/elsewhere.plan",
    "plans/up.plan": "../../elsewhere.plan",
    "plans/dangling.plan": "nowhere.plan",
}


def test_links_are_followed_within_the_revision(repository: Path, capsys: pytest.CaptureFixture[str]):
    (repository.parent / "real").mkdir()
    for link, target in LINKS.items():
        (repository.parent / link).symlink_to(target)
    for name, base in (("a", "link.plan"), ("b", "folder/twice.plan"), ("c", "out.plan"), ("d", "wrong.plan")):
        (repository / f"{name}.plan").write_text(f'plan base\nextends "{base}"\n', encoding="utf-8")
    (repository / "wrong.plan").write_text(SMALL.replace("layers", "layrs"), encoding="utf-8")
    commit(repository.parent, "links")
    (repository / "link.plan").unlink()  # only the revision has them
    for name in ("HEAD:plans/link.plan", "HEAD:plans/folder/twice.plan", "HEAD:./a.plan", "HEAD:./b.plan"):
        assert called(capsys, "diff", "--no-cost", name, "base.plan")[:2] == (
            0,
            f"{name.replace('./', 'plans/')} → base.plan: no difference\n",
        )
    for name, said in (
        ("circle", "its symbolic links lead in a circle"),
        ("out", "its symbolic link leads out of the repository, to `/tmp/elsewhere.plan`"),
        ("up", "leads out of the repository"),
        ("dangling", "leads to no file of the revision"),
        ("c", "leads out of the repository, to `/tmp/elsewhere.plan`"),
        ("c", "looked for HEAD:plans/out.plan"),
        ("d", "--> HEAD:plans/wrong.plan:3"),
        ("folder", "it is a directory"),
    ):
        path = f"HEAD:./{name}" + (".plan" if name != "folder" else "")
        status, _, err = called(capsys, "diff", "--no-cost", path, "base.plan")
        assert (status, said in err, "HEAD:/" in err) == (2, True, False), err


def test_files_behind_links_are_read_from_the_revision(repository: Path, capsys: pytest.CaptureFixture[str]):
    text = SMALL.replace("fsdp on dp_shard { layers.* = unit }", 'pipeline on pp (schedule = csv("linked/order.csv"))')
    text = text.replace("dp_shard = 2", "pp = 2").replace("n_layers = 1", "n_layers = 2")
    real = repository.parent / "real"
    real.mkdir()
    (real / "order.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    (real / "again").symlink_to("../real")
    (repository / "linked").symlink_to("../real")
    (repository / "out").symlink_to("/tmp/elsewhere")
    (real / "linked.plan").symlink_to("../plans/small.plan")
    (real / "linked").symlink_to("again")
    (repository / "small.plan").write_text(text, encoding="utf-8")
    commit(repository.parent, "a linked order")
    (repository / "linked").unlink()
    (repository / "linked").mkdir()
    (repository / "linked" / "order.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", encoding="utf-8")
    for name in ("HEAD:plans/small.plan", "HEAD:real/linked.plan", "HEAD:real/again/linked.plan"):
        status, found = differences(capsys, "--no-cost", name, "small.plan")
        assert (status, subjects(found)) == (1, ['file "linked/order.csv"'])
        assert found["changes"][0]["before_at"]["file"] == name


def test_a_plan_of_a_submodule_is_compared_from_within(repository: Path, capsys: pytest.CaptureFixture[str]):
    inner = repository / "inner"
    (inner / "deep").mkdir(parents=True)
    (inner / "deep" / "own.plan").write_text(SMALL, encoding="utf-8")
    git(inner, "init", "-q", "-b", "main")
    commit(inner, "first")
    (repository / "extends.plan").write_text('plan x\nextends "inner/deep/own.plan"\n', encoding="utf-8")
    commit(repository.parent, "a submodule")
    said = "`plans/inner` is a submodule: compare its plans from within it"
    for arguments in (
        ("HEAD", "--", "inner/deep/own.plan"),
        ("HEAD:plans/inner/deep/own.plan", "small.plan"),
        ("HEAD:./inner", "small.plan"),
        ("HEAD:./extends.plan", "small.plan"),
    ):
        status, _, err = called(capsys, "diff", "--no-cost", *arguments)
        assert (status, said in err) == (2, True), err
    status, _, err = called(capsys, "diff", "--no-cost", "HEAD", "--", "outer/own.plan")
    assert (status, "has no file `plans/outer/own.plan`" in err, "submodule" in err) == (2, True, False)


WRONG = [
    (["none.plan", "small.plan"], "LP001"),
    (["HEAD~7:plans/small.plan", "small.plan"], "there is no revision `HEAD~7`"),
    (["HEAD:plans/smal.plan", "small.plan"], "did you mean `plans/small.plan`?"),
    (["HEAD:./smal.plan", "small.plan"], "did you mean `./small.plan`?"),
    (["HEAD", "--", "smal.plan"], "did you mean `small.plan`?"),
    (["HEAD", "--", "../plan/small.plan"], "did you mean `small.plan`?"),
    (["HEAD:small.plan", "small.plan"], "did you mean `HEAD:./small.plan`?"),
    (["HEAD:../../x.plan", "small.plan"], "lies outside of the repository"),
    (["nowhere..HEAD", "--", "small.plan"], "there is no revision `nowhere`"),
    (["--upload-pack=x:y", "small.plan"], "unrecognized arguments"),
    (["HEAD", "small.plan"], "`HEAD` is a revision: write `HEAD -- small.plan`"),
    (["small.plan"], "expected two plans"),
    (["-", "-"], "only once"),
    (["HEAD", "--", "-"], "in no revision"),
    (["--profile", "gpu9000", "HEAD~1:plans/small.plan", "small.plan"], "--profile: unknown device 'gpu9000'"),
    (["--profile", "none.toml", "HEAD~1:plans/small.plan", "small.plan"], "--profile none.toml: "),
    (["--profile", "h200", "--no-cost", "small.plan", "small.plan"], "--no-cost costs none"),
    (["--json", "--format", "github", "small.plan", "small.plan"], "not allowed"),
    (["small.plan", "small.plan", "--variant", "wide"], "LP"),
]


def test_incomparable_arguments_report_the_reason(repository: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, said in WRONG:
        status, out, err = called(capsys, "diff", *arguments)
        assert (status, out) == (2, ""), arguments
        assert said in err, (arguments, err)
    (repository / "bad.plan").write_text(SMALL.replace("layers", "layrs"), encoding="utf-8")
    status, out, err = called(capsys, "diff", "small.plan", "bad.plan")
    assert (status, out) == (2, "")
    assert "LP2" in err
    assert "bad.plan is not compared: " in err


def test_other_profile_is_for_the_device_file_beside_the_plan(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def unsimulated(comparison: object, *, profile: str, progress: object) -> None:
        asked.append(profile)
        raise CannotCompareError("not simulated here")

    monkeypatch.setattr("legoai.cost.differences.cost_difference", unsimulated)
    (here / "sub").mkdir()
    shutil.copy(catalogue() / "h100_sxm.toml", here / "sub" / "own.toml")
    shutil.copy(shipped_file("h100_sxm"), here / "other.json.gz")
    plan = SMALL.replace("cpu(devices = 2)", 'profile("own.toml", devices = 2)')
    for name, text in (("a", plan), ("b", plan.replace("micro = 4", "micro = 2"))):
        (here / "sub" / f"{name}.plan").write_text(text, encoding="utf-8")
    status, out, err = called(capsys, "diff", "sub/a.plan", "sub/b.plan", "--profile", "other.json.gz")
    assert (status, "not simulated here" in out, asked) == (1, True, ["other.json.gz"]), err


def test_revision_outside_of_a_repository_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here.parent))
    status, _, err = called(capsys, "diff", "HEAD:good.plan", "good.plan")
    assert status == 2
    assert "the current folder lies in no git repository" in err


def test_plans_without_a_cost_are_compared(capsys: pytest.CaptureFixture[str]):
    Path("open.plan").write_text(GOOD.replace("micro = 4", "micro = auto in [2, 4]"), encoding="utf-8")
    status, out, _ = called(capsys, "diff", "good.plan", "open.plan")
    assert status == 1
    assert "batch micro: 4 → auto in [2, 4]" in out
    Path("open.plan").write_text(GOOD.replace("micro = 4", "micro = auto in 1..4000"), encoding="utf-8")
    assert "batch micro: 4 → auto in 1..4000" in called(capsys, "diff", "good.plan", "open.plan")[1]
    assert "cost: not known, open.plan has values that are not decided: solve it first" in out


def without_modules(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that fails if it imports one of these modules; there is no git."""
    code = "import sys; from legoai.cli import main; status = main(sys.argv[1:]); "
    code += f"sys.exit(9 if set({modules}) & sys.modules.keys() else status)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_git_asks_nobody_and_does_not_wait_for_ever(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = repository.parent / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("legoai.dsl.frontend.files.revisions._GIT_SECONDS", 0.5)
    for body, said in (
        ("exec sleep 30", "`git rev-parse --show-toplevel` has not answered in 0.5 s"),
        ('echo "prompt: $GIT_TERMINAL_PROMPT, input: $(cat)" >&2; exit 1', "git: prompt: 0, input:"),
    ):
        (folder / "git").write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / "git").chmod(0o755)
        status, out, err = called(capsys, "diff", "HEAD", "--no-cost", "--", "small.plan")
        assert (status, out) == (2, "")
        assert said in err


def test_no_cost_diff_needs_neither_torch_nor_git():
    done = without_modules(("torch", "numpy", "pydantic"), "diff", "--no-cost", "good.plan", "warned.plan")
    assert (done.returncode, done.stdout) == (0, "good.plan → warned.plan: no difference\n")
    assert started("diff", "--help").returncode == 0


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd(momentum = 0.9)", "sgd"])
def test_optimizer_state_equals_checkpoint_contents(optimizer: str):
    text = GOOD + f"optimizer {optimizer}\n"
    analysis = lint(text, "x.plan", directory=Path()).analysis
    model = nn.Linear(2, 2)
    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer.partition("(")[0]]
    options = {"momentum": 0.9} if "momentum" in optimizer else {}
    held = loadable_state(model, made(model.parameters(), **options))
    kept = {
        name.removeprefix(OPTIMIZER).removeprefix("weight.") for name in held if name.startswith(f"{OPTIMIZER}weight.")
    }
    assert {frozenset(kept)} == set(optimizer_state(analysis).values())
