"""A lowered pipeline trains as one process does, under every schedule and on every mesh around it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules

from support.marks import slow_but, some_slow
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered, refusals, without_hash
from support.training.staged import (
    DOUBLE,
    KEPT,
    PLAIN_DOUBLE,
    SCHEDULES,
    TOLERANCE,
    TRAINING,
    assert_close,
    text_of,
    together,
    train,
)


@pytest.mark.parametrize("schedule", slow_but(SCHEDULES, "1F1B", "InterleavedZeroBubble"))
def test_two_and_four_stages_equal_one_process(schedule: str, gloo, data, unstaged):
    text = text_of(f"mesh (pp = 2)\npipeline on pp (schedule = {schedule})\n{PLAIN_DOUBLE}")
    results = gloo(2)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


@pytest.mark.parametrize(
    "schedule",
    some_slow(SCHEDULES, "GPipe", "LoopedBFS", "1F1B", "InterleavedZeroBubble", "Interleaved1F1B", "DualPipeV"),
)
def test_sharded_stages_equal_one_process(schedule: str, gloo, data, unstaged):
    text = text_of(f"mesh (pp = 2, dp_shard = 2)\n{KEPT}pipeline on pp (schedule = {schedule})\n{DOUBLE}")
    results = gloo(4)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


def test_stages_with_separate_treatments_equal_one_process(gloo, data, unstaged):
    units = "fsdp on dp_shard { layers.* = stages([unit, unit(reshard = after_backward)]), root = unit }\n"
    kept = "checkpoint { layers.* = stages([full, first(1, selective([attention]))]) }\n"
    text = text_of(f"mesh (pp = 2, dp_shard = 2)\n{units}{kept}pipeline on pp (schedule = 1F1B)\n{DOUBLE}")
    results = gloo(4)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", some_slow(["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"], "GPipe", "LoopedBFS"))
def test_compiled_stages_equal_one_process(schedule: str, gloo, data, unstaged):
    compiled = "compile { layers.* = aot_eager }\n"
    text = text_of(f"mesh (pp = 2, dp_shard = 2)\n{KEPT}{compiled}pipeline on pp (schedule = {schedule})\n{DOUBLE}")
    results = gloo(4)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


COMPOSITIONS = {
    "recomputed, backward in two parts": f"""
mesh (pp = 2, tp = 2)
{SEQUENCE_PARALLEL}
checkpoint {{ layers.* = full }}
pipeline on pp (schedule = ZBVZeroBubble)
{PLAIN_DOUBLE}""",
    "units that are recomputed, backward in two parts": f"""
mesh (pp = 2, dp_shard = 2)
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit }}
checkpoint {{ layers.* = every(2), layers.3.feed_forward = full, norm = full }}
pipeline on pp (schedule = InterleavedZeroBubble)
{DOUBLE}""",
    "tensor and sequence parallel": f"""
mesh (pp = 2, tp = 2)
{SEQUENCE_PARALLEL}
pipeline on pp (schedule = 1F1B)
{PLAIN_DOUBLE}""",
    "tensor and sequence parallel, backward in two parts": f"""
mesh (pp = 2, tp = 2)
{SEQUENCE_PARALLEL}
pipeline on pp (schedule = ZBVZeroBubble)
{PLAIN_DOUBLE}""",
    "an embedding alone on its stage": f"""
mesh (pp = 2, tp = 2)
{SEQUENCE_PARALLEL}
pipeline on pp (split = [layers.0])
{PLAIN_DOUBLE}""",
    "stages unlike each other": f"""
mesh (pp = 2, tp = 2)
shard on tp {{
  tok_embeddings                      = rowwise
  layers.{{1, 3}}.feed_forward.{{w1, w3}} = colwise
  layers.{{1, 3}}.feed_forward.w2       = rowwise
  layers.0.feed_forward               = inputs(from = replicate, to = replicate)
  layers.0.feed_forward.{{w1, w3}}.weight = shard(0)
  layers.0.feed_forward.w2.weight     = shard(1)
  layers.0.feed_forward.w2            = outputs(from = partial, to = replicate)
  output                              = colwise(output = replicate)
}}
checkpoint {{ layers.{{0, 1}} = full, layers.2.attention = full, norm = full }}
pipeline on pp (schedule = GPipe, split = [layers.1])
{PLAIN_DOUBLE}""",
    "units that free their parameters": f"""
