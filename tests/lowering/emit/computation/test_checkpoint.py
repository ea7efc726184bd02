"""Recomputation changes memory and time, and no number."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path

import pytest

import legoai.runtime
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.runtime import RecomputeWithin
from legoai.runtime.torch_internals.checkpointing import recompute_freely
from support.marks import NEEDS_SOLVER, some_slow
from support.models.zoo import CONFIGS, SEQUENCE
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.training.meshed import TRAINING, TWO_BLOCKS, UNITS, text_of
from support.training.operator_calls import Calls
from support.training.staged import DOUBLE, PLAIN_DOUBLE, STEPS, TOLERANCE, assert_close, train

BOTH = f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}\nfsdp on dp_shard {UNITS}{DOUBLE}"
SHARDED = f"mesh (dp_shard = 4)\nfsdp on dp_shard {UNITS}{DOUBLE}"
RULES = {
    "selective": "layers.* = selective([attention, alternate_matmul])",
    "selective, with collectives and an operator by name": 'layers.* = selective([collective, "aten.silu"])',
    "greedy budget": "layers.* = budget(50%, by = greedy)",
    "knapsack in bytes": "layers.* = budget(150KiB)",
    "integer program": "layers.* = budget(50%, by = ilp)",
    "all kinds": """
  layers.0               = selective([matmul, attention])
  layers.1               = budget(20%)
  layers.2               = full
  layers.3.feed_forward  = budget(80%)
  layers.3.attention     = selective(["aten.mm.default"])""",
}

MARKS = {"integer program": (NEEDS_SOLVER,)}


@pytest.mark.slow
@pytest.mark.parametrize("rules", [pytest.param(name, marks=MARKS.get(name, ())) for name in RULES])
def test_every_treatment_under_fsdp_and_tp_equals_one_process(rules: str, gloo, data, alone):
    for result in gloo(4)(train, text_of(f"{BOTH}checkpoint {{ {RULES[rules]} }}"), data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
def test_budget_of_a_layer_whose_input_is_cut_by_the_product_equals_one_process(gloo, data, alone):
    """The weight is cut along the features of its input, which is whole until the product cuts it."""
    cut = "mesh (tp = 4)\nshard on tp { layers.*.attention.wq.weight = shard(1) }\n"
    rules = "checkpoint { layers.* = budget(50%, by = greedy) }"
    for result in gloo(4)(train, text_of(f"{cut}{PLAIN_DOUBLE}{rules}"), data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [pytest.param(name, marks=MARKS.get(name, ())) for name in RULES])
def test_every_fully_sharded_treatment_equals_one_process(rules: str, gloo, data, alone):
    for result in gloo(4)(train, text_of(f"{SHARDED}checkpoint {{ {RULES[rules]} }}"), data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [pytest.param(name, marks=MARKS.get(name, ())) for name in RULES])
def test_every_treatment_on_one_process_changes_no_number(rules: str, gloo, data, alone):
    [result] = gloo(1)(train, text_of(f"{PLAIN_DOUBLE}checkpoint {{ {RULES[rules]} }}"), data)
    assert_close(result, alone, TOLERANCE)


def counted(text: str, data: str) -> Counter[str]:
    with Calls() as calls:
        train(text, data)
    return calls.counts


def test_only_unsaved_operators_are_recomputed(gloo, data):
    def counts(rules: str) -> Counter[str]:
        return gloo(1)(counted, text_of(f"{PLAIN_DOUBLE}checkpoint {{ {rules} }}", TWO_BLOCKS), data)[0]

    attention = "_scaled_dot_product_flash_attention_for_cpu"
    micro_batches, layers = 2, 2
    blocks = STEPS * micro_batches * layers
    none, full = counts("layers.* = none"), counts("layers.* = full")
    assert full[attention] - none[attention] == blocks
    assert full["mm"] - none["mm"] == 6 * blocks  # of seven: recomputation stops before the last, which nothing needs
    kept = counts("layers.* = selective([attention])")
    assert kept[attention] == none[attention]
    assert kept["mm"] == full["mm"]
    kept = counts("layers.* = selective([alternate_matmul])")
    assert kept[attention] == full[attention]
    assert kept["mm"] - none["mm"] == 3 * blocks  # wk, wo and w3
    kept = counts('layers.* = selective(["aten.mm.default", attention])')
    assert kept["mm"] == none["mm"]
    assert kept["silu"] == full["silu"] == none["silu"] + blocks
    by_stride = counts("layers.* = every(2)")
    assert by_stride["mm"] - none["mm"] == 3 * blocks
    budget = counts("layers.* = budget(0%)")
    measured = layers * 7  # the first forward of each block runs once more
    assert budget["mm"] == full["mm"] + measured
    assert none["mm"] < counts("layers.* = budget(40%)")["mm"] < budget["mm"]


SHARED = f'plan shared\nmodel python("support.models.factories:build_shared")\ncluster cpu(devices = 2)\n{TRAINING}'


def test_module_with_several_places_is_recomputed_in_all_of_them(gloo, data):
    def counts(rule: str) -> Counter[str]:
        text = lowered(f"{SHARED}{PLAIN_DOUBLE}checkpoint {{ blocks.* = {rule} }}").text
        return gloo(1)(counted, text, data)[0]

    assert counts("full")["gelu"] == 2 * counts("none")["gelu"] > 0


def test_recomputed_module_with_several_places_may_be_a_unit(gloo, data):
    [alone] = gloo(1)(train, lowered(f"{SHARED}{PLAIN_DOUBLE}").text, data)
    sharded = "mesh (dp_shard = 2)\nfsdp on dp_shard { blocks.* = unit }\ncheckpoint { blocks.* = full }\n"
    for result in gloo(2)(train, lowered(f"{SHARED}{sharded}{DOUBLE}").text, data):
        assert_close(result, alone, TOLERANCE)


def test_program_names_the_saved_operators():
    text = lowered(f"{HEAD}{TRAINING}checkpoint {{ {RULES['all kinds']} }}").text
    assert 'context_fn=keep_outputs("matmul", "attention"),' in text
    assert 'checkpoint_fn=RecomputeWithin(0.2, by="knapsack")' in text
    assert 'context_fn=keep_outputs("aten.mm.default")' in text
    assert "    RecomputeWithin,\n" in text
    assert "    keep_outputs,\n" in text
    text = lowered(f"{HEAD}{TRAINING}checkpoint (preserve_rng = false) {{ layers.* = budget(1MiB, by = greedy) }}").text
    assert 'checkpoint_fn=RecomputeWithin(1048576, by="greedy"),' in text
    assert "preserve_rng_state=False" in text


@pytest.mark.parametrize(
    ("model", "option", "kept"),
    [
        ('llama3("tiny")', "", False),
        ('llama3("tiny")', "(preserve_rng = true)", True),
        ('llama3("tiny")', "(preserve_rng = false)", False),
        ('python("support.models.factories:build")', "", False),
        ('python("support.models.factories:build")', "(preserve_rng = true)", True),
        ('python("support.models.factories:build_random")', "", True),
        ('python("support.models.factories:build_random")', "(preserve_rng = false)", False),
        ('python("support.models.factories:build_random", drop = 0.0)', "", False),
        ('python("support.models.factories:build_unfollowed")', "", True),
    ],
)
def test_rng_state_is_preserved_for_random_models_or_on_request(model, option, kept):
    checkpoint = "blocks.*" if "factories" in model else "layers.*"
    text = lowered(
        f"{HEAD}{TRAINING}checkpoint {option} {{ {checkpoint} = full }}".replace('llama3("tiny")', model)
    ).text
    assert ("preserve_rng_state=False" not in text) is kept
    assert "checkpoint_wrapper(" in text


def test_rng_state_is_preserved_per_module_with_random_operators():
    model = 'python("support.models.factories:build_random")'
    text = lowered(
        f"{HEAD}{TRAINING}checkpoint {{ embeddings = full, blocks.* = full }}".replace('llama3("tiny")', model)
    ).text
    assert "model.embeddings = checkpoint_wrapper(model.embeddings, preserve_rng_state=False)" in text
    assert "checkpoint_wrapper(block)" in text


@pytest.mark.parametrize(("kind", "early"), [("none", True), ("noise", False)])
@pytest.mark.parametrize("treatment", ["full", "selective([matmul])", "budget(50%)"])
def test_recomputation_goes_on_where_an_operator_fills_noise_late(treatment: str, kind: str, early: bool):
    model = f'python("support.models.in_place_factories:build", kind = "{kind}")'
    text = lowered(
        f"{HEAD}{TRAINING}checkpoint {{ embeddings = full, blocks.* = {treatment} }}".replace('llama3("tiny")', model)
    ).text
    assert text.count("early_stop=False") == (0 if early else 1)


@pytest.mark.parametrize(("kind", "kept"), [("gpt2", True), ("llama", False), ("t5", True)])
def test_rng_state_is_preserved_for_hugging_face_dropout(kind: str, kept: bool, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    blocks = {"gpt2": "transformer.h.*", "llama": "model.layers.*", "t5": "decoder.block.*"}[kind]
    plan = f"""\
