"""The code writer's layout is the formatter's, and its imports are in the order that isort wants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.lowering.emit.code import (
    WIDTH,
    Function,
    Group,
    Imports,
    Item,
    Line,
    Loop,
    Note,
    Writer,
    call,
    dictionary,
    in_docstring,
    literal,
    on_one_line,
    quoted,
    sequence,
)
from legoai.specs.span import Span

NAMES = st.sampled_from(["x", "layer", "fully_shard", "reshard_after_forward", "a_name_that_is_rather_long_for_a_name"])
NOTES = st.sampled_from([None, None, Note(), Note(Span("a/b/tiny.plan", 0, 1, 7, 1, 7, 2))])
LEAVES = NAMES | st.integers(0, 10**9).map(str) | st.sampled_from(["None", "torch.float32", '"text"'])


def groups(children: st.SearchStrategy) -> st.SearchStrategy:
    items = st.lists(children, max_size=4)
    keywords = st.dictionaries(NAMES, children, max_size=4)
    entries = st.lists(st.tuples(NAMES, children, NOTES), max_size=4)
    return (
        st.builds(lambda name, args, kwargs: call(name, *args, **kwargs), NAMES, items, keywords)
        | items.filter(lambda found: len(found) > 0).map(sequence)
        | entries.map(dictionary)
    )


LINES = st.builds(
    Line,
    st.recursive(LEAVES, groups, max_leaves=12).filter(lambda node: isinstance(node, Group)),
    st.sampled_from(["", "x = ", "return "]),
    NOTES,
)


@settings(max_examples=10)
@given(st.lists(LINES, min_size=15, max_size=30))
def test_written_code_is_already_formatted(tmp_path_factory, lines: list[Line]):
    writer = Writer()
    for number, line in enumerate(lines):
        if number:
            writer.write()
            writer.write()
        writer.function(Function(f"f{number}(x) -> None", (Loop("for x in y", (line,)), line)))
    path: Path = tmp_path_factory.mktemp("code") / "code.py"
    path.write_text("\n".join(writer.text) + "\n")
    ruff = str(Path(sys.executable).parent / "ruff")
    command = [ruff, "format", "--isolated", "--line-length", str(WIDTH), "--diff", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_line_of_a_broken_call_has_a_span():
    span, other = Span("tiny.plan", 0, 1, 3, 1, 3, 2), Span("tiny.plan", 5, 6, 4, 1, 4, 2)
    writer = Writer()
    made = call("Trainer", Item("1", "first=", Note(other)), second="x" * 100)
    writer.body([Line(made, "return ", Note(span))], 4)
    assert writer.text[0] == "    return Trainer("
    assert writer.text[1] == "        first=1,  # tiny.plan:4"
    assert writer.text[-1] == "    )  # tiny.plan:3"
    assert [writer.spans[number].line for number in range(1, 5)] == [3, 4, 3, 3]


def test_imports_are_sorted_as_by_isort():
    imports = Imports()
    for module, name in [
        ("torch", "nn"), ("legoai.runtime", "Trainer"), ("torch.distributed.tensor", "distribute_tensor"),
        ("typing", "Any"), ("torch.distributed.tensor", "Shard"), ("legoai.runtime", "LIMIT"), ("abc_models", "build"),
    ]:  # fmt: skip
        imports.name(module, name)
    imports.module("torch")
    assert list(imports.lines()) == [
        "from typing import Any",
        "",
        "import torch",
        "from abc_models import build",
        "from torch import nn",
        "from torch.distributed.tensor import Shard, distribute_tensor",
        "",
        "from legoai.runtime import LIMIT, Trainer",
    ]


@given(st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none())
def test_literals_evaluate_to_their_values(value: object):
    assert eval(literal(value)) == value
    assert literal(value).isascii()


def test_quoted_text_stays_on_its_line():
    assert quoted("a'b\n\u2028") == r'''"a'b\n\u2028"'''
    assert quoted('it"s') == """'it"s'""", "as the formatter has it"
    assert quoted("""'it"s'""") == r'''"'it\"s'"'''


@given(st.text())
def test_any_text_stays_in_its_docstring_and_its_comment(text: str):
    assert eval(f'"""{in_docstring(text)}."""') == f"{text}."
    assert in_docstring(text).isprintable() and on_one_line(text).isprintable()
    assert eval(f"1  # {on_one_line(text)}") == 1


def test_numbers_without_a_literal_are_calls():
    infinity = float("inf")
    assert eval(literal([0.0, infinity, -infinity])) == (0.0, infinity, -infinity)
    assert literal(float("nan")) == 'float("nan")'
