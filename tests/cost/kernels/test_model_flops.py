"""Model FLOPs are those that the published conventions count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from legoai.cost.capture import capture
from legoai.cost.estimate import Estimate, estimate
from legoai.cost.kernels.model_flops import model_flops, product_dtype
from legoai.cost.machine.cluster import machine_of
from legoai.cost.profiles import ProfileError
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import Kernel, TensorType
from legoai.cost.trace.segments import Instance, Segment
from legoai.dsl.analysis.magnitudes.flops import forward_flops_per_token
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.runtime.attention.blocks import Balance, blocks_of_rank
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource
from legoai.specs.plan import Plan
from support.marks import slow_but
from support.simulation.simulator import in_the_simulator
from support.texts.drawn_plans import CONFIGS


def manifest(family: str, preset: str) -> Manifest:
    return load_manifest(ModelSource(kind="builtin", target=family, preset=preset), base_directory=".")


def test_llama_3_8b_flops_equal_the_torchtitan_formula():
    """`get_num_flop_per_token(num_params, config, seq_len)` with `exclude_embedding`; 8,030,261,248 parameters."""
    embedding, norms = 128_256 * 4096, (2 * 32 + 1) * 4096
    matrices = 8_030_261_248 - embedding - norms
    expected = 6 * matrices + 12 * 32 * 32 * 128 * 8192
    assert 3 * forward_flops_per_token(manifest("llama3", "8b"), 8192) == expected


def test_gpt_3_flops_equal_6nd_of_the_paper():
    """Brown et al. 2020, table D.1: 3.14e23 operations for 175B parameters and 300B tokens, without attention."""
    total = 3 * forward_flops_per_token(manifest("gpt3", "175b"), 0) * 300e9
    assert total == pytest.approx(3.14e23, rel=0.01)


def test_only_routed_experts_count():
    """Jiang et al. 2024, section 1: 13B of 47B parameters are active; embeddings of 131M among them."""
    active = forward_flops_per_token(manifest("mixtral", "8x7b"), 0) / 2 + 32_000 * 4096
    assert active == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize(("preset", "active"), [("v2_lite", 2.4e9), ("v2", 21e9), ("v3", 37e9)])
def test_deepseeks_active_parameters_are_those_of_its_papers(preset: str, active: float):
    """2.4B, 21B and 37B for a token (DeepSeek-V2, abstract and appendix B; DeepSeek-V3, abstract)."""
    assert forward_flops_per_token(manifest("deepseek", preset), 0) / 2 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param('llama3("tiny")', marks=pytest.mark.slow), pytest.param('mixtral("tiny")', marks=pytest.mark.slow),
        pytest.param('gpt2("small")', marks=pytest.mark.slow),
        'llama3("tiny", head_dim = 32, attention_bias = true, mlp_bias = true, qk_norm = true)',
        pytest.param('mixtral("tiny", head_dim = 32, qkv_bias = true, tie_embeddings = true)', marks=pytest.mark.slow),
        pytest.param('deepseek("tiny", v_head_dim = 32)', marks=pytest.mark.slow),
        'deepseek("tiny", q_lora_rank = 0, scores = "softmax")',
    ],
)  # fmt: skip
def test_formula_equals_captured_flops_of_one_device(model: str):
    formula, captured = in_the_simulator(both_ways, model)
    assert captured == pytest.approx(formula, rel=1e-12)


def both_ways(model: str) -> tuple[float, float]:
    text = (
        f"plan one\nmodel {model}\ncluster cpu\nbatch (global = 4, micro = 2, seq_len = 64)\nprecision (param = fp32)\n"
    )
    linted = lint(text, "one.plan", directory=Path())
    assert linted.plan is not None and linted.analysis is not None and linted.analysis.manifest is not None
    trace = capture(lower(linted.analysis).text, world=1, kind="cpu")
    span = trace.steps[-1]
    records = trace.records[span.start : span.stop]
    forward = sum(item.flops for item in records if isinstance(item, Kernel) and item.phase == "forward")
    return model_flops(linted.plan, linted.analysis.manifest, {0: records}, lambda: 0)[0], 3.0 * forward


ON_GPUS = """\
plan one
model {model}
cluster {device}(devices = 2)
batch (global = 4, micro = 1, seq_len = 512)
mesh (dp_shard = 2)
fsdp on dp_shard {{ root = unit }}
"""


def of_run_and_prediction(text: str) -> tuple[float | None, Estimate]:
    """MFU of a run whose steps take the predicted time, and the prediction."""
    linted = lint(text, "one.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    program = lower(linted.analysis)
    found = estimate(program, linted.analysis.plan, linted.analysis.manifest)
    names: dict[str, Any] = {"__name__": "one"}
    exec(program.text, names)
    return names["trainer"]().utilization(found.tokens_per_second_per_device), found


@pytest.mark.slow
@pytest.mark.parametrize("model", ['llama3("1b")', 'gpt2("small", max_seq_len = 2048)'])
def test_run_and_prediction_have_equal_mfu_at_equal_step_time(model: str):
    shown, found = in_the_simulator(of_run_and_prediction, ON_GPUS.format(model=model, device="h100_sxm"))
    assert shown == pytest.approx(found.metric("mfu", "fraction"), rel=1e-12)


@pytest.mark.parametrize(
    ("model", "device"), [('llama3("tiny")', "cpu"), ('python("support.models.factories:build", dim = 32)', "h100_sxm")]
)
def test_program_without_known_flops_omits_mfu(model: str, device: str):
    text = ON_GPUS.format(model=model, device=device)
    if device == "cpu":
        text += "precision (param = fp32)\n"
    linted = lint(text, "one.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    assert "flops" not in lower(linted.analysis).text


def planned(model: str, batch: str) -> Plan:
    head = f"plan one\nmodel {model}\ncluster h100_sxm(devices = 1)\n{batch}\nprecision (param = fp32)\n"
    plan = lint(head, "one.plan", directory=Path()).plan
    assert plan is not None
    return plan


def product(dtype: str, rows: int, phase: str = "forward") -> Kernel:
    shapes = TensorType((rows, 8), dtype), TensorType((8, 8), dtype)
    return Kernel(
        stream=0, op="aten.mm", inputs=shapes, outputs=(), flops=128 * rows, bytes_read=0, bytes_written=0,
        attributes={}, module="", phase=phase,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("products", "expected"),
    [
        ([product("bfloat16", 8), product("float32", 4)], "bf16"),
        ([product("bfloat16", 4), product("float32", 8)], "fp32"),
        ([product("bfloat16", 4), product("float32", 4)], "fp32"),
        ([product("float32", 4), product("bfloat16", 8, "backward")], "fp32"),
        ([product("float8_e4m3fn", 8), product("bfloat16", 4)], "fp32"),
        ([], "fp32"),
    ],
)
def test_peak_is_of_the_dtype_of_most_products(products: list[Kernel], expected: str):
    plan = planned('vit("tiny")', "batch (global = 4, micro = 4)")
    assert product_dtype(plan, {0: products}) == expected
    segment = Segment(tuple(products), (NONE,) * len(products))
    assert product_dtype(plan, {0: [Instance(segment, ((), (), ()), ())]}) == expected
    assert (
        product_dtype(planned('gpt2("small")', "batch (global = 4, micro = 4, seq_len = 64)"), {0: products}) == "fp32"
    )


def test_missing_rate_falls_back_to_that_of_the_parameters():
    cluster = planned('gpt2("small")', "batch (global = 4, micro = 4, seq_len = 64)").cluster
    machine = machine_of(cluster, 1, directory=Path())
    assert machine.peak("unknown", "bf16") == machine.peak("bf16")
    with pytest.raises(ProfileError, match="has a rate for unknown"):
        machine.peak("unknown", "unknown")


OF_A_FACTORY = """\
plan whole
model python("support.models.factories:build_placed")
cluster h100_sxm(devices = 4)
batch (global = 4, micro = {micro}, seq_len = 512)
precision (param = bf16)
{body}
"""


ON_CP = "mesh (cp = 4)\nfsdp on cp { root = unit }"


def captured(micro: int, body: str) -> float:
    linted = lint(OF_A_FACTORY.format(micro=micro, body=body), "whole.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    return estimate(lower(linted.analysis), linted.analysis.plan, linted.analysis.manifest).model_flops


@pytest.mark.parametrize(
    "body",
    [
        f"{ON_CP}\ncontext on cp (rotate = alltoall, balance = none)",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                f"{ON_CP}\ncontext on cp",
                f"{ON_CP}\ncontext on cp (rotate = alltoall)",
                f"{ON_CP}\ncontext on cp (balance = none)",
                f"{ON_CP}\ncontext on cp (rotate = heads)",
                f"{ON_CP}\ncontext on cp\ncheckpoint {{ blocks.* = full }}",
                f"{ON_CP}\ncontext on cp (rotate = alltoall)\ncompile {{ blocks.* = inductor }}",
                "mesh (pp = 2, cp = 2)\nfsdp on cp { blocks.* = unit(reshard = after_backward) }\ncontext on cp\n"
                "pipeline on pp (schedule = 1F1B)",
            )
        ),
    ],
)
def test_captured_flops_do_not_depend_on_how_ranks_share_a_sequence(body: str):
    alone = in_the_simulator(captured, 1, "mesh (dp_shard = 4)\nfsdp on dp_shard { root = unit }")
    micro = 2 if "pipeline" in body else 4
    assert in_the_simulator(captured, micro, body) == alone


ON_TP = """\
plan repeated
model {model}
cluster h100_sxm(devices = 4)
batch (global = 8, micro = {micro}{length})
{body}
fsdp on dp_shard {{ root = unit }}
"""


def of_mesh(model: str, micro: int, body: str) -> float:
    length = "" if model.startswith("vit") else ", seq_len = 32"
    text = ON_TP.format(model=model, micro=micro, length=length, body=body)
    linted = lint(text, "repeated.plan", directory=CONFIGS)
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    analysis = linted.analysis
    return estimate(lower(analysis), analysis.plan, analysis.manifest, directory=CONFIGS).model_flops


@pytest.mark.parametrize("model", slow_but(['vit("tiny")', 'huggingface("mixtral.json")']))
def test_work_that_ranks_of_tp_repeat_counts_once(model: str):
    alone = in_the_simulator(of_mesh, model, 2, "mesh (dp_shard = 4)")
    assert in_the_simulator(of_mesh, model, 4, "mesh (dp_shard = 2, tp = 2)\nshard standard on tp") == alone > 0


@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("rank", range(3))
def test_blocks_of_a_rank_have_the_queries_that_see_each_key(balance: Balance, gathered: bool, rank: int):
    """Full blocks and the lower halves of causal ones are all pairs that a causal mask leaves to a rank's tokens."""
    size, length = 3, 4
    blocks = blocks_of_rank(rank=rank, size=size, length=length, causal=True, gathered=gathered, balance=balance)
    seen = 0
    for queries, keys, causal in blocks:
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        seen += sum(range(1, rows + 1)) if causal else rows * columns
    half = length // 2
    head_tail = [*range(rank * half, (rank + 1) * half), *range((5 - rank) * half, (6 - rank) * half)]
    places = head_tail if balance == "head_tail" else range(rank * length, (rank + 1) * length)
    assert seen == sum(place + 1 for place in places)
