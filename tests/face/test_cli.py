"""The command line: its output streams, and its exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from legoai import __version__
from legoai.cli import main
from legoai.commands import COMMANDS, parser_of
from legoai.dsl.frontend.files import sources
from legoai.dsl.lint import Linted, lint
from support import ROOT
from support.commands.command_line import (
    BAD,
    GOOD,
    called,
    here,  # noqa: F401
    started,
)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "--help")
    assert status == 0
    for name, does in COMMANDS.items():
        assert f"{name} " in out
        assert does in out
    assert max(map(len, out.splitlines())) <= 110


def test_no_command_is_wrong_usage_with_help(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys)
    assert (status, out) == (2, "")
    assert "usage: legoai COMMAND" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, name, "--help")
    assert status == 0
    examples = out.split("examples:\n")[1].split("\n\n")[0].splitlines()
    assert examples
    for line in examples:
        words = line.split("   ")[0].strip().replace("- < plans/tiny.plan ", "-").split()
        assert words[:2] == ["legoai", name]
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        parser_of(name).parse_args([word.replace("`", "") for word in own if word != "<"])
    assert main(["help", name]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_descriptions_fit_the_terminal(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    whole = called(capsys, name, "--help")[1]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = called(capsys, name, "--help")[1]
    head = narrow.partition("\n\n")[2].partition("examples:")[0]
    assert max(map(len, head.splitlines())) <= 60
    description = str(parser_of(name).description).split()
    for page in (narrow, whole):
        assert page.partition("\n\n")[2].split()[: len(description)] == description
    assert narrow.partition("examples:")[2].split("\n\n")[0] == whole.partition("examples:")[2].split("\n\n")[0]


def test_version(capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "--version") == (0, f"legoai {__version__}\n", "")


def test_a_clean_plan_is_status_0(capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "lint", "good.plan") == (0, "", "1 plan: no diagnostics\n")


def test_diagnostics_go_to_standard_output(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "lint", "bad.plan")
    assert status == 1
    assert out.startswith("error[LP210] no-such-path: `layrs.*` matches no module of the model\n --> bad.plan:9:14\n")
    assert "= help: did you mean `layers.*`?" in out
    assert err == "1 plan: 1 error\n"


def test_warnings_fail_only_under_strict(capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "lint", "warned.plan")[::2] == (0, "1 plan: 1 warning\n")
    assert called(capsys, "lint", "warned.plan", "--strict")[0] == 1


def test_several_plans_are_linted_and_each_is_named(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "lint", "good.plan", "bad.plan", "warned.plan", "--format", "concise")
    assert status == 1
    assert [line.split(":")[0] for line in out.splitlines()] == ["bad.plan", "warned.plan"]
    assert err == "3 plans: 1 error and 1 warning\n"


def test_directory_argument_means_the_plans_below_it(capsys: pytest.CaptureFixture[str]):
    for folder in ("some/deeper", "some/.hidden"):
        Path(folder).mkdir(parents=True)
        Path(folder, "x.plan").write_text(BAD, encoding="utf-8")
    Path("some/notes.txt").write_text("no plan", encoding="utf-8")
    _, out, err = called(capsys, "lint", "some", "some/deeper/x.plan", "--format", "concise")
    assert out.startswith("some/deeper/x.plan:9:14: ")
    assert err == "1 plan: 1 error\n"


def test_plan_name_is_searched_here_then_in_plans(capsys: pytest.CaptureFixture[str]):
    Path("plans").mkdir()
    Path("plans/other.plan").write_text(BAD, encoding="utf-8")
    Path("plans/good.plan").write_text(BAD, encoding="utf-8")
    assert called(capsys, "lint", "plan.good")[0] == 0
    assert "plans/other.plan:9:14" in called(capsys, "lint", "plan.other")[1]
    status, out, _ = called(capsys, "lint", "plan.othr")
    assert status == 1
    assert "there is no plan `othr`" in out
    assert "did you mean `other`?" in out
    Path("plan.good").write_text(BAD, encoding="utf-8")
    assert called(capsys, "lint", "plan.good")[0] == 1


def test_standard_input_is_a_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    class Standard:
        def __init__(self, text: str) -> None:
            from io import BytesIO

            self.buffer = BytesIO(text.encode())

    monkeypatch.setattr(sources.sys, "stdin", Standard(BAD))
    status, out, _ = called(capsys, "lint", "-", "--format", "concise")
    assert status == 1
    assert out.startswith("<stdin>:9:14: error[LP210]")
    monkeypatch.setattr(sources.sys, "stdin", Standard("plan   x"))
    assert called(capsys, "fmt", "-")[1] == "plan x\n"
    monkeypatch.setattr(sources.sys, "stdin", None)
    assert "`<stdin>` cannot be read: it is closed" in called(capsys, "lint", "-")[1]


UNREADABLE = {
    "missing.plan": (None, "LP001", "no such file or directory"),
    "god.plan": (None, "LP001", "did you mean `good.plan`?"),
    "latin.plan": (b"plan x\n# caf\xe9\n", "LP108", "the byte 0xe9 is not UTF-8"),
    "nul.plan": (b"plan x\n\0\n", "LP108", "a NUL character"),
    "mark.plan": (b"\xef\xbb\xbfplan x\n# caf\xe9\n", "LP108", "the byte 0xe9 is not UTF-8"),
    "huge.plan": (b"# " + b"x" * 2**22, "LP002", "more than 4 MiB"),
    "good.plan/x": (None, "LP001", "not a directory"),
    "x" * 300: (None, "LP001", "file name too long"),
    "a\0b": (None, "LP001", "this is no file name"),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize(
    "command", [["lint"], ["fmt"], ["lower"], ["run"], ["explain", "norm", "--plan"]], ids=lambda c: c[0]
)
def test_unreadable_file_is_a_diagnostic(name: str, command: list[str], capsys: pytest.CaptureFixture[str]):
    data, code, words = UNREADABLE[name]
    if data is not None:
        Path(name).write_bytes(data)
    status, out, err = called(capsys, *command, name)
    assert status == 1
    found, other = (err, out) if command[0] in ("explain", "lower", "run") else (out, err)
    assert f"error[{code}]" in found
    assert words in found
    assert "error[" not in other and "Traceback" not in found + other


def test_link_to_nothing_is_called_one(capsys: pytest.CaptureFixture[str]):
    Path("link.plan").symlink_to("gone.plan")
    _, out, _ = called(capsys, "lint", "link.plan")
    assert "`link.plan` cannot be read: it is a link to `gone.plan`, which does not exist" in out
    assert "did you mean" not in out


def test_byte_order_mark_is_no_part_of_the_text(capsys: pytest.CaptureFixture[str]):
    plain = Path("good.plan").read_bytes()
    Path("mark.plan").write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"))
    Path("over.plan").write_bytes(b'\xef\xbb\xbfplan over\nextends "mark.plan"\nclip (nrm = 1.0)\n')
    assert called(capsys, "lint", "mark.plan")[:2] == (0, "")
    assert "over.plan:3:7: error[LP204]" in called(capsys, "lint", "over.plan", "--format", "concise")[1]
    assert called(capsys, "lower", "mark.plan")[0] == 0
    assert called(capsys, "fmt", "mark.plan")[0] == 0
    assert Path("mark.plan").read_bytes() == b"\xef\xbb\xbf" + plain


@pytest.mark.parametrize(
    "arguments",
    [
        ["lower", "good.plan", "-o", "missing/program.py"],
        ["cost", "good.plan", "--html", "missing/deep/page.html"],
        ["cost", "good.plan", "--trace", "missing/trace.json"],
        ["graph", "good.plan", "-o", "missing/mesh.svg"],
        ["graph", "good.plan", "-o", "good.plan/mesh.svg"],
        ["calibrate", "-o", "missing/gpu.toml"],
    ],
    ids=lambda words: " ".join(words[:-1]),
)
def test_missing_output_folder_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, *arguments)
    assert (status, out) == (2, "")
    assert f"there is no folder `{Path(arguments[-1]).parent}`" in err
    assert not Path("missing").exists()


def test_directory_without_plans_is_a_diagnostic(capsys: pytest.CaptureFixture[str]):
    Path("empty").mkdir()
    for command in ("lint", "lower"):
        status, out, err = called(capsys, command, "empty")
        assert status == 1
        assert "`empty` is a directory" in (out if command == "lint" else err)


def test_file_without_read_permission_is_a_diagnostic(capsys: pytest.CaptureFixture[str]):
    Path("good.plan").chmod(0)
    if os.access("good.plan", os.R_OK):
        pytest.skip("this user may read every file")
    assert "permission denied" in called(capsys, "lint", "good.plan")[1]


def test_endless_base_file_is_refused(capsys: pytest.CaptureFixture[str]):
    Path("good.plan").write_text('plan x\nextends "/dev/zero"\n', encoding="utf-8")
    status, out, _ = called(capsys, "lint", "good.plan")
    assert status == 1
    assert "it is no regular file" in out


def test_select_and_ignore_decide_what_is_reported(capsys: pytest.CaptureFixture[str]):
    Path("both.plan").write_text(BAD.replace("fsdp on", "let hosts = 4\n\nfsdp on"), encoding="utf-8")

    def codes(*options: str) -> list[str]:
        out = called(capsys, "lint", "both.plan", "--format", "json", *options)[1]
        return [item["code"] for item in json.loads(out)["diagnostics"]]

    assert codes() == ["LP901", "LP210"]
    assert codes("--ignore", "LP9") == ["LP210"]
    assert codes("--ignore", "lp901,LP8") == ["LP210"]
    # A name that means nothing leaves no plan to speak of, so it is reported whatever is selected.
    assert codes("--select", "LP3") == ["LP210"]
    assert codes("--select", "LP9", "--select", "LP3") == ["LP901", "LP210"]


def test_settings_and_variants_choose_the_plan(capsys: pytest.CaptureFixture[str]):
    text = GOOD.replace("mesh    (dp_shard = 4)", "let n = 4\nmesh    (dp_shard = n)")
    Path("good.plan").write_text(text + "variant odd {\n  mesh (dp_shard = 3)\n}\n", encoding="utf-8")
    assert called(capsys, "lint", "good.plan", "--variant", "odd")[0] == 1
    status, out, _ = called(capsys, "lint", "good.plan", "--set", "n=3", "--variant", "nodd")
    assert status == 1
    assert "did you mean `odd`?" in out
    assert "`dp_shard` = 3" in called(capsys, "lint", "good.plan", "--set", "n = 3")[1]
    status, out, _ = called(capsys, "lint", "good.plan", "--set", "m=(3")
    assert "--> --set m:1:9" in out


def test_nearest_pyproject_with_a_legoai_table_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("pyproject.toml").write_text('[tool.legoai]\nformat = "concise"\nignore = ["LP901"]\n', encoding="utf-8")
    Path("deep/er").mkdir(parents=True)
    Path("deep/pyproject.toml").write_text('[project]\nname = "x"\n', encoding="utf-8")
    Path("deep/er/x.plan").write_text(BAD + "let y = 1\n", encoding="utf-8")
    monkeypatch.chdir("deep/er")
    assert called(capsys, "lint", "x.plan")[1].splitlines() == [
        "x.plan:9:14: error[LP210] `layrs.*` matches no module of the model"
    ]
    # The command line comes before it.
    assert "-->" in called(capsys, "lint", "x.plan", "--format", "full")[1]
    assert "LP901" in called(capsys, "lint", "x.plan", "--ignore", "LP8")[1]


def test_strict_can_be_configured(capsys: pytest.CaptureFixture[str]):
    Path("pyproject.toml").write_text("[tool.legoai]\nstrict = true\n", encoding="utf-8")
    assert called(capsys, "lint", "warned.plan")[0] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[tool.legoai]\nselct = ["LP4"]\n', "no key `selct`; did you mean `select`?"),
        ('[tool.legoai]\nformat = "xml"\n', "`format` must be one of full, concise"),
        ('[tool.legoai]\nselect = "LP4"\n', "`select` must be a list of codes"),
        ('[tool.legoai]\nignore = ["LP77"]\n', "no rule has the code or name `LP77`"),
        ('[tool.legoai]\nignore = [""]\n', "must be a list of codes"),
        ("[tool.legoai]\nstrict = 1\n", "`strict` must be true or false"),
        ("[tool]\nlegoai = 1\n", "`tool.legoai` must be a table"),
        ("[tool.legoai\n", "cannot be read"),
    ],
)
def test_a_wrong_configuration_is_wrong_usage(text: str, words: str, capsys: pytest.CaptureFixture[str]):
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    status, out, err = called(capsys, "lint", "good.plan")
    assert (status, out) == (2, "")
    assert words in err
    assert "pyproject.toml" in err


def test_colours_require_a_supporting_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in called(capsys, "lint", "bad.plan")[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[1;31m" in called(capsys, "lint", "bad.plan")[1]
    assert "\x1b" not in called(capsys, "lint", "bad.plan", "--format", "json")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in called(capsys, "lint", "bad.plan")[1]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in called(capsys, "lint", "bad.plan")[1]


def test_internal_error_shows_a_traceback_only_in_debug_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr("legoai.commands.shared.lint", fail)
    for command, about in (("lower", ""), ("lint", "good.plan: "), ("check", "good.plan: ")):
        monkeypatch.delenv("LEGOAI_DEBUG", raising=False)
        status, out, err = called(capsys, command, "good.plan")
        assert (status, out) == (2, "")
        assert err.startswith(f"legoai {__version__}: {about}internal error: RuntimeError: broken in two lines\n")
        assert "Please report it" in err
        assert "Traceback" not in err
        monkeypatch.setenv("LEGOAI_DEBUG", "1")
        assert "Traceback" in called(capsys, command, "good.plan")[2]


@pytest.mark.parametrize("command", ["lint", "check"])
def test_an_internal_error_in_one_plan_hides_no_others(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fails_on_good(text: str, name: str, **more: Any) -> Linted:
        if name == "good.plan":
            raise RuntimeError("broken")
        return lint(text, name, **more)

    monkeypatch.setattr("legoai.commands.shared.lint", fails_on_good)
    status, out, err = called(capsys, command, "good.plan", "bad.plan", "--format", "json")
    assert status == 2
    assert {item["label"]["file"] for item in json.loads(out)["diagnostics"]} == {"bad.plan"}
    assert "good.plan: internal error: RuntimeError: broken" in err
    assert err.endswith("2 plans, 1 failed: 1 error\n")


def test_an_interrupt_is_status_130_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("legoai.commands.lint.examine", stop)
    assert called(capsys, "lint", "good.plan") == (130, "", "")


def test_interrupt_while_reading_exits_quietly():
    process = subprocess.Popen(
        [sys.executable, "-m", "legoai", "lint", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            # Blocked on standard input once the command is running; until then the interpreter is starting.
            if "pipe_read" in Path(f"/proc/{process.pid}/wchan").read_text() if Path("/proc").exists() else True:
                break
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_closed_output_pipe_exits_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "legoai", "explain", "defaults"],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_any_terminal_encoding_is_enough(here: Path):  # noqa: F811
    Path("bad.plan").write_text(BAD + "# 日本 ü\nattention flaschü\n", encoding="utf-8")
    done = started("lint", "bad.plan", env=os.environ | {"PYTHONIOENCODING": "ascii"}, cwd=here)
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert "error[LP" in done.stdout
    assert done.stderr.startswith("1 plan: ")


def test_linting_imports_nothing_heavy(here: Path):  # noqa: F811
    code = (
        "import sys\nfrom legoai.cli import main\nassert main(['lint', 'good.plan']) == 0\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'networkx', 'transformers', 'subprocess', 'difflib'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, cwd=here
    )
    assert done.stdout == "[]\n", done.stderr


def test_repository_plans_are_clean(capsys: pytest.CaptureFixture[str]):
    """Of the plans of Hugging Face models, the one whose model is inspected in the least time."""
    paths = [*(ROOT / "plans").glob("*.plan"), ROOT / "plans" / "zoo" / "convnextv2_huge.plan"]
    assert len(paths) > 5
    status, out, _ = called(capsys, "lint", *map(str, paths), "--strict")
    assert (status, out) == (0, "")


@pytest.mark.slow
def test_every_plan_below_the_folder_is_clean(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "lint", str(ROOT / "plans"), "--strict")
    assert (status, out) == (0, "")


def test_whole_paths_need_no_working_folder(
    here: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    extending = here / "extending.plan"
    extending.write_text(f'plan extending\nextends "good.plan"\nextends "{here}/missing.plan"\n', encoding="utf-8")
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert called(capsys, "lint", str(here / "good.plan"))[0] == 0
    assert called(capsys, "fmt", "--check", str(here / "good.plan"))[0] == 0
    status, out, err = called(capsys, "lint", str(extending), "--format", "concise")
    assert (status, out.count("LP214"), "cannot be read" in out) == (1, 1, True), out + err
    # A relative name means nothing there.
    monkeypatch.setenv("GITHUB_WORKSPACE", str(here))
    monkeypatch.setattr(sources, "_read_standard_input", lambda: b"plan a\n")
    status, out, err = called(capsys, "lint", "--format", "github", "--stdin-filename", "a.plan", "-")
    assert (status, out, err) == (2, "", "legoai: the working folder does not exist any more\n")
