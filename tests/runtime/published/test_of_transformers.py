"""Models of `transformers`: weights from files and back, with the same tensors and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from legoai.runtime import RunError, RunErrorCode
from legoai.runtime.checkpoint.checkpoint import weights
from legoai.runtime.published.export import export
from legoai.runtime.published.folder import Folder
from legoai.runtime.published.matching import config_warnings
from legoai.runtime.published.start import load_published
from legoai.runtime.published.whole_model import WholeModel
from legoai.specs.models.huggingface import transformers_model
from support.marks import slow_but
from support.models import published
from support.models.published import config_of, tensors_of

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMAGES = {**SMALL, "image_size": 32, "patch_size": 8}
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "shared_expert_intermediate_size": 16}  # fmt: skip
ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 128,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied in three places": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
    ),
    "with other names in files": ("ViTForImageClassification", {**IMAGES, "num_labels": 10}),
    "with an output layer of another name": ("GPTNeoXForCausalLM", TEXT),
    "with a parameter without dims": (
        "CLIPModel",
        {"text_config": TEXT, "vision_config": IMAGES, "projection_dim": 16},
    ),
    "encoder and decoder": ("BartForConditionalGeneration", ENCODER_DECODER),
    "dense": ("Gemma2ForCausalLM", GROUPED),
    "fused layers": ("Phi3ForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "experts of some layers": ("DeepseekV3ForCausalLM", {**TEXT, **LATENT, "num_key_value_heads": 4}),
    "shared experts": ("Qwen2MoeForCausalLM", {**TEXT, **SHARED, "num_key_value_heads": 2}),
    "counters of batches": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 10},
    ),
    "experts with biases": ("GptOssForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


alone = published.alone


@pytest.mark.parametrize(
    "name",
    slow_but(MODELS, "tied in three places", "with other names in files", "fused layers", "experts of some layers"),
)
def test_weight_files_round_trip_as_in_transformers(name: str, tmp_path: Path):
    kind, fields = MODELS[name]
    found = getattr(transformers, kind)
    model = found(found.config_class(**fields))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.fill_(7)
    model.save_pretrained(tmp_path / "hub")
    own = transformers_model(config_of(tmp_path / "hub"))
    for parameter in own.parameters():
        nn.init.constant_(parameter, torch.nan)
    whole, warned = WholeModel.of(own), list[str]()
    assert load_published(tmp_path / "hub", weights(own), whole, others=False, warn=warned.append) == warned == []
    wanted = dict(model.named_parameters())
    assert all(torch.equal(parameter, wanted[path]) for path, parameter in own.named_parameters())
    assert all(buffer.item() == 7 for path, buffer in own.named_buffers() if path.endswith("num_batches_tracked"))

    save_distributed(dict(weights(own)), storage_writer=FileSystemWriter(tmp_path / "checkpoint"))
    export(tmp_path / "checkpoint", tmp_path / "exported", whole, config_of(tmp_path / "hub"))
    assert tensors_of(tmp_path / "exported").keys() == tensors_of(tmp_path / "hub").keys()
    again = found.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(parameter, wanted[path]) for path, parameter in again.named_parameters())
    assert all(buffer.item() == 7 for path, buffer in again.named_buffers() if path.endswith("num_batches_tracked"))


def compared(fields: dict[str, Any], **changed: Any) -> list[str]:
    """Compare a plan's model, of a config with changes, with published weights of that config."""
    with torch.device("meta"):
        model = transformers_model(fields, **changed)
    return list(config_warnings(WholeModel.of(model), Folder(Path("hub"), {}, fields)))


NEOX = {"model_type": "gpt_neox", **TEXT}
RESNET = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "depths": [1], "hidden_sizes": [8],
          "embedding_size": 8, "layer_type": "basic"}  # fmt: skip


@pytest.mark.parametrize("fields", [NEOX, RESNET, {"model_type": "llama", **TEXT}], ids=lambda one: one["model_type"])
def test_fields_left_out_of_a_config_have_the_defaults_of_its_type(fields: dict[str, Any]):
    assert compared(fields) == []


@pytest.mark.parametrize(
    ("fields", "activation", "other"), [(NEOX, "gelu", "silu"), ({"model_type": "llama", **TEXT}, "silu", "gelu")]
)
def test_another_activation_than_the_default_of_the_type_is_refused(
    fields: dict[str, Any], activation: str, other: str
):
    assert compared(fields, hidden_act=activation) == []
    with pytest.raises(RunError, match=f"hidden_act = {activation}, and the plan's model {other}") as caught:
        compared(fields, hidden_act=other)
    assert caught.value.code == RunErrorCode.WEIGHTS_OTHER_MODEL


def test_other_number_than_the_default_of_the_type_is_reported():
    [warning] = compared(NEOX, layer_norm_eps=0.5)
    assert "layer_norm_eps = 1e-05, and the plan's model 0.5" in warning


def test_config_of_a_larger_model_is_compared_by_its_part_with_its_defaults():
    text = {"model_type": "llama", **TEXT}
    with torch.device("meta"):
        whole = WholeModel.of(transformers_model(text))
    published = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    assert list(config_warnings(whole, Folder(Path("hub"), {}, published))) == []
    published["text_config"] = {**text, "num_attention_heads": 1}
    with pytest.raises(RunError, match="has num_attention_heads = 1, and the plan's model"):
        list(config_warnings(whole, Folder(Path("hub"), {}, published)))
