"""Answers of `legoai solve` without effect, which no rule reports that is silent on the open plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legoai.dsl.formatting.edit import write_answers
from legoai.dsl.lint import check, lint
from legoai.dsl.open_plan import OpenPlan
from support import ROOT

HEAD = """\
plan answered
model llama3("tiny", n_layers = 4, dim = 256, n_heads = 4, n_kv_heads = 4, vocab_size = 1024)
"""
BATCH = "batch (global = 32, micro = 2, seq_len = 512)\n"
FOUR = "cluster h100_sxm(devices = 4)\n"
SHARDED = f"{BATCH}{FOUR}mesh (dp_shard = 4)\nfsdp blocks on dp_shard\n"

OPEN = {
    "cluster": (
        f"""\
{BATCH}cluster h100_sxm(hosts = auto in [1, 2], devices = auto in [1, 2, 4], fabric = infiniband_ndr)
mesh (dp_shard = rest)
fsdp blocks on dp_shard
minimize exposed_comm
""",
        {"LP303", "LP307", "LP709"},
    ),
    "mesh": (
        f"""\
{BATCH}{FOUR}mesh (dp_replicate = rest, dp_shard = auto in [1, 2, 4], tp = auto in [1, 2, 4])
shard standard on tp (sequence)
fsdp blocks on dp_replicate, dp_shard
checkpoint {{ layers.* = selective([collective]) }}
""",
        {"LP307", "LP654"},
    ),
    "layout": (
        f"""\
{BATCH}{FOUR}mesh (dp_shard = rest, tp = auto in [1, 2])
shard standard on tp (sequence = auto)
fsdp blocks on dp_shard
checkpoint {{ layers.* = selective([collective]) }}
""",
        {"LP307", "LP654"},
    ),
    "pipeline": (
        f"""\
batch (global = 32, micro = auto, seq_len = 512)
{FOUR}mesh (pp = auto in [1, 2, 4], dp_shard = rest)
pipeline on pp (schedule = auto in [GPipe, ZBVZeroBubble], microbatches = auto in [1, 2])
fsdp on dp_shard {{ layers.* = unit(reshard = auto), root = unit }}
comm (reduce = auto)
minimize bubble
""",
        {"LP307", "LP663", "LP664", "LP709"},
    ),
    "split": (
        f"""\
{BATCH}{FOUR}mesh (pp = 4)
pipeline on pp (split = auto in [even, even(embedding = 1, loss = 1), even(embedding = 0, loss = 0)])
checkpoint {{ layers.* = stages([auto in [none, full], none, none, none]) }}
""",
        {"LP830", "LP908"},
    ),
    "micro batch": (
        f"""\
