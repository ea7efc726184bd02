"""Output formats of diagnostics, for people and for programs."""

import json
import re
import unicodedata
from pathlib import Path

import pytest

from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.frontend.text import Lines
from legoai.dsl.reporting.output import FORMATS, render, render_full
from legoai.dsl.reporting.snippets import WIDTH, display_width
from legoai.dsl.rules import all_rules
from legoai.specs.span import Span

TEXT = """plan tiny
mesh (dp_shard = 8, tp = 8)
shard on tp {
  a = colwise
\tb = 日本 rowwise
  c = x
  d = x
  e = x
  f = x
}
  checkpoint {
  }
"""


def files(text: str = TEXT, name: str = "t.plan") -> dict[str, PlanFile]:
    return {name: PlanFile(name, text, (), ())}


def at(words: str, text: str = TEXT, name: str = "t.plan") -> Span:
    start = text.index(words)
    return Lines(text, name).span(start, start + len(words))


def made(label: Label, *others: Label, **more: object) -> Diagnostic:
    return Diagnostic("LP301", "some-slug", "error", "what is wrong", label, others, **more)  # type: ignore[arg-type]


def drawn(label: Label, *others: Label, text: str = TEXT) -> str:
    """The rows with source lines and marks."""
    rows = render_full([made(label, *others)], files(text)).splitlines()
    return "\n".join(rows[3:])


def test_diagnostic_shows_code_span_help_and_fix():
    span = at("tp = 8")
    fix = Fix("write `tp = 4`", (Edit(span, "tp = 4"),), safe=True)
    shown = render_full([made(Label(span, "too many"), help=("use fewer",), fix=fix)], files())
    assert shown == (
        "error[LP301] some-slug: what is wrong\n"
        " --> t.plan:2:21\n"
        "  |\n"
        "2 | mesh (dp_shard = 8, tp = 8)\n"
        "  |                     ^^^^^^ too many\n"
        "  |\n"
        "  = help: use fewer\n"
        "  = fix: write `tp = 4` (`legoai lint --fix` does it)\n"
    )


def test_labels_of_one_line_are_drawn_below_it():
    assert drawn(Label(at("tp = 8"), "here"), Label(at("dp_shard"), "there"), Label(at("mesh"), "this")) == (
        "2 | mesh (dp_shard = 8, tp = 8)\n  | ----  --------      ^^^^^^ here\n  | |     |\n  | |     there\n  | this"
    )


def test_primary_label_is_drawn_over_secondary_labels():
    assert drawn(Label(at("dp_shard"), "here"), Label(at("mesh (dp_shard = 8, tp = 8)"), "whole")) == (
        "2 | mesh (dp_shard = 8, tp = 8)\n  | ------^^^^^^^^-------------\n  | |     |\n  | |     here\n  | whole"
    )


def test_marks_are_right_below_tabs_and_wide_characters():
    assert drawn(Label(at("rowwise"), "wide")) == (
        "5 |     b = 日本 rowwise\n"
        "  |              ^^^^^^^ wide"
    )  # fmt: skip


def test_single_line_between_marked_lines_is_shown():
    assert (
        drawn(Label(at("a = colwise"), "second"), Label(at("mesh"), "first"))
        .splitlines()[2]
        .startswith("3 | shard on tp {")
    )
    far = drawn(Label(at("f = x"), "second"), Label(at("mesh"), "first"))
    assert far.splitlines()[2] == "..."


def test_multi_line_span_is_marked_by_a_side_bar():
    start = TEXT.index("{")
    span = Lines(TEXT, "t.plan").span(start, TEXT.index("}") + 1)
    assert drawn(Label(span, "this block")) == (
        " 3 |   shard on tp {\n"
        "   |  _____________^\n"
        " 4 | |   a = colwise\n"
        " 5 | |     b = 日本 rowwise\n"
        "...  |\n"
        " 9 | |   f = x\n"
        "10 | | }\n"
        "   | |_^ this block"
    )


def test_span_from_line_start_is_marked_on_its_first_line():
    start = TEXT.index("checkpoint")
    span = Lines(TEXT, "t.plan").span(start, TEXT.index("}", start) + 1)
    assert drawn(Label(span, "this block")) == (
        "11 | /   checkpoint {\n"
        "12 | |   }\n"
        "   | |___^ this block"
    )  # fmt: skip


def test_span_ending_at_a_line_end_stays_on_the_line():
    span = Lines(TEXT, "t.plan").span(TEXT.index("tp = 8"), TEXT.index("shard on"))
    assert drawn(Label(span, "here")).splitlines()[1] == "  |                     ^^^^^^^ here"


def test_an_empty_span_at_the_end_of_the_file_has_one_mark():
    text = "plan x"
    assert drawn(Label(Lines(text, "t.plan").span(6, 6), "more"), text=text).splitlines()[-1] == "  |       ^ more"


