"""`legoai fmt` and `legoai lint --fix` change what they must, and nothing else."""

import errno
from pathlib import Path

import pytest

from support.commands.command_line import (
    BAD,
    GOOD,
    called,
    here,  # noqa: F401
)


@pytest.mark.parametrize("command", [("fmt",), ("lint", "--fix")])
def test_plan_that_cannot_be_written_is_named(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    text = BAD.replace("mesh    (dp_shard = 4)", "mesh (tp = 1, dp_shard = 4)")
    Path("bad.plan").write_text(text, encoding="utf-8")

    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    status, _, err = called(capsys, *command, "bad.plan")
    assert status == 2 and "legoai: bad.plan cannot be written: No space left on device\n" in err
    assert ".tmp" not in err and Path("bad.plan").read_text(encoding="utf-8") == text


def test_fix_applies_safe_fixes_and_unsafe_ones_only_when_asked(capsys: pytest.CaptureFixture[str]):
    text = BAD.replace("mesh    (dp_shard = 4)", "mesh    (tp = 1, dp_shard = 4)")
    path = Path("bad.plan")
    path.write_text(text, encoding="utf-8")
    path.chmod(0o640)
    status, out, err = called(capsys, "lint", "bad.plan", "--fix", "--format", "concise")
    assert status == 1
    assert "bad.plan: fixed\n" in err
    assert path.read_text(encoding="utf-8") == BAD.replace("(dp_shard = 4)", "(dp_shard = 4, tp = 1)")
    assert [line.split("[")[1][:5] for line in out.splitlines()] == ["LP210"]
    status, out, _ = called(capsys, "lint", "bad.plan", "--fix", "--unsafe-fixes")
    assert (status, out) == (0, "")
    assert "layers.* = full" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in Path().iterdir()) == ["bad.plan", "good.plan", "warned.plan"]


def test_fix_skips_ignored_rules(capsys: pytest.CaptureFixture[str]):
    text = GOOD.replace("mesh    (dp_shard = 4)", "mesh    (tp = 1, dp_shard = 4)")
    Path("good.plan").write_text(text, encoding="utf-8")
    assert called(capsys, "lint", "good.plan", "--fix", "--ignore", "LP3")[0] == 0
    assert Path("good.plan").read_text(encoding="utf-8") == text


def test_fix_follows_a_symbolic_link(capsys: pytest.CaptureFixture[str]):
    Path("link.plan").symlink_to("bad.plan")
    assert called(capsys, "lint", "link.plan", "--fix", "--unsafe-fixes")[0] == 0
    assert Path("link.plan").is_symlink()
    assert Path("bad.plan").read_text(encoding="utf-8") == BAD.replace("layrs", "layers")


def test_fmt_writes_only_changed_files(capsys: pytest.CaptureFixture[str]):
    Path("ugly.plan").write_text("plan   x", encoding="utf-8")
    before = Path("good.plan").stat().st_mtime_ns
    called(capsys, "fmt", "good.plan")
    good = Path("good.plan").read_text(encoding="utf-8")
    assert called(capsys, "fmt", "ugly.plan") == (0, "", "1 plan, 1 changed\n")
    assert Path("ugly.plan").read_text(encoding="utf-8") == "plan x\n"
    assert called(capsys, "fmt", "good.plan", "ugly.plan") == (0, "", "2 plans, 0 changed\n")
    assert good != GOOD or Path("good.plan").stat().st_mtime_ns == before


def test_fmt_check_fails_and_changes_nothing(capsys: pytest.CaptureFixture[str]):
    Path("ugly.plan").write_text("plan   x\n", encoding="utf-8")
    assert called(capsys, "fmt", "--check", "ugly.plan")[:2] == (1, "would change ugly.plan\n")
    assert Path("ugly.plan").read_text(encoding="utf-8") == "plan   x\n"
    Path("ugly.plan").write_text("plan x\n", encoding="utf-8")
    assert called(capsys, "fmt", "--check", "ugly.plan")[:2] == (0, "")


def test_fmt_diff_is_a_patch(capsys: pytest.CaptureFixture[str]):
    Path("ugly.plan").write_text("plan   x", encoding="utf-8")
    status, out, _ = called(capsys, "fmt", "--diff", "ugly.plan")
    assert status == 1
    assert out == (
        "--- ugly.plan\n+++ ugly.plan (formatted)\n@@ -1 +1 @@\n-plan   x\n\\ No newline at end of file\n+plan x\n"
    )
    assert called(capsys, "fmt", "--diff", "--check", "ugly.plan")[:2] == (1, out)
    assert Path("ugly.plan").read_text(encoding="utf-8") == "plan   x"


def test_fmt_keeps_files_with_syntax_errors(capsys: pytest.CaptureFixture[str]):
    Path("broken.plan").write_text("plan   x\nmesh (tp = \n", encoding="utf-8")
    status, out, _ = called(capsys, "fmt", "broken.plan", "good.plan")
    assert status == 1
    assert "error[LP10" in out
    assert Path("broken.plan").read_text(encoding="utf-8") == "plan   x\nmesh (tp = \n"


def test_fmt_expand_prints_the_plan_with_its_defaults(capsys: pytest.CaptureFixture[str]):
    before = Path("good.plan").read_text(encoding="utf-8")
    status, out, _ = called(capsys, "fmt", "--expand", "good.plan")
    assert status == 0
    assert "precision (master = fp32, param = bf16, reduce = fp32)" in out
    assert Path("good.plan").read_text(encoding="utf-8") == before
    status, out, err = called(capsys, "fmt", "--expand", "warned.plan", "--expand")
    assert status == 0
    Path("bad.plan").write_text("plan x\nmesh (tp = y)\n", encoding="utf-8")
    status, out, err = called(capsys, "fmt", "--expand", "bad.plan")
    assert (status, out) == (1, "")
    assert "error[LP209]" in err


def test_fmt_expand_of_a_folder_prints_its_only_plan(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "fmt", "--expand", ".")
    assert (status, out) == (2, "")
    assert "--expand prints one plan" in err
    Path("only").mkdir()
    Path("good.plan").rename("only/good.plan")
    assert called(capsys, "fmt", "--expand", "only")[1] == called(capsys, "fmt", "--expand", "only/good.plan")[1] != ""


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    "words", [("lint", "--fix", "--unsafe-fixes"), ("fmt",), ("solve", "--in-place", "--top", "1")], ids=lambda w: w[0]
)
def test_a_rewritten_file_keeps_its_byte_order_mark(
    words: tuple[str, ...], mark: bytes, capsys: pytest.CaptureFixture[str]
):
    text = {
        "lint": BAD,
        "fmt": GOOD.replace("mesh    (", "mesh  ("),
        "solve": GOOD.replace("micro = 4", "micro = auto in [4]"),
    }[words[0]]
    path = Path("marked.plan")
    path.write_bytes(mark + text.encode())
    called(capsys, words[0], "marked.plan", *words[1:])
    after = path.read_bytes()
    assert after != mark + text.encode()
    assert after.startswith(mark) and after.count(b"\xef\xbb\xbf") == len(mark) // 3
