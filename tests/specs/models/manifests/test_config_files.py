"""Hugging Face configs are read as data, and built by `transformers` alone."""

import json

import pytest

from legoai.specs.models.manifests.cache import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    limit = '[0.0, {"__float__": "Infinity"}, -Infinity, {"__float__": "-Infinity"}, {"__float__": "other"}]'
    (tmp_path / "config.json").write_text(f'{{"model_type": "mamba2", "time_step_limit": {limit}}}')
    infinity = float("inf")
    fields = read_config(tmp_path / "config.json")
    assert fields["time_step_limit"] == [0.0, infinity, -infinity, -infinity, {"__float__": "other"}]


@pytest.mark.slow
def test_hugging_face_config_is_built_and_traced(workplace):
    pytest.importorskip("transformers")
    workplace.write("config.json", json.dumps(LLAMA))
    manifest = workplace.load("huggingface", "config.json", num_hidden_layers=2)
    assert manifest.flow_error is None
    assert manifest.model_class.endswith(".LlamaForCausalLM")
    assert (manifest.vocab_size, manifest.max_seq_len) == (100, 256)
    assert manifest.tied_parameters == (("model.embed_tokens.weight", "lm_head.weight"),)
    [blocks] = manifest.block_lists
    assert (blocks.path, len(blocks)) == ("model.layers", 2)
    attention = manifest.modules["model.layers.1.self_attn"]
    assert (attention.kind, attention.attributes) == (
        "attention",
        {"n_heads": 8, "n_kv_heads": 2, "head_dim": 8},
    )
    assert "hidden_states" in attention.keyword_inputs
    calls = [step.name for step in manifest.modules["model.layers.1"].flow if step.op in ("call", "add")]
    assert calls == ["input_layernorm", "self_attn", "add", "post_attention_layernorm", "mlp", "add"]


@pytest.mark.parametrize(
    ("text", "arguments", "kind", "words"),
    [
        (None, {}, "config_missing", "cannot read"),
        ("{", {}, "config_invalid", "is not JSON"),
        ("{}", {}, "config_invalid", "no model_type"),
        ('{"model_type": "zork"}', {}, "unknown_architecture", "'zork'"),
        (json.dumps({**LLAMA, "architectures": ["Zork"]}), {}, "unknown_architecture", "'Zork'"),
        (json.dumps(LLAMA), {"layers": 2}, "config_invalid", "no field named 'layers'"),
        (
            json.dumps(LLAMA),
            {"num_hidden_layers": 1001},
            "config_invalid",
            "num_hidden_layers = 1001 is more than 1000",
        ),
        (json.dumps(LLAMA | {"num_hidden_layers": -1}), {}, "config_invalid", "`num_hidden_layers` must be positive"),
        (json.dumps(LLAMA | {"rms_norm_eps": float("nan")}), {}, "config_invalid", "`rms_norm_eps` is no number"),
        (json.dumps(LLAMA | {"quantization_config": {"bits": 4}}), {}, "config_invalid", "quantised weights"),
        ('{"model_type": "gpt2", "n_layer": 100000000}', {}, "config_invalid", "n_layer = 100000000 is more than 1000"),
        ('{"model_type": "swin", "depths": [2, 2000]}', {}, "config_invalid", "depths = 2000 is more than 1000"),
        (
            '{"model_type": "clip", "text_config": {"num_hidden_layers": 2000}}',
            {},
            "config_invalid",
            "num_hidden_layers = 2000 is more than 1000",
        ),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_config_file_error_is_one_sentence(workplace, text, arguments, kind, words):
    if kind == "unknown_architecture" or arguments or text not in (None, "{", "{}"):
        pytest.importorskip("transformers")
    if text is not None:
        workplace.write("config.json", text)
    error = workplace.error("huggingface", "config.json", **arguments)
    assert error.kind == kind
    assert words in error.message


@pytest.mark.parametrize(
    ("arguments", "words", "cure"),
    [
        (
            {"hidden_size": 62},
            "62) is not a multiple of the number of attention heads",
            "huggingface(…, FIELD = VALUE)",
        ),
        ({"num_hiden_layers": 2}, "no field named 'num_hiden_layers'", "did you mean `num_hidden_layers`?"),
        ({"zork": 2}, "no field named 'zork'", "the fields are those of `LlamaConfig`"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_refused_config_has_a_cure(workplace, arguments, words, cure):
    pytest.importorskip("transformers")
    workplace.write("config.json", json.dumps(LLAMA))
    error = workplace.error("huggingface", "config.json", **arguments)
    assert words in error.message and "\n" not in error.message
    assert cure in error.detail and words not in error.detail


@pytest.mark.slow
def test_missing_transformers_error_names_the_install_command(workplace):
    workplace.write("transformers.py", "raise ImportError('not here')")
    workplace.write("config.json", json.dumps(LLAMA))
    error = workplace.error("huggingface", "config.json")
    assert error.kind == "transformers_missing"
    assert "pip install" in error.message
