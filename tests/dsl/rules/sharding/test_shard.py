"""Rules about styles and placements of shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.rule_plans import codes, diagnostics, message, place

MESH = "mesh (dp_shard = 4, tp = 2)\n"


def on_tp(*rules: str, model: str = 'llama3("tiny")') -> str:
    return f"model {model}\n{MESH}shard on tp {{ {', '.join(rules)} }}"


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        ("output = colwise", True),
        ("tok_embeddings = colwise", True),
        ("norm = colwise", False),
        ("layers.*.attention = rowwise", False),
        ("norm = sequence", True),
        ("output = sequence", True),
        ("tok_embeddings = sequence", False),
        ("layers.* = sequence", False),
        ("layers.*.attention = inputs(from = replicate, to = replicate)", True),
        ("layers = inputs(from = replicate, to = replicate)", False),
        ("layers = outputs(from = replicate, to = replicate)", False),
        ("output = experts", False),
        ("output.weight = colwise", False),
        ("layers.*.attention.* = colwise", True),
        ("layers.** = colwise", False),
    ],
)
def test_style_requires_a_matching_module_kind(rule: str, fits: bool) -> None:
    assert ("LP407" not in codes(on_tp(rule))) == fits


def test_pytorch_refuses_colwise_and_rowwise_of_a_norm() -> None:
    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError):
            style._apply(torch.nn.RMSNorm(4), None)


def test_all_wrong_modules_of_a_rule_are_one_diagnostic() -> None:
    found = [item for item in diagnostics(on_tp("layers.*.* = colwise")) if item.code == "LP407"]
    assert [item.message for item in found] == [
        "`colwise` cuts a linear layer or an embedding, and `layers.*.attention_norm` is a norm"
    ]
    assert found[0].label.text == "this path, and 3 more that it matches"


@pytest.mark.parametrize(
    ("axis", "path", "style", "fits"),
    [
        ("ep", "layers.*.feed_forward.experts", "experts", True),
        ("ep", "layers.*.feed_forward", "experts", False),
        ("ep", "layers.*.attention", "experts", False),
        ("ep", "layers.*.attention.wq", "colwise", False),
        ("tp", "layers.*.feed_forward.experts", "experts", False),
    ],
)
def test_ep_takes_experts_only(axis: str, path: str, style: str, fits: bool) -> None:
    mesh = "mesh (dp_shard = 4, tp = 2, ep = 4)"
    text = f'model mixtral("tiny")\n{mesh}\nshard on {axis} {{ {path} = {style} }}'
    assert ("LP407" not in codes(text)) == fits


@pytest.mark.parametrize(
    ("mesh", "axis", "rule", "fits"),
    [
        ("dp_shard = 4, ep = 4", "ep", "layers.2.attention.wo.weight = replicate", False),
        ("dp_shard = 4", "ep", "layers.2.attention.wo.weight = replicate", False),
        ("dp_shard = 4, ep = 4", "ep", "layers.*.attention.*.weight = shard(0)", False),
        ("dp_shard = 4, ep = 4", "ep", "layers.*.feed_forward.experts.w1 = shard(0)", False),
        ("dp_shard = 4, ep = 4", "ep", "layers.2.feed_forward.experts = none", True),
        ("dp_shard = 4, tp = 2", "tp", "layers.2.attention.wo.weight = replicate", True),
    ],
)
def test_parameter_placement_requires_tp(mesh: str, axis: str, rule: str, fits: bool) -> None:
    rules = f"layers.*.feed_forward.experts = experts, {rule}" if axis == "ep" else rule
    text = f'model mixtral("tiny")\nmesh ({mesh})\nshard on {axis} {{ {rules} }}'
    assert ("LP408" not in codes(text)) == fits


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        ("output.weight = shard(0)", True),
        ("output.weight = shard(-2)", True),
        ("output.weight = replicate", True),
        ("output.weight = shard(2)", False),
        ("output.weight = shard(-3)", False),
        ("norm.weight = shard(1)", False),
        ("output = shard(0)", False),
        ("output = replicate", False),
    ],
)
def test_placement_requires_a_parameter_and_an_existing_dim(rule: str, fits: bool) -> None:
    assert ("LP408" not in codes(on_tp(rule))) == fits


def test_parameter_placed_twice_is_refused() -> None:
    assert message(on_tp("output = colwise", "output.weight = shard(0)"), "LP408") == (
        "`colwise` places `output.weight` already"
    )
    assert "LP408" not in codes(on_tp("norm.weight = replicate", "layers.*.attention_norm = sequence"))
    some = on_tp("layers.*.attention.wk = colwise", "layers.*.attention.*.weight = replicate")
    assert message(some, "LP408") == "`colwise` places `layers.*.attention.wk.weight` already"


@pytest.mark.parametrize(
    ("layouts", "fits"),
    [
        ("from = shard(1), to = replicate", True),
        ("from = [shard(1), none], to = [replicate, none]", True),
        ("from = [shard(1)], to = [replicate]", True),
        ("from = [shard(1), none, none], to = [replicate, none, none]", False),
        ("from = [shard(1), none], to = replicate", False),
        ("from = [shard(1), none], to = [replicate, replicate]", False),
    ],
)
def test_layout_count_must_match_the_tensors(layouts: str, fits: bool) -> None:
    assert ("LP410" not in codes(on_tp(f"layers.*.attention = inputs({layouts})"))) == fits


def test_linear_layer_has_one_output_layout() -> None:
    rule = "layers.*.attention.wq = outputs(from = [shard(-1), shard(1)], to = [replicate, replicate])"
    assert message(on_tp(rule), "LP410") == "`layers.*.attention.wq` has 1 output"


def test_the_inputs_of_the_module_are_named() -> None:
    text = on_tp("layers.*.attention = inputs(from = [none, none, shard(1)], to = [none, none, replicate])")
    assert message(text, "LP410") == "`layers.*.attention` has 2 inputs: `x` and `rope`"


@pytest.mark.parametrize(
    ("rules", "fits"),
    [
        (["output = colwise(loss_parallel = true)"], True),
        (["output = colwise(output = shard(-1), loss_parallel = true)"], True),
        (["output = colwise(output = replicate, loss_parallel = true)"], False),
        (["layers.*.feed_forward.w1 = colwise(loss_parallel = true)"], False),
        (["tok_embeddings = colwise(loss_parallel = true)"], False),
    ],
)
def test_loss_parallel_requires_the_output_layer(rules: list[str], fits: bool) -> None:
    assert ("LP413" not in codes(on_tp(*rules))) == fits


@pytest.mark.parametrize(
    ("rules", "alike"),
    [
        (["tok_embeddings = rowwise", "output = colwise(loss_parallel = true)"], True),
        (["tok_embeddings = colwise(output = replicate)", "output = rowwise(input = replicate)"], True),
        (["tok_embeddings = colwise(output = replicate)", "output = colwise(loss_parallel = true)"], False),
        (["output = colwise(loss_parallel = true)"], False),
        (["tok_embeddings = rowwise"], False),
        (["tok_embeddings.weight = shard(0)", "output = colwise(loss_parallel = true)"], True),
        (["tok_embeddings.weight = shard(-2)", "output.weight = shard(0)"], True),
        (["tok_embeddings.weight = replicate"], False),
        (["layers.*.mlp.up = colwise", "layers.*.mlp.down = rowwise"], True),
    ],
)
def test_tied_parameters_must_have_one_placement(rules: list[str], alike: bool) -> None:
    assert ("LP416" not in codes(on_tp(*rules, model='gpt2("small")'))) == alike


def test_tied_parameter_diagnostic_labels_both_placements() -> None:
    text = on_tp("tok_embeddings = colwise(output = replicate)", "output = colwise", model='gpt2("small")')
    assert place(text, "LP416") == "output"
    found = next(item for item in diagnostics(text) if item.code == "LP416")
    assert found.message == (
        "`tok_embeddings.weight` and `output.weight` are one parameter, but the one is cut along dim 1 and the other "
        "cut along dim 0"
    )
    assert [label.text for label in found.others] == ["cut along dim 1"]


FACTORY = """
from torch import nn
from torch.nn.utils import parametrizations, weight_norm


