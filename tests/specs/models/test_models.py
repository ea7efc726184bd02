"""The reference models have their published sizes, are causal, and survive meta construction and splitting."""

import importlib
import math
import re

import pytest
import torch
from torch import nn

from legoai.specs.models.families import FAMILIES, resolve_config
from legoai.specs.models.llama import Llama
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.source import ModelSource
from support.models.presets import distinct_presets

# Totals of the released checkpoints: Llama and Mixtral from their safetensors indices, GPT-2 as Hugging Face counts it,
# ViT from torchvision (vit_b_16, vit_l_16, vit_h_14 at 224 pixels).
PUBLISHED = {
    ("llama3", "1b"): 1_235_814_400,
    ("llama3", "3b"): 3_212_749_824,
    ("llama3", "8b"): 8_030_261_248,
    ("llama3", "70b"): 70_553_706_496,
    ("llama3", "405b"): 405_853_388_800,
    ("gpt2", "124m"): 124_439_808,
    ("gpt2", "medium"): 354_823_168,
    ("gpt2", "355m"): 354_823_168,
    ("gpt2", "large"): 774_030_080,
    ("gpt2", "774m"): 774_030_080,
    ("gpt2", "xl"): 1_557_611_200,
    ("gpt2", "1.5b"): 1_557_611_200,
    ("mixtral", "8x7b"): 46_702_792_704,
    ("mixtral", "8x22b"): 140_620_634_112,
    ("vit", "b16"): 86_567_656,
    ("vit", "l16"): 304_326_632,
    ("vit", "h14"): 632_045_800,
}

# Brown et al. 2020, table D.1, in millions; the paper's own 13B and 1.3B rows are inconsistent and left out.
GPT3_MILLIONS = {"125m": 125, "350m": 356, "760m": 760, "2.7b": 2_651, "6.7b": 6_658, "175b": 174_600}


def build(family: str, preset: str, **overrides) -> nn.Module:
    chosen = FAMILIES[family]
    return getattr(importlib.import_module(chosen.module), chosen.class_name)(resolve_config(family, preset, overrides))


def count(family: str, preset: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(family, preset).parameters())


@pytest.mark.parametrize(("family", "preset"), PUBLISHED)
def test_parameter_count_equals_the_published_count(family, preset):
    assert count(family, preset) == PUBLISHED[family, preset]


@pytest.mark.parametrize("preset", GPT3_MILLIONS)
def test_gpt3_parameter_count_equals_the_paper(preset):
    assert count("gpt3", preset) / 1e6 == pytest.approx(GPT3_MILLIONS[preset], abs=0.6, rel=1e-4)


SMALL = {
    "llama3": {"preset": "tiny"},
    "mixtral": {"preset": "tiny"},
    "gpt2": {
        "preset": "small",
        "n_layers": 2,
        "dim": 32,
        "n_heads": 4,
        "hidden_dim": 64,
        "vocab_size": 256,
        "max_seq_len": 64,
    },
}


@pytest.mark.parametrize("family", SMALL)
def test_no_logit_depends_on_a_later_token(family):
    torch.manual_seed(0)
    model = build(family, **SMALL[family]).double()
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=-1).min() > 1e-6


@pytest.mark.parametrize("family", SMALL)
def test_forward_accepts_token_positions(family):
    model = build(family, **SMALL[family]).double()
    tokens = torch.randint(256, (2, 8))
    assert torch.equal(model(tokens), model(tokens, torch.arange(8)))
    assert not torch.allclose(model(tokens), model(tokens, torch.arange(8).flip(0)))


class Symbol:
    """The integer of a module in Dynamo's eyes: what compares it is no `bool`."""

    def __eq__(self, other: object):
        raise AssertionError("compared in forward")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("family", ["llama3", "mixtral"])
def test_attention_compares_no_numbers_of_heads_in_forward(family):
    model = build(family, **SMALL[family])
    for block in model.layers.values():
        block.attention.n_heads, block.attention.n_kv_heads = Symbol(), Symbol()
    assert model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 256)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_blocks_in_units_of_fsdp_compile_for_shapes_that_vary(family, gloo):
    """The integers of a unit's modules are symbols then, and PyTorch takes no comparison of symbols for a flag."""
    [shape] = gloo(1)(compiled_units, family)
    assert shape == (2, 8, 256)


