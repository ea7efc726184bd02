"""Corpora: the texts that a run trains on, as tokens, and their cache."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from legoai.runtime.data import content, parquet, token_counts
from legoai.runtime.data.building import building, cache_folder, writing
from legoai.runtime.data.hf_dataset import HFDataset
from legoai.runtime.data.tokens import SEPARATOR, Bytes, Tokens, tokens_of
from legoai.runtime.durable import sync
from legoai.runtime.errors import RunError, RunErrorCode, listed
from legoai.specs.directives.run import HF_DATASET, JSON_LINES, PARQUET

BUILTIN = "python"
"""The corpus that every machine has: the sources of the Python standard library that runs the program."""

VALIDATION_EVERY = 20
"""Every 20th document is validation; a corpus of fewer documents gives the last 20th of its tokens."""

TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".py", ".json", ".csv", ".tsv", ".html", ".xml", ".tex", PARQUET, *JSON_LINES}
)
"""Suffixes, in lower case, of the files of a folder that are text; a file that is named itself is taken whatever its
suffix."""

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})
"""Folders beside the library's own code, which distributions install or leave out as they like."""

_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")

_NOT_TEXT: Final = (
    (codecs.BOM_UTF16_LE, "is UTF-16", "`iconv -f utf-16 -t utf-8` converts it"),
    (codecs.BOM_UTF16_BE, "is UTF-16", "`iconv -f utf-16 -t utf-8` converts it"),
    (b"\x1f\x8b", "is compressed by gzip", "`gunzip` unpacks it"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", "`zstd -d` unpacks it"),
    (b"\xfd7zXZ\0", "is compressed by xz", "`unxz` unpacks it"),
    (b"\x04\x22\x4d\x18", "is compressed by lz4", "`lz4 -d` unpacks it"),
    (b"BZh", "is compressed by bzip2", "`bunzip2` unpacks it"),
    (b"PK\x03\x04", "is a ZIP archive", "`unzip` unpacks it"),
    (b"PAR1", "is Parquet", f"give it a name that ends in {PARQUET}"),
)
"""First bytes of files that are not text, with what they are and what helps."""

FORMAT_VERSION = 2
"""Part of the cache key; changes with the separator, the split, or how files are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text corpus, divided into a training part and a validation part that share no document.

    Attributes:
        name: as given on the command line.
        key: of the cache: digest of the files' names, sizes and times, or a dataset's fingerprint, and of their
            tokenizer.
        digest: of the tokens; the same on every machine that has the same texts.
        train: [tokens], unsigned, memory-mapped.
        validation: [tokens], unsigned, memory-mapped.
        counts: the file of how often each token occurs in each part.
        unit: name of a token.
        vocabulary: one more than the largest token of the tokenizer.
        left_out: names of files of its folder that are not read, of many the first; empty if there are none, or the
            source was not looked at.
        note: as of `Tokens`.
    """

    name: str
    key: str
    digest: str
    train: NDArray[Any]
    validation: NDArray[Any]
    counts: Path
    unit: str = Bytes.unit
    vocabulary: int = Bytes.count
    left_out: str = ""
    note: str = ""

    def unigram_entropy(self) -> float:
        """Return the entropy of a token of the training part in nats.

        It is the loss of a model that knows only how often each token occurs.
        """
        counts = self._counts()[0]
        frequencies = counts[counts > 0] / counts.sum()
        return -math.fsum(float(p) * math.log(float(p)) for p in frequencies)

    def largest_token(self) -> int:
        """Return the largest token of both parts."""
        return int(np.flatnonzero(self._counts().sum(axis=0))[-1])

    def _counts(self) -> token_counts.Counts:
        return token_counts.stored(self.counts, (self.train, self.validation), self.vocabulary)


def open_corpus(
    source: str,
    *,
    field: str = "text",
    tokenizer: str = "",
    cache: Path | None = None,
    built: str = "",
    vocabulary: int | None = None,
) -> Corpus:
    """Open a corpus, building its memory-mapped files on first use.

    Args:
        source: `python`, a text file, a JSONL or Parquet file, or a folder of such files; or a dataset, as of
            `HFDataset`.
        field: the field of a JSONL object, or the column of a Parquet file or a dataset, that holds the text.
        tokenizer: as of `tokens_of`.
        cache: folder for the files; the user's cache folder by default.
        built: key of the corpus that another process has built of the same arguments; if it is in the cache, the
            source is not read.
        vocabulary: tokens of the model; None where they are not compared.

    Raises:
        RunError: the source is missing, has no text, or does not match its suffix; the tokenizer is missing; or there
            is no cache folder, or none that can be written.
    """
    tokens, key, left_out = tokens_of(tokenizer), built, ""
    if vocabulary is not None and tokens.end >= vocabulary:
        raise RunError(
            RunErrorCode.VOCABULARY,
            f"--tokenizer {tokenizer} ends each text with the token {tokens.end}, and the model's vocabulary has "
            f"{vocabulary} tokens, from 0",
            help=f"take the tokenizer of the model, or give the model a vocabulary of {tokens.count}",
        )
    folder = (cache or cache_folder()) / "corpora"
    if not key or not _is_complete(folder, key, tokens):
        identities, documents, left_out = _read(source, field)
        key = _key(identities, field, tokens)
        if not _is_complete(folder, key, tokens):
            with writing(folder):
                _build(documents, folder, key, source, tokens)
    train, validation = (_open_tokens(part, tokens) for part in _parts(folder, key))
    return Corpus(
        name=source,
        key=key,
        digest=content.stored(_digest_file(folder, key), (train, validation)),
        train=train,
        validation=validation,
        counts=_counts_file(folder, key),
        unit=tokens.unit,
        vocabulary=tokens.count,
        left_out=left_out,
        note=tokens.note,
    )


def _is_complete(folder: Path, key: str, tokens: Tokens) -> bool:
    """Whether a corpus is in the cache, with as many tokens as were counted when it was built."""
    try:
        sizes = [part.stat().st_size for part in _parts(folder, key)]
    except OSError:  # where others cannot be written in their stead, that is reported
        return False
    lengths = token_counts.lengths(_counts_file(folder, key))
    return sizes == [length * tokens.dtype.itemsize for length in lengths]


def _parts(folder: Path, key: str) -> list[Path]:
    """The files of a corpus."""
    return [folder / f"{key[:32]}.{part}.bin" for part in ("train", "validation")]


def _counts_file(folder: Path, key: str) -> Path:
    return folder / f"{key[:32]}.counts.npy"


def _digest_file(folder: Path, key: str) -> Path:
    return folder / f"{key[:32]}.digest"


def _read(source: str, field: str) -> tuple[list[str], Iterator[bytes], str]:
    """Return what identifies a source, its documents, which are read when they are iterated over, and what is left out.

    Raises:
        RunError: there is no such source.
    """
    if source.startswith(HF_DATASET):
        dataset = HFDataset(source)
        return [dataset.identity], dataset.texts(field), ""
    files, left_out = (_library_files(), "") if source == BUILTIN else _local_files(Path(source))
    if not files:
        raise RunError(
            RunErrorCode.DATA_EMPTY,
            f"{source} has no text files" + (f", but {left_out}" if left_out else ""),
            help=f"text files end in {', '.join(sorted(TEXT_SUFFIXES))}",
        )
    texts = (text for file in files for text in _documents(file, field, is_library=source == BUILTIN))
    return [file.identity for file in files], texts, left_out


@dataclass(frozen=True, slots=True)
class _SourceFile:
    path: Path
    name: str  # relative to the corpus
    identity: str  # changes when the content may have changed


def _library_files() -> list[_SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in NOT_LIBRARY)
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                relative = path.relative_to(root).as_posix()
                found.append(_SourceFile(path, relative, f"{relative}:{path.stat().st_size}:{sys.version_info[:3]}"))
    return sorted(found, key=lambda file: file.name)


def _local_files(source: Path) -> tuple[list[_SourceFile], str]:
    """Return the files of a source, and the names of those of its folder that are left out."""
    if not source.exists():
        raise RunError(
            RunErrorCode.DATA_MISSING,
            f"--data {source}: no such file or folder",
            help=f"give a text file, a JSONL or Parquet file, a folder of them, or {BUILTIN!r} for the built-in corpus",
        )
    base, paths = (source.parent, [source]) if source.is_file() else (source, _within(source))
    files, left_out = [], []
    for path in paths:
        relative = path.relative_to(base).as_posix()
        if path == source or (path.suffix.lower() in TEXT_SUFFIXES and path.is_file()):
            status = path.stat()
            files.append(_SourceFile(path, relative, f"{relative}:{status.st_size}:{status.st_mtime_ns}"))
        else:
            left_out.append(relative)
    return sorted(files, key=lambda file: file.name), listed(left_out)


def _within(source: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those within it, also behind links; of several ways to a folder only one.

    Hidden ones, such as those of version control and what editors and systems keep, are left out.
    """
    seen = set()
    for folder, folders, names in os.walk(source, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _key(identities: Iterable[str], field: str, tokens: Tokens) -> str:
    digest = hashlib.sha256(f"{FORMAT_VERSION}:{field}".encode())
    if tokens.identity:
        digest.update(f"\n{tokens.identity}".encode())
    for identity in identities:
        digest.update(f"\n{identity}".encode())
    return digest.hexdigest()


def _documents(file: _SourceFile, field: str, *, is_library: bool) -> Iterator[bytes]:
    """Yield the texts of a file; a byte-order mark at its beginning is not part of it."""
    suffix = file.path.suffix.lower()
    if suffix == PARQUET:
        yield from parquet.column_texts(file.path, field)
        return
    if suffix not in JSON_LINES:
        content = file.path.read_bytes()
        if not is_library:
            _check_text(file.path, content)
        yield content.removeprefix(codecs.BOM_UTF8)
        return
    with file.path.open("rb") as head:
        _check_kind(file.path, head.read(16))
    # Bytes that are no UTF-8 become surrogates, by which their line is found.
    with file.path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{file.path}:{number}"
                if wrong := _SURROGATE.search(line):
                    raise _no_utf8(place, len(line[: wrong.start()].encode("utf-8")))
                yield _json_text(line, field, place)


def _check_kind(path: Path, head: bytes) -> None:
    """Reject a file that is no text, whose first bytes are those of another kind of file.

    Raises:
        RunError: they are.
    """
    for magic, what, cure in _NOT_TEXT:
        if head.startswith(magic):
            raise _not_text(str(path), what, cure)


def _check_text(path: Path, content: bytes) -> None:
    """Reject a file that is not text, since training on its bytes would be useless.

    Raises:
        RunError: it has a zero byte, or is not UTF-8.
    """
    if (zero := content.find(SEPARATOR)) >= 0:
        cure = "`tr -d '\\0'` removes zero bytes from a text that has some by mistake"
        wrong = _not_text(str(path), f"has a zero byte at offset {zero}", cure)
    else:
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong = _no_utf8(str(path), error.start)
        else:
            return
    _check_kind(path, content)
    raise wrong


def _no_utf8(place: str, offset: int) -> RunError:
    cure = "`iconv -f latin1 -t utf-8` converts text of another encoding, here Latin-1"
    return _not_text(place, f"is no UTF-8 at offset {offset}", cure)


def _not_text(place: str, what: str, cure: str) -> RunError:
    return RunError(
        RunErrorCode.DATA_FORMAT,
        f"{place} is not text: it {what}",
        help=f"give UTF-8 text, which is read byte by byte; files of token numbers are not read. {cure}",
    )


def _json_text(line: str, field: str, place: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunError(
            RunErrorCode.DATA_FORMAT,
            f"{place}: not a JSON object ({error})",
            help="a file of JSON lines has one JSON object in each line: correct or remove this line",
        ) from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise RunError(
            RunErrorCode.DATA_FORMAT,
            f"{place}: no text in field {field!r}",
            help="name the field that holds the text with --data-field",
        )
    # JSON can escape half a surrogate pair, of which texts of the web have some, cut within an emoji.
    return _SURROGATE.sub("\ufffd", text).encode("utf-8")


def _without_separators(texts: Iterable[bytes], source: str) -> Iterator[bytes]:
    """Yield texts that are written one behind the other.

    Raises:
        RunError: one has a zero byte, which would divide it.
    """
    for number, text in enumerate(texts, start=1):
        zero = text.find(SEPARATOR)
        if zero >= 0:
            before = text[max(0, zero - 40) : zero].decode("utf-8", errors="replace")
            raise RunError(
                RunErrorCode.DATA_FORMAT,
                f"{source}: text {number} has a zero byte, which ends a text, at offset {zero} (behind {before!r})",
                help="remove it, or train on the tokens of a tokenizer",
            )
        yield text


def _build(documents: Iterable[bytes], place: Path, key: str, source: str, tokens: Tokens) -> None:
    """Write all files under temporary names and rename them, the parts last; two builders write the same bytes."""
    if tokens.unit == Bytes.unit:
        documents = _without_separators(documents, source)
    parts, counts, digest = _parts(place, key), _counts_file(place, key), _digest_file(place, key)
    with building(place) as folder:
        drafts = [folder / part.name for part in parts]
        number = 0
        with drafts[0].open("wb") as train, drafts[1].open("wb") as validation:
            for numbers in tokens.of(text for text in documents if text):
                number += 1
                kept = validation if number % VALIDATION_EVERY == 0 else train
                kept.write(numbers.tobytes())
        if number == 0:
            raise RunError(
                RunErrorCode.DATA_EMPTY,
                f"{source} has no text: every file or row in it is empty",
                help=f"name a source that has text with --data, or {BUILTIN!r} for the built-in corpus",
            )
        if number < VALIDATION_EVERY:
            _split_tail(drafts[0], drafts[1], tokens.dtype.itemsize)
        written = [_open_tokens(draft, tokens) for draft in drafts]
        token_counts.save(folder / counts.name, token_counts.count(written, tokens.count))
        content.save(folder / digest.name, content.digest(written))
        for draft in drafts:
            sync(draft)
        for file in (counts, digest, *parts):
            (folder / file.name).replace(file)


def _split_tail(train: Path, validation: Path, size: int) -> None:
    """Assign the last of the tokens, of ``size`` bytes each, to validation."""
    whole = train.stat().st_size
    cut = whole - whole // size // VALIDATION_EVERY * size
    with train.open("rb+") as file, validation.open("wb") as tail:
        file.seek(cut)
        shutil.copyfileobj(file, tail)
        file.truncate(cut)


def _open_tokens(path: Path, tokens: Tokens) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=tokens.dtype)
    return np.memmap(path, dtype=tokens.dtype, mode="r")
