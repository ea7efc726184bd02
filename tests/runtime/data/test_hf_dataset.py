"""Datasets of Hugging Face, in a corpus and in a training."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from legoai.runtime import RunError, RunErrorCode, RunOptions
from legoai.runtime.data.corpus import SEPARATOR, open_corpus
from legoai.runtime.data.hf_dataset import Address
from legoai.runtime.training.loop import _open_data
from support.training import corpus, programs

own_cache = corpus.own_cache
TEXTS = [f"text {number}\nüß" for number in range(3000)]
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is not installed: pip install 'legoai[datasets]'"
)


@pytest.fixture(autouse=True)
def own_library_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what the library caches in the test's folder, and the library off the network."""
    if "datasets" in sys.modules or importlib.util.find_spec("datasets") is not None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
        datasets.disable_progress_bars()


def saved(folder: Path, columns: dict[str, Any], **options: Any) -> str:
    import datasets

    datasets.Dataset.from_dict(columns, **options).save_to_disk(str(folder), max_shard_size="20KB")
    return f"hf:{folder}"


def documents(source: str, cache: Path, **options: Any) -> list[str]:
    """The texts of a corpus, the training part first."""
    found = open_corpus(source, cache=cache, **options)
    parts = (found.train, found.validation)
    return [text.decode("utf-8") for part in parts for text in part.tobytes().split(SEPARATOR)[:-1]]


@pytest.mark.parametrize(
    "source, address",
    [
        ("hf:allenai/c4", Address(name="allenai/c4")),
        ("hf:allenai/c4:en", Address(name="allenai/c4", config="en")),
        ("hf:a/c4@1588ec4:en:test", Address(name="a/c4", revision="1588ec4", config="en", split="test")),
        ("hf:roneneldan/TinyStories::train[:10%]", Address(name="roneneldan/TinyStories", split="train[:10%]")),
        ("hf:/data/saved", Address(name="/data/saved")),
    ],
)  # fmt: skip
def test_a_source_names_dataset_revision_config_and_split(source: str, address: Address):
    assert Address.of(source) == address


@pytest.mark.parametrize("source", ["hf:", "hf::en", "hf:@main", "hf:a@b@c"])
def test_invalid_dataset_address_is_refused(source: str):
    with pytest.raises(RunError, match="names no dataset") as caught:
        Address.of(source)
    assert caught.value.code == RunErrorCode.WRONG_OPTION and "hf:NAME[@REVISION]" in caught.value.help


@needs_datasets
@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_texts_equal_a_jsonl_file(kind: str, tmp_path: Path):
    import datasets

    features = datasets.Features({"id": datasets.Value("int64"), "body": datasets.Value(kind)})
    source = saved(tmp_path / "saved", {"id": list(range(len(TEXTS))), "body": TEXTS}, features=features)
    assert len(list((tmp_path / "saved").glob("*.arrow"))) > 1, "several shards"
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS), encoding="utf-8")
    found = documents(source, tmp_path / "cache", field="body")
    assert found == documents(str(lines), tmp_path / "cache", field="body")
    assert sorted(found) == sorted(TEXTS)


@needs_datasets
def test_one_split_is_read_in_dataset_order(tmp_path: Path):
    import datasets

    splits = {"train": TEXTS[:30], "test": TEXTS[30:40]}
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()})
    both["test"] = both["test"].select(range(9, -1, -1))  # by indices, not by moved rows
    both.save_to_disk(str(tmp_path / "both"))
    cache = tmp_path / "cache"
    assert sorted(documents(f"hf:{tmp_path}/both", cache)) == sorted(splits["train"])
    assert documents(f"hf:{tmp_path}/both::test", cache)[:5] == TEXTS[39:34:-1]
    with pytest.raises(RunError, match=r"has no split 'dev': it has train, test"):
        open_corpus(f"hf:{tmp_path}/both::dev", cache=cache)


@needs_datasets
@pytest.mark.parametrize("recorded", [None, "train", "validation"])
def test_only_the_recorded_split_of_a_dataset_saved_alone_is_read(recorded: str | None, tmp_path: Path):
    import datasets

    split = None if recorded is None else datasets.NamedSplit(recorded)
    source = saved(tmp_path / "a", {"text": TEXTS[:40]}, split=split)
    assert sorted(documents(source, tmp_path / "cache")) == sorted(TEXTS[:40])
    if recorded is not None:
        assert sorted(documents(f"{source}::{recorded}", tmp_path / "cache")) == sorted(TEXTS[:40])
    for other in {"train", "validation", "nonsense"} - {recorded}:
        with pytest.raises(RunError, match=f"has no split '{other}'") as caught:
            open_corpus(f"{source}::{other}", cache=tmp_path / "cache")
        assert caught.value.code == RunErrorCode.DATA_MISSING
        assert caught.value.help == f"write {source}" + ("" if recorded is None else f"::{recorded}")


