"""Linear layers in float8: converted before all else, from the same first weights, or refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from legoai.runtime import RunError, convert_to_float8
from legoai.runtime.float8 import float8_products
from legoai.specs.models.layers import Linear
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered, refusals
from support.training.meshed import TRAINING, TWO_BLOCKS, UNITS, text_of
from support.training.staged import train

BOTH = f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}\nfsdp on dp_shard {UNITS}"
RULES = """precision {
  layers.*.feed_forward.*       = float8
  layers.*.attention.{wq, wo}   = float8(rowwise)
  layers.0.feed_forward.*       = none
  layers.0.attention.{wq, wo}   = none
  output                        = float8(rowwise_with_gw_hp)
}
"""


def test_float8_conversion_precedes_sharding():
    text = lowered(f"{HEAD}{TRAINING}{BOTH}{RULES}").text
    body = text.partition("def apply_float8(model: nn.Module) -> None:\n")[2].partition("\n\n\n")[0]
    assert "    for index in range(1, 4):" in body
    assert '("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),\n            recipe="tensorwise",' in body
    assert '("attention.wq", "attention.wo"), recipe="rowwise")' in body
    assert '    convert_to_float8(model, ("output",), recipe="rowwise_with_gw_hp")' in body
    calls = [line.split("(")[0].strip() for line in text.splitlines() if line.startswith("    apply_")]
    assert calls == ["apply_float8", "apply_tensor_parallel", "apply_fsdp"]
    assert text.index("def apply_float8") < text.index("def apply_tensor_parallel")


def test_float8_conversion_precedes_activation_offload():
    """Which is done by the runtime, and not by a function of the program."""
    text = lowered(
        f"{HEAD}{TRAINING}offload (activations = all)\nprecision {{ layers.*.attention.wq = float8 }}\n"
    ).text
    body = text.partition("def parallelize(")[2]
    assert 0 < body.index("    apply_float8(model)") < body.index("    offload_activations(model)")


def test_format_without_torchao_training_is_refused():
    found = refusals(f"{HEAD}{TRAINING}precision {{ layers.*.feed_forward.* = mxfp8 }}")
    assert found
    assert all(item.code == "LP010" and "`mxfp8`" in item.message for item in found)


def test_float8_gather_with_partial_reshard_is_refused():
    """From a smaller mesh after forward, `fully_shard` gathers plain parameters alone."""
    text = f"{HEAD}{TRAINING}mesh (dp_shard = 4)\nfsdp on dp_shard {{ layers.* = unit(reshard = 2), root = unit }}\n"
    rule = "precision {{ layers.*.feed_forward.* = float8{} }}"
    [found] = refusals(text + rule.format("(gather = [weights])"))
    assert found.code == "LP010" and "from 2 ranks" in found.message
    assert not refusals(text + rule.format(""))


def test_missing_torchao_is_an_error_with_a_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RunError, match=r"RUN044.*needs torchao"):
        convert_to_float8(nn.Sequential(nn.Linear(16, 16)), ("0",), recipe="tensorwise")


def test_float8_layers_have_the_initial_weights_of_linear_layers():
    pytest.importorskip("torchao.float8")
    model = nn.Sequential(Linear(16, 32, bias=False, init_std=0.5), Linear(32, 16, bias=False))
    convert_to_float8(model, ("0",), recipe="tensorwise")
    torch.manual_seed(0)
    model[0].reset_parameters()
    torch.manual_seed(0)
    expected = Linear(16, 32, bias=False, init_std=0.5).weight
    assert type(model[0]).__name__ == "Float8Linear"
    assert type(model[1]) is Linear
    assert torch.equal(model[0].weight, expected)


def test_layer_with_several_places_is_converted_in_all_of_them():
    pytest.importorskip("torchao.float8")
    layer = nn.Linear(16, 16)
    model = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), layer) for _ in range(3)])
    convert_to_float8(model[0], ("1",), recipe="tensorwise", everywhere_in=model)
    assert type(model[0][1]).__name__ == "Float8Linear"
    assert len({id(block[1]) for block in model}) == 1


def test_program_converts_a_layer_in_all_of_its_places():
    model = 'model python("support.models.factories:build_sharing")'
    head = f"plan shared\n{model}\ncluster h100_sxm(devices = 1)\n{TRAINING}"
    text = lowered(f"{head}precision {{ blocks.*.mixer.* = float8 }}\n").text
    assert 'convert_to_float8(model.blocks[0], ("mixer.up",), recipe="tensorwise", everywhere_in=model)' in text
    assert text.count("everywhere_in=") == 1


@pytest.mark.parametrize("in_fp32", [False, True])
def test_products_in_fp32_equal_the_float8_kernel(in_fp32: bool):
    """But for the order of scaling and of addition; the kernel is that of torch for a CPU."""
    pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False))
    inputs, plain = torch.randn(16, 16), model[0].weight.detach().clone()
    with float8_products(in_fp32=in_fp32):
        convert_to_float8(model, ("0",), recipe="tensorwise")
    assert model[0].config.emulate is in_fp32
    largest = torch.finfo(torch.float8_e4m3fn).max
    left, right = ((item * (largest / item.abs().max())).to(torch.float8_e4m3fn).float() for item in (inputs, plain))
    expected = left @ right.T * (inputs.abs().max() * plain.abs().max() / largest**2)
    assert torch.allclose(model(inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_float8_loss_and_gradients_are_close_to_bf16(gloo, data):
    pytest.importorskip("torchao.float8")
    plain = gloo(4)(train, text_of(BOTH, TWO_BLOCKS), data)[0]
    converted = gloo(4)(train, text_of(f"{BOTH}{RULES}", TWO_BLOCKS), data)[0]
    # Before the first update: this learning rate overshoots, which enlarges every difference in the steps after it.
    assert converted["loss"][0] == pytest.approx(plain["loss"][0], rel=2e-3)
    assert converted["norm"][0] == pytest.approx(plain["norm"][0], rel=3e-2)
    assert converted["loss"] != plain["loss"]


GATHERED = """precision (param = fp32, reduce = fp32) {{
  layers.*.feed_forward.*                = float8{gather}
  layers.*.attention.{{wq, wk, wv, wo}} = float8{gather}
}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "gather",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("weights", "activations")), "weights, activations"],
)
def test_float8_gather_changes_no_number(gloo, data, gather: str):
    """A scale is that of the whole tensor, so that casts before and after a gather are equal."""
    pytest.importorskip("torchao.float8")
    before, after = (
        gloo(4)(train_in_float8, text_of(f"{BOTH}{GATHERED.format(gather=said)}", TWO_BLOCKS), data)[0]
        for said in ("", f"(gather = [{gather}])")
    )
    assert after["loss"] == before["loss"]
    assert after["norm"] == before["norm"]
    assert after["validations"] == before["validations"]
    assert all(torch.equal(after["parameters"][name], value) for name, value in before["parameters"].items())


