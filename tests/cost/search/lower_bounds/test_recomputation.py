"""Lower bounds of recomputation, by treatment and by memory limit, against simulations."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.products import recomputed_products
from legoai.cost.search.lower_bounds.shared_work import work_of_micro_batch
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.marks import some_slow
from support.simulation.simulator import in_the_simulator

LLAMA = 'model llama3("1b", n_layers = 4, tie_embeddings = false)'
GPT2 = 'model gpt2("small", n_layers = 4)'
PLAN = """\
plan test
{model}
cluster h100_sxm(devices = 4)
attention {attention}
batch (global = 8, micro = 2, seq_len = {length})
mesh (dp_shard = 4)
fsdp blocks on dp_shard
checkpoint {{ layers.* = {treatment} }}
{more}
"""


def analysed(model: str, treatment: str, attention: str = "flash", more: str = "", length: int = 1024) -> Analysis:
    text = PLAN.format(model=model, treatment=treatment, attention=attention, more=more, length=length)
    linted = lint(text, "test.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    return linted.analysis


def recomputed(model: str, treatment: str) -> tuple[float, float]:
    """Least seconds of a micro batch's recomputation, and those that are simulated."""
    analysis = analysed(model, treatment)
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    return sum(BoundsOf()._again(analysis).values()), work_of_micro_batch(found, analysis.manifest).recomputed


@pytest.mark.parametrize("model", some_slow([LLAMA, GPT2], GPT2))
def test_alternate_products_bound_is_below_the_simulation(model: str):
    least, simulated = in_the_simulator(recomputed, model, "selective([attention, alternate_matmul])")
    assert 0.4 * simulated < least <= simulated


def test_products_are_counted_in_forward_order():
    manifest = analysed(LLAMA, "none").manifest
    block = "layers.0"
    assert recomputed_products(manifest, block) == {
        f"{block}.attention.wk",
        f"{block}.attention.wo",
        f"{block}.feed_forward.w3",
    }


def test_last_product_is_not_recomputed():
    """The sixth of six products is the last one, whose output nothing reads."""
    manifest, block = analysed(GPT2, "none").manifest, "layers.0"
    assert recomputed_products(manifest, block) == {f"{block}.attention.wk", f"{block}.attention.wo"}


def test_math_attention_products_lower_the_bound():
    """Math attention has products of its own, which count among the saved ones."""
    treatment = "selective([alternate_matmul])"
    assert sum(BoundsOf()._again(analysed(LLAMA, treatment, "math")).values()) < sum(
        BoundsOf()._again(analysed(LLAMA, treatment)).values()
    )


def test_smaller_memory_limit_raises_recomputation():
    def bound(limit: int) -> float:
        more = f"loss chunked(16)\nrequire peak_memory <= {limit}GiB"
        return BoundsOf()(analysed(LLAMA, "auto", more=more, length=8192)).step_time

    assert bound(7) > bound(8) > bound(9) > bound(40)
