"""Published weights have the tokenizer of the training beside them, and no file that is of another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legoai.runtime.published.beside import Beside

OTHERS = ("tokenizer_config.json", "vocab.json", "generation_config.json")


def folder(place: Path, **tokenizers: str) -> Path:
    """A folder with tokenizers, by name without suffix, and with files that go with one, which contain its name."""
    place.mkdir()
    for name, text in tokenizers.items():
        (place / f"{name}.json").write_text(text, encoding="utf-8")
    for name in OTHERS:
        (place / name).write_text(place.name, encoding="utf-8")
    (place / "config.json").write_text(json.dumps({"eos_token_id": len(place.name)}), encoding="utf-8")
    return place


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    def copy(*sources: Path | None) -> tuple[dict[str, str], Any]:
        target = tmp_path / "target"
        target.mkdir()
        ids = Beside(*sources).copy(target)
        return {file.name: file.read_text(encoding="utf-8") for file in target.iterdir()}, ids.get("eos_token_id")

    return copy


def test_folder_of_weights_gives_all_its_files(copied: Any, tmp_path: Path):
    weights = folder(tmp_path / "weights", tokenizer="one")
    assert copied(None, weights) == ({"tokenizer.json": "one"} | dict.fromkeys(OTHERS, "weights"), 7)


def test_named_file_is_the_tokenizer(copied: Any, tmp_path: Path):
    place = folder(tmp_path / "place", tokenizer="other", named="one")
    assert copied(place / "named.json", None) == ({"tokenizer.json": "one"}, None)


def test_named_copy_of_a_tokenizer_has_its_files(copied: Any, tmp_path: Path):
    place = folder(tmp_path / "place", tokenizer="one", named="one")
    assert copied(place / "named.json", None) == ({"tokenizer.json": "one"} | dict.fromkeys(OTHERS, "place"), 5)


def test_named_file_alone_has_the_config_that_the_training_reads(copied: Any, tmp_path: Path):
    place = folder(tmp_path / "place", named="one")
    assert copied(place / "named.json", None) == ({"tokenizer.json": "one", "tokenizer_config.json": "place"}, None)


def test_weights_with_another_tokenizer_give_nothing(copied: Any, tmp_path: Path):
    weights, tokenizer = folder(tmp_path / "weights", tokenizer="other"), tmp_path / "named.json"
    tokenizer.write_text("one", encoding="utf-8")
    assert copied(tokenizer, weights) == ({"tokenizer.json": "one"}, None)


def test_weights_without_a_tokenizer_give_settings_of_generation(copied: Any, tmp_path: Path):
    weights, tokenizer = folder(tmp_path / "weights"), folder(tmp_path / "place", tokenizer="one") / "tokenizer.json"
    (tokenizer.parent / "generation_config.json").unlink()
    (tokenizer.parent / "config.json").unlink()
    files = {"tokenizer.json": "one", "vocab.json": "place", "tokenizer_config.json": "place"}
    assert copied(tokenizer, weights) == (files | {"generation_config.json": "weights"}, 7)


def test_missing_tokenizer_is_not_replaced_by_that_of_the_weights(copied: Any, tmp_path: Path):
    weights = folder(tmp_path / "weights", tokenizer="other")
    assert copied(tmp_path / "gone.json", weights) == ({}, None)