@needs_datasets
@pytest.mark.parametrize("rest", ["", ":en", "::train"])
@pytest.mark.parametrize("name", ["v:2", "a@b", "a@b:c"])
def test_folder_whose_name_divides_a_source_is_reported(name: str, rest: str, tmp_path: Path):
    source = saved(tmp_path / name, {"text": TEXTS[:40]})
    with pytest.raises(RunError, match=f"the folder {tmp_path / name} cannot be named") as caught:
        open_corpus(f"{source}{rest}", cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.WRONG_OPTION and "symbolic link" in caught.value.help


@needs_datasets
def test_damaged_folder_is_reported_with_its_cause(tmp_path: Path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"is damaged, or none: .*JSON parse error") as caught:
        open_corpus(f"hf:{folder}", cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.DATA_FORMAT and "again" in caught.value.help


@needs_datasets
def test_folder_and_split_slice_are_read_by_datasets(tmp_path: Path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:40]), encoding="utf-8")
    source = f"hf:{folder}::train[:50%]"
    assert sorted(documents(source, tmp_path / "cache")) == sorted(TEXTS[:20])


@needs_datasets
def test_corpus_digest_follows_rows_and_cache_needs_no_source(tmp_path: Path):
    cache = tmp_path / "cache"
    first = open_corpus(saved(tmp_path / "a", {"text": TEXTS[:40]}), cache=cache)
    assert open_corpus(saved(tmp_path / "b", {"text": TEXTS[1:41]}), cache=cache).digest != first.digest
    again = open_corpus(f"hf:{tmp_path}/gone", cache=cache, built=first.key)
    assert (again.digest, again.name) == (first.digest, f"hf:{tmp_path}/gone")
    assert np.array_equal(again.train, first.train)


