"""Models of `transformers` as they are trained."""

import logging

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime.device import Device
from legoai.runtime.initialize import materialize
from legoai.specs.models import huggingface
from legoai.specs.models.first_values import construct
from legoai.specs.models.huggingface import transformers_config, transformers_model
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.manifest import ManifestError

transformers = pytest.importorskip("transformers")


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
    "max_position_embeddings": 32,
}


def test_fields_are_left_as_they_are():
    rope = {"rope_type": "linear", "factor": 2.0}
    fields = {"model_type": "llama", **SMALL, "rope_scaling": rope}
    transformers_config(fields)
    assert rope == {"rope_type": "linear", "factor": 2.0}


def test_import_of_torchao_for_quantised_weights_is_quiet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    found = huggingface._model_class

    def importing(*arguments: object) -> type:
        logging.getLogger("torchao").warning("Failed to load")
        logging.getLogger("torchao").error("an error")
        return found(*arguments)

    monkeypatch.setattr(huggingface, "_model_class", importing)
    with torch.device("meta"):
        transformers_model({"model_type": "llama", **SMALL})
    assert [record.message for record in caplog.records if record.name == "torchao"] == ["an error"]


def test_activation_whose_constructor_alone_knows_its_parameters_starts_with_them():
    model, first_values = construct(lambda: transformers_model({"model_type": "apertus", **SMALL}))
    assert describe(model, "theirs", first_values).unfilled == ()
    materialize(model, device=Device(type="cpu"), seed=0, first_values=first_values)
    own = transformers_model({"model_type": "apertus", **SMALL}).model.layers[0].mlp.act_fn
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(model.model.layers[0].mlp.act_fn.state_dict()[name], tensor)


def test_parameters_drawn_off_the_meta_device_are_moved_to_it():
    model, first_values = construct(lambda: transformers_model({"model_type": "diffllama", **SMALL}))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert describe(model, "theirs", first_values).flow_error is None
    materialize(model, device=Device(type="cpu"), seed=0, first_values=first_values)


def test_recomputed_layers_append_to_no_cache_whatever_the_file_says():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    model = transformers_model({**kind, **sizes, **heads, "max_position_embeddings": 64, "use_cache": True})
    model.init_weights()
    tokens = torch.arange(16)[None]
    gradients = []
    for wrapped in (False, True):
        if wrapped:
            model.model.layers = torch.nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
        model.zero_grad()
        model(tokens).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


TRANSLATOR = {
    "model_type": "m2m_100", "architectures": ["M2M100ForConditionalGeneration"], "d_model": 32, "vocab_size": 128,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip


def test_layers_that_ranks_would_leave_out_at_random_are_refused():
    """Ranks that run different layers wait for each other's collectives without end."""
    with pytest.raises(ManifestError, match="`encoder_layerdrop`, `decoder_layerdrop` above 0") as raised:
        transformers_model(TRANSLATOR)  # by default one of twenty is left out
    assert "huggingface(…, encoder_layerdrop = 0, decoder_layerdrop = 0)" in raised.value.detail
    with torch.device("meta"):
        assert transformers_model(TRANSLATOR, encoder_layerdrop=0, decoder_layerdrop=0).reads is not None


def test_whole_number_may_be_given_for_a_field_that_holds_fractions():
    """`transformers` checks the types of BART's fields, and the advice for layers left out at random is `= 0`."""
    fields = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "decoder_layerdrop": 0.0}
    with torch.device("meta"):
        config = transformers_model(fields, encoder_layerdrop=0, dropout=0, d_model=32).config
    assert (config.encoder_layerdrop, config.dropout, config.d_model) == (0.0, 0.0, 32)
    assert type(config.d_model) is int


DECODER = {"d_model": 32, "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 1, "dropout": 0.0}
TWO_TEXTS = {
    **DECODER, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 2, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
ONE_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "layerdrop": 0.0,
    "vocab_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MASKING_NOTHING = {
    "BartForConditionalGeneration": ("bart", TWO_TEXTS),
    "MBartForConditionalGeneration": ("mbart", TWO_TEXTS),
    "M2M100ForConditionalGeneration": ("m2m_100", TWO_TEXTS),
    "PegasusForConditionalGeneration": ("pegasus", TWO_TEXTS),
    "BlenderbotForConditionalGeneration": ("blenderbot", TWO_TEXTS),
    "PLBartForConditionalGeneration": ("plbart", TWO_TEXTS),
    "BioGptForCausalLM": ("biogpt", ONE_TEXT),
}
"""Models whose decoder makes a mask of ones where it is given none."""


class Waits(TorchDispatchMode):
    """Counts the operators by which a host asks for a value, and those that read a mask of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.masks = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.values += func is torch.ops.aten._local_scalar_dense.default
        if "scaled_dot_product" in str(func):
            self.masks += (kwargs or {}).get("attn_mask") is not None
        return func(*args, **(kwargs or {}))


def padded_texts(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Texts in which one token is that of padding, which these models mask no more than any other."""
    torch.manual_seed(0)
    texts = torch.randint(4, 64, (2 if model.reads.kind == "two_texts" else 1, 2, 16))
    texts[..., 5] = 1
    return tuple(texts)


def theirs(model: torch.nn.Module, texts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The logits of the forward of `transformers` itself."""
    given = dict(zip(("input_ids", "decoder_input_ids"), texts, strict=False))
    plain = getattr(transformers, type(model).__name__)
    return plain.forward(model, **given).logits


@pytest.mark.parametrize("name", MASKING_NOTHING)
def test_decoder_that_masks_nothing_asks_for_no_value(name: str):
    kind, fields = MASKING_NOTHING[name]
    model = transformers_model({"model_type": kind, "architectures": [name], **fields})
    model.init_weights()
    model.eval()  # nothing is dropped out
    texts = padded_texts(model)
    with Waits() as waits:
        found = model(*texts)
    assert (waits.values, waits.masks) == (0, 0)
    assert torch.equal(found, theirs(model, texts))


def test_padding_that_a_model_finds_itself_is_masked():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64, "pad_token_id": 1}  # fmt: skip
    fields = {"encoder": sizes, "decoder": sizes, "dropout_rate": 0.0, "vocab_size": 64, "pad_token_id": 1}
    model = transformers_model(
        {"model_type": "t5gemma", "architectures": ["T5GemmaForConditionalGeneration"], **fields}
    )
    model.init_weights()
    model.eval()
    texts = padded_texts(model)
    assert torch.equal(model(*texts), theirs(model, texts))
