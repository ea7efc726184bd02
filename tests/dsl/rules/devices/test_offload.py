"""Rules about offloading."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, message

FSDP = "mesh (dp_shard = 8)\nfsdp on dp_shard (backend = {}) {{ layers.* = unit }}\n"


def test_offloading_on_a_cpu_is_reported() -> None:
    assert "LP671" in codes("cluster cpu(devices = 4)\noffload (activations = all)")
    assert "LP671" not in codes("offload (activations = all)")


@pytest.mark.parametrize(
    ("backend", "option", "said"),
    [
        ("eager", "activations = all", "has no effect"),
        ("graph", "activations = all", "`backend = graph` copies them"),
        ("graph", "parameters = all", "has no effect"),
    ],
)
def test_copies_of_the_graph_backend_on_a_cpu_are_called_so(backend: str, option: str, said: str) -> None:
    text = f"cluster cpu(devices = 8)\n{FSDP.format(backend)}offload ({option})"
    assert said in message(text, "LP671")


def test_parameter_offload_requires_fsdp_units() -> None:
    assert "LP672" in codes("offload (parameters = all)")
    assert "LP672" not in codes(FSDP.format("eager") + "offload (parameters = all)")


@pytest.mark.parametrize("option", ["optimizer = adaptive", "optimizer = bytes(4GiB)", "parameters = bytes(4GiB)"])
def test_partial_offload_requires_the_graph_backend(option: str) -> None:
    assert "needs one traced graph" in message(FSDP.format("eager") + f"offload ({option})", "LP673")
    assert "LP673" not in codes(FSDP.format("graph") + f"offload ({option})")
    assert "LP673" not in codes(FSDP.format("eager") + "offload (optimizer = all, activations = adaptive)")


@pytest.mark.parametrize(("amount", "fits"), [("1023B", False), ("1KiB", True), ("1GiB", True)])
def test_an_amount_below_every_parameters_state_is_reported(amount: str, fits: bool) -> None:
    plan = f"{FSDP.format('graph')}offload (optimizer = bytes({amount}))"
    assert ("LP677" in codes(plan)) is not fits
    if not fits:
        # 8 elements of a norm and two values of each: a block of the allocator for either.
        assert message(plan, "LP677").endswith("that of `layers.0.attention_norm.weight`, is 1KiB on a rank")


def test_optimizer_offload_beside_parameter_offload_is_reported() -> None:
    parameters = FSDP.format("eager") + "offload (parameters = all"
    assert "its state is there too" in message(f"{parameters}, optimizer = none)", "LP675")
    for rest in (")", ", optimizer = all)"):
        assert "LP675" not in codes(parameters + rest)


def test_offload_without_effect_is_reported() -> None:
    assert "LP674" in codes("offload (optimizer = none)")
    assert "LP674" not in codes("offload (activations = all)")


@pytest.mark.parametrize(
    ("optimizer", "option", "found"),
    [
        ("sgd(lr = 0.1)", "optimizer = all", True),
        ("sgd(lr = 0.1)", "optimizer = all, activations = all", True),
        ("sgd(lr = 0.1)", "optimizer = all, parameters = all", False),
        ("sgd(lr = 0.1)", "activations = all", False),
        ("sgd(lr = 0.1, momentum = 0.9)", "optimizer = all", False),
        ("adamw(lr = 1e-3)", "optimizer = all", False),
    ],
)
def test_offload_of_an_optimizer_without_state_is_reported(optimizer: str, option: str, found: bool) -> None:
    assert ("LP674" in codes(f"{FSDP.format('eager')}optimizer {optimizer}\noffload ({option})")) is found