def opened_on_hosts(folder: Path, *, one_cache: bool) -> str:
    """Digest of the dataset `data` of the folder of this rank's host, or code of the error, in a run of two hosts."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / f"host{rank}")
        patch.setenv("XDG_CACHE_HOME", str(folder / f"cache{0 if one_cache else rank}"))
        if one_cache and rank:
            patch.setitem(sys.modules, "datasets", None)
        try:
            trainer = dataclasses.replace(programs.trainer(), vocab_size=256)
            return _open_data(trainer, RunOptions(data="hf:data")).digest
        except RunError as error:
            return str(error.code)


@needs_datasets
def test_ranks_share_the_corpus_or_read_the_same_dataset(gloo: Any, tmp_path: Path):
    saved(tmp_path / "host0" / "data", {"text": TEXTS[:400]})
    saved(tmp_path / "host1" / "data", {"text": TEXTS[1:401]})
    [digest, other] = gloo(2)(opened_on_hosts, tmp_path, one_cache=True)
    assert digest == other, "rank 1 has read nothing, as it has no package `datasets`"
    shutil.rmtree(tmp_path / "cache0")
    assert gloo(2)(opened_on_hosts, tmp_path, one_cache=False) == [digest, RunErrorCode.DATA_DIFFERS]
    shutil.rmtree(tmp_path / "host1" / "data")
    shutil.copytree(tmp_path / "host0" / "data", tmp_path / "host1" / "data")
    assert gloo(2)(opened_on_hosts, tmp_path, one_cache=False) == [digest, digest]


@needs_datasets
def test_non_text_column_is_refused(tmp_path: Path):
    def refused(source: str, match: str, code: RunErrorCode = RunErrorCode.DATA_FORMAT) -> RunError:
        with pytest.raises(RunError, match=match) as caught:
            open_corpus(source, cache=tmp_path / "cache")
        assert caught.value.code == code
        return caught.value

    error = refused(saved(tmp_path / "a", {"id": [1], "body": ["x"]}), r"no column 'text': it has id, body")
    assert "--data-field" in error.help
    refused(saved(tmp_path / "b", {"text": [1, 2]}), r"'text' has int64, and no text")
    refused(saved(tmp_path / "c", {"text": ["x", None]}), r"row 2 has no text in 'text'")
    refused(saved(tmp_path / "d", {"text": ["", ""]}), "has no text", RunErrorCode.DATA_EMPTY)
    refused(f"{saved(tmp_path / 'e', {'text': TEXTS})}@main", "has no revision main", RunErrorCode.WRONG_OPTION)
    refused(f"hf:{tmp_path}/e:en", "no configs, such as en", RunErrorCode.WRONG_OPTION)
    (tmp_path / "e" / "state.json").write_text("{", encoding="utf-8")
    refused(f"hf:{tmp_path}/e", "is damaged")
    shard = sorted((Path(saved(tmp_path / "f", {"text": TEXTS})[3:])).glob("*.arrow"))[1]
    shard.write_bytes(shard.read_bytes()[:500])
    refused(f"hf:{tmp_path}/f", "is damaged")
    (tmp_path / "none").mkdir()
    refused(f"hf:{tmp_path}/none", "no such dataset", RunErrorCode.DATA_MISSING)
    corpora = tmp_path / "cache" / "corpora"
    assert not list(corpora.iterdir()), "nothing is left half built"


@needs_datasets
def test_damaged_text_of_a_dataset_is_reported(tmp_path: Path):
    import datasets
    import pyarrow

    offsets = pyarrow.py_buffer(np.array([0, 3, 6], dtype=np.int32))
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"ab\xffcde")])
    datasets.Dataset(pyarrow.table({"text": texts})).save_to_disk(str(tmp_path / "a"))
    with pytest.raises(RunError, match="is damaged behind row 0: 'utf-8' codec") as caught:
        open_corpus(f"hf:{tmp_path}/a", cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.DATA_FORMAT


@needs_datasets
def test_zero_byte_in_a_row_is_refused(tmp_path: Path):
    source = saved(tmp_path / "a", {"text": ["one", "two \0 three"]})
    with pytest.raises(RunError, match="text 2 has a zero byte") as caught:
        open_corpus(source, cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.DATA_FORMAT and "tokenizer" in caught.value.help


@needs_datasets
@pytest.mark.parametrize(
    "raised, code, cure",
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), RunErrorCode.DATA_UNREACHABLE, "HF_HOME"),
        (FileNotFoundError("Dataset 'a/b' doesn't exist on the Hub"), RunErrorCode.DATA_MISSING, "hf auth login"),
        (ValueError("Config name is missing. Please pick one"), RunErrorCode.DATA_MISSING, ":CONFIG"),
        (RuntimeError("Dataset scripts are no longer supported"), RunErrorCode.DATA_FORMAT, "Parquet"),
    ],
)
def test_hub_errors_have_codes_and_help(
    raised: Exception, code: RunErrorCode, cure: str, monkeypatch: pytest.MonkeyPatch
):
    import datasets

    def load_dataset_builder(name: str, config: str | None, *, revision: str | None) -> None:
        assert (name, config, revision) == ("a/b", "c", None)
        raise raised

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    with pytest.raises(RunError, match=str(raised)[:20]) as caught:
        open_corpus("hf:a/b:c:d")
    assert caught.value.code == code and cure in caught.value.help


@needs_datasets
def test_only_the_requested_revision_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets
    from huggingface_hub import HfApi

    old, new = "a" * 40, "b" * 40
    asked: list[str] = []

    def dataset_info(self: Any, name: str, *, revision: str) -> Any:
        asked.append(revision)
        if revision == "gone":
            raise ConnectionError("no route to the Hub")
        return SimpleNamespace(sha=old)

    def load_dataset_builder(name: str, config: str | None, *, revision: str | None) -> Any:
        found = old if revision == old else new  # as the library does with what its cache has
        rows = datasets.Dataset.from_dict({"text": [f"{found} {text}" for text in TEXTS[:40]]})
        return SimpleNamespace(hash=found, download_and_prepare=lambda: None, as_dataset=lambda split: rows)

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    cache = tmp_path / "cache"
    for source, commit in (("hf:a/b", new), ("hf:a/b@v1", old), (f"hf:a/b@{old}", old)):
        assert documents(source, cache)[0].startswith(commit)
    assert asked == ["v1"], "a commit is no question for the Hub"
    for source, match in (
        (f"hf:a/b@{'c' * 40}", f"the cache offers commit {new}"),
        ("hf:a/b@gone", "no route to the Hub"),
    ):
        with pytest.raises(RunError, match=match) as caught:
            open_corpus(source, cache=cache)
        assert caught.value.code == RunErrorCode.DATA_UNREACHABLE


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RunError, match="needs the package `datasets`") as caught:
        open_corpus("hf:allenai/c4:en", cache=tmp_path / "cache")
    assert caught.value.code == RunErrorCode.NO_DATASETS and "legoai[datasets]" in caught.value.help


def fit(dp_shard: int = 1, **options: Any) -> list[float]:
    trainer = dataclasses.replace(programs.trainer(dtype=torch.float64, dp_shard=dp_shard), vocab_size=256)
    return [record.loss for record in trainer.fit(RunOptions(device="cpu", log_every=0, **options)).steps]


@pytest.mark.slow
@needs_datasets
def test_training_resumes_within_an_epoch_on_another_degree(gloo: Any, tmp_path: Path):
    source, out = saved(tmp_path / "saved", {"text": TEXTS}), tmp_path / "run"
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    [whole] = gloo(1)(fit, steps=6, data=str(lines))
    [first] = gloo(1)(fit, steps=3, out=out, data=source)
    [then, same] = gloo(2)(fit, 2, steps=6, out=out, data=source)
    assert first == whole[:3], "as from a file with the same texts"
    assert then == same == pytest.approx(whole[3:], rel=1e-9)
