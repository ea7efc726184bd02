"""Computed manifests of built-in models equal those of an inspection of the models."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legoai.specs.models.families import FAMILIES
from legoai.specs.models.inspect import inspect_model
from legoai.specs.models.manifests.computed.builtin import computed_manifest
from legoai.specs.models.source import ModelSource
from support.marks import slow_but
from support.models.presets import distinct_presets


def assert_computed_as_inspected(source: ModelSource) -> None:
    inspected = inspect_model(source, Path())
    assert inspected.flow_error is None
    computed = computed_manifest(source)
    assert computed == inspected
    assert computed.to_json() == inspected.to_json()


# Most presets differ from one of these in their dimensions alone, as random ones do below.
QUICK = (
    ("llama3", "tiny"), ("llama3", "1b"), ("mixtral", "tiny"), ("deepseek", "tiny"), ("deepseek", "v2_lite"),
    ("gpt2", "small"), ("vit", "tiny"),
)  # fmt: skip


@pytest.mark.parametrize("named", slow_but(distinct_presets(), *QUICK), ids="-".join)
@pytest.mark.parametrize("layers", [{"n_layers": 4}, pytest.param({}, marks=pytest.mark.slow)], ids=["4 layers", "all"])
def test_computed_manifest_of_a_preset_equals_inspection(named, layers):
    family, preset = named
    assert_computed_as_inspected(ModelSource(kind="builtin", target=family, preset=preset, arguments=layers))


SMALL = st.integers(1, 9)


@st.composite
def heads(draw: st.DrawFn) -> dict[str, int]:
    kv_heads, group, pairs = draw(SMALL), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return {"n_heads": kv_heads * group, "n_kv_heads": kv_heads, "dim": kv_heads * group * 2 * pairs}


DECODER = {"n_layers": st.integers(1, 3), "hidden_dim": SMALL, "vocab_size": SMALL, "max_seq_len": st.integers(1, 20)}


@st.composite
def llamas(draw: st.DrawFn) -> dict:
    return {**draw(heads()), **draw(st.fixed_dictionaries(DECODER | {"mlp_bias": st.booleans()})), **draw(options())}


@st.composite
def options(draw: st.DrawFn) -> dict:
    """What a Llama and a mixture may have beside their dimensions."""
    found = {name: draw(st.booleans()) for name in ("tie_embeddings", "qk_norm")}
    biased = draw(st.sampled_from(["", "qkv_bias", "attention_bias"]))
    return {**found, "head_dim": draw(st.sampled_from([0, 2, 4, 6])), **({biased: True} if biased else {})}


@st.composite
def mixtrals(draw: st.DrawFn) -> dict:
    experts, of_heads = draw(SMALL), draw(heads())
    # Experts are matrices of whole blocks of 8.
    of_heads["dim"] *= 8
    found = {**of_heads, **draw(st.fixed_dictionaries(DECODER)), "hidden_dim": 8 * draw(SMALL)}
    return {**found, **draw(options()), "n_experts": experts, "top_k": draw(st.integers(1, experts))}


@st.composite
def deepseeks(draw: st.DrawFn) -> dict:
    found = draw(st.fixed_dictionaries(DECODER)) | {name: draw(SMALL) for name in LATENT}
    found |= {"dim": 8 * draw(SMALL), "hidden_dim": 8 * draw(SMALL), "rope_head_dim": 2 * draw(SMALL)}
    groups, each = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    found |= {"n_groups": groups, "n_experts": groups * each, "top_groups": draw(st.integers(1, groups))}
    return {
        **found,
        "n_dense_layers": draw(st.integers(0, found["n_layers"] - 1)),
        "q_lora_rank": draw(st.integers(0, 9)),
        "top_k": draw(st.integers(1, found["top_groups"] * each)),
        "scores": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize_weights": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
    }


LATENT = ("n_heads", "kv_lora_rank", "nope_head_dim", "v_head_dim", "dense_hidden_dim", "n_shared_experts")


@st.composite
def gpts(draw: st.DrawFn) -> dict:
    n_heads = draw(SMALL)
    found = {**draw(st.fixed_dictionaries(DECODER)), "n_heads": n_heads, "dim": n_heads * draw(SMALL)}
    return {**found, "bias": draw(st.booleans()), "tie_embeddings": draw(st.booleans())}


@st.composite
def vits(draw: st.DrawFn) -> dict:
    n_heads, patch = draw(SMALL), draw(SMALL)
    found = {name: draw(SMALL) for name in ("hidden_dim", "n_channels", "n_classes")}
    return {
        **found,
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": n_heads,
        "dim": n_heads * draw(SMALL),
        "patch_size": patch,
        "image_size": patch * draw(st.integers(1, 4)),
    }


DRAWN = {"llama3": llamas(), "mixtral": mixtrals(), "deepseek": deepseeks(), "vit": vits()}
DRAWN |= {"gpt2": gpts(), "gpt3": gpts()}


@pytest.mark.parametrize("family", slow_but(FAMILIES, "vit"))
def test_computed_manifest_of_random_dimensions_equals_inspection(family):
    @settings(max_examples=3, suppress_health_check=list(HealthCheck))
    @given(DRAWN[family])
    def check(arguments: dict) -> None:
        assert_computed_as_inspected(ModelSource(kind="builtin", target=family, arguments=arguments))

    check()
