"""Syntax trees and texts for property tests. Trees are built, not parsed: the parser cannot agree with itself."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from hypothesis import strategies as st

from legoai.dsl.frontend import syntax as tree
from legoai.specs.span import Span
from legoai.specs.units import UNITS

ONE_LINE = Span("t.plan", 0, 0, 1, 1, 1, 1)
TWO_LINES = Span("t.plan", 0, 0, 1, 1, 2, 1)

RESERVED = {"let", "require", "variant", "on", "in", "auto", "true", "false"}
"""Words that the grammar keeps for itself."""

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True).filter(lambda word: word not in RESERVED)
names = st.builds(tree.Name, words, st.just(ONE_LINE))
dotted_names = st.builds(
    tree.Name,
    st.builds(
        "{}.{}".format,
        words,
        st.lists(st.from_regex(r"[a-z0-9_]{1,4}", fullmatch=True), min_size=1, max_size=3).map(".".join),
    ),
    st.just(ONE_LINE),
)
number_texts = st.one_of(
    st.from_regex(r"[0-9][0-9_]{0,5}", fullmatch=True),
    st.from_regex(r"[0-9]{1,3}\.[0-9]{1,3}", fullmatch=True),
    st.from_regex(r"[0-9](\.[0-9])?[eE][+-]?[0-9]{1,2}", fullmatch=True),
)
numbers = st.builds(tree.Number, number_texts, st.sampled_from(["", *UNITS]), st.just(ONE_LINE))
strings = st.builds(
    tree.String,
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12),
    st.just(ONE_LINE),
)
booleans = st.builds(tree.Boolean, st.booleans(), st.just(ONE_LINE))

segments = st.one_of(
    st.from_regex(r"[a-z_][a-z0-9_\-]{0,8}", fullmatch=True),
    st.just("*"),
    st.just("**"),
    st.builds("{{{}..{}}}".format, st.integers(0, 9), st.integers(10, 99)),
    st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,4}", fullmatch=True), min_size=1, max_size=3).flatmap(
        lambda words: st.sampled_from([",", ", ", " , "]).map(lambda comma: f"{{{comma.join(words)}}}")
    ),
)
paths = st.builds(tree.PathText, st.lists(segments, min_size=1, max_size=4).map(".".join), st.just(ONE_LINE))


def lists_of(items: st.SearchStrategy[tree.Value]) -> st.SearchStrategy[tree.ListValue]:
    return st.builds(tree.ListValue, st.lists(items, max_size=4).map(tuple), st.just(ONE_LINE))


def arguments_of(values: st.SearchStrategy[tree.Value]) -> st.SearchStrategy[tree.Arguments]:
    one = st.builds(tree.Argument, st.none() | names, values, st.just(ONE_LINE))
    return st.builds(tree.Arguments, st.lists(one, max_size=4).map(tuple), st.just(ONE_LINE))


def calls_of(values: st.SearchStrategy[tree.Value]) -> st.SearchStrategy[tree.Call]:
    return st.builds(tree.Call, names, arguments_of(values), st.just(ONE_LINE))


def _sums(inner: st.SearchStrategy[tree.Value]) -> st.SearchStrategy[tree.Value]:
    """Values that may stand in arithmetic; `auto` may not, but may stand in the lists and calls that do."""
    values = inner | holes_of(inner)
    return st.one_of(
        lists_of(values),
        calls_of(values),
        st.builds(tree.Binary, st.sampled_from(("+", "-", "*", "/", "//", "%")), inner, inner, st.just(ONE_LINE)),
        st.builds(tree.Negation, inner, st.just(ONE_LINE)),
    )


def holes_of(sums: st.SearchStrategy[tree.Value]) -> st.SearchStrategy[tree.Auto]:
    domains = st.none() | lists_of(sums) | st.builds(tree.Range, sums, sums, st.just(ONE_LINE))
    return st.builds(tree.Auto, domains, st.none() | sums, st.just(ONE_LINE))


operands = st.one_of(names, dotted_names, numbers, strings, booleans)
sums = st.recursive(operands, _sums, max_leaves=8)
values = sums | holes_of(sums)
subjects = operands | lists_of(values) | calls_of(values) | holes_of(sums)
rules = st.builds(tree.RuleLine, paths, values, st.just(ONE_LINE))
blocks = st.builds(tree.Block, st.lists(rules, max_size=4).map(tuple), st.sampled_from([ONE_LINE, TWO_LINES]))


@st.composite
def directives(draw: st.DrawFn) -> tree.Statement:
    """A statement in any form that can be written: options right behind a name would be the name's own arguments."""
    subject = draw(st.none() | subjects)
    axes = tuple(draw(st.lists(names, max_size=3)))
    options = draw(st.none() | arguments_of(values)) if subject is None or axes else None
    keyword = draw(names.filter(lambda name: name.text not in ("solved", "unset")))
    return tree.Statement(keyword, subject, axes, options, draw(st.none() | blocks), ONE_LINE)


