"""Folders of weights that are missing, damaged, or of another model: each is an error with a code, before training."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from legoai.runtime import RunError, RunErrorCode
from legoai.runtime.checkpoint.checkpoint import weights
from legoai.runtime.published.folder import INDEX, is_published
from legoai.runtime.published.start import load_published
from legoai.runtime.published.whole_model import WholeModel
from support.models import published
from support.models.published import CASES, _llama, tensors_of

CASE = CASES["llama"]
Q = "model.layers.1.self_attn.q_proj.weight"


alone = published.alone


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Published weights in several files."""
    CASE.published().save_pretrained(tmp_path / "hub", max_shard_size="30KB")
    return tmp_path / "hub"


def read(folder: Path, model: nn.Module | None = None, *, others: bool = False) -> list[str]:
    model = CASE.own() if model is None else model
    whole = WholeModel.of(model)
    return load_published(folder, weights(model), whole, others=others, warn=lambda text: None)


def refused(code: RunErrorCode, match: str, folder: Path, model: nn.Module | None = None) -> RunError:
    with pytest.raises(RunError, match=match) as caught:
        read(folder, model)
    assert caught.value.code == code
    return caught.value


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"][tensor]


def with_tensor(folder: Path, name: str, value: torch.Tensor | None, *, file: Path | None = None) -> None:
    """Change a tensor of a folder, take it away, or add it."""
    file = file or file_of(folder, name)
    tensors = load_file(file)
    tensors.pop(name, None)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index["weight_map"].pop(name, None)
    if value is not None:
        tensors[name] = value
        index["weight_map"][name] = file.name
    save_file(tensors, file)
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def test_missing_weight_file_is_named(hub: Path):
    file = file_of(hub, Q)
    file.unlink()
    refused(RunErrorCode.WEIGHTS_MISSING, rf"{file.name} is missing, which has \d+ of the tensors", hub)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-10], lambda data: data[:100], lambda data: b"", lambda data: b"x" * 99]
)
def test_a_truncated_or_corrupt_file_is_named(hub: Path, damage: Callable[[bytes], bytes]):
    file = file_of(hub, Q)
    file.write_bytes(damage(file.read_bytes()))
    refused(RunErrorCode.WEIGHTS_CORRUPT, f"{file.name} is damaged, or no safetensors file", hub)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is damaged, or no index of safetensors files: Expecting property name"),
        ("[]", "it is no JSON object"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"weight_map": []}', "its 'weight_map' does not map names of tensors to files"),
        ("{}", "it has no 'weight_map'"),
        (
            '{"weight_map": {"a": "../model.safetensors"}}',
            r"names '\.\./model\.safetensors', which is no file beside it",
        ),
        ('{"weight_map": {"a": 3}}', "names 3"),
    ],
)
def test_damaged_index_is_refused(hub: Path, index: str, message: str):
    (hub / INDEX).write_text(index, encoding="utf-8")
    error = refused(RunErrorCode.WEIGHTS_CORRUPT, message, hub)
    assert error.help == "download or write it again"


