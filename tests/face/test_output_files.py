"""The files that commands write: what stands at their names, and names that are no files."""

import os
import re
import stat
import subprocess
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from legoai.commands import COMMANDS, parser_of, shared
from legoai.commands.shared import output_file
from support.commands.command_line import (
    GOOD,
    called,
    here,  # noqa: F401
    started,
)
from support.marks import some_slow


def read_behind(path: Path) -> tuple[threading.Thread, list[str]]:
    """Start to read a pipe until its writers have closed it."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(path.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    return reader, found


def test_output_into_a_named_pipe_goes_to_its_reader(capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe")
    reader, found = read_behind(Path("pipe"))
    assert called(capsys, "lower", "good.plan", "-o", "pipe")[0] == 0
    reader.join(timeout=10)
    assert found[0] == called(capsys, "lower", "good.plan")[1]
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def test_what_standard_output_cannot_take_is_refused(capsys: pytest.CaptureFixture[str]):
    for command in (["export", "good.plan", "-o", "-"], ["verify", "good.plan", "--save-program", "-"]):
        status, out, err = called(capsys, *command)
        assert (status, out) == (2, "")
        assert "standard output" in err


WITH_RESULTS = {
    "explain": ("explain", "norm", "--plan"),
    "lower": ("lower",),
    "cost": ("cost", "--json"),
    "solve": ("solve", "--json"),
    "diff": ("diff", "good.plan"),
    "graph": ("graph",),
    "verify": ("verify",),
    "run": ("run",),
    "export": ("export", "-o", "published"),
    "import": ("import",),
}
"""Commands of one plan whose standard output is their result."""


def test_every_command_with_a_result_is_tried():
    # Their result is diagnostics, or of no plan that is read.
    others = {"lint", "check", "fmt", "calibrate", "lsp", "completion", "new"}
    assert WITH_RESULTS.keys() == COMMANDS.keys() - others


@pytest.mark.parametrize("command", WITH_RESULTS)
def test_a_refused_plan_leaves_standard_output_empty(command: str, capsys: pytest.CaptureFixture[str]):
    Path("broken.plan").write_text("plan broken\nmodel llama3(\n", encoding="utf-8")
    for plan in ("broken.plan", "missing.plan"):
        status, out, err = called(capsys, *WITH_RESULTS[command], plan)
        assert (status, out) == (2 if command == "diff" else 1, "")
        assert "error[LP" in err
        if plan == "broken.plan" and command != "import":
            assert re.search(r"legoai: broken.plan is not \w+: \d error", err)


def test_output_to_a_full_device_fails_and_leaves_it(capsys: pytest.CaptureFixture[str]):
    try:
        os.mknod("full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        Path("full").write_bytes(b"")
    except OSError:
        pytest.skip("this user may make or open no devices")
    status, _, err = called(capsys, "lower", "good.plan", "-o", "full")
    assert (status, err) == (2, "legoai: full cannot be written: No space left on device\n")
    assert stat.S_ISCHR(Path("full").stat().st_mode)


@pytest.mark.parametrize("name", some_slow(["/dev/stdout", "/dev/fd/1"], "/dev/fd/1"))
def test_output_to_a_descriptor_follows_what_is_written_to_it(name: str):
    program = started("lower", "good.plan").stdout
    with Path("log").open("w", encoding="utf-8") as log:
        log.write("before\n")
        log.flush()
        done = started("lower", "good.plan", "-o", name, capture_output=False, stdout=log)
    assert done.returncode == 0
    assert Path("log").read_text(encoding="utf-8") == f"before\n{program}"


def test_formatting_a_named_pipe_prints_the_result(capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe")
    threading.Thread(target=Path("pipe").write_text, args=("plan   x\n",), daemon=True).start()
    assert called(capsys, "fmt", "pipe", "-q")[:2] == (0, "plan x\n")
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


@pytest.mark.parametrize(
    "arguments", [["cost", "good.plan", "--trace"], ["cost", "good.plan", "--html"], ["lower", "good.plan", "-o"]]
)
def test_folder_as_output_file_is_refused_before_any_work(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    Path("folder").mkdir()
    status, out, err = called(capsys, *arguments, "folder")
    assert (status, out) == (2, "")
    assert "`folder` is a folder: name a file in it" in err


@pytest.mark.parametrize("options", [[], ["--from", "missing"]], ids=" ".join)
def test_files_of_a_calibration_are_tried_before_it_measures(options: list[str], capsys: pytest.CaptureFixture[str]):
    Path("ours.json.gz").mkdir()
    status, out, err = called(capsys, "calibrate", "-o", "ours.toml", *options)
    assert (status, out, err) == (2, "", "legoai: ours.json.gz cannot be written: Is a directory\n")


@pytest.mark.parametrize("arguments", [["lint", "--help"], ["help", "lint"], ["--version"]], ids=" ".join)
def test_help_that_cannot_be_written_is_a_failure(arguments: list[str]):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = started(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr


def test_help_of_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "help", "lnt")
    assert (status, out) == (2, "")
    assert "there is no command `lnt`; did you mean `lint`?" in err


WRITING = {
    "lower": (["-o"],),
    "cost": (["--html"], ["--trace"]),
    "solve": (["-o"],),
    "graph": (["-o"],),
    "verify": (["--save-program"],),
    "import": (["--force", "-o"],),
}
"""Options of each command of a plan or config that name a file to write."""
OPTIONS = [(name, *options) for name, several in WRITING.items() for options in several]


def test_every_option_that_names_an_output_file_is_tried():
    found = {name: [x for x in parser_of(name)._actions if x.type is output_file] for name in COMMANDS}
    assert {name: len(actions) for name, actions in found.items() if actions} == {
        **{name: len(several) for name, several in WRITING.items()},
        "calibrate": 1,  # it may update the device file that it reads
        "new": 1,  # it reads no plan
    }


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a base, a hole and files that it names; nothing is lowered or simulated."""
    monkeypatch.setattr(shared, "lacks_factory", _refuse_work)
    Path("lower").mkdir()
    Path("lower/base.plan").write_text(GOOD, encoding="utf-8")
    Path("corpus.txt").write_text("text\n", encoding="utf-8")
    top = 'plan top\nextends "lower/base.plan"\ndata (source = "corpus.txt")\n'
    top += "batch (global = 16, micro = auto in [4], seq_len = 64)\n"
    Path("top.plan").write_text(top, encoding="utf-8")
    Path("link").symlink_to("top.plan")
    Path("config.toml").write_text("[parallelism]\n", encoding="utf-8")


