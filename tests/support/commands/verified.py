"""Plans in an empty folder, and calls of `legoai verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands.command_line import called


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LEGOAI_DEBUG", raising=False)
    return tmp_path


def verified(capsys: pytest.CaptureFixture[str], text: str, *options: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of verifying a plan."""
    Path("a.plan").write_text(text, encoding="utf-8")
    return called(capsys, "verify", "a.plan", *options)
