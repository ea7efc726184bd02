"""The cache of the parser's tables."""

from __future__ import annotations

import pytest

from legoai.dsl.frontend.parsing import lalr
from legoai.specs.cache import private_cache, read_cached, without_digest

TEXT = 'model llama3("tiny", n_layers = 4)\n'


def made() -> object:
    """The tree of a text, from a parser that is made or loaded."""
    return lalr.grammar.__wrapped__().parse(TEXT)


def test_tables_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = made()
    monkeypatch.setattr(lalr.Lark, "__init__", None)
    assert made() == tree


@pytest.mark.parametrize("how", ["byte", "older", "key"])
def test_changed_tables_are_made_again(how, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = made()
    folder = private_cache("grammar")
    assert folder is not None
    [file] = folder.iterdir()
    whole = file.read_bytes()
    held = {"byte": whole.replace(b"NAME", b"NAMF", 1), "older": without_digest(whole)}
    if how == "key":
        monkeypatch.setattr(lalr.lark, "__version__", "0")
    else:
        file.write_bytes(held[how])
    assert made() == tree
    assert file.read_bytes() != held.get(how, whole) and read_cached(file) is not None
    assert not caplog.records
