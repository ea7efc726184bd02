"""The parser accepts every form, finds several mistakes in one text, records all spans, and never raises."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark import Lark

from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend import syntax as tree
from legoai.dsl.frontend.parsing.parse import Parsed, parse
from legoai.dsl.frontend.syntax import children, same
from support.texts import strategies as some

BATCH = "batch (global = 512, micro = 4)"


def statement(text: str) -> tree.AnyStatement:
    """The one statement of a text without mistakes."""
    parsed = parse(text, "t.plan")
    assert parsed.diagnostics == ()
    [found] = parsed.file.statements
    return found


def value(text: str) -> tree.Value:
    found = statement(f"let x = {text}")
    assert isinstance(found, tree.Let)
    return found.value


def found(text: str) -> list[tuple[str, int]]:
    """The code and line of each mistake."""
    return [(item.code, item.label.span.line) for item in parse(text, "t.plan").diagnostics]


def nodes(parent: tree.Node) -> Iterator[tree.Node]:
    yield parent
    for child in children(parent):
        yield from nodes(child)


def every_node(parsed: Parsed) -> Iterator[tree.Node]:
    for item in (*parsed.file.statements, *parsed.file.comments):
        yield from nodes(item)


@pytest.mark.parametrize(
    "text", ["[1]\n", "checkpoint {\n  [1] = full\n}\n", "checkpoint {\n  *[1] = full\n}\n", "[0:4]\n"]
)
def test_a_slice_of_nothing_is_a_mistake_without_a_hint(text: str):
    [item] = parse(f"plan s\n{text}", "t.plan").diagnostics
    assert (item.code, item.help) == ("LP102", ())


def test_the_grammar_has_no_conflicts():
    """Lark's strict mode finds LALR conflicts and, with interegular, terminals that can match the same text."""
    pytest.importorskip("interegular")
    text = (files("legoai.dsl.grammar") / "plan.lark").read_text(encoding="utf-8")
    Lark(text, parser="lalr", lexer="contextual", strict=True)


