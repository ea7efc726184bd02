"""The root of a plan's repository, and the plans below a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.frontend.files.project import TooManyFoldersError, plans_below, repository_root


def test_root_is_the_nearest_folder_of_git_upward(tmp_path: Path):
    inner = tmp_path / "module" / "plans"
    inner.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    assert repository_root(inner / ".." / "plans") == tmp_path
    (tmp_path / "module" / ".git").write_text("gitdir: elsewhere\n", encoding="utf-8")
    assert repository_root(inner) == tmp_path / "module"


def test_plans_of_nested_folders_come_once_and_hidden_ones_not(tmp_path: Path):
    for name in ("b.plan", "a/c.plan", "a/c.txt", ".git/d.plan", "venv/e.plan", "a/deep/f.plan"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for folders in ([tmp_path, tmp_path / "a"], [tmp_path / "a", tmp_path], [tmp_path, tmp_path]):
        found = [str(path.relative_to(tmp_path)) for path in plans_below(folders)]
        assert sorted(found) == ["a/c.plan", "a/deep/f.plan", "b.plan"]
    with pytest.raises(TooManyFoldersError):
        list(plans_below([tmp_path], 2))
