"""Rules about collectives: a schedule without effect is reported."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, diagnostics, message

FSDP = "mesh (dp_shard = 8)\nfsdp on dp_shard {{ layers.* = unit{} }}\n"
REPLICATE = "mesh (dp_replicate = 8)\nreplicate on dp_replicate\n"


@pytest.mark.parametrize(
    "option", ["reorder = true", "prefetch = units(forward = 1)", "unshard = selective", "reduce = last_micro_batch"]
)
def test_comm_options_require_their_collectives(option: str) -> None:
    assert "LP661" in codes(f"comm ({option})")
    assert "LP661" not in codes(f"{FSDP.format('')}comm ({option})")
    assert ("LP661" in codes(f"{REPLICATE}comm ({option})")) is not option.startswith("reduce")


def test_proactive_prefetch_of_a_graph_needs_reorder() -> None:
    graph = "mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
    prefetch = "prefetch = proactive(limit = 4GiB)"
    [refused] = [item for item in diagnostics(f"{graph}comm ({prefetch})") if item.code == "LP010"]
    assert any("`reorder = true`" in line for line in refused.help)
    assert "LP010" not in codes(f"{graph}comm (reorder = true, {prefetch})")


def test_bucket_must_match_fsdp_units() -> None:
    bucket = "comm {{ {} = bucket(module) }}"
    assert "LP661" in codes(bucket.format("layers.*"))
    assert "LP662" not in codes(FSDP.format("") + bucket.format("layers.*"))
    assert "LP662" not in codes(FSDP.format("") + bucket.format("root"))
    assert "neither `layers.0.feed_forward` nor" in message(
        FSDP.format("") + bucket.format("layers.*.feed_forward"), "LP662"
    )


@pytest.mark.parametrize(
    "rule",
    [
        "layers.*.attention = bucket(group)",
        "layers.*.attention = bucket(bytes(1MiB))",
        "layers.*.attention = bucket(module)",
        "norm = bucket(group)",
    ],
)
def test_bucket_of_a_graph_must_match_units(rule: str) -> None:
    graph = FSDP.format("").replace("dp_shard {", "dp_shard (backend = graph) {")
    assert "is a unit" in message(f"{graph}comm {{ {rule} }}", "LP662")
    assert "LP662" not in codes(f"{graph}comm {{ layers.* = bucket(group) }}")
    assert "LP662" not in codes(f"{graph}comm {{ layers.*.attention = bucket(compiler) }}")


@pytest.mark.parametrize(
    ("rules", "message_of"),
    [
        ("layers.* = bucket([1, 3])", None),
        ("layers.* = bucket([4])", None),
        ("layers.* = bucket([1, 2])", "the buckets hold 3 modules, and `layers.*` decides 4"),
        (
            "layers.* = bucket([2, 2]), layers.3 = bucket(module)",
            "the buckets hold 4 modules, and `layers.*` decides 3",
        ),
        ("layers.* = bucket([2, 1]), layers.3 = bucket(module)", None),
    ],
)
def test_bucket_must_hold_all_units_of_its_rule(rules: str, message_of: str | None) -> None:
    plan = FSDP.format("") + f"comm {{ {rules} }}"
    if message_of is None:
        assert "LP666" not in codes(plan)
    else:
        assert message(plan, "LP666") == message_of


def test_gradient_reduction_time_has_effect_only_under_accumulation() -> None:
    plan = FSDP.format("") + "comm (reduce = last_micro_batch)\n"
    assert "LP663" not in codes(plan)
    assert "LP663" in codes(plan + "batch (global = 8, micro = 1, seq_len = 256)")


def test_a_pipeline_reduces_after_the_last_micro_batch() -> None:
    plan = """
    mesh (pp = 2, dp_shard = 4)
    fsdp on dp_shard {{ layers.* = unit }}
    pipeline on pp
    comm {}
    """
    assert "LP664" in codes(plan.format("(reduce = every_micro_batch)"))
    assert "LP664" not in codes(plan.format("(reduce = last_micro_batch)"))
    assert "LP664" not in codes(plan.format("(prefetch = units(forward = 1))"))


@pytest.mark.parametrize(
    ("reshard", "forward", "backward"),
    [("after_forward", True, True), ("after_backward", True, False), ("never", True, False), ("2", True, True)],
)
def test_prefetch_requires_gathers_in_the_same_pass(reshard: str, forward: bool, backward: bool) -> None:
    units = f"fsdp on dp_shard {{ layers.* = unit(reshard = {reshard}), root = unit(reshard = never) }}\n"
    plan = f"mesh (dp_shard = 8)\n{units}"
    assert ("LP665" not in codes(f"{plan}comm (prefetch = units(forward = 1))")) is forward
    assert ("LP665" not in codes(f"{plan}comm (prefetch = units(backward = 1))")) is backward


@pytest.mark.parametrize(
    ("units", "idle"),
    [
        ("", True),
        ("{ root = unit(reshard = never) }", True),
        ("{ root = unit(reshard = after_forward) }", False),  # gathered again where backward begins
        ("{ layers.* = unit }", False),
    ],
)
@pytest.mark.parametrize("option", ["reorder = true", "reorder = by_time", "prefetch = proactive(limit = 1GiB)"])
def test_collectives_of_a_graph_of_one_unit_have_nothing_to_overlap_with(units: str, idle: bool, option: str) -> None:
    plan = f"mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) {units}\ncomm ({option})"
    assert ("LP665" in codes(plan)) is idle
    if idle:
        assert f"`{option.split()[0]}` has no effect: the model is one unit" in message(plan, "LP665")
    assert "LP665" not in codes(plan.replace("graph", "eager"))


@pytest.mark.parametrize(
    ("reshard", "samples", "something"),
    [
        ("after_forward", 8, True),
        ("after_backward", 16, True),
        ("after_backward", 8, False),
        ("never", 16, False),
    ],
)
def test_selective_unshard_requires_resharded_units(reshard: str, samples: int, something: bool) -> None:
    rules = f"{{ layers.* = unit(reshard = {reshard}), root = unit(reshard = {reshard}) }}"
    plan = (
        f"mesh (dp_shard = 8)\nbatch (global = {samples}, micro = 1, seq_len = 256)\n"
        f"fsdp on dp_shard (backend = graph) {rules}\ncomm (unshard = selective)\nrequire peak_memory <= 70GiB\n"
    )
    assert ("LP667" in codes(plan)) is not something
    assert "LP667" not in codes(plan.replace("graph", "eager"))


@pytest.mark.parametrize("asking", ["comm (unshard = selective)", "offload (activations = adaptive)"])
def test_limit_of_reserved_memory_is_none_for_passes_over_a_graph(asking: str) -> None:
    plan = f"mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) {{ layers.* = unit }}\n{asking}\n"
    [found] = (item for item in diagnostics(plan + "require reserved_memory <= 60GiB") if item.code == "LP010")
    assert "without a limit of active memory" in found.message
    assert any("add `require peak_memory <= 60GiB`: passes over a graph count active" in line for line in found.help)
    assert "LP010" not in codes(plan + "require peak_memory <= 60GiB\nrequire reserved_memory <= 62GiB")


def test_prefetching_every_unit_is_reported() -> None:
    assert "LP826" in codes(FSDP.format("") + "comm (prefetch = units(forward = 4))")  # four blocks and the root
    assert "LP826" not in codes(FSDP.format("") + "comm (prefetch = units(forward = 2))")
