"""Texts of Parquet files, in a corpus and in a training."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from legoai.runtime import RunError, RunErrorCode
from legoai.runtime.data.corpus import SEPARATOR, open_corpus

TEXTS = [f"text {number}\nüß" for number in range(3000)]
needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed: pip install 'legoai[parquet]'"
)


def written(path: Path, columns: dict[str, object], **options) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def documents(source: Path, cache: Path, **options) -> list[str]:
    """The texts of a corpus, the training part first."""
    found = open_corpus(str(source), cache=cache, **options)
    return [
        text.decode("utf-8")
        for part in (found.train, found.validation)
        for text in part.tobytes().split(SEPARATOR)[:-1]
    ]


@needs_pyarrow
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "string_view"])
def test_texts_equal_a_jsonl_file(kind: str, tmp_path: Path):
    import pyarrow

    types = {
        "string": pyarrow.string(),
        "large_string": pyarrow.large_string(),
        "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
        "string_view": pyarrow.string_view(),
    }
    columns = {"id": list(range(len(TEXTS))), "body": pyarrow.array(TEXTS, pyarrow.string()).cast(types[kind])}
    source = written(tmp_path / "texts.parquet", columns, row_group_size=700)
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS), encoding="utf-8")
    found = documents(source, tmp_path / "cache", field="body")
    assert found == documents(lines, tmp_path / "cache", field="body")
    assert sorted(found) == sorted(TEXTS)


@needs_pyarrow
def test_folder_of_parquet_files_is_read_in_order(tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in (1, 0):
        written(folder / f"train-0000{number}.parquet", {"text": [f"{number} {text}" for text in TEXTS[:9]]})
    found = documents(folder, tmp_path / "cache")
    assert found[:2] == ["0 text 0\nüß", "0 text 1\nüß"] and len(found) == 18


@needs_pyarrow
def test_texts_are_tokenized(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = written(tmp_path / "texts.parquet", {"text": TEXTS[:50]})
    found = open_corpus(str(source), tokenizer=str(tmp_path / "tokenizer.json"), cache=tmp_path / "cache")
    assert found.train[: len(tokenizer.encode(TEXTS[0]).ids)].tolist() == tokenizer.encode(TEXTS[0]).ids


@needs_pyarrow
def test_non_text_column_is_refused(tmp_path: Path):
    import pyarrow.parquet

    def refused(path: Path, match: str) -> RunError:
        with pytest.raises(RunError, match=match) as caught:
            open_corpus(str(path), cache=tmp_path / "cache")
        assert caught.value.code == RunErrorCode.DATA_FORMAT
        return caught.value

    error = refused(written(tmp_path / "a.parquet", {"id": [1], "body": ["x"]}), r"no column 'text': it has id, body")
    assert "--data-field" in error.help
    refused(written(tmp_path / "b.parquet", {"text": [1, 2]}), r"'text' has int64, and no text")
    refused(written(tmp_path / "c.parquet", {"text": ["x", None]}), r"row 2 has no text in 'text'")
    (tmp_path / "d.parquet").write_text("no Parquet at all", encoding="utf-8")
    refused(tmp_path / "d.parquet", "d.parquet is damaged, or no Parquet file")
    whole = written(tmp_path / "e.parquet", {"text": TEXTS}, compression="none").read_bytes()
    (tmp_path / "e.parquet").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "e.parquet", "e.parquet is damaged, or no Parquet file")
    (tmp_path / "f.parquet").write_bytes(whole[:100] + bytes(500) + whole[600:])
    refused(tmp_path / "f.parquet", "f.parquet is damaged behind row 0")
    whole = written(tmp_path / "g.parquet", {"text": ["one", "two"]}, compression="none", write_page_checksum=True)
    whole.write_bytes(whole.read_bytes().replace(b"two", b"TWO", 1))
    refused(whole, "g.parquet is damaged behind row 0: .*CRC checksum")
    table = pyarrow.table([["one"], ["two"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "h.parquet")
    refused(tmp_path / "h.parquet", "h.parquet has the column 'text' twice")
    assert not list((tmp_path / "cache" / "corpora").iterdir()), "nothing is left half built"


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunError, match="needs the package `pyarrow`") as caught:
        open_corpus(str(tmp_path / "a.parquet"), cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.NO_PYARROW and "legoai[parquet]" in caught.value.help
