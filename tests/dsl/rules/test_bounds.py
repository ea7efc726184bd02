"""Bounds without simulation: their boundaries, and that a real step does not go below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.magnitudes.bounds import idle_share, logits_bytes, shortest_step
from legoai.dsl.lint import lint
from support.texts.rule_plans import BASE, codes, diagnostics, message

FSDP = "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit }\n"
LARGE = BASE.replace('llama3("tiny")', 'llama3("8b")')
VOCABULARY = 128_256


def analysis(text: str, base: str = LARGE):
    found = lint(f'plan t\nextends "base.plan"\n{text}', "t.plan", directory=Path(), read=lambda path: base).analysis
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("", 10),
        ("loss fused", 2),
        ("loss chunked(4)", 2),
        ("precision (param = fp32)", 8),
        ("precision (param = bf16, output = fp32)", 8),
    ],
)
def test_logits_size_follows_their_dtypes(text: str, each: int):
    found = analysis(f"{FSDP}batch (global = 64, micro = 4, seq_len = 1024)\n{text}")
    assert logits_bytes(found) == 4 * 1024 * VOCABULARY * each


def test_output_of_units_is_no_dtype_of_logits_where_there_are_none():
    text = "batch (global = 32, micro = 4, seq_len = 1024)\nmesh (tp = 8)\nprecision (param = fp32, output = bf16)\n"
    assert logits_bytes(analysis(text)) == 4 * 1024 * VOCABULARY * 8


def test_logits_are_cut_over_context_and_tensor_parallel_ranks():
    text = "batch (global = 64, micro = 4, seq_len = 1024)\nloss fused\n"
    assert logits_bytes(analysis(text + "mesh (cp = 8)\ncontext on cp\n")) == 4 * 128 * VOCABULARY * 2
    assert (
        logits_bytes(analysis(text + "mesh (tp = 8)\nshard on tp { output = colwise }")) == 4 * 1024 * VOCABULARY // 4
    )


@pytest.mark.parametrize(("micro", "found"), [(4, False), (6, False), (8, True), (64, True)])
def test_logits_that_do_not_fit_are_an_error(micro: int, found: bool):
    text = f"{FSDP}batch (global = {8 * micro}, micro = {micro}, seq_len = 8192)\n"
    assert ("LP713" in codes(text, base=LARGE)) is found
    assert "LP713" not in codes(text + "loss chunked(16)\n" if micro < 64 else FSDP, base=LARGE)


def test_a_memory_budget_counts_the_logits():
    text = f"{FSDP}batch (global = 32, micro = 4, seq_len = 8192)\n"
    assert "LP713" not in codes(text + "require peak_memory <= 60GiB\n", base=LARGE)
    assert "LP713" in codes(text + "require peak_memory <= 40GiB\n", base=LARGE)


def test_step_time_bound_is_six_flops_per_weight_and_token():
    found = analysis(f"{FSDP}batch (global = 64, micro = 1, seq_len = 8192)\n")
    weights = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 4096 * VOCABULARY
    assert shortest_step(found) == pytest.approx(6 * weights * 64 * 8192 / (8 * 989.4e12))


@pytest.mark.parametrize(
    ("precision", "peak"),
    [
        ("param = fp32", 494.7e12),
        ("param = bf16", 989.4e12),
        ("param = bf16) { layers.*.feed_forward = float8", 1978.9e12),
    ],
)
def test_step_time_bound_is_by_the_fastest_rate_that_the_dtypes_allow(precision: str, peak: float):
    end = " }" if "{" in precision else ")"
    rule = "()" if "{" in precision else ""
    found = analysis(f"{FSDP}batch (global = 64, micro = 1, seq_len = 8192)\nprecision ({precision}{rule}{end}\n")
    weights = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 4096 * VOCABULARY
    assert shortest_step(found) == pytest.approx(6 * weights * 64 * 8192 / (8 * peak), rel=1e-3)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        ("step_time <= 2.9s", False),
        ("step_time <= 3.1s", True),
        ("step_time < 1ms", False),
        ("tokens_per_s >= 22100", False),
        ("tokens_per_s >= 12000", True),
        ("tokens_per_s <= 100000", True),
    ],
)
def test_step_budget_below_the_peak_rate_bound_is_refused(budget: str, kept: bool):
    text = f"{FSDP}batch (global = 64, micro = 1, seq_len = 8192)\nrequire {budget}\n"
    assert ("LP714" not in codes(text, base=LARGE)) is kept


def test_devices_without_rates_and_other_models_have_no_bound():
    cpu = BASE.replace("h100_sxm", "cpu(devices = 8)")
    assert "LP714" not in codes(FSDP + "require step_time <= 1us", base=cpu)


PIPELINE = "mesh (pp = 4, dp_shard = 2)\nfsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"


@pytest.mark.parametrize(
    ("schedule", "samples", "bound", "kept"),
    [
        ("schedule = 1F1B", 16, "5%", False),
        ("schedule = 1F1B", 16, "26%", True),
        ("schedule = 1F1B", 512, "5%", True),
        ("schedule = Interleaved1F1B, stages = 16", 16, "5%", False),
        ("schedule = Interleaved1F1B, stages = 16", 64, "5%", True),
        ("schedule = GPipe", 8, "10%", False),
        ("schedule = ZBVZeroBubble", 16, "5%", True),
    ],
)
def test_the_bubble_of_the_schedule_is_compared_with_its_budget(schedule: str, samples: int, bound: str, kept: bool):
    batch = f"batch (global = {samples}, micro = 1, seq_len = 256)\n"
    text = f"{PIPELINE}{batch}pipeline on pp ({schedule})\nrequire bubble <= {bound}\n"
    assert ("LP715" not in codes(text, base=LARGE)) is kept


def test_bubble_share_equals_the_published_formula():
    found = analysis(f"{PIPELINE}batch (global = 16, micro = 1, seq_len = 256)\npipeline on pp (schedule = 1F1B)\n")
    assert idle_share(found) == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("split", "uneven"),
    [
        ("[layers.1]", True),
        ("[layers.31]", True),
        ("[layers.4]", True),
        ("[layers.12]", False),
        ("[layers.16]", False),
        ("[layers.20]", False),
        ("even", False),
    ],
)
def test_stages_of_very_different_lengths_are_warned_of(split: str, uneven: bool):
    text = "mesh (pp = 2, dp_shard = 4)\nfsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
    assert ("LP829" in codes(f"{text}pipeline on pp (split = {split})\n", base=LARGE)) is uneven


def test_most_even_possible_split_is_clean():
    text = "mesh (pp = 8)\npipeline on pp (schedule = Interleaved1F1B, stages = 16, split = even(loss = 1))\n"
    assert "LP829" not in codes(text, base=LARGE)
    three = "cluster h100_sxm(devices = 3)\nmesh (pp = 3)\npipeline on pp (split = [layers.2, layers.3])\n"
    assert "LP829" not in codes(three)


@pytest.mark.parametrize(
    ("split", "uneven"),
    [
        ("even", True),
        ("[2, 2, 2, 2]", True),
        ("[1, 2, 2, 3]", True),
        ("[2, 3, 2, 1]", False),
        ("even(loss = 1)", False),
        ("even(loss = 4)", False),
        ("auto -> [1, 2, 2, 3]", False),
        ("[auto -> 1, auto -> 2, 2, 3]", False),
    ],
)
def test_output_layer_counts_with_its_operations(split: str, uneven: bool):
    """A head over a large vocabulary is worth 3.8 blocks, so that the last of four ranks is better left with one."""
    model = 'llama3("1b", n_layers = 8, tie_embeddings = false)'
    base = BASE.replace('llama3("tiny")', model)
    batch = "batch (global = 64, micro = 1, seq_len = 2048)\n"
    text = f"{batch}mesh (pp = 4, dp_shard = 2)\npipeline on pp (split = {split})\n"
    assert ("LP829" in codes(text, base=base)) is uneven
    found = [help for item in diagnostics(text, base=base) if item.code == "LP829" for help in item.help]
    assert all("write `split = even(loss = 1)`" in help for help in found)


def test_stages_of_one_rank_are_summed():
    text = "mesh (pp = 2, dp_shard = 4)\nfsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
    text += "pipeline on pp (schedule = ZBVZeroBubble, split = [SPLIT])\n"
    assert "LP829" not in codes(text.replace("SPLIT", "layers.10, layers.16, layers.26"), base=LARGE)
    found = message(text.replace("SPLIT", "layers.2, layers.16, layers.30"), "LP829", base=LARGE)
    assert "as much as 6.39 and 28 blocks" in found
