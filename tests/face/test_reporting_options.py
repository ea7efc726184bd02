"""Options for the plans to look at, the diagnostics to report, and the exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from legoai import lint as linted
from legoai.dsl.frontend.files import sources
from legoai.dsl.frontend.parsing.suppress import NEVER_ACCEPTED
from legoai.dsl.rules import all_rules
from support.commands.command_line import (
    BAD,
    GOOD,
    WARNED,
    called,
    here,  # noqa: F401
)
from support.simulation.simulated import in_a_fork


def write(name: str, text: str = BAD) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def files(capsys: pytest.CaptureFixture[str], *argv: str) -> set[str]:
    out = called(capsys, *argv, "--format", "concise")[1]
    return {line.split(":")[0] for line in out.splitlines()}


def test_lint_without_a_path_lints_the_current_folder(capsys: pytest.CaptureFixture[str]):
    write("some/where.plan")
    assert files(capsys, "lint") == {"bad.plan", "some/where.plan", "warned.plan"}


def test_folder_without_plans_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    assert "there is no plan in it" in called(capsys, "lint")[1]


@pytest.mark.parametrize(
    "folder",
    ["node_modules/x", ".hidden", "venv/lib", "deep/env", "deep/conda", "lib/site-packages/y", "__pypackages__"],
)
def test_dependency_folders_are_skipped(folder: str, capsys: pytest.CaptureFixture[str]):
    write(f"plans/{folder}/x.plan")
    if folder == "deep/env":
        write(f"plans/{folder}/pyvenv.cfg", "")
    if folder == "deep/conda":
        Path(f"plans/{folder}/conda-meta").mkdir()
    write("plans/mine.plan")
    assert files(capsys, "lint", "plans") == {"plans/mine.plan"}
    assert files(capsys, "lint", f"plans/{folder}/x.plan") == {f"plans/{folder}/x.plan"}


@pytest.fixture
def unprivileged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user who may not read everything, in a folder of his own."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.chdir(folder)
        write("ok/good.plan", GOOD)
        write("locked/x.plan")
        write("listed/x.plan")
        Path("locked").chmod(0)
        Path("listed").chmod(0o444)
        linted("ok/good.plan")  # imports while it may
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield
        finally:
            if is_root:
                os.seteuid(0)
            monkeypatch.chdir(tmp_path)
            for name in ("locked", "listed"):
                Path(folder, name).chmod(0o755)


@pytest.mark.usefixtures("unprivileged")
def test_unreadable_folder_is_reported_beside_the_other_plans(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "lint", ".", "--format", "concise")
    assert status == 1, err
    assert [line.split(":")[0] for line in out.splitlines()] == ["listed/x.plan", "locked"]
    assert out.count("LP001") == out.count("permission denied") == 2
    assert "3 plans" in err
    assert called(capsys, "fmt", "--check", ".")[0] == 1
    for path in (".", "locked", "listed", "listed/x.plan"):
        assert [item.code for item in linted(path)] == ["LP001"]


def test_only_files_are_taken_from_a_folder(capsys: pytest.CaptureFixture[str]):
    Path("plans").mkdir()
    os.mkfifo("plans/pipe.plan")
    Path("plans/link.plan").symlink_to("../bad.plan")
    Path("plans/broken.plan").symlink_to("nowhere.plan")
    assert files(capsys, "lint", "plans") == {"plans/link.plan", "plans/broken.plan"}


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ([], {"a.plan", "old/a.plan", "old/deep/b.plan", "new/old.plan"}),
        (["old"], {"a.plan", "new/old.plan"}),
        (["old/"], {"a.plan", "new/old.plan"}),
        (["a.plan"], {"old/deep/b.plan", "new/old.plan"}),
        (["old/a.plan"], {"a.plan", "old/deep/b.plan", "new/old.plan"}),
        (["./old/deep"], {"a.plan", "old/a.plan", "new/old.plan"}),
        (["*/*.plan"], {"a.plan"}),
        (["o*"], {"a.plan"}),
    ],
)
def test_configured_excludes_are_skipped(
    patterns: list[str], left: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("a.plan", "old/a.plan", "old/deep/b.plan", "new/old.plan"):
        write(f"project/{name}")
    write("project/pyproject.toml", f"[tool.legoai]\nexclude = {patterns}\n")
    monkeypatch.chdir("project")
    assert files(capsys, "lint") == left
    assert files(capsys, "check", ".") == left
    assert called(capsys, "fmt", ".", "--check")[2].startswith(f"{len(left)} plan")
    monkeypatch.chdir("new")
    assert files(capsys, "lint", "..") == {f"../{name}" for name in left}
    assert files(capsys, "lint", "../old/a.plan") == {"../old/a.plan"}  # a named file is linted


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("exclude = 'old'", "`exclude` must be a list of patterns"),
        ("exclude = ['']", "`exclude` must be a list of patterns"),
        ("exclud = ['old']", "did you mean `exclude`?"),
        ("folder = 'x'", "has no key `folder`"),
        ("ignore = ['unused-lets']", "did you mean `unused-let`?"),
    ],
)
def test_invalid_configuration_is_wrong_usage(table: str, words: str, capsys: pytest.CaptureFixture[str]):
    write("pyproject.toml", f"[tool.legoai]\n{table}\n")
    for command in ("lint", "check", "fmt"):
        status, _, err = called(capsys, command, "good.plan")
        assert status == 2
        assert words in err


def test_rules_are_selected_by_code_prefix_or_slug(capsys: pytest.CaptureFixture[str]):
    for selector in ("LP901", "lp9", "unused-let", "Unused-Let"):
        assert called(capsys, "lint", "warned.plan", "--ignore", selector)[::2] == (0, "1 plan: no diagnostics\n")
        assert "LP901" in called(capsys, "lint", "warned.plan", "--select", selector)[1]
    assert "did you mean `unused-let`?" in called(capsys, "lint", "warned.plan", "--ignore", "unusedlet")[2]
    write("pyproject.toml", '[tool.legoai]\nignore = ["unused-let"]\n')
    assert called(capsys, "lint", "warned.plan")[1] == ""


def test_ignoring_what_is_always_reported_is_announced(capsys: pytest.CaptureFixture[str]):
    write("indivisible.plan", GOOD.replace("global = 16", "global = 18"))
    said = "has no effect on LP601, no-such-path: what leaves no plan, or no figures, is always reported\n"
    status, out, err = called(capsys, "lint", "indivisible.plan", "--ignore", "LP601,LP6,no-such-path,unused-let")
    assert status == 1 and "error[LP601]" in out and f"legoai: --ignore {said}" in err
    assert "LP601" in called(capsys, "lint", "indivisible.plan", "--select", "LP9")[1]
    assert "no effect" not in called(capsys, "lint", "indivisible.plan", "--quiet", "--ignore", "LP601")[2]
    write("pyproject.toml", '[tool.legoai]\nignore = ["LP601", "no-such-path", "LP8"]\n')
    for command in ("lint", "check"):
        assert f"legoai: `ignore` of [tool.legoai] {said}" in called(capsys, command, "indivisible.plan")[2]


def test_manual_names_every_code_that_is_always_reported():
    manual = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    sentence = manual.partition("Always reported is ")[2].partition("Where `--ignore`")[0]
    codes = set(re.findall(r"LP\d+", sentence))
    codes |= {
        f"LP{code}"
        for first, last in re.findall(r"LP(\d+) to LP(\d+)", sentence)
        for code in range(int(first), int(last))
    }
    assert codes & set(NEVER_ACCEPTED) == set(NEVER_ACCEPTED)
    assert {code for code in codes - set(NEVER_ACCEPTED) if any(rule.code == code for rule in all_rules())} == set()


def test_suppression_comment_accepts_a_slug(capsys: pytest.CaptureFixture[str]):
    write("warned.plan", WARNED.replace("let hosts = 4", "let hosts = 4  # legoai: ignore[unused-let]"))
    assert called(capsys, "lint", "warned.plan")[::2] == (0, "1 plan: no diagnostics\n")
    write("warned.plan", WARNED.replace("let hosts = 4", "let hosts = 4  # legoai: ignore[unused-lets]"))
    out = called(capsys, "lint", "warned.plan")[1]
    assert "LP901" in out and "did you mean `unused-let`?" in out


@pytest.mark.parametrize("command", ["lint", "check"])
def test_exit_zero_reports_and_does_not_fail(command: str, capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, command, "bad.plan", "--exit-zero")
    assert (status, err) == (0, "1 plan: 1 error\n")
    assert "LP210" in out
    options = ("--strict", "--exit-zero", "--select", "LP9")
    assert in_a_fork(called, capsys, command, "warned.plan", "bad.plan", *options)[0] == 0  # `check` simulates it
    assert called(capsys, command, "bad.plan", "--exit-zero", "--format", "xml")[0] == 2


def test_quiet_omits_the_summary(capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "lint", "good.plan", "-q") == (0, "", "")
    status, out, err = called(capsys, "check", "bad.plan", "--quiet")
    assert (status, err) == (1, "") and "LP210" in out
    write("wide.plan", GOOD.replace("batch   (", "batch ("))
    assert called(capsys, "fmt", "wide.plan", "-q") == (0, "", "")


def test_colours_are_shown_when_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for command in ("lint", "check"):
        assert "\x1b[" in called(capsys, command, "bad.plan", "--color", "always")[1]
        assert "\x1b[" not in called(capsys, command, "bad.plan", "--color", "never")[1]
        assert "\x1b[" not in called(capsys, command, "bad.plan")[1]
    write("broken.plan", "plan (\n")
    assert "\x1b[" in called(capsys, "fmt", "broken.plan", "--color", "always")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in called(capsys, "lint", "bad.plan", "--color", "always")[1]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Standard:
        buffer = BytesIO(b'plan x\nextends "base.plan"\ncheckpoint {layrs.* = full}\n')

    monkeypatch.setattr(sources.sys, "stdin", Standard)


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize("command", ["lint", "check"])
def test_stdin_filename_sets_name_and_folder(command: str, capsys: pytest.CaptureFixture[str]):
    write("deep/base.plan", GOOD)
    status, out, _ = called(capsys, command, "-", "--stdin-filename", "deep/mine.plan", "--format", "concise")
    assert status == 1
    assert out.startswith("deep/mine.plan:3:13: error[LP210]")


@pytest.mark.usefixtures("typed")
def test_fmt_diff_of_stdin_uses_the_given_name(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "fmt", "-", "--diff", "--stdin-filename", "deep/mine.plan")
    assert status == 1
    assert out.startswith("--- deep/mine.plan\n+++ deep/mine.plan (formatted)\n")


def test_stdin_filename_without_stdin_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    for command in ("lint", "check", "fmt"):
        assert called(capsys, command, "good.plan", "--stdin-filename", "x.plan")[0] == 2


def test_fmt_diff_fails_if_files_would_change(capsys: pytest.CaptureFixture[str]):
    write("wide.plan", GOOD.replace("batch   (", "batch ("))
    status, out, err = called(capsys, "fmt", "wide.plan", "--diff")
    assert (status, err) == (1, "1 plan, 1 would change\n")
    assert "+batch   (" in out
    assert called(capsys, "fmt", "good.plan", "--diff") == (0, "", "1 plan, 0 would change\n")


FACTORY = GOOD.replace('llama3("tiny")', 'python("hostile:build")')


@pytest.fixture
def hostile() -> None:
    write("hostile.py", "import pathlib\npathlib.Path('ran').touch()\ndef build():\n    raise SystemExit\n")
    variant = "variant other {\n  batch (global = 32, micro = 4, seq_len = 64)\n}\n"
    write("hostile.plan", FACTORY + "checkpoint { anything.* = full }\n" + variant)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("command", ["lint", "check"])
def test_no_factories_runs_no_factory(command: str, capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, command, "hostile.plan", "--no-factories", "--format", "concise")
    assert status == 0
    assert [line.split("]")[0] for line in out.splitlines()] == ["hostile.plan:3:16: advice[LP226"]
    assert err == "1 plan: 1 advice\n"
    assert not Path("ran").exists()


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("command", ["lower", "cost", "graph", "run", "verify", "solve"])
def test_commands_stop_at_a_forbidden_factory(command: str, capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, command, "hostile.plan", "--no-factories")
    assert (status, out) == (1, "")
    assert "LP226" in err
    done = {
        "verify": "verified", "solve": "solved", "cost": "costed", "graph": "drawn", "run": "run", "lower": "lowered",
    }[command]  # fmt: skip
    assert f"hostile.plan is not {done}: --no-factories, and its model is the factory hostile:build" in err
    assert not Path("ran").exists()


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("options", [["--expand"], ["--expand", "--no-factories"], ["--check"], ["--diff"]])
def test_formatting_runs_no_factory(options: list[str], capsys: pytest.CaptureFixture[str]):
    write("hostile.plan", FACTORY.replace("batch", "shard standard on tp\nbatch"))
    _, out, err = called(capsys, "fmt", "hostile.plan", *options)
    assert out + err
    assert not Path("ran").exists()


@pytest.mark.usefixtures("hostile")
def test_rules_without_a_model_run_without_the_factory(capsys: pytest.CaptureFixture[str]):
    write("hostile.plan", FACTORY.replace("dp_shard = 4", "dp_shard = 3"))
    status, out, _ = called(capsys, "lint", "hostile.plan", "--no-factories", "--format", "concise")
    assert status == 1
    assert "LP3" in out
    assert not Path("ran").exists()


@pytest.mark.usefixtures("hostile")
def test_explain_refuses_a_forbidden_factory(capsys: pytest.CaptureFixture[str]):
    status, _, err = called(capsys, "explain", "root", "--plan", "hostile.plan", "--no-factories")
    assert status == 1
    assert "LP226" in err
    assert "hostile.plan is not explained: --no-factories" in err
    assert not Path("ran").exists()


def test_reporting_imports_nothing_heavy():
    code = "import sys, legoai.dsl.reporting.topics, legoai.commands.reporting; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "command",
    [
        ("lint", "--format", "concise"),
        ("lint", "--format", "full"),
        ("lint", "--format", "github"),
        ("fmt", "--check"),
        ("fmt", "--diff"),
        ("lower",),
        ("explain", "fsdp", "--plan"),
        ("explain", "layers.0", "--plan"),
    ],
)
@pytest.mark.parametrize("text", ["good", "bad"])
def test_name_of_a_file_neither_steers_the_terminal_nor_forges_a_line(
    command: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
):
    name = "\x1b[31m\n::error::forged.plan"
    Path(name).write_text((GOOD if text == "good" else BAD).replace("mesh   ", "mesh"), encoding="utf-8")
    _, out, err = called(capsys, *command, name)
    assert not any(line.lstrip().startswith("::error::forged") for line in (out + err).splitlines())
    assert "\x1b" not in (out + err).replace("file=\x1b[31m", "")  # which a program reads


def test_name_of_a_file_in_an_error_is_visible(capsys: pytest.CaptureFixture[str]):
    name = "\x1b[31m\n::error::forged.plan"
    Path(name).write_text(GOOD, encoding="utf-8")
    status, _, err = called(capsys, "solve", name)
    assert status == 2 and "␛[31m␊::error::forged.plan has no holes" in err
