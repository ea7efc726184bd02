"""Output of `legoai fmt --expand`: the same plan, without a diagnostic that the plan does not get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from legoai.dsl.formatting.expand import expand
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.formatting.idle import expand_meant
from legoai.dsl.frontend.files.sources import read_base
from legoai.dsl.lint import Linted, lint
from support import TESTS, VALID_PLANS, WORKED_PLANS
from support.marks import slow_but_longest

PLANS = [*WORKED_PLANS, *VALID_PLANS, *slow_but_longest(sorted(TESTS.glob("dsl/invalid/LP*/*.plan")))]
MODEL = 'plan a\nmodel llama3("tiny")\n'
HEAD = MODEL + "cluster h100_sxm(devices = {devices})\nbatch (global = 16, micro = 1, seq_len = 64)\n"
TAIL = "precision (param = fp32, master = fp32)\noptimizer adamw(lr = 1e-3, fused = false)\n"


def linting(path: Path) -> Callable[[str], Linted]:
    return lambda text: lint(text, path.name, directory=path.parent, read=read_base, factories=False)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_expansion_is_as_clean_as_the_plan(path: Path):
    lints = linting(path)
    before = lints(path.read_bytes().decode())
    if before.plan is None or any(item.severity == "error" for item in before.resolution.diagnostics):
        return
    text = expand_meant(before.resolution, lambda text: lints(text).diagnostics)
    after = lints(text)
    assert Counter(item.code for item in after.diagnostics) - Counter(item.code for item in before.diagnostics) == {}
    assert format_text(text, path.name).text == text
    if not before.has_errors:
        assert after.plan is not None
        assert after.plan.digest == before.plan.digest


def expanded(text: str, devices: int) -> tuple[str, str]:
    """The expansion, and that with every default."""
    lints = linting(Path("a.plan"))
    linted = lints(HEAD.format(devices=devices) + text + TAIL)
    assert linted.diagnostics == ()
    after = expand_meant(linted.resolution, lambda text: lints(text).diagnostics)
    assert lints(after).diagnostics == ()
    return after, expand(linted.resolution).text


def test_default_without_effect_under_a_pipeline_is_left_out():
    after, full = expanded(
        "mesh (pp = 2, dp_replicate = 2)\nreplicate on dp_replicate\npipeline on pp (schedule = 1F1B)\n", devices=4
    )
    assert "bucket = " in full
    assert after == full.replace("bucket = 25MiB, ", "")


def test_default_that_the_plan_makes_idle_is_left_out_of_every_statement():
    after, full = expanded("variant whole { precision (param = bf16, master = fp32) }\n", devices=1)
    assert full.count("reduce = fp32") == 2
    assert "reduce" not in after
    assert after.count("master = fp32") == 2
