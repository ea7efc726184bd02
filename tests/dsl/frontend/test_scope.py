"""`let` names and arithmetic over them, against Python's, in the units of the language."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend import syntax as tree
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.frontend.values.scope import Definition, Scope
from legoai.specs.units import UNITS
from support.texts import strategies as some


def scope_of(text: str) -> Scope:
    parsed = parse(text, "t.plan")
    assert parsed.diagnostics == ()
    lets = [item for item in parsed.file.statements if isinstance(item, tree.Let)]
    return Scope({item.name.text: Definition(item, "human") for item in lets})


def evaluate(text: str, lets: str = "") -> tuple[float, str] | Diagnostic:
    found = scope_of(f"let it_ = {text}\n{lets}")
    return found.arithmetic(found.names["it_"].let.value)


def number(value: int) -> tree.Number:
    return tree.Number(str(value), "", some.ONE_LINE)


def python(node: tree.Value) -> Fraction:
    """The same arithmetic in exact fractions."""
    if isinstance(node, tree.Number):
        return Fraction(node.text)
    if isinstance(node, tree.Negation):
        return -python(node.operand)
    assert isinstance(node, tree.Binary)
    left, right = python(node.left), python(node.right)
    return {
        "+": lambda: left + right, "-": lambda: left - right, "*": lambda: left * right, "/": lambda: left / right,
    }[node.operator]()  # fmt: skip


sums = st.recursive(
    st.integers(0, 999).map(number),
    lambda inner: st.one_of(
        st.builds(tree.Binary, st.sampled_from("+-*/"), inner, inner, st.just(some.ONE_LINE)),
        st.builds(tree.Negation, inner, st.just(some.ONE_LINE)),
    ),
    max_leaves=8,
)


@given(sums)
@settings(max_examples=200)
def test_arithmetic_equals_python(node: tree.Value):
    let = tree.Let(tree.Name("it_", some.ONE_LINE), node, some.ONE_LINE)
    text = format_plan(tree.PlanFile("t.plan", "", (let,), ()))
    result = evaluate(text.strip().removeprefix("let it_ = "))
    try:
        expected = python(node)
    except ZeroDivisionError:
        assert isinstance(result, Diagnostic)
        assert result.message == "division by zero"
        return
    assert not isinstance(result, Diagnostic)
    assert result[1] == "number"
    assert result[0] == pytest.approx(float(expected), rel=1e-9, abs=1e-6)


@given(st.integers(-999, 999), st.integers(-99, 99))
def test_floor_division_and_modulo_equal_python(left: int, right: int):
    for sign, python_result in (("//", lambda: left // right), ("%", lambda: left % right)):
        result = evaluate(f"({left}) {sign} ({right})")
        if right == 0:
            assert isinstance(result, Diagnostic)
            assert result.message == "division by zero"
        else:
            assert result == (python_result(), "number")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("min(3, 2, 4)", (2, "number")),
        ("max(1GiB, 2 * 1GiB)", (2**31, "bytes")),
        ("floor(7 / 2)", (3, "number")),
        ("floor(-1 / 2)", (-1, "number")),
        ("max(n, 2) * 2", (10, "number")),
        ("10GiB // 3GiB", (3, "number")),
        ("10GiB // 4", (10 * 2**30 // 4, "bytes")),
        ("10GiB % 3GiB", (2**30, "bytes")),
        ("17 % 5 * 2", (4, "number")),
    ],
)
def test_functions_and_divisions_have_results(text: str, result: tuple[float, str]):
    assert evaluate(text, "let n = 5\n") == result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min()", "`min` needs at least one value"),
        ("min(1, 1GiB)", "`min` takes values of one kind, not number and bytes"),
        ("floor(1, 2)", "`floor` takes one plain number"),
        ("floor(1GiB)", "`floor` takes one plain number"),
        ("max(a = 1)", "`max` takes values without names"),
        ("10GiB % 3", "an amount of memory cannot be divided by a plain number"),
        ("3 // 1GiB", "a plain number cannot be divided by an amount of memory"),
        ("min(1, 1 / 0)", "division by zero"),
    ],
)
def test_functions_of_wrong_types_are_errors(text: str, message: str):
    result = evaluate(text)
    assert isinstance(result, Diagnostic)
    assert (result.code, result.message) == ("LP217", message)


@pytest.mark.parametrize("unit", UNITS)
def test_units_scale_to_bytes_seconds_and_fractions(unit: str):
    dimension, size = UNITS[unit]
    assert evaluate(f"3{unit}") == (pytest.approx(3 * size), dimension)


@pytest.mark.parametrize(("unit", "exponent"), [("%", -2), ("ms", -3), ("us", -6), ("KB", 3), ("TB", 12)])
def test_numbers_with_a_unit_are_those_without_it(unit: str, exponent: int):
    for tenths in range(1, 1001):
        for text in (str(tenths), f"{tenths // 10}.{tenths % 10}"):
            assert evaluate(f"{text}{unit}")[0] == float(f"{text}e{exponent}")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1GiB + 1MiB", (2**30 + 2**20, "bytes")),
        ("80GiB * 0.5", (40 * 2**30, "bytes")),
        ("90% * 80GiB", (72 * 2**30, "bytes")),
        ("1GiB / 1MiB", (1024, "number")),
        ("1min - 1s", (59, "seconds")),
        ("50% * 50%", (0.25, "fraction")),
        ("-2 * -(3 + 4)", (14, "number")),
        ("7 / 2", (3.5, "number")),
        ("1_000 * 1e-3", (1, "number")),
    ],
)
def test_dimensions_follow_the_operators(text: str, result: tuple[float, str]):
    assert evaluate(text) == (pytest.approx(result[0]), result[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1GiB + 1s", "a time cannot be added to an amount of memory"),
        ("80GiB - 10%", "a fraction cannot be subtracted from an amount of memory"),
        ("1GiB * 1GiB", "an amount of memory cannot be multiplied by an amount of memory"),
        ("2 / 1s", "a plain number cannot be divided by a time"),
        ("1 / 0", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ('1 + "a"', "arithmetic takes numbers and `let` names only"),
        ("1 + [1]", "arithmetic takes numbers and `let` names only"),
        ("1 + hosts", "no `let` defines `hosts`"),
        ("1e20 * 1e20", "the result is too large"),
        ("1e400", "the number is too large"),
        ("9" * 400, "the number is too large"),
    ],
)
def test_undefined_arithmetic_reports_the_reason(text: str, message: str):
    result = evaluate(text)
    assert isinstance(result, Diagnostic)
    assert result.message == message


def test_let_names_evaluate_to_their_values():
    assert evaluate("hosts * 8", "let hosts = base / 2\nlet base = 8") == (32, "number")


@pytest.mark.parametrize("lets", ["let a = a", "let a = b\nlet b = a", "let a = b + 1\nlet b = c * 2\nlet c = a"])
def test_cyclic_let_names_are_reported(lets: str):
    result = evaluate("a", lets)
    assert isinstance(result, Diagnostic)
    assert result.code == "LP216"
    assert "a →" in result.message


def test_each_let_name_is_computed_once():
    lets = "\n".join(f"let a{index + 1} = a{index} + a{index}" for index in range(60))
    start = time.process_time()
    assert evaluate("a60", f"let a0 = 1\n{lets}") == (2**60, "number")
    assert time.process_time() - start < 5


def test_too_long_let_chain_is_reported():
    lets = "\n".join(f"let a{index + 1} = a{index} + 1" for index in range(5000))
    result = evaluate("a5000", f"let a0 = 1\n{lets}")
    assert isinstance(result, Diagnostic)
    assert result.code == "LP217"


HEAD = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 4)\nbatch (global = 4, micro = 1, seq_len = 64)\n'


def codes(text: str, **settings: Any) -> list[str]:
    return [item.code for item in resolve(HEAD + text, "t.plan", directory=Path(), **settings).diagnostics]


def test_let_cycle_is_reported_once():
    assert codes("let a = b\nlet b = a\nmesh (tp = a)\nattention b\n") == ["LP216"]
    assert codes("let a = b + 1\nlet b = a\nmesh (tp = a)\n") == ["LP216"]
    assert codes("let a = 1 / 0\nmesh (tp = a, pp = a)\n") == ["LP217"]


def test_command_line_setting_replaces_only_a_let():
    plan = resolve(HEAD + "let n = 2\nmesh (tp = n * 2)\n", "t.plan", directory=Path(), settings={"n": "1 + 1"}).plan
    assert plan is not None
    assert plan.mesh.tp == 4
    assert codes("let n = 2\nmesh (tp = n)\n", settings={"m": "2"}) == ["LP209"]
    assert codes("let n = 2\nmesh (tp = n)\n", settings={"n": "("}) == ["LP103"]
    assert codes("let n = 2\nmesh (tp = n)\n", settings={"n": "2\nclip (norm = 1)"}) == ["LP102"]
