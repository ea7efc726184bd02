"""Inputs of a model in its manifest: from its family, its config, its author, or `timm`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from legoai.specs.models.huggingface import language_model, transformers_model
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.models.reads import Images, Tokens


class Vision(nn.Module):
    """What a factory gives, with what its author says of it."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 7, 4)
        for name, value in fields.items():
            setattr(self, name, value)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images).mean((2, 3))


def read_by(model: nn.Module):
    return describe(model.to("meta"), "theirs").reads


SAID = {"kind": "images", "channels": 3, "height": 8, "width": 6, "classes": 7}


def test_author_declares_the_model_inputs():
    manifest = describe(Vision(reads=SAID).to("meta"), "theirs")
    assert manifest.reads == Images(channels=3, height=8, width=6, classes=7)
    assert manifest.flow_error is None, "its forward was followed with such images"
    assert manifest.forward == ("images",)


def test_timm_pretrained_config_gives_the_inputs():
    # The form of `timm.models.create_model(...).pretrained_cfg`.
    found = read_by(Vision(pretrained_cfg={"input_size": (3, 32, 16), "num_classes": 1000}, num_classes=7))
    assert found == Images(channels=3, height=32, width=16, classes=7)
    assert read_by(Vision(num_classes=7)) == Tokens()


class Failing(Vision):
    @property
    def reads(self) -> Images:
        return self.nothing


def test_inputs_that_cannot_be_computed_are_an_error_and_not_text():
    with pytest.raises(ManifestError, match=r"Failing: its `reads` fails: .* no attribute 'nothing'"):
        read_by(Failing())


def test_convolutions_whose_config_names_no_size_read_images_of_a_usual_one():
    fields = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
    with torch.device("meta"):
        model = transformers_model(
            {"architectures": ["ResNetForImageClassification"], "model_type": "resnet", **fields}
        )
    assert describe(model, "theirs").reads == Images(channels=3, height=224, width=224, classes=5)


def test_encoder_decoder_of_speech_is_none_of_two_texts():
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    kind = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    with torch.device("meta"):
        model = transformers_model({**kind, **sizes, **heads})
    assert model.reads is None


def test_invalid_input_declaration_is_an_error():
    with pytest.raises(ManifestError, match="Vision: `reads` of kind images has the fields"):
        read_by(Vision(reads={**SAID, "depth": 3}))


BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}  # fmt: skip
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "d_kv": 8, "num_heads": 2,
      "d_ff": 32, "num_layers": 1, "vocab_size": 64, "n_positions": 4}  # fmt: skip


def test_class_of_unknown_task_has_no_inputs():
    with torch.device("meta"):
        assert read_by(transformers_model(BERT)) is None


def test_relative_positions_have_no_maximum_length():
    with torch.device("meta"):
        manifest = describe(transformers_model(T5), "theirs")
    assert manifest.max_seq_len is None
    assert manifest.reads is not None and manifest.reads.kind == "two_texts"


def test_non_causal_class_is_no_language_model():
    with torch.device("meta"), pytest.raises(ManifestError, match="T5ForConditionalGeneration is no causal"):
        language_model(T5)


def test_attention_implementation_can_be_chosen():
    with torch.device("meta"):
        chosen = [
            transformers_model(T5, attn_implementation=name).config._attn_implementation for name in ("eager", "sdpa")
        ]
    assert chosen == ["eager", "sdpa"]
