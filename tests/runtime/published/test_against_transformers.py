"""Published weights in built-in models, and built-in models' weights in `transformers`: the same logits both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from legoai.runtime.checkpoint.checkpoint import weights
from legoai.runtime.published.export import export
from legoai.runtime.published.start import load_published
from legoai.runtime.published.whole_model import WholeModel
from legoai.specs.published.configs import published_config
from support.marks import slow_but
from support.models import published
from support.models.published import CASES, Case, logits_of, tensors_of

TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(3))
EXACT = {"GPT2": 1e-12}
"""Of the others `transformers` computes rotary angles and norms in single precision, whatever is asked."""


alone = published.alone


def read(folder: Path, case: Case, *, others: bool = False) -> tuple[torch.nn.Module, list[str], list[str]]:
    """A built-in model with a folder's weights, the skipped tensors, and the warnings."""
    model, warned = case.own(), list[str]()
    left = load_published(folder, weights(model), WholeModel.of(model), others=others, warn=warned.append)
    return model, left, warned


def written(model: torch.nn.Module, checkpoint: Path, folder: Path, **options) -> None:
    """The weights of a model as those of a checkpoint, and then as published ones."""
    whole = WholeModel.of(model)
    save_distributed(dict(weights(model)), storage_writer=FileSystemWriter(checkpoint))
    export(checkpoint, folder, whole, published_config(model.config), **options)


def assert_alike(one: torch.Tensor, other: torch.Tensor, kind: str) -> None:
    assert float(one.abs().max()) > 0.5, "the comparison says something"
    tolerance = EXACT.get(kind, 1e-5)
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("name", slow_but(CASES, "deepseek v3", "mixtral", "llama, tied, wide heads, biases", "gpt2"))
def test_import_and_export_give_equal_logits_and_weights(name: str, tmp_path: Path):
    case = CASES[name]
    case.published().save_pretrained(tmp_path / "hub", max_shard_size="30KB")
    reference = published.loaded(tmp_path / "hub")
    model, left, warned = read(tmp_path / "hub", case)
    assert not left and not warned
    assert_alike(logits_of(model, TOKENS), logits_of(reference, TOKENS), case.kind)

    written(model, tmp_path / "checkpoint", tmp_path / "exported", dtype=torch.float32, most_bytes=20_000)
    original, exported = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "exported")
    assert original.keys() == exported.keys()
    for tensor, value in original.items():
        assert torch.equal(value, exported[tensor]), tensor
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 3
    again = published.loaded(tmp_path / "exported")
    assert type(again) is type(reference)
    assert torch.equal(logits_of(again, TOKENS), logits_of(reference, TOKENS)), "the config says the same"
    assert {path.name for path in tmp_path.iterdir()} == {"hub", "checkpoint", "exported"}