plan hf
model huggingface("config.json")
cluster cpu(devices = 1)
batch (global = 8, micro = 4, seq_len = {SEQUENCE})
checkpoint {{ {blocks} = full }}
"""
    linted = lint(plan, "hf.plan", directory=tmp_path)
    assert linted.analysis is not None and not linted.has_errors
    text = lower(linted.analysis).text
    assert ("preserve_rng_state=False" not in text) is kept
    off = lint(plan.replace("checkpoint", "checkpoint (preserve_rng = false)"), "hf.plan", directory=tmp_path)
    assert ("LP659" in {item.code for item in off.diagnostics}) is kept


def kept_and_computed(text: str, data: str) -> tuple[list[Counter[str]], Counter[str]]:
    """Operators saved by each module's policy on this rank, and counts of operators in recomputation."""
    policies: list[RecomputeWithin] = []
    calls = Calls()

    class Noted(RecomputeWithin):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            policies.append(self)

    @contextlib.contextmanager
    def counted(*args):
        with calls, recompute_freely(*args):
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legoai.runtime, "RecomputeWithin", Noted)
        patch.setattr("legoai.runtime.recomputation.policies.recompute_freely", counted)
        train(text, data)
    names = [
        [operator.name().partition("::")[2].partition(".")[0] for operator, _ in one.kept or ()] for one in policies
    ]
    return list(map(Counter, names)), calls.counts


