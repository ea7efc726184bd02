"""Tokenization of texts: into bytes, or by a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from legoai.runtime.data.encoding import EncodingError, encoded
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.json_object import read_json_object

VOCABULARY: Final = 256
"""Different bytes."""

SEPARATOR: Final = b"\x00"
"""Ends a document of bytes; it does not occur in text."""

FILE: Final = "tokenizer.json"
"""Hugging Face's name of a tokenizer's file."""

CONFIG: Final = "tokenizer_config.json"
"""The file beside it, which names the end token."""

_MOST: Final = 1 << 24
"""Different tokens; how often each occurs is counted. The largest vocabularies have some million."""

_ENDS: Final = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]")
"""Default end tokens, for tokenizers whose configuration names none."""


class Tokens(Protocol):
    """Tokenization of text for a model.

    Attributes:
        unit: name of a token.
        count: one more than the largest token.
        dtype: of token ids.
        end: the token that ends each text.
        identity: changes when the tokenization may change; empty for bytes.
        note: a sentence on what may not be as the user expects; empty for nothing.
    """

    unit: str
    count: int
    dtype: np.dtype[Any]
    end: int
    identity: str
    note: str

    def of(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Yield the tokens of documents, each followed by the end token."""


class Bytes:
    """Each byte is a token."""

    unit = "byte"
    count = VOCABULARY
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    end = SEPARATOR[0]
    identity = note = ""

    def of(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """As of :class:`Tokens`."""
        return (np.frombuffer(document + SEPARATOR, dtype=np.uint8) for document in documents)


class Tokenized:
    """Tokenizer in Hugging Face's format; the file is data, and contains no code.

    Args:
        path: of its file, or of the folder that has a `tokenizer.json`.

    Raises:
        RunError: the file is missing, cannot be read, or has no end token; or the package `tokenizers` is missing.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        file = self._file = file_of(path)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise RunError(
                RunErrorCode.TOKENIZER,
                f"--tokenizer {path} needs the package `tokenizers`, which is not installed",
                help="`pip install 'legoai[tokenizers]'` installs it",
            ) from None
        try:
            content = file.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(content)
        except OSError as error:
            raise RunError(
                RunErrorCode.TOKENIZER,
                f"--tokenizer {path}: {error.strerror or error}: {file}",
                help=f"give the {FILE} of a model, as Hugging Face publishes it, or the folder that has it",
            ) from None
        except Exception as error:  # of the library's own, without a common class
            raise RunError(
                RunErrorCode.TOKENIZER,
                f"--tokenizer {path}: {file} is no tokenizer: {error}",
                help=f"give the {FILE} of a model, as Hugging Face publishes it, or download it again",
            ) from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # not the number of tokens: a trimmed vocabulary keeps its ids, which then have gaps
        self.count = 1 + max(vocabulary.values(), default=-1)
        if self.count > _MOST:
            last = max(vocabulary, key=vocabulary.__getitem__)
            raise RunError(
                RunErrorCode.TOKENIZER,
                f"--tokenizer {path}: the token {last!r} of {file} has the number {self.count - 1:,}, and numbers are "
                f"below {_MOST:,}",
                help="give its tokens the numbers that they have in the model's embedding, or download it again",
            )
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.count <= 1 << 16 else np.uint32)
        self.end, self.note = self._end_of_text(file)
        self.identity = f"{hashlib.sha256(content).hexdigest()}:{self.end}"
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            # Both are for batches of a model's inputs; a corpus has whole texts, and nothing else.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.identity += ":whole"

    def of(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """As of :class:`Tokens`.

        Raises:
            RunError: the tokenizer cannot encode a text.
        """
        texts = (document.decode("utf-8", errors="replace") for document in documents)
        try:
            for ids in encoded(self._tokenizer, texts, self.dtype):
                yield np.append(ids, self.dtype.type(self.end))
        except EncodingError as error:
            raise RunError(
                RunErrorCode.TOKENIZER,
                f"{self._file} cannot encode a text: {error}",
                help="give it a token for what it does not know (`unk_token` of its model), which its vocabulary has, "
                "or take another tokenizer",
            ) from error

    def _end_of_text(self, file: Path) -> tuple[int, str]:
        """Return the token that ends a text, and a note where it is not that of the configuration."""
        configured = _configured_end(file)
        names = [name for name in (configured, *_ENDS) if name is not None]
        for name in names:
            number = self._tokenizer.token_to_id(name)
            if number is not None:
                note = f"{file.with_name(CONFIG)} names the `eos_token` {configured!r}, which {FILE} does not have"
                return int(number), "" if configured in (None, name) else f"{note}: {name!r} ends each text"
        raise RunError(
            RunErrorCode.TOKENIZER,
            f"nothing ends a text in {file}: it has none of {', '.join(names)}",
            help=f"name the token as `eos_token` in {CONFIG} beside it",
        )


def file_of(path: Path) -> Path:
    """Return a tokenizer's file, given it or its folder."""
    return path / FILE if path.is_dir() else path


def tokens_of(tokenizer: str) -> Tokens:
    """Return the tokens of a tokenizer's file or folder; bytes for an empty name.

    Raises:
        RunError: as of :class:`Tokenized`.
    """
    return Tokenized(Path(tokenizer)) if tokenizer else Bytes()


def _configured_end(file: Path) -> str | None:
    """Return the end token from the configuration beside a tokenizer's file, if there is one."""
    try:
        found = read_json_object(file.with_name(CONFIG))["eos_token"]
    except (OSError, ValueError, KeyError):
        return None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None
