"""Models of `transformers` as they are trained."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from legoai.specs.models.huggingface import transformers_model
from legoai.specs.models.manifest import ManifestError

pytest.importorskip("transformers")


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
