"""Texts as the tokens of a tokenizer, in a corpus and in a training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from legoai.runtime import RunError, RunErrorCode, RunOptions
from legoai.runtime.data import encoding
from legoai.runtime.data.corpus import open_corpus
from legoai.runtime.data.samples import TextData, check_vocabulary
from legoai.runtime.data.tokens import Tokenized
from legoai.specs.models.reads import Tokens
from support.training import corpus, programs

tokenizers = pytest.importorskip("tokenizers")
data, own_cache = corpus.data, corpus.own_cache

END = "<|end_of_text|>"
WORDS = [f"word{number} says {number * number % 97}\nüß {number}" for number in range(60)]


def made(folder: Path, *, size: int = 200, end: str = END, configured: object = None) -> Path:
    """A small tokenizer in a folder of its own."""
    folder.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if size > 256 else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if configured is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": configured}), encoding="utf-8")
    return folder


def written(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in WORDS), encoding="utf-8")
    return path


@pytest.mark.parametrize("as_folder", [True, False])
def test_tokenized_documents_decode_to_their_text(as_folder: bool, tmp_path: Path):
    folder, source = made(tmp_path / "bpe", size=400), written(tmp_path / "texts.jsonl")
    given = folder if as_folder else folder / "tokenizer.json"
    found = open_corpus(str(source), tokenizer=str(given), cache=tmp_path / "cache")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    texts = {
        name: [tokenizer.decode(list(map(int, part[:-1] if part[-1] == end else part))) for part in _split(tokens, end)]
        for name, tokens in (("train", found.train), ("validation", found.validation))
    }
    assert texts["validation"] == WORDS[19::20]
    assert texts["train"] == [text for number, text in enumerate(WORDS, 1) if number % 20]
    assert (found.unit, found.vocabulary, found.train.dtype) == ("token", tokenizer.get_vocab_size(), np.uint16)
    assert len(found.train) < sum(map(len, WORDS)) / 2, "fewer than bytes"


def _split(tokens: Any, end: int) -> list[Any]:
    return np.split(tokens, np.flatnonzero(tokens == end)[:-1] + 1)


def test_tokenizer_is_part_of_the_corpus_digest(tmp_path: Path):
    source, cache = written(tmp_path / "texts.jsonl"), tmp_path / "cache"
    found = [
        open_corpus(str(source), tokenizer=name, cache=cache)
        for name in ("", str(made(tmp_path / "a", size=300)), str(made(tmp_path / "b", size=310)))
    ]
    assert len({one.key for one in found}) == len({one.digest for one in found}) == 3
    assert (found[0].unit, found[0].vocabulary, found[0].train.dtype) == ("byte", 256, np.uint8)


def test_last_tokens_of_one_text_are_the_validation_split(tmp_path: Path):
    (tmp_path / "one.txt").write_text(" ".join(WORDS), encoding="utf-8")
    found = open_corpus(str(tmp_path / "one.txt"), tokenizer=str(made(tmp_path / "bpe", size=400)), cache=tmp_path)
    whole = np.concatenate([found.train, found.validation])
    assert len(found.validation) == len(whole) // 20
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json"))
    assert tokenizer.decode(whole[:-1].tolist()) == " ".join(WORDS)


def test_zero_byte_is_text_to_a_tokenizer(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one \0 two"}), encoding="utf-8")
    folder = made(tmp_path / "bpe", size=400)
    found = open_corpus(str(tmp_path / "a.jsonl"), tokenizer=str(folder), cache=tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = np.concatenate([found.train, found.validation])
    assert tokenizer.decode(whole[:-1].tolist()) == "one \0 two"


@pytest.mark.parametrize("section", ["truncation", "padding"])
def test_truncation_and_padding_of_a_tokenizer_are_ignored(section: str, tmp_path: Path):
    plain, other = (made(tmp_path / name, size=400) for name in ("plain", section))
    tokenizer = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json"))
    if section == "truncation":
        tokenizer.enable_truncation(max_length=3)
    else:
        tokenizer.enable_padding(pad_id=1)
    tokenizer.save(str(other / "tokenizer.json"))
    texts = [text.encode() * count for count, text in enumerate(WORDS, 1)]
    whole, found = (Tokenized(folder) for folder in (plain, other))
    for one, same in zip(whole.of(texts), found.of(texts), strict=True):
        assert np.array_equal(one, same)
    content = (other / "tokenizer.json").read_bytes()
    assert found.identity != f"{hashlib.sha256(content).hexdigest()}:{tokenizer.token_to_id(END)}", "of an older cache"


def trimmed(folder: Path, *, end: int) -> Path:
    """A tokenizer of a few words whose end token is far behind the others."""
    folder.mkdir()
    vocabulary = {"other": 0, "one": 1, "two": 2, END: end}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="other"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def far_from_the_others(folder: Path, *, end: int) -> Path:
    """As :func:`trimmed`, without the library, which lists each number that is left out when it saves."""
    file = trimmed(folder, end=225) / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace(f'"{END}": 225', f'"{END}": {end}'), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("end", "dtype"), [(225, np.uint16), (65_535, np.uint16), (65_536, np.uint32)])
def test_ids_of_a_trimmed_vocabulary_have_gaps(end: int, dtype: type, tmp_path: Path):
    (tmp_path / "one.txt").write_text("one two three\n" * 100, encoding="utf-8")
    tokenizer = str(trimmed(tmp_path / "words", end=end))
    found = open_corpus(str(tmp_path / "one.txt"), tokenizer=tokenizer, cache=tmp_path / "cache")
    assert (found.vocabulary, found.train.dtype, found.validation[-1]) == (end + 1, dtype, end)
    assert found.unigram_entropy() == pytest.approx(math.log(3), abs=1e-3)
    data = TextData(found, Tokens(), seq_len=4)
    check_vocabulary(data, end + 1)
    with pytest.raises(RunError, match=f"has the token {end}, and the model's vocabulary has {end} tokens") as raised:
        check_vocabulary(data, end)
    assert f"a vocabulary of {end + 1}" in raised.value.help


def test_token_with_an_implausible_number_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match=r"the token '<\|end_of_text\|>' .* has the number 4,294,967,290") as raised:
        Tokenized(far_from_the_others(tmp_path / "words", end=4_294_967_290))
    assert raised.value.code == RunErrorCode.TOKENIZER and "embedding" in raised.value.help


def test_end_beyond_the_vocabulary_is_refused_before_texts_are_read(tmp_path: Path):
    tokenizer, cache = str(trimmed(tmp_path / "words", end=300)), tmp_path / "cache"
    with pytest.raises(RunError, match=r"ends each text with the token 300, .* has 256 tokens") as raised:
        open_corpus(str(tmp_path / "no text"), tokenizer=tokenizer, cache=cache, vocabulary=256)
    assert raised.value.code == RunErrorCode.VOCABULARY and "a vocabulary of 301" in raised.value.help


@pytest.mark.parametrize("longest", [1 << 16, 50])
def test_tokenizer_that_cannot_encode_is_named(longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "_LONGEST", longest)
    monkeypatch.setattr(encoding, "_CONTEXT", 0)
    file = trimmed(tmp_path / "words", end=3) / "tokenizer.json"
    file.write_text(
        file.read_text()
        .replace('"unk_token":"other"', '"unk_token":"absent"')
        .replace('"unk_token": "other"', '"unk_token": "absent"')
    )
    with pytest.raises(RunError, match=r"words/tokenizer\.json cannot encode a text: ") as raised:
        list(Tokenized(file).of([b"one two three\n" * 9]))
    assert raised.value.code == RunErrorCode.TOKENIZER and "`unk_token`" in raised.value.help


@pytest.mark.parametrize("configured", ["<stop>", {"content": "<stop>"}])
def test_absent_end_of_text_is_noted(configured: object, tmp_path: Path):
    folder = made(tmp_path / "bpe", size=400, configured=configured)
    assert Tokenized(folder).note.endswith(
        f"names the `eos_token` '<stop>', which tokenizer.json does not have: {END!r} ends each text"
    )
    source = str(written(tmp_path / "texts.jsonl"))
    found = open_corpus(source, tokenizer=str(folder), cache=tmp_path / "cache")
    assert found.note == TextData(found, Tokens(), seq_len=4).note == Tokenized(folder).note
    assert not Tokenized(made(tmp_path / "plain", configured=END)).note


def test_deeply_nested_configuration_names_no_end(tmp_path: Path):
    folder = made(tmp_path / "bpe")
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    assert not Tokenized(folder).note


@pytest.mark.parametrize("configured", ["<stop>", {"content": "<stop>"}])
def test_tokenizer_config_defines_the_end_of_text_token(configured: object, tmp_path: Path):
    tokens = Tokenized(made(tmp_path / "bpe", end="<stop>", configured=configured))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json"))
    [found] = tokens.of([b"word1"])
    assert found[-1] == tokenizer.token_to_id("<stop>")


def test_invalid_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text("[]")
    for name, message in (
        ("empty.json", "is no tokenizer"),
        ("list.json", "is no tokenizer"),
        ("none.json", "No such file"),
    ):
        with pytest.raises(RunError, match=message) as raised:
            Tokenized(tmp_path / name)
        assert raised.value.code == RunErrorCode.TOKENIZER and "as Hugging Face publishes it" in raised.value.help
    with pytest.raises(RunError, match="nothing ends a text"):
        Tokenized(made(tmp_path / "bpe", end="<unknown end>"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RunError, match="needs the package `tokenizers`") as raised:
        Tokenized(tmp_path / "bpe")
    assert "legoai[tokenizers]" in raised.value.help


def fit(**options: Any) -> list[float]:
    trainer = dataclasses.replace(programs.trainer(dtype=torch.float32), vocab_size=256)
    history = trainer.fit(RunOptions(device="cpu", log_every=0, **options))
    return [record.loss for record in history.steps]


def test_training_on_tokens_resumes(gloo, tmp_path: Path):
    source, out = str(written(tmp_path / "texts.jsonl")), tmp_path / "run"
    given = {"data": source, "tokenizer": str(made(tmp_path / "bpe", size=150))}
    [whole] = gloo(1)(fit, steps=6, out=tmp_path / "whole", **given)
    [first] = gloo(1)(fit, steps=3, out=out, **given)
    [then] = gloo(1)(fit, steps=6, out=out, **given)
    assert first + then == whole
    [on_bytes] = gloo(1)(fit, steps=6, data=source)
    assert on_bytes != whole


def test_tokens_beyond_the_vocabulary_are_refused(gloo, tmp_path: Path):
    source = str(written(tmp_path / "texts.jsonl"))
    with pytest.raises(RunError, match=r"has the token \d+, and the model's vocabulary has 256 tokens"):
        gloo(1)(fit, steps=1, data=source, tokenizer=str(made(tmp_path / "bpe", size=400)))
