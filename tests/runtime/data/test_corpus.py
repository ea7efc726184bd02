"""A corpus is the same bytes on every start, and a bad one is reported."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest

from legoai.runtime.data import content, token_counts
from legoai.runtime.data.corpus import open_corpus
from legoai.runtime.errors import RunError, RunErrorCode


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_built_in_corpus_is_the_standard_library(tmp_path):
    corpus = open_corpus("python", cache=tmp_path)
    text = corpus.train.tobytes() + corpus.validation.tobytes()
    assert len(text) > 5_000_000
    for name in ("argparse.py", "json/decoder.py"):
        assert Path(sysconfig.get_path("stdlib"), name).read_bytes() in text
    assert 0.02 < len(corpus.validation) / len(corpus.train) < 0.12
    assert 3.0 < corpus.unigram_entropy() < 3.5


def test_cached_corpus_is_memory_mapped(tmp_path):
    first = open_corpus("python", cache=tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = open_corpus("python", cache=tmp_path)
    assert isinstance(again.train, np.memmap) and again.digest == first.digest
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "a.txt", "one " * 100)
    before = open_corpus(str(path), cache=tmp_path / "cache")
    write(path, "two " * 100)
    os.utime(path, ns=(1, 1))
    after = open_corpus(str(path), cache=tmp_path / "cache")
    assert b"one" in before.train.tobytes() and b"one" not in after.train.tobytes()
    assert before.digest != after.digest


def test_digest_is_of_the_tokens_whatever_the_file(tmp_path):
    text = "one " * 100
    first = open_corpus(str(write(tmp_path / "a.txt", text)), cache=tmp_path / "cache")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    places = [tmp_path / "a.txt", write(tmp_path / "b.txt", text)]
    again = [open_corpus(str(path), cache=tmp_path / "cache") for path in places]
    assert {one.digest for one in again} == {first.digest} and len({first.key, *(one.key for one in again)}) == 3
    assert open_corpus(str(write(tmp_path / "c.txt", text[1:])), cache=tmp_path / "cache").digest != first.digest


@pytest.mark.parametrize("text", [None, "", "tokens:12", "\xff"])
def test_digest_that_is_not_there_is_computed(tmp_path, text):
    source = str(write(tmp_path / "a.txt", "one " * 100))
    first = open_corpus(source, cache=tmp_path)
    [file] = (tmp_path / "corpora").glob("*.digest")
    written = file.read_text()
    file.unlink() if text is None else file.write_text(text, encoding="latin-1")
    assert open_corpus(source, cache=tmp_path).digest == first.digest and file.read_text() == written


def test_end_of_a_single_file_is_the_validation_split(tmp_path):
    content = "".join(str(n) for n in range(1000))
    corpus = open_corpus(str(write(tmp_path / "a.any", content)), cache=tmp_path)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == content.encode() + b"\0"
    assert len(corpus.validation) == (len(content) + 1) // 20


def test_folder_is_split_by_whole_documents(tmp_path):
    for n in range(40):
        write(tmp_path / "text" / f"{n:02}.md", f"document {n:02}")
    for name in ("image.png", ".hidden.txt", ".git/description.txt"):
        write(tmp_path / "text" / name, "not text")
    corpus = open_corpus(str(tmp_path / "text"), cache=tmp_path)
    assert corpus.left_out == "image.png"
    assert corpus.validation.tobytes() == b"document 19\0document 39\0"
    assert (
        corpus.train.tobytes().startswith(b"document 00\0document 01\0") and b"not text" not in corpus.train.tobytes()
    )


def test_folders_behind_links_are_read_once(tmp_path):
    for name in ("data/own/a", "data/b", "elsewhere/deep/c"):
        write(tmp_path / f"{name}.txt", f"document {name[-1]}")
    (tmp_path / "data" / "link").symlink_to("../elsewhere")
    (tmp_path / "data" / "link again").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "data" / "own" / "loop").symlink_to("..")
    (tmp_path / "data" / "broken").symlink_to("nowhere")
    corpus = open_corpus(str(tmp_path / "data"), cache=tmp_path / "cache")
    text = corpus.train.tobytes() + corpus.validation.tobytes()
    assert sorted(text.split(b"\0")) == [b"", b"document a", b"document b", b"document c"]


def test_json_lines_are_read_by_field(tmp_path):
    lines = "\n".join(json.dumps({"body": f"café {n}", "id": n}) for n in range(30))
    corpus = open_corpus(str(write(tmp_path / "a.jsonl", lines)), field="body", cache=tmp_path)
    assert corpus.train.tobytes().decode().split("\0")[:2] == ["café 0", "café 1"]


@pytest.mark.parametrize(
    ("escaped", "read"),
    [
        (rb"\ud83d\ude00", "\U0001f600".encode()),
        (rb"\ud83d", b"\xef\xbf\xbd"),
        (rb"\udc80.\ude00", b"\xef\xbf\xbd.\xef\xbf\xbd"),
        (b"caf\xc3\xa9 \\ud83d", b"caf\xc3\xa9 \xef\xbf\xbd"),
    ],
)
def test_half_of_a_surrogate_pair_becomes_the_replacement_character(tmp_path, escaped, read):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(b'{"text": "%s"}' % text for text in (escaped, b"end")))
    corpus = open_corpus(str(path), cache=tmp_path)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == read + b"\0end\0"


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.NDJson"])
def test_json_lines_are_known_by_any_spelling_of_their_suffix(tmp_path, name):
    path = write(tmp_path / "text" / name, '{"text": "one"}\n{"text": "two"}')
    for source in (path, path.parent):
        corpus = open_corpus(str(source), cache=tmp_path)
        assert corpus.train.tobytes() + corpus.validation.tobytes() == b"one\0two\0" and not corpus.left_out


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.NDJSON", "deep/d.bin", "e.zst", "f.xz"):
        write(tmp_path / "text" / name, '{"text": "one"}')
    (tmp_path / "text" / "f.txt").symlink_to("nowhere")
    corpus = open_corpus(str(tmp_path / "text"), cache=tmp_path)
    assert corpus.train.tobytes() == b"one\0one\0"
    assert corpus.left_out == "b.jsonl.gz, deep/d.bin, e.zst and 2 more"
    assert not open_corpus(str(tmp_path / "text" / "a.jsonl"), cache=tmp_path).left_out


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt", "a.jsonl"])
@pytest.mark.parametrize("kind", ["gzip", "bz2", "lzma"])
def test_compressed_file_is_named_as_such(tmp_path, name, kind):
    path = tmp_path / name
    path.write_bytes(importlib.import_module(kind).compress(b'{"text": "one"}\n' * 50))
    what = {"gzip": "gzip", "bz2": "bzip2", "lzma": "xz"}[kind]
    with pytest.raises(RunError, match=f"{name} is not text: it is compressed by {what}") as caught:
        open_corpus(str(path), cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.DATA_FORMAT
    assert "unpacks it" in caught.value.help and "tr -d" not in caught.value.help


@pytest.mark.parametrize("text", ["BZh is no compressed text", "PAR1 neither", "\ufeffBZh"])
def test_text_with_first_bytes_of_another_kind_of_file_is_read(tmp_path, text):
    corpus = open_corpus(str(write(tmp_path / "a.txt", text)), cache=tmp_path / "cache")
    whole = corpus.train.tobytes() + corpus.validation.tobytes()
    assert whole.decode("utf-8") == text.removeprefix("\ufeff") + "\0", "without a byte-order mark"


def test_bytes_that_are_no_utf8_are_refused_in_json_lines_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "één"}\n{"text": "één'.encode() + b' caf\xe9"}\n')
    with pytest.raises(RunError, match=r"a\.jsonl:2 is not text: it is no UTF-8 at offset 19") as caught:
        open_corpus(str(path), cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.DATA_FORMAT and "iconv" in caught.value.help


def test_unigram_entropy_equals_the_frequency_entropy(tmp_path):
    corpus = open_corpus(str(write(tmp_path / "a.txt", "abcd" * 5000)), cache=tmp_path)
    assert corpus.unigram_entropy() == pytest.approx(math.log(4), abs=1e-3)


def refuse_to_count(parts: object, vocabulary: int) -> None:
    raise AssertionError("the corpus is read")


def test_tokens_are_counted_only_when_the_corpus_is_built(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "abcd" * 5000 + "~")
    counted = open_corpus(str(path), cache=tmp_path).unigram_entropy()
    monkeypatch.setattr(token_counts, "count", refuse_to_count)
    corpus = open_corpus(str(path), cache=tmp_path)
    assert corpus.unigram_entropy() == counted == entropy_of(corpus.train)
    assert corpus.largest_token() == max(corpus.train.max(), corpus.validation.max()) == ord("~")


def entropy_of(tokens: np.ndarray) -> float:
    counts = np.bincount(tokens)
    frequencies = counts[counts > 0] / counts.sum()
    return -math.fsum(float(p) * math.log(float(p)) for p in frequencies)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: os.truncate(file, 200),
        lambda file: file.write_text(""),
        lambda file: file.write_bytes(b"PK\x03\x04"),
    ],
)
def test_missing_or_damaged_counts_are_made_again(tmp_path, monkeypatch, damage):
    corpus = open_corpus(str(write(tmp_path / "a.txt", "abcd" * 5000)), cache=tmp_path)
    entropy = corpus.unigram_entropy()
    damage(corpus.counts)
    assert corpus.unigram_entropy() == entropy
    monkeypatch.setattr(token_counts, "count", refuse_to_count)
    assert corpus.unigram_entropy() == entropy


@pytest.mark.parametrize("kind", ["train.bin", "validation.bin", "counts.npy", "digest"])
def test_link_to_itself_in_the_cache_is_replaced(tmp_path, kind):
    source = str(write(tmp_path / "a.txt", "abcd" * 5000))
    first = open_corpus(source, cache=tmp_path)
    [file] = (tmp_path / "corpora").glob(f"*.{kind}")
    file.unlink()
    file.symlink_to(file)
    again = open_corpus(source, cache=tmp_path)
    assert again.train.tobytes() == first.train.tobytes() and again.digest == first.digest
    assert again.unigram_entropy() == first.unigram_entropy() and not file.is_symlink()


def test_counts_of_another_corpus_are_not_believed(tmp_path):
    one, other = (open_corpus(str(write(tmp_path / text, text * 999)), cache=tmp_path) for text in ("ab", "abc"))
    entropy = one.unigram_entropy()
    other.counts.replace(one.counts)
    assert one.unigram_entropy() == entropy


def test_counts_need_no_writable_cache(tmp_path, monkeypatch):
    corpus = open_corpus(str(write(tmp_path / "a.txt", "abcd" * 5000)), cache=tmp_path)
    corpus.counts.unlink()

    def unwritable(**_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", unwritable)
    assert corpus.unigram_entropy() == pytest.approx(math.log(4), abs=1e-3)
    assert not corpus.counts.exists()


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("length", [100, 0])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("is_counted", [False, True])
def test_truncated_cache_is_built_again(tmp_path, part, length, by_key, is_counted):
    source = str(write(tmp_path / "a.txt", "abcd" * 5000))
    corpus = open_corpus(source, cache=tmp_path)
    whole = corpus.train.tobytes(), corpus.validation.tobytes()
    [file] = (tmp_path / "corpora").glob(f"*.{part}.bin")
    file.unlink()  # the first corpus still maps it
    file.write_bytes(whole[part == "validation"][:length])
    if not is_counted:
        corpus.counts.unlink()
    again = open_corpus(source, cache=tmp_path, built=corpus.key if by_key else "")
    assert (again.train.tobytes(), again.validation.tobytes()) == whole


def test_corpus_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = set()

    def record(path):
        synced.add(path.name)
        assert path.stat().st_size > 0 and "building-" in str(path)

    monkeypatch.setattr(token_counts, "sync", record)
    monkeypatch.setattr(content, "sync", record)
    monkeypatch.setattr("legoai.runtime.data.corpus.sync", record)
    open_corpus(str(write(tmp_path / "a.txt", "abcd" * 5000)), cache=tmp_path)
    assert synced == {file.name for file in (tmp_path / "corpora").iterdir()} and len(synced) == 4


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("missing.txt", None, RunErrorCode.DATA_MISSING, "no such file"),
        ("empty.txt", "", RunErrorCode.DATA_EMPTY, "has no text"),
        ("a.jsonl", "{]", RunErrorCode.DATA_FORMAT, r"a\.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}', RunErrorCode.DATA_FORMAT, r"a\.jsonl:2: no text in field 'text'"),
        ("a.jsonl", "[1]", RunErrorCode.DATA_FORMAT, "no text in field"),
        ("a.jsonl", "[" * 200_000, RunErrorCode.DATA_FORMAT, r"a\.jsonl:1: not a JSON object"),
        (
            *("a.jsonl", '{"text": "x"}\n{"text": "one \\u0000 two"}', RunErrorCode.DATA_FORMAT),
            r"text 2 has a zero byte, which ends a text, at offset 4 \(behind 'one '\)",
        ),
        ("folder/image.png", "x", RunErrorCode.DATA_EMPTY, "has no text files"),
    ],
)
def test_unusable_data_is_refused(tmp_path, name, content, code, message):
    path = tmp_path / name
    if content is not None:
        write(path, content)
    source = path.parent if name.startswith("folder/") else path
    with pytest.raises(RunError, match=message) as caught:
        open_corpus(str(source), cache=tmp_path / "cache")
    assert caught.value.code == code and caught.value.help
    assert not [*(tmp_path / "cache").rglob("*.bin")], "nothing half-built is left"


def test_byte_order_mark_before_json_lines_is_no_part_of_them(tmp_path):
    path = write(tmp_path / "a.jsonl", '\ufeff{"text": "one"}\n{"text": "\ufefftwo"}\n')
    corpus = open_corpus(str(path), cache=tmp_path / "cache")
    assert corpus.train.tobytes() + corpus.validation.tobytes() == b"one\0\xef\xbb\xbftwo\0"


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("is_write", [False, True])
def test_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, error, is_write):
    def fails(folder, *arguments, **options):
        raise OSError(error, os.strerror(error), None if is_write and error == errno.ENOSPC else str(folder))

    source = str(write(tmp_path / "a.txt", "abc " * 50))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "open" if is_write else "mkdir", fails)
    with pytest.raises(RunError) as caught:
        _ = open_corpus(source)
    assert caught.value.code == RunErrorCode.FOLDER_NOT_WRITABLE
    assert f"the cache folder {tmp_path}/cache/legoai/corpora: {os.strerror(error)}" in str(caught.value)
    assert "XDG_CACHE_HOME" in caught.value.help and ("free space" in caught.value.help) == (error == errno.ENOSPC)


def test_source_that_cannot_be_read_is_no_error_of_the_cache(tmp_path, monkeypatch):
    def fails(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    source = str(write(tmp_path / "a.txt", "abc " * 50))
    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(PermissionError):
        open_corpus(source, cache=tmp_path / "cache")