POLICIES = {
    "FSDP and tensor parallelism": (4, "layers.*", BOTH),
    "pipeline": (2, "layers.*", f"mesh (pp = 2)\npipeline on pp (schedule = 1F1B)\n{PLAIN_DOUBLE}"),
    "attention beside compiled feed-forwards": (
        1,
        "layers.*.attention",
        f"{PLAIN_DOUBLE}compile {{ layers.*.feed_forward = aot_eager }}\n",
    ),
}


@pytest.mark.parametrize(
    "by", [pytest.param("knapsack", marks=pytest.mark.slow), pytest.param("ilp", marks=NEEDS_SOLVER)]
)
@pytest.mark.parametrize("case", some_slow(POLICIES, "FSDP and tensor parallelism"))
def test_operators_saved_by_the_policy_are_not_recomputed(case: str, by: str, gloo, data):
    ranks, path, body = POLICIES[case]
    head = HEAD.replace("devices = 4", f"devices = {ranks}")

    def trained(budget: str):
        rules = f"checkpoint {{ {path} = budget({budget}, by = {by}) }}"
        return gloo(ranks)(kept_and_computed, text_of(f"{body}{rules}", head), data)

    micro_batches = 2
    for (nothing, every), (kept, fewer) in zip(trained("0%"), trained("45%"), strict=True):
        assert len(kept) == len(nothing) > 0
        assert not any(nothing)
        assert all(sum(policy.values()) > 1 for policy in kept)
        expected = Counter(name for policy in kept for name in policy.elements() for _ in range(STEPS * micro_batches))
        assert {name: every[name] - fewer[name] for name in expected} == expected
        assert expected["mm"] > 0