WINDOWED = {"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}
ALIKE = {
    "Mistral": ({"sliding_window": None}, {}),
    "Ministral": ({**WINDOWED, "head_dim": 8}, {}),
    "SeedOss": ({"head_dim": 8}, {"qkv_bias": True}),
    "Cwm": ({**WINDOWED, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, {}),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_other_types_with_the_same_function_are_read(kind: str, tmp_path: Path):
    fields, own = ALIKE[kind]
    case = Case(kind, {**published.SIZES, "rms_norm_eps": 1e-6, **fields}, published._llama(**own))
    case.published().save_pretrained(tmp_path)
    model, left, warned = read(tmp_path, case)
    assert not left and not warned
    assert_alike(logits_of(model, TOKENS), logits_of(published.loaded(tmp_path), TOKENS), kind)


UNLIKE = {
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 16.0},
    "SmolLM3": {"pad_token_id": 0},
    "Ernie4_5": {"head_dim": 8},
    "Helium": {"head_dim": 8},
    "Ministral3": {"head_dim": 8},
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_other_types_with_the_same_tensors_are_refused(kind: str, tmp_path: Path):
    from legoai.runtime import RunError, RunErrorCode

    case = Case(kind, {**published.SIZES, **UNLIKE[kind]}, published._llama())
    case.published().save_pretrained(tmp_path)
    assert tensors_of(tmp_path).keys() == _names_of(CASES["llama"], tmp_path / "llama")
    with pytest.raises(RunError, match=rf"model_type = {kind.lower()}, and the plan's model llama") as caught:
        read(tmp_path, case)
    assert caught.value.code == RunErrorCode.WEIGHTS_OTHER_MODEL


def _names_of(case: Case, folder: Path) -> set[str]:
    case.published().save_pretrained(folder)
    return set(tensors_of(folder))


@pytest.mark.parametrize("field", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_gpt2_with_other_scores_is_refused(field: dict[str, bool], tmp_path: Path):
    from legoai.runtime import RunError

    case = CASES["gpt2"]._replace(fields={**published.GPT_SIZES, **field, "reorder_and_upcast_attn": True})
    case.published().save_pretrained(tmp_path)
    with pytest.raises(RunError, match=f"{next(iter(field))} = .*the weights mean something else there"):
        read(tmp_path, case)


def test_transformers_model_of_another_type_is_refused(tmp_path: Path):
    from legoai.runtime import RunError
    from legoai.specs.models.huggingface import language_model

    CASES["llama"].published().save_pretrained(tmp_path)
    fields = published.config_of(tmp_path)
    for kind, legal in (("mistral", True), ("granite", False)):
        model = language_model({**fields, "model_type": kind, "sliding_window": None})
        given = (tmp_path, weights(model), WholeModel.of(model))
        if legal:
            load_published(*given, others=False, warn=lambda text: None)
        else:
            with pytest.raises(RunError, match=r"model_type = llama, and the plan's model granite"):
                load_published(*given, others=False, warn=lambda text: None)


def test_fused_expert_weights_are_read(tmp_path: Path):
    case = CASES["mixtral"]
    model = case.published()
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors_of(tmp_path / "fused"))
    apart, together = (read(tmp_path / folder, case)[0] for folder in ("hub", "fused"))
    assert all(torch.equal(a, b) for a, b in zip(apart.parameters(), together.parameters(), strict=True))


def test_gpt2_base_model_file_is_read(tmp_path: Path):
    case = CASES["gpt2"]
    model = case.published()
    model.save_pretrained(tmp_path / "whole")
    model.transformer.save_pretrained(tmp_path / "base")
    assert "wte.weight" in tensors_of(tmp_path / "base")
    whole, base = (read(tmp_path / folder, case)[0] for folder in ("whole", "base"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), base.parameters(), strict=True))


def test_bf16_weights_are_converted_and_exported_back(tmp_path: Path):
    case = CASES["llama"]
    case.published().to(torch.bfloat16).save_pretrained(tmp_path / "hub")
    model, _, _ = read(tmp_path / "hub", case)
    written(model, tmp_path / "checkpoint", tmp_path / "exported", dtype=torch.bfloat16)
    original, exported = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "exported")
    assert {value.dtype for value in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(value, exported[name]) for name, value in original.items())
    assert published.config_of(tmp_path / "exported")["torch_dtype"] == "bfloat16"


def test_config_differences_are_refused_or_reported(tmp_path: Path):
    from legoai.runtime import RunError, RunErrorCode

    CASES["llama"].published().save_pretrained(tmp_path)
    other = CASES["llama"]._replace(config=published._llama(rope_theta=20_000.0, rope_scaling=8.0, norm_eps=1e-5))
    _, _, warned = read(tmp_path, other)
    assert [text.split(" has ")[1].split(" = ")[0] for text in warned] == ["rms_norm_eps", "rope_theta", "rope_scaling"]
    assert "rope_theta = 10000, and the plan's model 20000" in warned[1]
    heads = CASES["llama"]._replace(config=published._llama(n_heads=8, n_kv_heads=4))
    with pytest.raises(RunError, match=r"num_attention_heads = 4, and the plan's model 8") as caught:
        read(tmp_path, heads)
    assert caught.value.code == RunErrorCode.WEIGHTS_OTHER_MODEL


def test_older_config_fields_are_understood(tmp_path: Path):
    case = CASES["llama, stretched as Llama 3.1"]
    case.published().save_pretrained(tmp_path)
    fields = published.config_of(tmp_path)
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert read(tmp_path, case)[2] == []
    (tmp_path / "config.json").write_text(json.dumps({**fields, "rope_scaling": None}), encoding="utf-8")
    [warning] = read(tmp_path, case)[2]
    assert "rope_scaling = none" in warning


def test_transformers_model_is_compared_with_the_published_config(tmp_path: Path):
    from legoai.runtime import RunError
    from legoai.specs.models.huggingface import language_model

    CASES["gpt2"].published().save_pretrained(tmp_path)

    def warnings_of(**changed: object) -> list[str]:
        warned = list[str]()
        model = language_model(published.config_of(tmp_path), **changed)
        load_published(tmp_path, weights(model), WholeModel.of(model), others=False, warn=warned.append)
        return warned

    assert warnings_of() == warnings_of(attn_pdrop=0.0, use_cache=True) == []
    [warning] = warnings_of(scale_attn_weights=False)
    assert "scale_attn_weights = True, and the plan's model False" in warning
    with pytest.raises(RunError, match="n_head = 4, and the plan's model 8"):
        warnings_of(n_head=8)


def test_export_leaves_folders_beside_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import safetensors.torch

    from legoai.runtime import RunError

    case, save = CASES["llama"], safetensors.torch.save_file
    (tmp_path / "own.tmp").mkdir()
    (tmp_path / "own.tmp" / "notes").write_text("kept", encoding="utf-8")
    (tmp_path / "new").mkdir()

    def overtaken(tensors, path, **options) -> None:
        """Another export to the same name begins and ends meanwhile."""
        monkeypatch.setattr(safetensors.torch, "save_file", save)
        written(case.own(), tmp_path / "other", tmp_path / "own")
        save(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", overtaken)
    with pytest.raises(RunError, match="own cannot be written: Directory not empty"):
        written(case.own(), tmp_path / "checkpoint", tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "other", "own", "own.tmp", "new"}
    assert (tmp_path / "own.tmp" / "notes").exists() and published.loaded(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode == (tmp_path / "new").stat().st_mode


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("I/O error: no space left")])
def test_failed_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    import safetensors.torch

    from legoai.runtime import RunError, RunErrorCode

    save, written_files = safetensors.torch.save_file, list[Path]()

    def full(tensors, path, **options) -> None:
        if written_files:
            raise error
        written_files.append(path)
        save(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    case = CASES["llama"]
    with pytest.raises(RunError, match=r"exported cannot be written: .*[Nn]o space left") as caught:
        written(case.own(), tmp_path / "checkpoint", tmp_path / "exported", most_bytes=20_000)
    assert caught.value.code == RunErrorCode.FOLDER_NOT_WRITABLE
    assert written_files and {path.name for path in tmp_path.iterdir()} == {"checkpoint"}
