"""The user's cache folder, as each of its users finds it."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from legoai.runtime.data.building import cache_folder
from legoai.runtime.errors import RunError
from legoai.specs.cache import (
    private_cache,
    read_cached,
    refreshed,
    user_cache,
    with_digest,
    without_digest,
    write_cached,
)
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


@pytest.mark.parametrize("content", [b"", b"{}", b"two\nlines\n", bytes(range(256))])
def test_a_digest_finds_each_changed_byte(content):
    held = with_digest(content)
    assert without_digest(held) == content == without_digest(with_digest(content, b"more"))
    for place in range(len(held)):
        changed = bytearray(held)
        changed[place] ^= 1
        assert without_digest(bytes(changed)) != content
    assert without_digest(content) is without_digest(held[:-1] if content else b"") is None


def test_a_refresh_reads_what_was_written_in_it_only(tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    assert read_cached(file) is None
    write_cached(file, b"before")
    with refreshed(False):
        assert read_cached(file) == b"before"
    with refreshed():
        assert read_cached(file) is None and read_cached(file, before=True) == b"before"
        write_cached(other, b"partly from before", whole=False)
        with refreshed():
            write_cached(file, b"in it")
        assert (read_cached(file), read_cached(other)) == (b"in it", None)
    assert (read_cached(file), read_cached(other)) == (b"in it", b"partly from before")
    with refreshed():
        assert read_cached(file) is None


def test_forked_processes_are_in_the_refresh(tmp_path):
    write_cached(tmp_path / "before", b"content")
    with refreshed(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(read_cached, tmp_path / "before").result(60) is None
        pool.submit(write_cached, tmp_path / "now", b"content").result(60)
        assert read_cached(tmp_path / "now") == pool.submit(read_cached, tmp_path / "now").result(60) == b"content"