def _refuse_work(*_: object) -> NoReturn:
    pytest.fail("the output is refused before any work")


READ = {
    "top.plan": "the plan that is read",
    "link": "the plan that is read",
    "lower/base.plan": "a base of top.plan",
    "lower/../lower/base.plan": "a base of top.plan",
    "corpus.txt": "a file that top.plan names",
}


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("command", OPTIONS, ids=" ".join)
def test_no_output_replaces_what_is_read(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    source, outputs = "top.plan", READ
    if command[0] == "import":
        source, outputs = "config.toml", {"config.toml": "the config that is read"}
    for output, what in outputs.items():
        status, out, err = called(capsys, command[0], source, *command[1:], output)
        assert (status, out) == (2, "")
        if command[0] == "solve" and what == "the plan that is read":
            assert err == f"legoai: {output} is the plan itself: --in-place writes the answers into it\n"
        else:
            assert err == f"legoai: {output} is {what}: name another file to write\n"
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_profile_that_is_read_is_not_written(capsys: pytest.CaptureFixture[str]):
    for name in ("ours.toml", "ours.json.gz"):
        Path(name).write_bytes(b"")
        status, _, err = called(capsys, "cost", "good.plan", "--profile", "ours.toml", "--html", name)
        assert status == 2 and "of --profile: name another file to write" in err


@pytest.mark.parametrize(
    "words",
    [
        ("cost", "good.plan", "--html", "out", "--trace", "./out"),
        ("cost", "good.plan", "--html", "good.html", "--trace", "link"),
    ],
    ids=lambda words: words[-1],
)
def test_two_outputs_into_one_file_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared, "examine", _refuse_work)
    Path("good.html").write_text("page", encoding="utf-8")
    Path("link").symlink_to("good.html")
    status, out, err = called(capsys, *words)
    assert (status, out) == (2, "") and "is named for two outputs: name another file for one of them" in err
    assert Path("good.html").read_text(encoding="utf-8") == "page" and not Path("out").exists()