mesh (pp = 2, dp_shard = 2)
fsdp on dp_shard {{
  layers.*                 = unit
  layers.0.attention       = unit
  {{tok_embeddings, output}} = unit
}}
checkpoint {{ layers.* = every(2) }}
pipeline on pp (schedule = Interleaved1F1B)
{DOUBLE}""",
    "replicas": f"""
mesh (pp = 2, dp_replicate = 2)
replicate on dp_replicate
pipeline on pp (schedule = InterleavedZeroBubble)
{DOUBLE}""",
    "parts of each sequence": f"""
mesh (pp = 2, cp = 2)
fsdp on cp {{ layers.* = unit(reshard = after_backward), root = unit }}
context on cp (rotate = allgather, balance = head_tail)
pipeline on pp (schedule = 1F1B)
{DOUBLE}""",
    "two passes in a step": f"""
mesh (pp = 2, dp_shard = 2)
{KEPT}
pipeline on pp (schedule = GPipe, microbatches = 2)
{DOUBLE}""",
    "four ranks, blocks of their own": f"""
mesh (pp = 4)
pipeline on pp (schedule = GPipe, split = [layers.0, layers.3, output])
{PLAIN_DOUBLE}""",
}


@pytest.mark.parametrize(
    "name",
    slow_but(COMPOSITIONS, "units that free their parameters"),
)
def test_pipeline_with_other_parallelism_equals_one_process(name: str, gloo, data, unstaged):
    results = gloo(4)(train, text_of(COMPOSITIONS[name]), data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_kinds_of_parallelism_equal_one_process(schedule: str, gloo, data, unstaged):
    text = text_of(f"""