lets = st.builds(tree.Let, names, values, st.just(ONE_LINE))
requirements = st.builds(tree.Require, names, st.sampled_from(["<=", "<", ">=", ">", "=="]), values, st.just(ONE_LINE))
solved_lines = st.builds(
    tree.SolvedLine,
    st.builds(
        '"{}" {}'.format, st.text("0123456789abcdef:", max_size=9), st.text(string.ascii_letters + " ,.%@", max_size=20)
    ).map(str.rstrip),
    st.just(ONE_LINE),
)
unsets = st.builds(tree.Unset, names, st.none() | names, st.lists(names, max_size=2).map(tuple), st.just(ONE_LINE))
plain_statements = st.one_of(directives(), lets, requirements, solved_lines, unsets)
variants = st.builds(tree.Variant, names, st.lists(plain_statements, max_size=3).map(tuple), st.just(ONE_LINE))
statements = plain_statements | variants
plans = st.builds(
    tree.PlanFile, st.just("t.plan"), st.just(""), st.lists(statements, max_size=4).map(tuple), st.just(())
)

fragments = st.sampled_from([
    "plan", "model", "mesh", "shard", "let", "require", "variant", "solved", "on", "in", "auto", "true",
    "(", ")", "[", "]", "{", "}", "=", ",", ".", "..", "->", "<=", "+", "-", "*", "/", "#", '"', "\\", "%",
    "8", "1.5", "4GiB", "0..9", "layers.*", "**", "{a,b}",
    "\n", "\n\n", "\r\n", "\t", " ", "\ufeff", "é", "\x00", "\u2028", "\x0c",
])  # fmt: skip
texts = st.one_of(
    st.text(max_size=60), st.lists(fragments, max_size=40).map("".join), st.lists(fragments, max_size=40).map(" ".join)
)


def damage(text: str, chance: random.Random) -> str:
    """The text with one to three mistakes of the kind that people and merges make."""
    for _ in range(chance.randint(1, 3)):
        text = chance.choice(_DAMAGES)(text, chance)
    return text


def _place(text: str, chance: random.Random) -> int:
    return chance.randrange(len(text) + 1)


def _characters(text: str, chance: random.Random) -> str:
    at = _place(text, chance)
    other = chance.choice(string.printable + "“é\x00")
    return chance.choice([
        text[:at] + text[at + 1 :], text[:at] + text[at : at + 1] * 2 + text[at + 1 :], text[:at] + other + text[at:],
        text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :],
    ])  # fmt: skip


def _edited(found: list[str], chance: random.Random, changed: Callable[[str, str], str]) -> list[str]:
    """Delete one item, copy one, swap two, or replace the first of two by ``changed(first, second)``."""
    first, second = chance.randrange(len(found)), chance.randrange(len(found))
    kind = chance.randrange(4)
    if kind == 0:
        del found[first]
    elif kind == 1:
        found.insert(first, found[second])
    elif kind == 2:
        found[first], found[second] = found[second], found[first]
    else:
        found[first] = changed(found[first], found[second])
    return found


def _tokens(text: str, chance: random.Random) -> str:
    import re

    found = re.findall(r"\w+|\s+|[^\w\s]", text) or [""]
    return "".join(_edited(found, chance, lambda _, other: other))


def _lines(text: str, chance: random.Random) -> str:
    return "\n".join(_edited(text.split("\n"), chance, lambda line, _: line[: chance.randrange(len(line) + 1)]))


def _numbers(text: str, chance: random.Random) -> str:
    import re

    found = list(re.finditer(r"[0-9][0-9_.]*", text))
    if not found:
        return text
    match = chance.choice(found)
    other = chance.choice(
        [
            "0",
            "1",
            "3",
            "7",
            "-1",
            "0.5",
            "1e9",
            "1e400",
            "9" * 30,
            "9" * 400,
            "2GiB",
            "10%",
            "auto",
            "auto in [1, 2]",
            "x",
            '"8"',
        ]
    )
    return text[: match.start()] + other + text[match.end() :]


def _names(text: str, chance: random.Random) -> str:
    import re

    found = list(re.finditer(r"[A-Za-z_]\w*", text))
    if not found:
        return text
    match, source = chance.choice(found), chance.choice(found)
    other = chance.choice(
        [source[0], source[0][:-1], source[0] + "s", source[0].upper(), "root", "auto", "none", "**", "{0..9}"]
    )
    return text[: match.start()] + other + text[match.end() :]


_DAMAGES = (_characters, _tokens, _lines, _numbers, _names)