def compiled_units(family: str) -> tuple[int, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    model = build(family, **{**SMALL[family], "n_layers": 1})
    for block in model.layers.values():
        block.compile(backend="eager", fullgraph=True, dynamic=True)
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    return tuple(model(torch.zeros(2, 8, dtype=torch.int64)).shape)


@pytest.mark.parametrize("family", SMALL)
def test_stages_in_sequence_equal_the_whole_model(family):
    torch.manual_seed(0)
    model = build(family, **SMALL[family]).double()
    tokens = torch.randint(256, (2, 8))
    expected = model(tokens)

    first, last = build(family, **SMALL[family]).double(), build(family, **SMALL[family]).double()
    first.load_state_dict(model.state_dict())
    last.load_state_dict(model.state_dict())
    names = list(model.layers)
    for name in names:
        del (last if name == "0" else first).layers[name]
    first.norm = first.output = last.tok_embeddings = None
    assert torch.equal(last(first(tokens)), expected)
    assert list(last.layers) == names[1:]


@pytest.mark.parametrize("family", SMALL)
def test_every_module_can_initialise_its_parameters_and_buffers(family):
    for path, module in build(family, **SMALL[family]).named_modules():
        if module._parameters:
            assert callable(getattr(module, "reset_parameters", None)), path
        if module._buffers:
            assert callable(getattr(module, "init_buffers", None)), path


@pytest.mark.parametrize("family", [*SMALL, "vit"])
def test_initialisation_by_module_is_independent_of_order(family):
    def initialised(reverse: bool) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = build(family, **SMALL.get(family, {"preset": "tiny"}))
        model.to_empty(device="cpu")
        modules = list(model.named_modules())
        for index, (_, module) in sorted(enumerate(modules), reverse=reverse):
            if module._parameters:
                torch.manual_seed(index)
                module.reset_parameters()
        return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "output.weight"}

    one, other = initialised(False), initialised(True)
    assert all(torch.isfinite(tensor).all() for tensor in one.values())
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_initial_weights_give_uniform_predictions():
    torch.manual_seed(0)
    model = build("llama3", "tiny")
    tokens = torch.randint(256, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


def exact_table(model: Llama) -> torch.Tensor:
    """The rotary table of a model without scaling, by complex powers of Python's own."""
    config = model.config
    rows = [
        [
            complex(
                math.cos(p * config.rope_theta ** (-2 * i / config.head_size)),
                math.sin(p * config.rope_theta ** (-2 * i / config.head_size)),
            )
            for i in range(config.head_size // 2)
        ]
        for p in range(config.max_seq_len)
    ]
    return torch.tensor(rows, dtype=torch.complex128)


def test_rotary_table_is_exact_after_device_and_dtype_changes():
    def fresh(device: str) -> Llama:
        with torch.device(device):
            return build("llama3", "tiny", max_seq_len=64)

    exact = exact_table(fresh("cpu"))
    assert torch.equal(fresh("cpu").rope, exact.to(torch.complex64))
    assert torch.equal(fresh("meta").to_empty(device="cpu").rope, exact.to(torch.complex64))
    assert torch.equal(fresh("cpu").bfloat16().rope, exact.to(torch.complex64)), "bf16 does not round it"
    torch.testing.assert_close(fresh("cpu").double().rope, exact, rtol=0, atol=1e-15)
    torch.testing.assert_close(fresh("cpu").bfloat16().double().rope, exact, rtol=0, atol=1e-15)
    spoiled = fresh("cpu")
    spoiled.rope.zero_()
    spoiled.init_buffers()
    assert torch.equal(spoiled.rope, exact.to(torch.complex64))
    assert "rope" not in spoiled.state_dict()


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_a_sequence_that_is_too_long_is_refused(family):
    model = build(family, **{**SMALL[family], "max_seq_len": 8})
    with pytest.raises(ValueError, match="9 tokens is longer than max_seq_len = 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_tied_embeddings_are_one_parameter():
    model = build("llama3", "tiny", tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight


@pytest.mark.parametrize(("family", "preset"), list(distinct_presets()))
def test_no_built_in_model_draws_random_numbers_in_its_forward(family, preset):
    """So that recomputing them needs no random state (`dsl/analysis/computation/checkpoint.py`)."""
    manifest = load_manifest(ModelSource(kind="builtin", target=family, preset=preset), base_directory=".")
    assert manifest.flow_error is None
    for info in manifest.modules.values():
        assert "dropout" not in info.class_name.lower()
        assert not [step for step in info.flow if re.search("dropout|bernoulli|rand|multinomial|normal_", step.name)]