batch (global = 32, micro = auto in [1, 8], seq_len = 512)
{FOUR}mesh (dp_shard = 4)
fsdp on dp_shard {{ layers.* = unit(reshard = never), root = unit }}
comm (reduce = every_micro_batch)
precision (gradient = fp32)
""",
        {"LP330", "LP616", "LP663"},
    ),
    "replicas": (
        f"""\
{BATCH}{FOUR}mesh (dp_replicate = 4)
replicate on dp_replicate (optimizer = auto)
optimizer sgd(lr = 0.1)
""",
        {"LP334"},
    ),
    "checkpoint": (
        f"""\
{SHARDED}checkpoint (preserve_rng = true) {{
  layers.*                 = auto in [none, full, every(8), selective([collective]), budget(100%)]
  layers.0                 = none
  layers.*.feed_forward.w1 = auto in [none, full]
}}
minimize recompute
""",
        {"LP652", "LP654", "LP655", "LP658", "LP709", "LP827", "LP909"},
    ),
    "first modules": (f"{SHARDED}checkpoint {{ layers.* = first(auto in [1, 4], full, none) }}\n", {"LP908"}),
    "offload": (f"{SHARDED}offload (optimizer = auto, activations = auto)\noptimizer sgd(lr = 0.1)\n", {"LP674"}),
    "host": (
        f"""\
{BATCH}cluster cpu(devices = 2)
mesh (dp_shard = 2)
fsdp blocks on dp_shard
offload (optimizer = auto)
compile {{ layers.* = auto in [none, inductor(mode = reduce_overhead)] }}
""",
        {"LP627", "LP671", "LP674"},
    ),
    "compile": (
        f"{SHARDED}compile {{ layers.* = auto in [none, inductor], layers.*.attention = auto in [none, inductor] }}\n",
        {"LP622"},
    ),
}
"""Plans with holes, and the rules that find something without effect in them by some answer."""

WORDS = re.compile(
    r"no effect|does nothing|nothing else|(decides|limits|keeps|holds|drops|frees|saves|changes|leaves) no|for nothing"
    r"|leave (it|out|the)|is always 0|the same (as|for)|as without|nothing is|only \d+ modules"
)
PATHS = {"LP612", "LP902"}
"""Rules for which a path is the slip, whatever the answer."""


def solved(text: str, name: str, directory: Path) -> tuple[set[str], set[str]]:
    """Answer each hole of a plan with each of its values, beside the first value of every other.

    Returns:
        The codes of what has no effect only by an answer: those that the rules find, and those that lint reports.
    """
    opened = lint(text, name, directory=directory)
    assert not opened.has_errors, opened.diagnostics
    known = {item.code for item in opened.diagnostics} | PATHS
    plan = OpenPlan(opened, directory=directory)
    first = {hole.span: hole.choices[0] for hole in plan.holes}
    found: set[str] = set()
    reported: set[str] = set()
    for answers in ({**first, hole.span: choice} for hole in plan.holes for choice in hole.choices[:8]):
        linted = lint(write_answers(opened.files[name], answers), name, directory=directory)
        of_rules = check(linted.analysis) if linted.analysis is not None else ()
        for items, codes in ((of_rules, found), (linted.diagnostics, reported)):
            for item in items:
                words = f"{item.message} {item.label.text} {' '.join(item.help)}"
                if item.severity != "error" and item.code not in known and WORDS.search(words):
                    codes.add(item.code)
    return found, reported


@pytest.mark.parametrize("name", OPEN)
def test_no_effect_by_an_answer_is_no_slip(name: str):
    text, codes = OPEN[name]
    assert solved(HEAD + text, "answered.plan", Path()) == (codes, set())


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in sorted((ROOT / "plans").glob("*.plan")) if "auto" in path.stem])
def test_answers_of_worked_plans_are_no_slips(path: Path):
    assert solved(path.read_text(), path.name, path.parent)[1] == set()


def test_what_has_no_effect_by_any_answer_is_reported():
    text = (
        f"{HEAD}{BATCH}{FOUR}mesh (dp_shard = rest, tp = auto in [1, 2] -> 1)\nfsdp blocks on dp_shard\ncontext on cp\n"
    )
    text += "shard standard on tp\nrequire bubble <= 5%\n"
    codes = {item.code for item in lint(text, "answered.plan", directory=Path()).diagnostics}
    assert codes == {"LP307", "LP709"}


@pytest.mark.parametrize("sequence", ["true", "auto -> true"])
def test_what_has_no_effect_beside_a_layout_with_an_answer_is_reported(sequence: str):
    """The layout cannot be read without the answer, so that this is kept while others are opened."""
    text = f"{HEAD}{BATCH}{FOUR}mesh (dp_shard = rest, tp = auto in [1, 2] -> 1)\nfsdp blocks on dp_shard\n"
    text += f"shard standard on tp (sequence = {sequence})\ncontext on cp\n"
    found = lint(text, "answered.plan", directory=Path()).diagnostics
    assert [(item.code, "context on cp" in item.message) for item in found] == [("LP307", True)]


UNITS = f"{SHARDED}compile {{{{ {{rules}} }}}}\n".replace("fsdp blocks on dp_shard", "fsdp on dp_shard {{ {units} }}")


@pytest.mark.parametrize(
    ("units", "rules", "code"),
    [
        (
            "layers.* = auto in [none, unit] -> none, layers.*.attention = unit, layers.*.attention.* = unit",
            "norm = inductor",
            "LP323",
        ),
        (
            "layers.* = unit",
            "layers.* = inductor, layers.*.feed_forward = inductor(mode = max_autotune), "
            "output = auto in [none, inductor] -> none",
            "LP622",
        ),
    ],
)
def test_slip_in_a_statement_with_an_answer_is_reported(units: str, rules: str, code: str):
    """Rules stop at an open value, so that they report nothing of the open plan."""
    text = HEAD + UNITS.format(units=units, rules=rules)
    assert code in {item.code for item in lint(text, "answered.plan", directory=Path()).diagnostics}


def test_answers_of_a_base_plan_are_no_slips(tmp_path: Path):
    base = f"{HEAD}{SHARDED}offload (optimizer = auto -> none)\n"
    (tmp_path / "base.plan").write_text(base)
    derived = 'plan derived\nextends "base.plan"\nseed 3\n'
    assert lint(derived, "derived.plan", directory=tmp_path).diagnostics == ()
    (tmp_path / "base.plan").write_text(base.replace("auto -> none", "none"))
    assert [item.code for item in lint(derived, "derived.plan", directory=tmp_path).diagnostics] == ["LP674"]