class Adapted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = nn.Linear(*sizes)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class WrappedNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.LayerNorm(dim)

    def forward(self, x):
        return self.inner(x)


def build():
    return nn.Sequential(
        nn.Embedding(256, 16),
        nn.Linear(16, 16),
        parametrizations.weight_norm(nn.Linear(16, 16)),
        parametrizations.spectral_norm(nn.Linear(16, 16)),
        weight_norm(nn.Linear(16, 16)),
        Adapted(16, 16),
        WrappedNorm(16),
    )
"""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_styles_are_for_layers_that_hold_their_own_parameters(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    rules = [f"{path} = {'sequence' if path == 6 else 'colwise(output = replicate)'}" for path in range(1, 7)]
    placed = ["4.weight_v = shard(0)", "2.parametrizations.weight.original1 = shard(0)"]
    messages = []
    for written in (rules, placed):
        text = on_tp(*written, model='python("net:build")')
        messages += [item.message for item in diagnostics(text, tmp_path) if item.code == "LP010"]
    reasons = [
        "`2` computes its weight from `parametrizations.weight.original0` and `parametrizations.weight.original1`",
        "`3` computes its weight from `parametrizations.weight.original`",
        "`4` computes its weight from `weight_g` and `weight_v`",
        "`5` has `adapter.weight` inside of it",
        "`6` has `inner.weight` inside of it",
    ]
    for text, reason in zip(messages[: len(reasons)], reasons, strict=True):
        assert text.endswith(f"and {reason}")
    assert len(messages) == len(reasons) + len(placed)
