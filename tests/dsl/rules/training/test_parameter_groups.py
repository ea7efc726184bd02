"""Rules about parameters that the optimizer treats unlike the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.dsl.lint import lint
from support.texts.rule_plans import BASE, codes, message

ADAMW = "optimizer adamw(lr = 3e-4, weight_decay = 0.1)"
TIED = BASE.replace('"tiny"', '"tiny", tie_embeddings = true')
FAMILY = {"LP686", "LP687", "LP688", "LP689", "LP696", "LP697"}


@pytest.mark.parametrize(
    "rules",
    [
        "norm = group(weight_decay = 0)",
        "**.weight = group(lr_scale = 0.5)",
        "layers.* = group(lr = 1e-3)\nlayers.0 = group",
        "layers.* = group(lr = 1e-3)\nlayers.*.attention.wq.weight = group(weight_decay = 0.1)",
        "layers.*.attention = group(betas = [0.8, 0.9], eps = 1e-6)",
        "root = group(lr_scale = 2)",
        "layers.** = muon(lr = 0.02)\nlayers.*.attention.wq = muon(lr = 0.01)",
        "layers.* = muon(lr = 0.02)\nlayers.*.*_norm = group(weight_decay = 0)",
        "layers.* = group(lr_scale = 2)\nlayers.**.weight = muon(lr = 0.02)",
        "layers.**.weight = muon(lr = 0.02)\nlayers.*.attention.wq.weight = group",
    ],
)
def test_a_rule_that_changes_a_constant_of_a_parameter_is_clean(rules: str) -> None:
    assert not FAMILY & codes(f"{ADAMW} {{ {rules} }}")


@pytest.mark.parametrize(
    "rules",
    [
        "norm = group",
        "norm = group(weight_decay = 0.1)",
        "norm = group(lr_scale = 1)",
        "layers.* = group(lr = 1e-3)\nlayers.1 = group(lr = 1e-3)",
        "norm = group(lr_scale = 2)\nnorm.weight = group(lr_scale = 3)",
        "layers.*.*_norm = muon(lr = 0.02)",
        "layers.** = muon(lr = 0.02)\nlayers.0 = muon(lr = 0.02)",
    ],
)
def test_parameter_group_without_effect_is_reported(rules: str) -> None:
    assert "LP686" in codes(f"{ADAMW} {{ {rules} }}")


def test_constants_of_adam_are_refused_for_sgd() -> None:
    assert message("optimizer sgd(lr = 0.1) { norm = group(eps = 1e-5) }", "LP687") == "`sgd` has no `eps`"
    assert "LP687" not in codes("optimizer sgd(lr = 0.1) { norm = group(lr_scale = 0.1) }")
    assert "LP687" not in codes("optimizer adam(lr = 0.1) { norm = group(eps = 1e-5) }")


def test_lr_and_lr_scale_exclude_each_other() -> None:
    assert "LP688" in codes(f"{ADAMW} {{ norm = group(lr = 1e-3, lr_scale = 2) }}")


@pytest.mark.parametrize(
    ("rules", "divided"),
    [
        ("tok_embeddings = group(weight_decay = 0)", True),
        ("output.weight = group(weight_decay = 0)", True),
        ("tok_embeddings = group(weight_decay = 0)\noutput = group(weight_decay = 0.2)", True),
        ("tok_embeddings = group(weight_decay = 0)\noutput = group(weight_decay = 0)", False),
        ("{tok_embeddings, output} = group(weight_decay = 0)", False),
        ("norm = group(weight_decay = 0)", False),
    ],
)
def test_tied_parameters_must_share_a_group(rules: str, divided: bool) -> None:
    assert ("LP689" in codes(f"{ADAMW} {{ {rules} }}", base=TIED)) is divided


def test_optimizer_rules_apply_to_parameter_groups() -> None:
    assert "LP681" in codes(f"{ADAMW} {{ norm = group(lr = 0) }}")
    assert "LP681" in codes(f"{ADAMW} {{ norm = group(lr_scale = 0) }}")
    assert "LP683" in codes(
        f"precision (master = fp16, param = fp16)\n{ADAMW[:-1]}, eps = 1e-6) {{ norm = group(eps = 1e-9) }}"
    )
    assert "LP684" in codes(f"{ADAMW} {{ norm = group(lr = 3e4) }}")
    assert "LP684" in codes(f"{ADAMW} {{ norm = group(betas = [0.99, 0.9]) }}")


def test_unknown_parameter_path_is_reported() -> None:

    found = lint(
        f"{BASE}{ADAMW} {{ layers.*.attention.wq.bias = group(weight_decay = 0) }}\n", "a.plan", directory=Path()
    )
    [item] = [item for item in found.diagnostics if item.code.startswith("LP2")]
    assert "matches no module or parameter" in item.message


def test_muon_requires_matrices_of_hidden_layers() -> None:
    for path in ("**.weight", "tok_embeddings", "output.weight", "root"):
        assert "LP696" in codes(f"{ADAMW} {{ {path} = muon(lr = 0.02) }}"), path
    assert "LP696" not in codes(f"{ADAMW} {{ layers.** = muon(lr = 0.02) }}")


def test_hidden_layers_may_be_as_wide_as_the_vocabulary() -> None:
    model = 'model llama3("tiny", vocab_size = 128)\n'
    assert "LP696" not in codes(f"{model}{ADAMW} {{ layers.** = muon(lr = 0.02) }}")
    assert "LP696" in codes(f"{model}{ADAMW} {{ output = muon(lr = 0.02) }}")


def test_muon_refuses_stacked_expert_weights() -> None:
    base = BASE.replace('llama3("tiny")', 'mixtral("tiny")')
    assert "LP697" in codes(f"{ADAMW} {{ layers.** = muon(lr = 0.02) }}", base=base)
    assert "LP697" not in codes(f"{ADAMW} {{ layers.*.attention = muon(lr = 0.02) }}", base=base)
    closer = "layers.** = muon(lr = 0.02)\nlayers.*.feed_forward.experts = group(lr_scale = 0.5)"
    assert "LP697" not in codes(f"{ADAMW} {{ {closer} }}", base=base)


def test_muon_nesterov_without_momentum_is_reported() -> None:
    muon = "layers.** = muon(lr = 0.02, momentum = 0, nesterov = true)"
    assert "LP682" in codes(f"{ADAMW} {{ {muon} }}")
    assert "LP682" not in codes(f"{ADAMW} {{ {muon.replace('momentum = 0', 'momentum = 0.9')} }}")


def test_muon_of_parameters_in_host_memory_is_refused() -> None:
    sharded = "cluster h100_sxm(devices = 2)\nmesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n"
    muon = f"{sharded}{ADAMW} {{ layers.** = muon(lr = 0.02) }}\n"
    assert "LP010" in codes(f"{muon}offload (parameters = all)")
    assert "LP010" not in codes(f"{muon}offload (optimizer = all)")


def test_muon_state_is_one_value_per_element() -> None:
    def state(rules: str) -> int:
        found = lint(f"{BASE}{ADAMW} {rules}\n", "a.plan", directory=Path()).analysis
        assert found is not None
        bytes_ = state_bytes(found)
        assert bytes_ is not None
        return bytes_.optimizer

    found = lint(BASE, "a.plan", directory=Path()).analysis
    assert found is not None
    assert found.manifest is not None
    matrices = sum(
        shape[0] * shape[1]
        for name, shape in found.manifest.parameters()
        if name.startswith("layers.") and len(shape) == 2
    )
    assert state("") - state("{ layers.** = muon(lr = 0.02) }") == 4 * matrices