def test_index_naming_an_absent_tensor_is_refused(hub: Path):
    index = json.loads((hub / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["model.extra"] = file_of(hub, Q).name
    (hub / INDEX).write_text(json.dumps(index), encoding="utf-8")
    error = refused(RunErrorCode.WEIGHTS_CORRUPT, r"looks for model\.extra in .*, which does not have it", hub)
    assert error.help == "download or write it again"


def test_file_name_that_cannot_be_is_missing(hub: Path):
    (hub / INDEX).write_text(json.dumps({"weight_map": {Q: "x" * 300}}), encoding="utf-8")
    refused(RunErrorCode.WEIGHTS_MISSING, "xxx is missing, which has 1 of the tensors", hub)


def test_tensor_of_two_files_is_refused(tmp_path: Path):
    for name in ("a", "b"):
        save_file({Q: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    error = refused(RunErrorCode.WEIGHTS_CORRUPT, "both a.safetensors and b.safetensors hold", tmp_path)
    assert INDEX in error.help


def test_links_in_a_circle_are_refused(tmp_path: Path):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "a.safetensors")
    assert refused(RunErrorCode.WEIGHTS_CORRUPT, "a.safetensors", tmp_path).help


def test_files_outside_the_index_are_ignored(hub: Path):
    save_file({"other": torch.ones(1)}, hub / "consolidated.safetensors")
    assert read(hub) == []


def test_pickles_are_not_read(hub: Path, tmp_path: Path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"")
    assert is_published(tmp_path / "old")
    error = refused(RunErrorCode.WEIGHTS_MISSING, "pytorch_model.bin, a pickle", tmp_path / "old")
    assert "save_pretrained" in error.help


def test_shape_mismatch_names_both_shapes(hub: Path):
    with_tensor(hub, Q, torch.ones(32, 48))
    error = refused(
        RunErrorCode.WEIGHTS_OTHER_MODEL,
        r"q_proj\.weight of .*hub has the shape \[32, 48\], and the plan's model needs \[32, 32\] for its "
        r"layers\.1\.attention\.wq\.weight\n",
        hub,
    )
    assert "--resume-other-plan" in error.help
    assert read(hub, others=True) == ["layers.1.attention.wq.weight"]


def test_vocabulary_mismatch_is_refused(hub: Path):
    model = CASE._replace(config=_llama(vocab_size=300)).own()
    refused(
        RunErrorCode.WEIGHTS_OTHER_MODEL,
        r"embed_tokens\.weight .*\[256, 32\].*\[300, 32\].*; another differs too",
        hub,
        model,
    )


def test_missing_and_extra_tensors_are_named(hub: Path):
    last = file_of(hub, Q)
    with_tensor(hub, Q, None)
    refused(RunErrorCode.WEIGHTS_OTHER_MODEL, rf"has no {Q}, which is layers\.1\.attention\.wq\.weight", hub)
    assert read(hub, others=True) == ["layers.1.attention.wq.weight"]
    with_tensor(hub, Q, torch.ones(32, 32), file=last)
    with_tensor(hub, "model.layers.0.self_attn.q_proj.bias", torch.ones(32), file=last)
    refused(RunErrorCode.WEIGHTS_OTHER_MODEL, r"has tensors that the plan's model has not: .*q_proj\.bias\n", hub)
    assert read(hub, others=True) == []


def renamed(hub: Path, change: Callable[[str], str]) -> None:
    """Change the names of all tensors of a folder."""
    index = json.loads((hub / INDEX).read_text(encoding="utf-8"))
    for file in set(index["weight_map"].values()):
        save_file({change(name): tensor for name, tensor in load_file(hub / file).items()}, hub / file)
    index["weight_map"] = {change(name): file for name, file in index["weight_map"].items()}
    (hub / INDEX).write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("change", "prefix", "names"),
    [
        (lambda name: f"language_model.{name}", "language_model.", "with names without `language_model.`"),
        (
            lambda name: name.replace("model.", "model.language_model."),  # all but the output layer
            "model.language_model.",
            "with names that begin with `model.`",
        ),
    ],
)
def test_part_of_a_larger_model_is_named_by_its_prefix(
    hub: Path, change: Callable[[str], str], prefix: str, names: str, others: bool
):
    renamed(hub, change)
    with pytest.raises(RunError, match=f"only under names that begin with `{prefix}`") as caught:
        read(hub, others=others)
    assert caught.value.code == RunErrorCode.WEIGHTS_OTHER_MODEL
    assert names in caught.value.help and "--resume-other-plan" not in caught.value.help


def of_other_shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor])


def rewritten(hub: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Put other tensors in the place of each tensor of a folder, in one file."""
    held = tensors_of(hub)
    for file in hub.glob("*.safetensors*"):
        file.unlink()
    tensors = {other: value for name, tensor in held.items() for other, value in change(name, tensor).items()}
    save_file(tensors, hub / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda name, tensor: {name: of_other_shape(tensor), f"ema.{name}": tensor.clone()},
        lambda name, tensor: {f"language_model.{name}": of_other_shape(tensor)},
    ],
    ids=["names without the prefix exist", "other shapes under the prefix"],
)
def test_prefix_is_not_that_of_a_part(hub: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]):
    rewritten(hub, change)
    with pytest.raises(RunError, match="none of the tensors of the plan's model by name and shape"):
        read(hub, others=True)


def test_ending_of_few_names_is_not_that_of_a_part(hub: Path):
    rewritten(hub, lambda name, tensor: {f"other.{name}": tensor.clone()} if name == "model.norm.weight" else {})
    model = CASE.own()
    whole = dataclasses.replace(WholeModel.of(model), shapes={"norm.weight": (32,)})
    state = {"norm.weight": weights(model)["model.norm.weight"]}
    with pytest.raises(RunError, match="none of the tensors of the plan's model by name and shape"):
        load_published(hub, state, whole, others=True, warn=lambda text: None)


def test_part_with_some_tensors_of_other_shapes_is_named(hub: Path):
    rewritten(hub, lambda name, tensor: {
        f"language_model.{name}": of_other_shape(tensor) if "embed" in name else tensor.clone()
    })  # fmt: skip
    with pytest.raises(RunError, match=r"has 20 of the 21 tensors .* only under names that begin with `language_mod"):
        read(hub, others=True)


@pytest.mark.parametrize("others", [False, True])
def test_folder_without_any_tensor_of_the_model_is_refused(hub: Path, others: bool):
    renamed(hub, lambda name: name.replace(".", "_"))
    with pytest.raises(RunError, match=r"none of the tensors of the plan's model .* it has lm_head_weight, ") as caught:
        read(hub, others=others)
    assert caught.value.code == RunErrorCode.WEIGHTS_OTHER_MODEL


def test_few_missing_tensors_are_not_taken_for_those_of_a_part(hub: Path):
    with_tensor(hub, f"other.{Q}", torch.ones(32, 32), file=file_of(hub, Q))
    with_tensor(hub, Q, None)
    error = refused(RunErrorCode.WEIGHTS_OTHER_MODEL, rf"has no {Q}", hub)
    assert "--resume-other-plan" in error.help
    assert read(hub, others=True) == ["layers.1.attention.wq.weight"]


def nested(hub: Path, **fields: object) -> None:
    """Make a folder's config the one of the text in a model of several parts."""
    text = json.loads((hub / "config.json").read_text(encoding="utf-8"))
    whole = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {**text, **fields},
    }
    (hub / "config.json").write_text(json.dumps(whole), encoding="utf-8")