@pytest.mark.parametrize("before", [0, 40, 1000])
@pytest.mark.parametrize("after", [0, 40, 1000])
@pytest.mark.parametrize("filler", ["x", "日"])
def test_a_long_line_is_cut_around_the_mark(before: int, after: int, filler: str):
    text = filler * before + " MARK " + filler * after
    line, marks = drawn(Label(at("MARK", text), "here"), text=text).splitlines()[:2]
    assert display_width(line) <= WIDTH + len("1 | ") + 2
    start = marks.index("^")
    assert marks[start : start + 5] == "^^^^ "
    column = 0
    for index, character in enumerate(line):
        if column == start:
            assert line[index : index + 4] == "MARK"
            break
        column += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    else:
        pytest.fail("the mark is below nothing")


def test_labels_in_another_file_are_shown_with_their_line():
    base = "plan base\nmesh (tp = 4)\n"
    other = Label(at("tp = 4", base, "base.plan"), "decided here")
    shown = render_full([made(Label(at("tp = 8"), "here"), other)], files() | files(base, "base.plan"))
    assert shown.endswith(" ::: base.plan:2:7\n  |\n2 | mesh (tp = 4)\n  |       ------ decided here\n")


def test_a_file_without_text_is_named_without_a_line():
    span = Span("gone.plan", 0, 0, 1, 1, 1, 1)
    assert render_full([made(Label(span))], {}).splitlines()[1] == " --> gone.plan"


def test_control_characters_are_not_printed():
    text = "plan \x1b[31mx\x07\u202e"
    diagnostic = Diagnostic("LP301", "s", "error", "m \x1b[2J", Label(at("x", text), "l\x08"))
    for name in ("full", "concise"):
        shown = render(name, [diagnostic], files(text))
        assert not [character for character in shown if character != "\n" and not character.isprintable()]


def test_colours_only_wrap_the_text():
    diagnostic = made(Label(at("tp = 8"), "here"), Label(at("mesh"), "there"), help=("do it",))
    for name in ("full", "concise"):
        plain, colored = (render(name, [diagnostic], files(), color=color) for color in (False, True))
        assert "\x1b[1;31m" in colored
        assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_empty_result_is_empty_text_or_a_valid_document():
    assert {name: bool(render(name, [], {})) for name in FORMATS} == {
        "full": False, "concise": False, "github": False, "json": True, "sarif": True,
    }  # fmt: skip


def test_concise_prints_one_line_per_diagnostic():
    shown = render("concise", [made(Label(at("tp = 8"))), made(Label(at("mesh")))], files())
    assert shown == "t.plan:2:21: error[LP301] what is wrong\nt.plan:2:1: error[LP301] what is wrong\n"


def test_json_holds_everything_and_offsets_cut_the_text():
    span = at("tp = 8")
    fix = Fix("write it", (Edit(span, "tp = 4"),), safe=False)
    body = json.loads(
        render("json", [made(Label(span, "here"), Label(at("mesh"), "m"), help=("h",), fix=fix)], files())
    )
    assert body["format_version"] == 1
    [item] = body["diagnostics"]
    assert (item["code"], item["slug"], item["severity"], item["message"]) == (
        "LP301",
        "some-slug",
        "error",
        "what is wrong",
    )
    assert item["label"]["text"] == "here"
    assert item["help"] == ["h"]
    assert [other["text"] for other in item["others"]] == ["m"]
    assert item["fix"]["safe"] is False
    [edit] = item["fix"]["edits"]
    assert TEXT[edit["start"]["offset"] : edit["end"]["offset"]] == "tp = 8"
    assert edit["start"] == {"offset": span.start, "line": 2, "column": 21}


def test_github_commands_escape_messages_and_file_names():
    span = at("tp = 8", TEXT, "a,b:c%.plan")
    item = Diagnostic("LP801", "slug", "advice", "50% slower\n::error::no", Label(span), help=("x\r\ny",))
    shown = render("github", [item], {})
    assert shown.count("\n") == 1
    assert shown == (
        "::notice title=LP801 slug,file=a%2Cb%3Ac%25.plan,line=2,endLine=2,col=21,endColumn=27::"
        "a,b:c%25.plan:2:21: LP801 50%25 slower%0A::error::no%0Ahelp: x␍%0Ay\n"
    )


@pytest.mark.parametrize("name", ["--set ranks", "<stdin>"])
def test_github_annotates_no_file_for_what_is_in_none(name: str):
    shown = render("github", [made(Label(at("tp = 8", TEXT, name)))], {})
    assert shown == f"::error title=LP301 some-slug::{name}:2:21: LP301 what is wrong\n"


