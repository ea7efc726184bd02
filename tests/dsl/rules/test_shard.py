"""Rules about styles and placements of shards."""

from __future__ import annotations

import pytest

from support.rule_plans import codes, diagnostics, message, place

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
        ("output = sequence", False),
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
def test_a_style_is_for_some_kinds_of_modules(rule: str, fits: bool) -> None:
    assert ("LP407" not in codes(on_tp(rule))) == fits


def test_pytorch_refuses_column_cuts_of_what_is_no_matrix() -> None:
    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError):
            style._apply(torch.nn.RMSNorm(4), None)


def test_all_wrong_modules_of_one_rule_are_one_finding() -> None:
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
def test_experts_are_on_ep_and_nothing_else_is(axis: str, path: str, style: str, fits: bool) -> None:
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
def test_parameters_are_placed_on_tp_and_not_on_ep(mesh: str, axis: str, rule: str, fits: bool) -> None:
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
def test_a_placement_is_for_a_parameter_and_one_of_its_dims(rule: str, fits: bool) -> None:
    assert ("LP408" not in codes(on_tp(rule))) == fits


def test_a_parameter_is_placed_once() -> None:
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
def test_layouts_are_given_for_the_tensors_that_there_are(layouts: str, fits: bool) -> None:
    assert ("LP410" not in codes(on_tp(f"layers.*.attention = inputs({layouts})"))) == fits


def test_a_layer_whose_flow_is_not_followed_gives_one_tensor() -> None:
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
def test_loss_parallel_is_for_the_logits(rules: list[str], fits: bool) -> None:
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
def test_a_tied_parameter_has_one_placement(rules: list[str], alike: bool) -> None:
    assert ("LP416" not in codes(on_tp(*rules, model='gpt2("small")'))) == alike


def test_both_places_of_a_tied_parameter_are_shown() -> None:
    text = on_tp("tok_embeddings = colwise(output = replicate)", "output = colwise", model='gpt2("small")')
    assert place(text, "LP416") == "output"
    found = next(item for item in diagnostics(text) if item.code == "LP416")
    assert found.message == (
        "`tok_embeddings.weight` and `output.weight` are one parameter, but the one is cut along dim 1 and the other "
        "cut along dim 0"
    )
    assert [label.text for label in found.others] == ["cut along dim 1"]