mesh (pp = 2, dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
{KEPT}
checkpoint {{ layers.* = every(2) }}
pipeline on pp (schedule = {schedule})
{DOUBLE}""")
    results = gloo(8)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


@pytest.mark.slow
def test_four_kinds_of_parallelism_equal_one_process(gloo, data, unstaged):
    text = text_of(f"""
mesh (pp = 2, cp = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on cp {{ layers.* = unit(reshard = after_backward), root = unit }}
context on cp (rotate = allgather, balance = head_tail)
pipeline on pp (schedule = Interleaved1F1B)
{DOUBLE}""")
    results = gloo(8)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


@pytest.mark.slow
def test_sharded_and_replicated_stages_equal_one_process(gloo, data, unstaged):
    text = text_of(f"""
mesh (pp = 2, dp_replicate = 2, dp_shard = 2)
fsdp on dp_replicate, dp_shard {{ layers.* = unit, root = unit }}
pipeline on pp (schedule = GPipe)
{DOUBLE}""")
    results = gloo(8)(train, text, data, evaluate_every=2, evaluate_batches=2)
    assert_close(together(results), unstaged, TOLERANCE)


MODELS = {
    "gpt2": """gpt2("small", dim = 32, n_heads = 4, n_layers = 4, vocab_size = 256, max_seq_len = 32,
        tie_embeddings = false)""",
    "mixtral": """mixtral("8x7b", dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 32, n_layers = 4, n_experts = 4,
        vocab_size = 256, max_seq_len = 32, head_dim = 16, qk_norm = true, attention_bias = true)""",
    "llama3": """llama3("tiny", head_dim = 32, attention_bias = true, mlp_bias = true, qk_norm = true,
        rope_type = "yarn", rope_scaling = 4)""",
}


@pytest.mark.parametrize("model", some_slow(MODELS, "gpt2", "llama3"))
def test_every_language_model_in_stages_equals_one_process(model: str, gloo, data):
    head = HEAD.replace('llama3("tiny")', MODELS[model])
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    results = gloo(2)(
        train, text_of(f"mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n{PLAIN_DOUBLE}", head), data
    )
    assert_close(together(results), one, TOLERANCE)


UNITS = "fsdp on dp_shard { layers.* = unit(reshard = after_backward), {norm, output} = unit, root = unit }\n"


@pytest.mark.parametrize(
    ("axes", "units", "precision"),
    [
        pytest.param("", "", "param = bf16", id="autocast", marks=pytest.mark.slow),
        pytest.param(", dp_shard = 2", UNITS, "param = bf16, reduce = fp32", id="units", marks=pytest.mark.slow),
        pytest.param(
            ", dp_shard = 2", UNITS, "param = bf16, reduce = fp32, output = fp32", id="units with outputs in fp32"
        ),
        pytest.param(
            ", dp_replicate = 2",
            "replicate on dp_replicate\n",
            "param = bf16, reduce = fp32",
            id="replicas",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mixed_precision_in_stages_equals_one_process(axes, units, precision, gloo, data):
    """The same products round to bf16, so that only sums in fp32 differ, by the order in which they are taken."""
    alone = f"mesh (dp_shard = 1)\n{units}precision ({precision})"
    [one] = gloo(1)(train, lowered(f"{HEAD}{TRAINING}{alone}").text, data)
    body = f"mesh (pp = 2{axes})\n{units}pipeline on pp (schedule = Interleaved1F1B)\nprecision ({precision})"
    result = together(gloo(4 if axes else 2)(train, lowered(f"{HEAD}{TRAINING}{body}").text, data))
    assert result["loss"] == pytest.approx(one["loss"], rel=2e-4)
    assert result["norm"] == pytest.approx(one["norm"], rel=1e-2)


PIPELINE = f"mesh (pp = 2, dp_shard = 2)\n{KEPT}pipeline on pp (schedule = Interleaved1F1B)\n{DOUBLE}"
SHARDED = f"mesh (dp_shard = 4)\nfsdp on dp_shard {{ layers.* = unit, root = unit }}\n{DOUBLE}"
V_SHAPED = f"mesh (pp = 2, dp_shard = 2)\n{KEPT}pipeline on pp (schedule = DualPipeV)\n{DOUBLE}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(PIPELINE, SHARDED, id="from stages to one model", marks=pytest.mark.slow),
        pytest.param(SHARDED, PIPELINE, id="from one model to stages", marks=pytest.mark.slow),
        pytest.param(PIPELINE, V_SHAPED, id="to other stages"),
    ],
)
def test_checkpoint_continues_under_another_plan(first: str, second: str, gloo, data, unstaged, tmp_path):
    gloo(4)(train, text_of(first), data, out=tmp_path, steps=1)
    result = together(gloo(4)(train, text_of(second), data, out=tmp_path))
    assert result["resumed_from"] == 1
    assert result["loss"] == pytest.approx(unstaged["loss"][1:], abs=TOLERANCE)
    assert_close({**unstaged, "loss": [], "norm": [], "validations": ()}, {**result, "loss": [], "norm": []}, TOLERANCE)


def test_pipeline_checkpoint_continues_on_one_process(gloo, data, unstaged, tmp_path):
    text = text_of(f"mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n{PLAIN_DOUBLE}")
    gloo(2)(train, text, data, out=tmp_path, steps=1)
    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE), data, out=tmp_path)
    assert result["resumed_from"] == 1
    assert_close({**result, "loss": [], "norm": []}, {**unstaged, "loss": [], "norm": [], "validations": ()}, TOLERANCE)


@pytest.mark.parametrize("schedule", slow_but(["1F1B", "InterleavedZeroBubble"]))
def test_resumed_pipeline_equals_an_uninterrupted_one_bitwise(schedule: str, gloo, data, tmp_path):
    text = text_of(f"mesh (pp = 2, dp_shard = 2)\n{KEPT}pipeline on pp (schedule = {schedule})\n{DOUBLE}")
    whole = together(gloo(4)(train, text, data))
    gloo(4)(train, text, data, out=tmp_path, steps=1)
    rest = together(gloo(4)(train, text, data, out=tmp_path))
    assert rest["resumed_from"] == 1
    assert (rest["loss"], rest["norm"]) == (whole["loss"][1:], whole["norm"][1:])
    for name, parameter in rest["parameters"].items():
        assert torch.equal(parameter, whole["parameters"][name]), name


def order_file(path: Path, schedule: str, style: str, *, communication: bool) -> None:
    """Write the order of one of torch's schedules for 2 ranks, 4 stages and 4 micro batches, as torch writes it."""

    def stage(index: int) -> SimpleNamespace:
        first, last = index == 0, index == 3
        return SimpleNamespace(
            num_stages=4, group_size=2, group_rank=0, stage_index=index, submod=None, is_first=first, is_last=last
        )

    made = getattr(schedules, f"Schedule{schedule}")(
        [stage(index) for index in ((0, 3) if style == "v" else (0, 2))], 4
    )
    made._dump_csv(str(path), format="compute_comms" if communication else "compute_only")


@pytest.mark.parametrize(
    ("schedule", "style", "communication"),
    [
        pytest.param("ZBVZeroBubble", "v", False, marks=pytest.mark.slow),
        pytest.param("DualPipeV", "v", True, marks=pytest.mark.slow),
        ("Interleaved1F1B", "loop", False),
    ],
)
def test_order_file_equals_one_process(schedule: str, style: str, communication: bool, gloo, data, unstaged, tmp_path):
    order_file(tmp_path / "order.csv", schedule, style, communication=communication)
    body = f'mesh (pp = 2, dp_shard = 2)\n{KEPT}pipeline on pp (schedule = csv("order.csv"))\n{DOUBLE}'
    text = lowered(f"{HEAD}{TRAINING}{body}", name=str(tmp_path / "tiny.plan")).text
    (tmp_path / "order.csv").unlink()  # the program holds the order
    results = gloo(4)(train, text, data, evaluate_every=2, evaluate_batches=4)
    assert_close(together(results), unstaged, TOLERANCE)


def why(body: str, head: str = HEAD) -> list[str]:
    found = refusals(f"{head}{TRAINING}{body}")
    assert {item.code for item in found} <= {"LP010"}
    return [item.message for item in found]


def test_every_option_changes_the_program():
    plain = lowered(f"{HEAD}{TRAINING}mesh (pp = 2)\npipeline on pp{{}}\n".replace("{}", " (schedule = GPipe)"))
    texts = {plain.text.replace(plain.digest, "")}
    options = [f"schedule = {schedule}" for schedule in SCHEDULES if schedule != "GPipe"]
    options += [
        "schedule = LoopedBFS, stages = 4, split = [layers.0, layers.1, layers.2]",
        "schedule = GPipe, split = [layers.3]",
        "schedule = GPipe, microbatches = 2",
    ]
    for option in options:
        program = lowered(f"{HEAD}{TRAINING}mesh (pp = 2)\npipeline on pp ({option})\n")
        texts.add(program.text.replace(program.digest, ""))
    assert len(texts) == 1 + len(options)


def test_blocks_are_split_evenly_with_fewer_at_the_ends():
    head = HEAD.replace('"tiny"', '"tiny", n_layers = 10')
    text = text_of("mesh (pp = 4)\npipeline on pp (schedule = GPipe)", head)
    stages = ast.literal_eval(re.search(r"^STAGES = (\(.*?^\))", text, re.DOTALL | re.MULTILINE)[1])
    assert [len([path for path in stage if path.startswith("layers.")]) for stage in stages] == [2, 3, 3, 2]
    assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ("norm", "output")


def test_pipeline_over_one_rank_changes_nothing():
    plain, idle = lowered(f"{HEAD}{TRAINING}"), lowered(f"{HEAD}{TRAINING}pipeline on pp (schedule = GPipe)")
    assert without_hash(idle) == without_hash(plain)


def test_pipeline_that_would_train_wrongly_is_refused():
    [between] = why(f"mesh (pp = 2, tp = 2)\n{SEQUENCE_PARALLEL}pipeline on pp (schedule = GPipe, split = [output])\n")
    assert between.startswith("what arrives at `output` is not known to be one plain tensor")
    cut = SEQUENCE_PARALLEL.replace("rowwise(output = shard(1))", "rowwise(output = replicate)", 1)
    cut = cut.replace("{\n", "{\n  layers.0 = inputs(from = [replicate, none], to = [shard(1), none])\n", 1)
    split = "split = [layers.0, layers.1, layers.2]"
    [unlike] = why(f"mesh (pp = 4, tp = 2)\n{cut}pipeline on pp (schedule = GPipe, {split})")
    assert unlike.startswith("what arrives at `layers.1` is")
