"""Checkpoints in compiled graphs that break: lint reports them, and what it advises beside experts, units and hooks."""

from __future__ import annotations

import pytest

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from support.texts.plans import lowered
from support.texts.rule_plans import codes, diagnostics, message

EXPERTS = 'model mixtral("tiny")\nmesh (dp_shard = 4, ep = 2)\nshard standard on ep\nfsdp blocks on dp_shard\n'
UNITS = "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.*.attention = unit, layers.* = unit }\n"
SAVED = "selective([attention, matmul])"
BREAKS = "inductor(fullgraph = false)"


def model(what: str) -> str:
    return f'model python("support.models.untraced:build", what = "{what}")\n'


def one(text: str, code: str) -> Diagnostic:
    [found] = [item for item in diagnostics(text) if item.code == code]
    return found


@pytest.mark.parametrize(
    ("checkpoint", "compiled", "where"),
    [
        (f"layers.* = {SAVED}", f"layers.* = {BREAKS}", "layers.0"),
        (f"layers.* = {SAVED}", "layers.* = aot_eager(fullgraph = false)", "layers.0"),
        (f"layers.1 = {SAVED}", f"layers.* = {BREAKS}", "layers.1"),
        (f"layers.* = first(1, none, {SAVED})", f"layers.* = {BREAKS}", "layers.1"),
        (f"layers.* = {SAVED}", f"root = {BREAKS}", "layers.0"),
        ("layers.* = full", f"root = {BREAKS}", "layers.0"),
        ("layers.* = every(2)", f"root = {BREAKS}", "layers.1"),
        ("layers.*.feed_forward = full", f"layers.* = {BREAKS}", "layers.0.feed_forward"),
        ("layers.* = full", f"layers.* = {BREAKS}", None),
        ("layers.* = every(2)", f"layers.* = {BREAKS}", None),
        ("layers.* = budget(50%)", f"layers.* = {BREAKS}", None),
        (f"layers.*.attention = {SAVED}", f"layers.* = {BREAKS}", None),
        (f"layers.*.attention = {SAVED}", f"root = {BREAKS}", None),
        (f"layers.*.attention = {SAVED}", "layers.*.attention = inductor", None),
        (f"layers.* = {SAVED}", "norm = inductor", None),
    ],
)
def test_checkpoints_with_a_break_inside_are_not_compiled(checkpoint: str, compiled: str, where: str | None):
    text = f"{EXPERTS}checkpoint {{ {checkpoint} }}\ncompile {{ {compiled} }}"
    if where is None:
        assert "LP668" not in codes(text)
    else:
        path = where if where.endswith("feed_forward") else f"{where}.feed_forward"
        assert message(text, "LP668") == (
            f"nothing of `{where}` is compiled: its checkpoint has a graph break at `{path}.experts`"
        )


def test_units_and_hooks_inside_break_a_checkpoint():
    both = f"checkpoint {{ layers.* = selective([matmul]) }}\ncompile {{ layers.* = {BREAKS} }}"
    assert message(f"{UNITS}{both}", "LP668").endswith("a graph break at `layers.0.attention`")
    assert "LP668" not in codes(f"mesh (dp_shard = 4)\nfsdp blocks on dp_shard\n{both}")
    assert message(f"{model('backward')}{both}", "LP668").endswith("a graph break at `layers.0.inner`")
    for what in ("own_backward", "number"):
        assert message(f"{model(what)}{both}", "LP668").endswith("its checkpoint has a graph break")
    assert "LP668" not in codes(f"{model('in_place')}{both}")


def test_help_names_what_is_compiled_around_a_break():
    both = f"checkpoint {{ layers.* = {SAVED} }}\ncompile {{ layers.* = {{}} }}"
    told = one(EXPERTS + both.replace("{}", BREAKS), "LP668")
    full = "recompute `layers.*` by `full`: then the compiled graphs lie inside of the checkpoint, and may break"
    parts = "or checkpoint and compile parts of it without a break, such as `layers.*.attention`"
    assert list(told.help) == [full, parts]
    assert list(one(EXPERTS + both.replace("{}", "inductor"), "LP630").help) == [
        "write `fullgraph = false`", full, parts,
    ]  # fmt: skip
    around = one(f"{EXPERTS}checkpoint {{ layers.* = full }}\ncompile {{ root = {BREAKS} }}", "LP668")
    [how] = around.help
    assert how.startswith("recompute `layers.*` by `full`, and compile `layers.*` instead of what holds it:")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (UNITS, "LP623"),
        (model("backward"), "LP646"),
        (model("number"), "LP647"),
    ],
)
def test_breaks_that_leave_nothing_compiled_are_no_fix(text: str, code: str):
    compiled = "compile { layers.* = inductor(fullgraph = true) }"
    found = one(f"{text}checkpoint {{ layers.* = selective([matmul]) }}\n{compiled}", code)
    assert found.fix is None
    assert any("by `full`" in item for item in found.help)
    if code != "LP647":
        assert one(f"{text}{compiled}", code).fix is not None


def test_advice_needs_no_answers_of_holes():
    text = f"{EXPERTS}checkpoint {{ layers.* = auto in [full, {SAVED}] }}\ncompile {{ layers.* = inductor }}"
    assert list(one(text, "LP630").help) == ["write `fullgraph = false`"]


def test_programs_compile_the_modules_without_a_broken_checkpoint():
    plan = f"""plan test
{EXPERTS}cluster cpu(devices = 4)
batch (global = 8, micro = 1, seq_len = 64)
compile {{ layers.* = {BREAKS} }}
"""
    assert "compile" not in lowered(f"{plan}checkpoint {{ layers.* = {SAVED} }}").text.replace("model compiles", "")
    some = lowered(f"{plan}checkpoint {{ layers.* = first(1, {SAVED}, full) }}").text
    assert some.count(".compile(") == 1
    assert some.index("    apply_compile(") < some.index("    apply_checkpoint(")
