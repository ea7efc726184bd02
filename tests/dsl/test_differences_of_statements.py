"""Differences by a statement that only one of two plans has: none by defaults, else by its options and rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from legoai.dsl.differences.changes import text_of
from legoai.dsl.differences.comparison import Comparison, Side
from legoai.dsl.differences.numerics import EFFECTS, WHOLE
from legoai.dsl.differences.summary import summary
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.specs.directives import DEFAULTED, FAMILIES, family

BASE = """\
plan base
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = 8, seq_len = 128)
mesh    (dp_shard = 2, tp = 2)
shard standard on tp
fsdp on dp_shard { layers.* = unit, root = unit }
precision (param = fp32, reduce = fp32)
"""
COMMENT = r"""(?m)  # [^"'\n]*$"""
"""A comment of a program, which names lines of the plan."""


def side(text: str) -> Side:
    linted = lint(text, "a.plan", directory=Path())
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    return Side(linted=linted, directory=Path(), resolved=lambda variant: resolve(text, "a.plan", variant=variant))


NEUTRAL = [keyword for keyword in FAMILIES if family(keyword).absent is not None and keyword not in DEFAULTED]
"""Statements that a plan may omit or write with nothing but defaults."""


def with_defaults(keyword: str) -> Iterator[str]:
    """A statement with each of its defaults alone, and with the treatment that modules without a rule have."""
    declared = family(keyword)
    for option in declared.options:
        value = declared.absent.get(option.name) if option.required else option.default
        if value is not None:
            text = text_of(value, option.kind)
            yield f"{keyword} {text}" if option.field == declared.subject else f"{keyword} ({option.name} = {text})"
    if declared.unruled is not None:
        yield f"{keyword} {{ layers.* = {declared.unruled.name}, root = {declared.unruled.name} }}"


@pytest.mark.parametrize("text", [text for keyword in NEUTRAL for text in with_defaults(keyword)])
def test_a_statement_of_nothing_but_defaults_is_no_difference(text: str):
    without, written = (side(one) for one in (BASE, f"{BASE}{text}\n"))
    assert not Comparison(without, written).differs and not Comparison(written, without).differs
    assert without.plan.digest == written.plan.digest
    programs = [re.sub(COMMENT, "", lower(one.analysis).text) for one in (without, written)]
    assert programs[0] == programs[1].replace("        seed=0,\n", "")


def test_every_statement_says_whether_its_presence_has_an_effect():
    assert all(family(keyword).absent == {} for keyword in DEFAULTED)
    assert {"checkpoint", "comm", "offload", "compile", "seed"} == set(NEUTRAL)
    assert all(EFFECTS[keyword][WHOLE][0] == "none" for keyword in NEUTRAL)


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("comm (prefetch = units(forward = 2))", "none", ""),
        ("comm (reduce = last_micro_batch)", "rounding", "before, or after"),
        ("comm (reorder = true) { layers.* = bucket(by = group) }", "rounding", "in other buckets"),
        ("comm { layers.* = bucket(by = group) }", "rounding", "in other buckets"),
        ("offload (optimizer = all)", "none", ""),
        ("offload (optimizer = all, parameters = all)", "rounding", "computes on the host"),
        ("compile { layers.* = inductor }", "rounding", "compiled kernels"),
        ("seed 7", "training", "other first weights"),
        ("clip (norm = 1)", "training", "the update"),
        ("checkpoint (preserve_rng = false) { layers.* = full }", "none", ""),
        ("pipeline on pp (schedule = GPipe)", "none", ""),
    ],
)
def test_a_statement_counts_by_what_it_has_beside_the_defaults(text: str, kind: str, why: str):
    bare = BASE
    if "reorder" in text:
        bare = bare.replace("fsdp on dp_shard {", "fsdp on dp_shard (backend = graph) {")
    if "parameters" in text:
        bare = bare.replace("cpu(devices = ranks)", "h100_sxm(devices = ranks)")
    sides = side(bare), side(f"{bare}{text}\n")
    for comparison in (Comparison(*sides), Comparison(*reversed(sides))):
        assert len(comparison.changes) == 1
        found = summary(comparison)
        assert found.numerics == kind
        assert [why in reason.why for reason in found.reasons] == [True] * bool(why)
