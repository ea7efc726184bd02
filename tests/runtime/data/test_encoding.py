"""Texts are encoded in batches of limited size, and long ones in pieces without a trace of the seams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from legoai.runtime.data import encoding

tokenizers = pytest.importorskip("tokenizers")

LINES = [f"line {number} says  {number * number % 97}\n\nüß {number}" for number in range(60)]
TEXTS = ["\n".join(LINES), " ".join(LINES).replace("\n", " "), "", "short"]
RUNS = "x" * 700 + " and " + "\n" * 500
DTYPE = np.dtype(np.uint16)


def byte_level() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def begins_words_with_a_space() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


def begins_texts_with_a_space() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def trained(tokenizer: Any) -> Any:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, RUNS], trainer)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, begins_words_with_a_space, begins_texts_with_a_space])
def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "_LONGEST", 150)
    monkeypatch.setattr(encoding, "_CONTEXT", 60)
    monkeypatch.setattr(encoding, "_CHARACTERS", 400)
    tokenizer = trained(make())
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [ids.tolist() for ids in encoding.encoded(tokenizer, TEXTS, DTYPE)] == whole


@pytest.mark.parametrize("context", [0, 3])
def test_no_text_is_lost_where_pieces_have_no_token_in_common(context: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "_LONGEST", 50)
    monkeypatch.setattr(encoding, "_CONTEXT", context)
    tokenizer = trained(byte_level())
    texts = [*TEXTS, RUNS]
    assert [tokenizer.decode(ids.tolist()) for ids in encoding.encoded(tokenizer, texts, DTYPE)] == texts


class Recorder:
    """A tokenizer that keeps the number of characters of each batch."""

    def __init__(self) -> None:
        self.tokenizer, self.sizes = trained(byte_level()), list[int]()

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.sizes.append(sum(map(len, texts)))
        return self.tokenizer.encode_batch(texts, **options)


def test_batches_are_limited_and_texts_are_read_as_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "_LONGEST", 1000)
    monkeypatch.setattr(encoding, "_CHARACTERS", 3000)
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for _ in range(40):
            read += 1
            yield TEXTS[0]

    tokenizer = Recorder()
    found = encoding.encoded(tokenizer, texts(), DTYPE)
    next(found)
    assert read <= 4
    assert len(list(found)) == 39
    assert sum(tokenizer.sizes) >= 40 * len(TEXTS[0]) and max(tokenizer.sizes) <= 3000 + 1000 + 2 * 256
