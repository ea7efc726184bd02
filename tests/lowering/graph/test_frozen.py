"""Models with frozen parameters under the graph backend of `fsdp`: nothing is differentiated by these, or reduced."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.report.causes import Causes
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.marks import slow_but
from support.simulation.simulator import in_the_simulator
from support.texts.plans import HEAD
from support.training.backends import MIXED, agree

KINDS = ("first blocks", "last blocks", "parts of blocks", "embedding without gradients", "unused", "tied")
UNITS = f"mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit }}\n{MIXED}"
STAGES = f"""\
mesh (pp = 2, dp_shard = 2)
pipeline on pp (schedule = 1F1B)
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}
{MIXED}"""
WAYS = {
    "alone": (UNITS, ""),
    "reordered, offloaded": (
        UNITS,
        "(reorder = true, prefetch = proactive(limit = 1MiB))\noffload (activations = all, optimizer = all)",
    ),
    "reordered by time, compiled": (UNITS, "(reorder = by_time)\ncompile { layers.* = aot_eager }"),
    "scheduled by torch": (UNITS, "{ layers.* = bucket(compiler) }"),
    "unsharded selectively": (UNITS, "(reorder = true, unshard = selective)\nrequire peak_memory <= 20MiB"),
    "checkpointed": (f"{UNITS}checkpoint {{ layers.* = selective([matmul]) }}\n", "(reorder = true)"),
    "never resharded": (UNITS.replace("unit", "unit(reshard = never)"), ""),
    "stages": (STAGES, "(reorder = true)"),
    "stages whose backward is split": (
        STAGES.replace("1F1B", "ZBVZeroBubble").replace(MIXED, "precision (param = fp32, reduce = fp32)\n"),
        "(reorder = true)",
    ),
    "stages that gather again for backward": (STAGES.replace("(reshard = after_backward)", ""), "(reorder = true)"),
}
PAIRS = [(kind, way) for kind in KINDS for way in WAYS if kind != "tied" or "stages" not in way]
"""Tied parameters lie on one stage."""


def of_frozen(kind: str, blocks: int = 2) -> str:
    """The head of a plan for a model of which a part is frozen."""
    model = f'python("support.models.frozen_models:partly", kind = "{kind}", depth = {blocks})'
    return HEAD.replace('llama3("tiny")', model)


@pytest.mark.parametrize(
    "pair",
    slow_but(PAIRS, ("embedding without gradients", "alone")),
    ids=", ".join,
)
def test_backends_agree_bitwise(pair: tuple[str, str], gloo, tmp_path: Path):
    kind, way = pair
    body, comm = WAYS[way]
    agree(gloo, tmp_path, of_frozen(kind, 4 if "split" in way else 2), body, comm)


def simulated(kind: str, backend: str) -> tuple[int, int, list[tuple[int, int]]]:
    """Bytes of gradients and of the optimizer's state, and the counts and bytes of reductions."""
    text = f"{of_frozen(kind)}batch (global = 16, micro = 2, seq_len = 16)\n{UNITS}".replace("= 4)", "= 2)")
    linted = lint(text.replace("dp_shard {", f"dp_shard (backend = {backend}) {{"), "test.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    found = estimate(lower(linted.analysis), linted.analysis.plan, linted.analysis.manifest)
    causes, held = Causes(linted.analysis), found.fullest.memory.by_category
    reductions = sorted(
        (item.count, item.bytes) for item in causes.collectives(found.slowest) if item.kind == "reduce_scatter"
    )
    return held["sharded_gradient"], held["optimizer_state"], reductions


@pytest.mark.parametrize("kind", slow_but(KINDS, "parts of blocks"))
def test_gradients_and_reductions_cost_as_under_the_eager_backend(kind: str):
    traced, eager = (in_the_simulator(simulated, kind, backend) for backend in ("graph", "eager"))
    assert traced == eager