def test_nothing_is_an_output_of_any_number(monkeypatch: pytest.MonkeyPatch):
    shared.check_outputs([Path(os.devnull), Path(os.devnull), Path("-"), Path("-"), None])


def test_graphs_leave_the_program_its_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    text = GOOD.replace("fsdp on dp_shard {", "fsdp on dp_shard (backend = graph) {")
    Path("g.plan").write_text(text, encoding="utf-8")
    monkeypatch.setattr("legoai.cost.step_graphs.step_graphs", lambda *_, **__: {"trace": "graph"})
    status, _, err = called(capsys, "lower", "g.plan", "--dump-graphs", "graphs", "-o", "graphs/0_trace.py")
    assert status == 2 and "no folder" in err
    Path("graphs").mkdir()
    status, _, err = called(capsys, "lower", "g.plan", "--dump-graphs", "graphs", "-o", "graphs/0_trace.py")
    assert (status, err) == (
        2,
        "legoai: graphs/0_trace.py is named for two outputs: name another file for one of them\n",
    )
    assert list(Path("graphs").iterdir()) == []


@pytest.mark.parametrize("place", [["--in-place"], ["-o", "solved.plan"]], ids=" ".join)
def test_solve_tries_its_file_before_the_search(
    place: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("open.plan").write_text(GOOD.replace("micro = 4", "micro = auto in [4]"), encoding="utf-8")
    monkeypatch.setattr(shared, "examine", _refuse_work)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", denied)
    status, out, err = called(capsys, "solve", "open.plan", *place)
    name = place[-1].replace("--in-place", "open.plan")
    assert (status, out, err) == (2, "", f"legoai: {name} cannot be written: Permission denied\n")


UMLAUT = GOOD.replace("plan small", "# Ün 日本\nplan small")
CONTENTS = {
    "fmt": (("fmt", "-"), "# Ün 日本\n"),
    "fmt --expand": (("fmt", "--expand", "-"), "# Ün 日本\n"),
    "fmt --diff": (("fmt", "--diff", "wide.plan"), " # Ün 日本\n"),
    "solve": (("solve", "open.plan", "-o", "-"), "# Ün 日本\n"),
    "lower": (("lower", "ün.plan"), "lowered from ün.plan"),
    "diff": (("diff", "--no-cost", "--json", "wide.plan", "ün.plan"), '"ün.plan"'),
}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("name", some_slow(CONTENTS, "fmt --expand", "fmt --diff", "solve", "diff"))
def test_contents_of_files_are_utf8_on_any_standard_output(name: str, encoding: str):
    Path("wide.plan").write_text(UMLAUT.replace("plan small", "plan  small"), encoding="utf-8")
    Path("open.plan").write_text(UMLAUT.replace("micro = 4", "micro = auto in [4]"), encoding="utf-8")
    Path("ün.plan").write_text(UMLAUT, encoding="utf-8")
    words, said = CONTENTS[name]
    done = started(*words, text=False, input=UMLAUT.encode(), env=os.environ | {"PYTHONIOENCODING": encoding})
    assert said in done.stdout.decode("utf-8"), done.stderr
