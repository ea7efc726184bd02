"""Configs reject impossible values, and name the accepted ones."""

import dataclasses

import pytest

from legoai.specs.models.config_checks import ConfigError
from legoai.specs.models.configs import DeepSeekConfig, LlamaConfig
from legoai.specs.models.families import FAMILIES, config_values, resolve_config
from legoai.specs.models.source import ModelSource


def error_of(*arguments) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve_config(*arguments)
    return caught.value


def test_overrides_replace_fields_of_a_preset():
    config = resolve_config("llama3", "8b", {"n_layers": 2, "rope_theta": 10_000})
    assert config == dataclasses.replace(resolve_config("llama3", "8b"), n_layers=2, rope_theta=10_000.0)
    assert type(config.rope_theta) is float, "a whole number is a fine float"


def test_without_a_preset_all_dimensions_must_be_given():
    values = config_values(resolve_config("llama3", "tiny"))
    assert resolve_config("llama3", None, values) == resolve_config("llama3", "tiny")
    del values["n_heads"]
    error = error_of("llama3", None, values)
    assert (error.argument, error.legal) == ("preset", tuple(FAMILIES["llama3"].presets))
    assert "n_heads" in error.message


@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_is_rebuilt_from_its_values(family):
    for preset in FAMILIES[family].presets:
        config = resolve_config(family, preset)
        assert type(config)(**config_values(config)) == config


def test_every_field_is_documented():
    for family in FAMILIES.values():
        for field in dataclasses.fields(family.config_class):
            assert field.metadata["doc"], f"{family.config_class.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("arguments", "argument", "legal"),
    [
        (("lama3", "8b"), "family", tuple(FAMILIES)),
        (("llama3", "9b"), "preset", tuple(FAMILIES["llama3"].presets)),
        (("llama3", "8b", {"layers": 2}), "layers", tuple(f.name for f in dataclasses.fields(LlamaConfig))),
        (("llama3", "tiny", {"n_heads": 3}), "n_heads", ("1", "2", "4", "8", "16", "32", "64", "128")),
        (("llama3", "tiny", {"n_kv_heads": 3}), "n_kv_heads", ("1", "2", "4", "8")),
        (("llama3", "tiny", {"n_heads": 128, "n_kv_heads": 64}), "n_heads", ()),
        (("llama3", "tiny", {"n_layers": 0}), "n_layers", ()),
        (("llama3", "tiny", {"n_layers": True}), "n_layers", ()),
        (("llama3", "tiny", {"dim": 128.0}), "dim", ()),
        (("llama3", "tiny", {"tie_embeddings": 1}), "tie_embeddings", ()),
        (("llama3", "tiny", {"rope_scaling": 0.5}), "rope_scaling", ()),
        (("llama3", "tiny", {"rope_low_freq_factor": 4.0}), "rope_low_freq_factor", ()),
        (("llama3", "tiny", {"rope_low_freq_factor": 2.0}), "rope_low_freq_factor", ()),
        (("llama3", "8b", {"rope_type": "yran"}), "rope_type", ("llama3", "linear", "yarn")),
        (("llama3", "8b", {"rope_type": 2}), "rope_type", ()),
        (("llama3", "tiny", {"rope_type": "linear"}), "rope_scaling", ()),
        (("llama3", "8b", {"rope_type": "yarn", "rope_low_freq_factor": 2.0}), "rope_low_freq_factor", ()),
        (("llama3", "8b", {"rope_type": "linear", "rope_original_seq_len": 64}), "rope_original_seq_len", ()),
        (("llama3", "8b", {"rope_beta_fast": 8.0}), "rope_beta_fast", ()),
        (("llama3", "8b", {"rope_type": "yarn", "rope_beta_fast": 1.0}), "rope_beta_slow", ()),
        (("llama3", "8b", {"rope_type": "yarn", "rope_attention_factor": -1.0}), "rope_attention_factor", ()),
        (("llama3", "8b", {"rope_type": "yarn", "rope_theta": 1.0}), "rope_theta", ()),
        (("llama3", "8b", {"attention_bias": True, "qkv_bias": True}), "qkv_bias", ()),
        (("mixtral", "8x7b", {"attention_bias": True, "qkv_bias": True}), "qkv_bias", ()),
        (("mixtral", "8x7b", {"head_dim": 63}), "head_dim", ()),
        (("mixtral", "tiny", {"top_k": 5}), "top_k", ()),
        (("gpt2", "small", {"n_heads": 7}), "n_heads", None),
        (("vit", "tiny", {"patch_size": 5}), "patch_size", ("1", "2", "4", "8", "16", "32")),
        (("vit", "b16", {"image_size": 16 * 10**7}), "image_size", ()),
        (("llama3", "8b", {"vocab_size": 10**15}), "vocab_size", ()),
        (("llama3", "8b", {"vocab_size": -1}), "vocab_size", ()),
        (("llama3", "8b", {"max_seq_len": 10**11}), "max_seq_len", ()),
        (("llama3", "8b", {"hidden_dim": 2**60}), "hidden_dim", ()),
        (("llama3", "8b", {"norm_eps": float("nan")}), "norm_eps", ()),
        (("llama3", "8b", {"rope_theta": float("inf")}), "rope_theta", ()),
        (("llama3", "8b", {"n_heads": 7}), "n_heads", None),
        (("llama3", "8b", {"head_dim": 63}), "head_dim", ()),
        (("llama3", "8b", {"head_dim": -2}), "head_dim", ()),
        (("mixtral", "8x7b", {"n_experts": 10**9}), "n_experts", ()),
        (("mixtral", "8x7b", {"hidden_dim": 100}), "hidden_dim", ()),
        (("gpt2", "small", {"max_seq_len": 10**11}), "max_seq_len", ()),
    ],
)
def test_config_error_names_argument_and_legal_values(arguments, argument, legal):
    error = error_of(*arguments)
    assert error.argument == argument
    assert legal is None or error.legal == legal


def test_model_source_prints_as_plan_text():
    builtin = ModelSource(kind="builtin", target="llama3", preset="8b", arguments={"n_layers": 2})
    assert str(builtin) == 'llama3("8b", n_layers = 2)'
    python = ModelSource(kind="python", target="m:build", arguments={"b": True, "a": 'x"y', "c": 0.5})
    assert str(python) == r'python("m:build", a = "x\"y", b = true, c = 0.5)'
    assert hash(builtin) == hash(dataclasses.replace(builtin, arguments=dict(builtin.arguments)))


def test_implausible_layer_count_is_refused_before_construction():
    assert resolve_config("llama3", "8b", {"n_layers": 1000}).n_layers == 1000
    for family, preset in (("llama3", "8b"), ("gpt2", "xl"), ("mixtral", "8x7b")):
        with pytest.raises(ConfigError, match="n_layers = 320000 is more than 1000"):
            resolve_config(family, preset, {"n_layers": 320_000})


def test_preset_without_its_stretching_keeps_no_field_of_it() -> None:
    config = resolve_config("deepseek", "v2", {"rope_scaling": 1})
    assert isinstance(config, DeepSeekConfig)
    assert config.rope_mscale == 1.0
    with pytest.raises(ConfigError, match="rope_mscale has no effect"):
        resolve_config("deepseek", "v2", {"rope_scaling": 1, "rope_mscale": 0.707})
