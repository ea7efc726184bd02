"""The user's cache folder, as each of its users finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.runtime.data.building import cache_folder
from legoai.runtime.errors import RunError
from legoai.specs.cache import private_cache, user_cache
from legoai.specs.models.manifests.cache import default_cache_directory


@pytest.mark.parametrize("ignored", [None, "", "relative", "./relative"])
def test_a_relative_cache_home_is_ignored_by_all(tmp_path, monkeypatch, ignored):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if ignored is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
    folder = tmp_path / "home/.cache/legoai"
    assert user_cache() == cache_folder() == folder
    assert (private_cache("pieces"), default_cache_directory()) == (folder / "pieces", folder / "manifests")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_without_a_home_nothing_is_cached(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does then
    assert user_cache() is private_cache("pieces") is default_cache_directory() is None
    with pytest.raises(RunError, match="XDG_CACHE_HOME"):
        cache_folder()
    assert not any(Path(tmp_path).iterdir())