@pytest.mark.slow
def test_float8_gathers_are_no_activations_of_a_budget(gloo, data):
    pytest.importorskip("torchao.float8")
    weights = GATHERED.format(gather="(gather = [weights, activations])")
    texts = [text_of(f"{BOTH}{weights}{checkpoint}") for checkpoint in ("", "checkpoint { layers.* = budget(50%) }\n")]
    before, after = (gloo(4)(train_in_float8, text, data)[0] for text in texts)
    assert (after["loss"], after["norm"]) == (before["loss"], before["norm"])


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoint_holds_weights_in_their_storage_dtype(gloo, data, tmp_path, asynchronous: bool):
    """It is written where weights are gathered in float8, and read where they are not, and the other way."""
    pytest.importorskip("torchao.float8")
    plain, weights = (
        text_of(f"{BOTH}{GATHERED.format(gather=said)}", TWO_BLOCKS) for said in ("", "(gather = [weights])")
    )
    expected = gloo(4)(train, plain, data)[0]
    for index, (first, second) in enumerate([(weights, plain), (plain, weights)]):
        out = tmp_path / str(index)
        result = gloo(4)(resumed, first, second, data, str(out), asynchronous)[0]
        assert result["resumed_from"] == 1
        assert result["loss"] == expected["loss"][1:]
        assert all(torch.equal(result["parameters"][name], value) for name, value in expected["parameters"].items())


def resumed(first: str, second: str, data: str, out: str, asynchronous: bool) -> dict:
    """Train one step with a program, and another one with the second program."""
    train(first, data, out=Path(out), steps=1, save_async=asynchronous)
    return train(second, data, out=Path(out), resume_other_plan=True)


def train_in_float8(text: str, data: str) -> dict:
    """Train where float8 is sent as bytes: gloo has no such numbers."""
    from torchao.float8 import float8_ops

    gather = torch.ops._c10d_functional.all_gather_into_tensor.default

    def as_bytes(values: torch.Tensor, *others) -> torch.Tensor:
        return gather(values.view(torch.uint8), *others).view(values.dtype)

    with pytest.MonkeyPatch.context() as patch:
        in_torchao = float8_ops.FLOAT8_OPS_TABLE[gather]
        patch.setitem(
            float8_ops.FLOAT8_OPS_TABLE, gather, lambda _, args, kwargs=None: in_torchao(as_bytes, args, kwargs or {})
        )
        return train(text, data, evaluate_every=1, evaluate_batches=2)
