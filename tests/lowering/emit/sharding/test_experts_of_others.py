"""Experts of Hugging Face mixtures on several ranks train as on one, or lint reports the required interface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import legoai.runtime.training.trainer  # noqa: F401  what torch registers once must not come with an inspected model
from legoai.cost.estimate import CannotEstimateError, estimate
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.lowering.verify.prepare import prepare
from support.marks import some_slow
from support.simulation.simulated import in_a_fork
from support.texts.drawn_plans import CONFIGS
from support.training.staged import assert_close, train

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
TOLERANCE = 1e-4  # norms and routers of `transformers` compute in fp32
EXPERTS = """\
mesh (dp_shard = 4, ep = EP)
shard on ep { model.layers.*.mlp.experts = experts }
fsdp on dp_shard { model.layers.* = unit, root = unit }
precision (master = fp64, param = fp64, reduce = fp64)
"""

GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256,
    "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip
"""Experts with biases, whose forward has other names than those of most mixtures."""


def plan(family: str, body: str, *, ranks: int, options: str = ', experts_implementation = "batched_mm"') -> str:
    return (
        f'plan others\nmodel huggingface("{family}.json"{options})\ncluster cpu(devices = {ranks})\n'
        f"batch (global = 4, micro = 1, seq_len = 16)\noptimizer adamw(lr = 1e-2)\n{body}"
    )


def linted(text: str, directory: Path = CONFIGS):
    return lint(text, "others.plan", directory=directory)


def program(text: str, directory: Path = CONFIGS) -> str:
    found = linted(text, directory)
    assert not found.has_errors, [item.message for item in found.diagnostics]
    return lower(found.analysis).text


def trained(programs: list[str], data: str) -> list[dict]:
    return [train(program, data, steps=2) for program in programs]


@pytest.mark.slow
def test_expert_parallelism_equals_one_process(gloo, data):
    one = [program(plan(name, "precision (master = fp64, param = fp64)\n", ranks=1)) for name in FAMILIES]
    [alone] = gloo(1)(trained, one, data)
    four = [program(plan(name, EXPERTS.replace("EP", "4" if name == "mixtral" else "2"), ranks=4)) for name in FAMILIES]
    assert all("ExpertParallel(routed=True)" in text for text in four)
    for results in gloo(4)(trained, four, data):
        for result, wanted in zip(results, alone, strict=True):
            assert_close(result, wanted, TOLERANCE)


@pytest.mark.parametrize(
    "experts",
    [pytest.param(4, id="shards of experts", marks=pytest.mark.slow), pytest.param(2, id="shards of their rows")],
)
def test_experts_of_gpt_oss_equal_one_process(gloo, data, tmp_path: Path, experts: int):
    (tmp_path / "gpt_oss.json").write_text(json.dumps({**GPT_OSS, "num_local_experts": experts}))
    one = program(plan("gpt_oss", "precision (master = fp64, param = fp64)\n", ranks=1), tmp_path)
    [[alone]] = gloo(1)(trained, [one], data)
    four = program(plan("gpt_oss", EXPERTS.replace("EP", "2"), ranks=4), tmp_path)
    assert "ExpertParallel(routed=True)" in four
    for [result] in gloo(4)(trained, [four], data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
def test_experts_across_tensor_parallel_ranks_equal_one_process(gloo, data):
    """A router of `transformers` has several results, of each rank's piece of the sequence."""
    one = program(plan("qwen3_moe", "precision (master = fp64, param = fp64)\n", ranks=1))
    [[alone]] = gloo(1)(trained, [one], data)
    across = EXPERTS.replace("mesh (dp_shard = 4, ep = EP)\nshard on ep { model.layers.*.mlp.experts = experts }", (
        "mesh (dp_shard = 2, tp = 2, ep = 4)\nshard standard on tp (sequence, loss_parallel, across_tp)\n"
        "shard standard on ep (across_tp)"
    ))  # fmt: skip
    four = program(plan("qwen3_moe", across, ranks=4))
    assert "ExpertParallel(pieces=2, routed=True)" in four
    assert "SequenceParallelResults(sequence_dim=0)" in four
    for [result] in gloo(4)(trained, [four], data):
        assert_close(result, alone, TOLERANCE)


