"""The rules about choices between operators that compilation hides."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, message

TENSOR_PARALLEL = """
mesh (dp_replicate = 4, tp = 2)
replicate on dp_replicate
shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
"""


@pytest.mark.parametrize(
    ("checkpoint", "compiled", "found"),
    [
        ("layers.* = selective([matmul])", "layers.*.feed_forward = inductor", True),
        ("layers.* = selective([matmul])", "layers.3.feed_forward = aot_eager", True),
        ("layers.* = selective([matmul])", "layers.* = inductor", False),
        ("layers.* = selective([matmul])", "root = inductor", False),
        ("layers.* = budget(50%)", "layers.* = inductor", False),
        ("layers.* = budget(50%, by = greedy)", "layers.* = aot_eager", False),
        ("layers.* = budget(50%, by = ilp)", "layers.* = inductor", True),
        ("layers.* = budget(50%, by = ilp)", "layers.* = none", False),
        ("layers.* = budget(1GiB)", "layers.* = inductor", True),
        ("root = budget(50%)", "root = inductor", False),
        ("layers.* = budget(50%)", "root = inductor", True),
        ("layers.* = budget(50%)", "layers.*.feed_forward = inductor", True),
        ("layers.*.attention = budget(50%)", "layers.*.feed_forward = inductor", False),
        ("layers.* = full", "layers.*.feed_forward = inductor", False),
    ],
)
def test_selective_recomputation_of_compiled_operators_is_reported(checkpoint: str, compiled: str, found: bool) -> None:
    text = f"checkpoint {{ {checkpoint} }}\ncompile {{ {compiled} }}"
    assert ("LP628" in codes(text)) is found


def test_message_names_the_first_module_with_compiled_operators() -> None:
    text = "checkpoint { layers.* = selective([matmul]) }\ncompile { layers.3.feed_forward = inductor }"
    assert "the operators of `layers.3`" in message(text, "LP628")


@pytest.mark.parametrize(
    ("factory", "found"), [("build", False), ("build_random", True), ("build_random, drop = 0.0", False)]
)
def test_compiler_budget_of_a_random_module_is_refused(factory: str, found: bool) -> None:
    name, *options = factory.split(", ")
    model = f'model python("support.models.factories:{name}"{"".join(f", {item}" for item in options)})\n'
    for compiled, refused in (("compile { blocks.* = inductor }", found), ("", False)):
        text = f"{model}checkpoint {{ blocks.* = budget(50%) }}\n{compiled}"
        assert ("LP639" in codes(text)) is refused


def test_random_state_of_compiler_budgets_is_never_kept() -> None:
    text = "checkpoint (preserve_rng = true) { layers.* = budget(50%) }\n"
    assert "LP658" not in codes(text)
    assert "compiled modules with a budget" in message(f"{text}compile {{ layers.* = inductor }}", "LP658")


def test_random_state_is_not_kept_by_a_graph() -> None:
    text = (
        "mesh (dp_shard = 8)\nfsdp on dp_shard (backend = {}) {{ layers.* = unit }}\n"
        "checkpoint (preserve_rng = {}) {{ layers.* = full }}"
    )
    assert "`backend = graph` restores no random state" in message(text.format("graph", "true"), "LP658")
    for backend, keeps in (("eager", "true"), ("graph", "false")):
        assert "LP658" not in codes(text.format(backend, keeps))


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        ("[matmul]", True),
        ("[attention, matmul]", False),
        ("[attention]", False),
        ('["aten._scaled_dot_product_flash_attention", matmul]', False),
        ('["aten._scaled_dot_product_cudnn_attention.default"]', False),
        ('["aten._scaled_dot_product_flash_attention_backward"]', True),
        ('["aten._scaled_dot_product_flash_attention_for_cpu"]', True),
    ],
)
def test_compiled_tensor_parallel_attention_is_saved(keep: str, found: bool) -> None:
    text = f"compile {{ layers.* = inductor }}\ncheckpoint {{ layers.* = selective({keep}) }}"
    assert ("LP629" in codes(TENSOR_PARALLEL + text)) is found
    assert "LP629" not in codes(text)
