"""Tokenization of texts: into bytes, or by a tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from legoai.runtime.data.encoding import encoded
from legoai.runtime.errors import RunError, RunErrorCode

VOCABULARY: Final = 256
"""Different bytes."""

SEPARATOR: Final = b"\x00"
"""Ends a document of bytes; it does not occur in text."""

FILE: Final = "tokenizer.json"
"""Hugging Face's name of a tokenizer's file."""

CONFIG: Final = "tokenizer_config.json"
"""The file beside it, which names the end token."""

_ENDS: Final = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]")
"""Default end tokens, for tokenizers whose configuration names none."""


class Tokens(Protocol):
    """Tokenization of text for a model.

    Attributes:
        unit: name of a token.
        count: one more than the largest token.
        dtype: of token ids.
        identity: changes when the tokenization may change; empty for bytes.
    """

    unit: str
    count: int
    dtype: np.dtype[Any]
    identity: str

    def of(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Yield the tokens of documents, each followed by the end token."""


class Bytes:
    """Each byte is a token."""

    unit = "byte"
    count = VOCABULARY
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    identity = ""

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
        file = file_of(path)
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
            raise RunError(RunErrorCode.TOKENIZER, f"--tokenizer {path}: {error.strerror or error}: {file}") from None
        except Exception as error:  # of the library's own, without a common class
            raise RunError(RunErrorCode.TOKENIZER, f"--tokenizer {path}: {file} is no tokenizer: {error}") from None
        # not the number of tokens: a trimmed vocabulary keeps its ids, which then have gaps
        self.count = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.count <= 1 << 16 else np.uint32)
        self._end = self._end_of_text(file)
        self.identity = f"{hashlib.sha256(content).hexdigest()}:{self._end}"
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            # Both are for batches of a model's inputs; a corpus has whole texts, and nothing else.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.identity += ":whole"

    def of(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """As of :class:`Tokens`."""
        texts = (document.decode("utf-8", errors="replace") for document in documents)
        for ids in encoded(self._tokenizer, texts, self.dtype):
            yield np.append(ids, self.dtype.type(self._end))

    def _end_of_text(self, file: Path) -> int:
        names = [name for name in (_configured_end(file), *_ENDS) if name is not None]
        for name in names:
            number = self._tokenizer.token_to_id(name)
            if number is not None:
                return int(number)
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
        found = json.loads(file.with_name(CONFIG).read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None