class TestForms:
    def test_a_statement_has_keyword_value_axes_options_and_block(self):
        full = statement('fsdp x on dp_replicate, dp_shard (backend = graph, "a") { root = unit, layers.* = none }')
        assert isinstance(full, tree.Statement)
        assert full.keyword.text == "fsdp"
        assert isinstance(full.subject, tree.Name)
        assert [axis.text for axis in full.axes] == ["dp_replicate", "dp_shard"]
        assert full.options is not None
        assert [item.name.text if item.name else None for item in full.options.items] == ["backend", None]
        assert full.block is not None
        assert [rule.path.text for rule in full.block.rules] == ["root", "layers.*"]

    def test_brackets_after_a_value_are_its_arguments(self):
        full = statement('model llama3("8b", n_layers = 4)')
        assert isinstance(full, tree.Statement)
        assert isinstance(full.subject, tree.Call)
        assert full.options is None

    @pytest.mark.parametrize("separator", [", ", "\n  ", ",\n  ", "\n  , ", "  # why\n  ", ", # why\n\n  # more\n  "])
    def test_commas_and_newlines_are_equivalent_separators(self, separator: str):
        expected = parse("mesh (tp = 8, pp = 2)", "t.plan").file.statements
        assert same(parse(f"mesh (tp = 8{separator}pp = 2)", "t.plan").file.statements, expected)
        assert same(parse(f"mesh (\n  tp = 8{separator}pp = 2\n)", "t.plan").file.statements, expected)

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "  \n", "# c", "\n# c", ""])
    def test_line_ends_may_be_of_any_kind(self, end: str):
        assert len(parse(f"plan a{end}", "t.plan").file.statements) == 1

    def test_arithmetic_binds_as_in_mathematics_and_to_the_left(self):
        product = value("1 + 2 * 3")
        assert isinstance(product, tree.Binary)
        assert product.operator == "+"
        left = value("8 - 4 - 2")
        assert isinstance(left, tree.Binary)
        assert isinstance(left.left, tree.Binary)
        assert same(value("8 - (4 - 2)"), value("8-(4-2)"))
        assert not same(value("8 - (4 - 2)"), value("8 - 4 - 2"))
        assert same(value("-2 * 3"), tree.Binary("*", value("-2"), value("3"), some.ONE_LINE))

    @pytest.mark.parametrize(
        ("text", "domain", "answer"),
        [
            ("auto", None, False),
            ("auto in [1, 2, 4]", tree.ListValue, False),
            ("auto in 1..8", tree.Range, False),
            ("auto -> 8", None, True),
            ("auto in [a, b] -> a", tree.ListValue, True),
        ],
    )
    def test_a_hole_has_a_domain_and_an_answer(self, text: str, domain: type | None, answer: bool):
        for hole in (value(text), getattr(statement(f"attention {text}"), "subject", None)):
            assert isinstance(hole, tree.Auto)
            assert type(hole.domain) is (domain or type(None))
            assert (hole.answer is not None) == answer

    @pytest.mark.parametrize(
        ("text", "number", "unit"), [("72GiB", "72", "GiB"), ("1e-5", "1e-5", ""), ("10%", "10", "%")]
    )
    def test_numbers_keep_their_text_and_have_units(self, text: str, number: str, unit: str):
        assert same(value(text), tree.Number(number, unit, some.ONE_LINE))

    def test_strings_have_four_escapes(self):
        assert same(value(r'"a\"b\\c\n\t#"'), tree.String('a"b\\c\n\t#', some.ONE_LINE))

    def test_option_names_may_be_keywords_of_statements(self):
        parsed = parse("offload (\noptimizer = all\n)\nplan a\n", "t.plan")
        assert parsed.diagnostics == ()
        assert len(parsed.file.statements) == 2

    def test_a_statement_may_be_indented(self):
        assert [item.code for item in parse("plan a\n  mesh (tp = 8)\n", "t.plan").diagnostics] == []

    def test_variant_may_hold_unindented_statements(self):
        text = "variant v {\nmesh (tp = 8)\nfsdp on dp_shard {\n  root = unit\n}\n}\nplan a\n"
        parsed = parse(text, "t.plan")
        assert parsed.diagnostics == ()
        assert [type(item) for item in parsed.file.statements] == [tree.Variant, tree.Statement]

    def test_comments_are_kept_outside_the_tree(self):
        parsed = parse('# first\nmodel m("# no")  # second\r\n', "t.plan")
        assert [(item.text, item.alone) for item in parsed.file.comments] == [("# first", True), ("# second", False)]


@pytest.mark.parametrize(
    ("text", "column", "help"),
    [
        ("let größe = 3", 7, "names have the letters a to z"),
        ("let a = ²", 9, "names have the letters a to z"),
        ("plan a\rlet a = 3\r", 7, "lines end with a line feed"),
        ("let a = 3\f\nlet b = 4", 10, "a page or column break: delete it"),
    ],
)
def test_unexpected_character_has_a_cure(text: str, column: int, help: str):
    item = parse(text, "t.plan").diagnostics[0]
    assert (item.code, item.label.span.column) == ("LP101", column)
    assert help in item.help[0]