def test_gpt_oss_has_no_grouped_products_in_fp64(tmp_path: Path):
    (tmp_path / "gpt_oss.json").write_text(json.dumps(GPT_OSS))
    found = linted(plan("gpt_oss", "precision (master = fp64, param = fp64)\n", ranks=1, options=""), tmp_path)
    assert [item.code for item in found.diagnostics if item.severity == "error"] == ["LP010"]


def test_capacity_drops_equal_tokens_on_one_and_four_ranks(gloo, data):
    def dropping(body: str, ranks: int) -> str:
        text = plan("mixtral", body.replace("= experts", "= experts(capacity_factor = 0.75)"), ranks=ranks)
        return program(text)

    precision = "precision (master = fp64, param = fp64)\n"
    one = dropping(f"shard on ep {{ model.layers.*.mlp.experts = experts }}\n{precision}", 1)
    [[alone]] = gloo(1)(trained, [one], data)
    for [result] in gloo(4)(trained, [dropping(EXPERTS.replace("EP", "4"), 4)], data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.parametrize("family", some_slow(FAMILIES, "qwen3_moe", "deepseek_v3"))
def test_verification_multiplies_in_fp64_without_grouped_products(family: str):
    body = EXPERTS.replace("EP", "2").replace("precision (master = fp64, param = fp64, reduce = fp64)\n", "")
    found = linted(plan(family, body, ranks=4, options=""))
    assert not found.has_errors
    small = prepare(found, directory=CONFIGS, ranks=4)
    assert "model: experts by batched products, since grouped ones have no fp64" in small.shrunken.changes
    assert '"experts_implementation": "batched_mm"' in small.program.text


def test_grouped_products_in_fp64_are_refused():
    found = linted(plan("mixtral", "precision (master = fp64, param = fp64)\n", ranks=1, options=""))
    assert [item.message for item in found.diagnostics if item.severity == "error"] == [
        "`model.layers.0.mlp.experts` multiplies by grouped products, which have no fp64"
    ]


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("compile { model.layers.* = inductor }\n", True),
        ("compile { model.layers.*.mlp = inductor }\n", True),
        ("compile { model.layers.*.self_attn = inductor }\n", False),
        ("compile { model.layers.* = inductor }\nprecision (master = bf16, param = bf16)\n", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("chosen", ["grouped_mm", "batched_mm"])
def test_unsimulated_compiled_experts_are_reported(body: str, warned: bool, chosen: str):
    found = linted(plan("mixtral", body, ranks=1, options=f', experts_implementation = "{chosen}"'))
    assert any(item.code == "LP637" for item in found.diagnostics) is (warned and chosen == "grouped_mm")


def test_simulation_failure_names_the_lint_warning():
    body = "compile { model.layers.* = inductor }\n"
    found = linted(plan("mixtral", body, ranks=1, options="").replace("cpu(devices = 1)", "h100_sxm(devices = 1)"))
    assert found.analysis is not None
    with pytest.raises(CannotEstimateError, match=r"\[LP637\]"):
        in_a_fork(estimated, found.analysis)


def estimated(analysis: Analysis) -> float:
    return estimate(lower(analysis), analysis.plan, analysis.manifest, directory=CONFIGS).step_time


OTHER_EXPERTS = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, tokens):
        return torch.einsum("btd,edf->btf", tokens, self.weight)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = Experts()

    def forward(self, x):
        return x + self.experts(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList([Mixture() for _ in range(2)])
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


def test_other_expert_signatures_are_reported_with_help(tmp_path: Path):
    (tmp_path / "mixtures.py").write_text(OTHER_EXPERTS)
    text = plan("x", EXPERTS.replace("EP", "2").replace("model.layers.*.mlp.experts", "layers.*.experts"), ranks=4)
    text = text.replace("model.layers", "layers")
    text = text.replace('huggingface("x.json", experts_implementation = "batched_mm")', 'python("mixtures:Model")')
    [found] = [item for item in lint(text, "x.plan", directory=tmp_path).diagnostics if item.severity == "error"]
    assert found.code == "LP010"
    assert "is called with `tokens`" in found.message
    assert "rows sorted by expert" in found.help[0]
    assert "top_k_index" in found.help[1]