def test_config_of_a_larger_model_is_compared_by_its_part(hub: Path):
    nested(hub)
    assert read(hub) == []


def test_other_field_in_the_part_of_a_config_is_refused(hub: Path):
    nested(hub, num_attention_heads=8)
    error = refused(RunErrorCode.WEIGHTS_OTHER_MODEL, "has num_attention_heads = 8, and the plan's model 4", hub)
    assert error.help == "give the plan's model the value of the published one"


def test_field_that_a_config_does_not_state_is_named(hub: Path):
    fields = json.loads((hub / "config.json").read_text(encoding="utf-8"))
    del fields["num_attention_heads"]
    (hub / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    error = refused(RunErrorCode.WEIGHTS_OTHER_MODEL, "has no num_attention_heads, and the plan's model 4", hub)
    assert error.help == "where the published model has 4 too, add it to config.json"


def test_computed_buffers_in_a_file_are_ignored(hub: Path):
    with_tensor(hub, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4), file=file_of(hub, Q))
    assert read(hub) == []


def test_fewer_layers_than_in_the_file_are_refused(hub: Path):
    model = CASE._replace(config=_llama(n_layers=1)).own()
    refused(
        RunErrorCode.WEIGHTS_OTHER_MODEL,
        r"not: model\.layers\.1\.\S+, model\.layers\.1\.\S+, .* and 6 more",
        hub,
        model,
    )
    assert read(hub, model, others=True) == []
    assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())


def test_tied_and_untied_models_do_not_mix(tmp_path: Path, hub: Path):
    tied = CASE._replace(fields={**CASE.fields, "tie_word_embeddings": True}, config=_llama(tie_embeddings=True))
    tied.published().save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in tensors_of(tmp_path / "tied")
    error = refused(RunErrorCode.WEIGHTS_OTHER_MODEL, r"has no lm_head\.weight", tmp_path / "tied")
    assert "tie_embeddings = true" in error.help
    assert read(tmp_path / "tied", tied.own()) == []
    refused(RunErrorCode.WEIGHTS_OTHER_MODEL, r"has not: lm_head\.weight", hub, tied.own())


@pytest.mark.parametrize("keep_config", [True, False])
def test_untied_weights_are_not_dropped_where_the_config_says_nothing(hub: Path, keep_config: bool):
    fields = json.loads((hub / "config.json").read_text(encoding="utf-8"))
    del fields["tie_word_embeddings"]
    (hub / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    if not keep_config:
        (hub / "config.json").unlink()
    tied = CASE._replace(config=_llama(tie_embeddings=True)).own()
    refused(RunErrorCode.WEIGHTS_OTHER_MODEL, r"has not: lm_head\.weight", hub, tied)
    assert read(hub) == []


def test_config_without_a_type_is_refused(hub: Path):
    (hub / "config.json").write_text("{}", encoding="utf-8")
    refused(RunErrorCode.WEIGHTS_CORRUPT, "has no model_type", hub)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(hub: Path, dtype: torch.dtype):
    with_tensor(hub, Q, torch.zeros(32, 32).to(dtype))
    refused(RunErrorCode.WEIGHTS_OTHER_MODEL, r"q_proj\.weight of .* is in (I8|F8_E4M3)", hub)


def test_model_without_a_weight_map_is_refused(hub: Path):
    refused(RunErrorCode.NO_WEIGHT_MAP, "those of Linear is not known", hub, nn.Linear(2, 2))


def test_missing_package_names_the_extra(hub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    error = refused(RunErrorCode.NO_SAFETENSORS, "needs the package `safetensors`", hub)
    assert "legoai[safetensors]" in error.help