@pytest.mark.parametrize("is_checkout", [False, True])
@pytest.mark.parametrize("name", ["plans/a b.plan", "../shared/a b.plan", "{root}/ml/plans/a b.plan"])
def test_files_are_named_from_the_root_of_the_repository(
    name: str, is_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = tmp_path / "checkout"
    for folder in (root / "ml", root / ".git"):
        folder.mkdir(parents=True)
    if is_checkout:
        (root / "ml" / ".git").write_text("gitdir: elsewhere\n", encoding="utf-8")  # a submodule of the checkout
        monkeypatch.setenv("GITHUB_WORKSPACE", str(root))
    else:
        monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(root / "ml")
    name = name.format(root=root)
    item = made(Label(at("tp = 8", TEXT, name)), Label(at("mesh", TEXT, str(tmp_path / "outside.plan")), "there"))
    expected = "shared/a b.plan" if "shared" in name else "ml/plans/a b.plan"
    shown = render("github", [item], {})
    assert f",file={expected},line=2" in shown and f"::{name}:2:21: " in shown
    [run] = json.loads(render("sarif", [item], {}))["runs"]
    [result] = run["results"]
    location = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location == {"uri": expected.replace(" ", "%20"), "uriBaseId": "%SRCROOT%"}
    assert location["uriBaseId"] in run["originalUriBaseIds"]  # 3.14.14
    other = result["relatedLocations"][0]["physicalLocation"]["artifactLocation"]
    assert other == {"uri": f"file://{tmp_path}/outside.plan"}


def test_github_omits_columns_for_multi_line_spans():
    span = Lines(TEXT, "t.plan").span(0, len(TEXT))
    assert ",col=" not in render("github", [made(Label(span))], {})


def test_sarif_output_follows_the_standard():
    # Section numbers are those of SARIF 2.1.0 (OASIS, 27 March 2020).
    first, second = (next(rule for rule in all_rules() if rule.code == code) for code in ("LP206", "LP901"))
    span = at("tp = 8", TEXT, "dir/a plan.plan")
    fix = Fix("write it", (Edit(span, "tp = 4"),), safe=False)
    found = [
        second.at(at("plan", TEXT, "<stdin>"), "unused"),
        first.at(span, "twice", label="again", others=[Label(at("mesh"), "first")], help=["one only"], fix=fix),
    ]
    log = json.loads(render("sarif", found, {}))
    assert log["version"] == "2.1.0"
    [run] = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "legoai"  # 3.19.8
    assert [rule["id"] for rule in driver["rules"]] == ["LP206", "LP901"]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"].endswith(".")  # 3.49.9
        assert rule["help"]["text"]  # 3.49.13: text must be there beside markdown
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    assert run["columnKind"] == "unicodeCodePoints"  # 3.14.17
    for result, item in zip(run["results"], found, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == item.code  # 3.27.5, 3.27.6
        assert result["message"]["text"].startswith(item.message)
        [location] = result["locations"]
        region = location["physicalLocation"]["region"]
        assert (region["startLine"], region["startColumn"]) == (item.label.span.line, item.label.span.column)
        assert region["charLength"] == item.label.span.end - item.label.span.start
    uris = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]]
    assert uris == ["%3Cstdin%3E", "dir/a%20plan.plan"]  # 3.4.3: a valid URI reference
    assert [result["level"] for result in run["results"]] == ["warning", "error"]
    [change] = run["results"][1]["fixes"][0]["artifactChanges"]  # 3.55
    assert change["replacements"][0]["insertedContent"] == {"text": "tp = 4"}
    assert run["results"][1]["relatedLocations"][0]["message"] == {"text": "first"}


def test_texts_of_plans_make_no_placeholder_and_no_link_in_sarif():
    span = at("tp = 8", TEXT, "a.plan")
    fix = Fix("write {0}", (Edit(span, "{0}[x](1)"),), safe=True)
    rule = next(rule for rule in all_rules() if "{" in (rule.__doc__ or ""))
    item = rule.at(span, "{0} [x](1)", label="no {1}", others=[Label(at("mesh"), "{2}")], help=["[0]{3}"], fix=fix)
    [run] = json.loads(render("sarif", [item], {}))["runs"]
    [result] = run["results"]
    assert result["message"]["text"] == "{{0}} [x\\](1)\nhelp: [0]{{3}}"  # 3.11.5, 3.11.6
    assert result["locations"][0]["message"]["text"] == "no {{1}}"
    assert result["relatedLocations"][0]["message"]["text"] == "{{2}}"
    assert result["fixes"][0]["description"]["text"] == "write {{0}}"
    [change] = result["fixes"][0]["artifactChanges"]
    assert change["replacements"][0]["insertedContent"]["text"] == "{0}[x](1)"  # 3.3: content of a file, no message
    [described] = run["tool"]["driver"]["rules"]
    for text in described["help"].values():  # 3.12: a message too
        assert text.replace("{{", "").replace("}}", "").count("{") == 0 and "{{" in text


def test_every_rule_can_be_written_in_every_format():
    for rule in all_rules():
        for name in FORMATS:
            assert rule.code in render(name, [rule.at(at("mesh"), "found")], files())