class TestRecovery:
    def test_several_syntax_errors_are_reported(self):
        text = f"""
plan a b
model llama3("8b"
{BATCH}
fsdp dp_shard on {{ root = unit }}
mesh (tp = 8; pp = 2)
checkpoint {{
  layers.0 full
  layers.1 = full
  layers.2 : full
}}
clip (norm = 1)
"""
        assert found(text) == [
            ("LP102", 2), ("LP103", 3), ("LP102", 5), ("LP101", 6), ("LP102", 8), ("LP101", 10),
        ]  # fmt: skip
        kept = [item.keyword.text for item in parse(text, "t.plan").file.statements if isinstance(item, tree.Statement)]
        assert kept == ["batch", "checkpoint", "clip"]

    def test_valid_rules_of_a_block_with_an_invalid_line_are_kept(self):
        parsed = parse("checkpoint {\n  layers.0 full\n  layers.1 = full\n}\n", "t.plan")
        [block] = [item.block for item in parsed.file.statements if isinstance(item, tree.Statement)]
        assert block is not None
        assert [rule.path.text for rule in block.rules] == ["layers.1"]

    @pytest.mark.parametrize("opening", ["shard on tp {", "mesh (", "let a = [", "variant v {"])
    def test_an_unclosed_bracket_ends_at_the_next_statement(self, opening: str):
        text = f"{opening}\n{BATCH}\nmodel m\n"
        assert ("LP103", 1) in found(text)
        assert len(parse(text, "t.plan").file.statements) == 2

    def test_values_may_be_nested_deep_but_not_endlessly(self):
        for many in ("[" * 50 + "]" * 50, "+".join(["1"] * 60)):
            assert found(f"let a = {many}") == []
        for many in ("[" * 5000 + "]" * 5000, "+".join(["1"] * 5000), "-" * 5000 + "1", "f(" * 5000 + ")" * 5000):
            assert found(f"let a = {many}") == [("LP109", 1)]

    @given(some.texts)
    @settings(max_examples=300)
    def test_parser_never_raises(self, text: str):
        parsed = parse(text, "t.plan")
        for item in parsed.diagnostics:
            assert 0 <= item.label.span.start <= item.label.span.end <= len(text) + 1
            assert item.message
            assert item.code.startswith("LP1")


class TestSpans:
    @given(some.plans)
    @settings(max_examples=25)
    def test_every_node_span_reparses_to_the_node(self, plan: tree.PlanFile):
        text = format_plan(plan)
        for node in every_node(parse(text, "t.plan")):
            cut = text[node.span.start : node.span.end]
            if isinstance(node, tree.Name | tree.PathText | tree.Comment):
                assert cut == node.text
            elif isinstance(node, tree.Number):
                assert cut == node.text + node.unit
            elif isinstance(node, tree.SolvedLine):
                assert cut == f"solved {node.text}"
            elif isinstance(node, tree.AnyStatement.__args__):  # type: ignore[attr-defined]
                assert same(parse(cut, "t.plan").file.statements, (node,))
            elif isinstance(node, tree.Value.__args__):  # type: ignore[attr-defined]
                assert same(value(cut), node)
            elif isinstance(node, tree.Argument | tree.Arguments):
                inside = cut if isinstance(node, tree.Arguments) else f"({cut})"
                options = getattr(statement(f"x {inside}"), "options", None)
                assert same(options if isinstance(node, tree.Arguments) else options.items[0], node)
            elif isinstance(node, tree.RuleLine | tree.Block):
                inside = cut if isinstance(node, tree.Block) else f"{{ {cut} }}"
                block = getattr(statement(f"x {inside}"), "block", None)
                assert same(block if isinstance(node, tree.Block) else block.rules[0], node)
            else:
                assert isinstance(node, tree.Range)
                domain = getattr(value(f"auto in {cut}"), "domain", None)
                assert domain is not None
                assert same(domain, node)

    @given(some.texts)
    @settings(max_examples=120)
    def test_lines_and_columns_count_from_one_and_agree_with_offsets(self, text: str):
        parsed = parse(text, "t.plan")
        for node in every_node(parsed):
            for offset, line, column in (
                (node.span.start, node.span.line, node.span.column),
                (node.span.end, node.span.end_line, node.span.end_column),
            ):
                before = text[:offset]
                assert line == before.count("\n") + 1
                assert column == offset - (before.rfind("\n") + 1) + 1


@given(st.data())
@settings(max_examples=25)
def test_truncated_text_parses_up_to_the_cut(data: st.DataObject):
    text = format_plan(data.draw(some.plans))
    cut = data.draw(st.integers(0, len(text)))
    whole = parse(text, "t.plan").file.statements
    part = parse(text[:cut], "t.plan").file.statements
    complete = [item for item in whole if item.span.end < cut]
    assert same(part[: len(complete)], tuple(complete))
