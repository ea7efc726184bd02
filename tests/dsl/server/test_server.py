"""The language server over standard input and output, as an editor drives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.lint import lint
from legoai.dsl.reporting import topics
from support import ROOT
from support.commands.command_line import BAD, GOOD
from support.commands.language_client import Client, applied

TINY = (ROOT / "plans" / "tiny.plan").read_text(encoding="utf-8")
STANDARD = GOOD.replace("dp_shard = 4)", "dp_shard = 2, tp = 2)") + "shard standard on tp (sequence)\n"


def codes(diagnostics: list[dict[str, object]]) -> list[object]:
    return [item["code"] for item in diagnostics]


def test_diagnostics_use_the_buffer_text(editor: tuple[Client, str]):
    server, name = editor
    server.change(name, BAD)
    [found] = server.diagnostics(name)
    assert found["code"] == "LP210"
    assert found["source"] == "legoai"
    assert found["severity"] == 1
    start = found["range"]["start"]
    assert BAD.split("\n")[start["line"]][start["character"] :].startswith("layrs.*")
    [related] = found["relatedInformation"]
    assert related["location"]["uri"] == server.uri(name)
    assert "help: did you mean `layers.*`?" in found["message"]
    server.change(name, GOOD)
    assert server.diagnostics(name) == []


def test_only_the_last_change_is_linted(editor: tuple[Client, str]):
    server, name = editor
    for n in range(20):
        server.change(name, GOOD + "#" * n)
    server.change(name, BAD)
    assert codes(server.diagnostics(name)) == ["LP210"]
    versions = [
        note["params"].get("version")
        for note in server.notes
        if note["method"] == "textDocument/publishDiagnostics" and note["params"]["uri"] == server.uri(name)
    ]
    assert len(versions) < 5


def test_closing_clears_the_diagnostics(shared: Client):
    assert shared.open("closed.plan", BAD)
    shared.close("closed.plan")
    sent = shared.note("textDocument/publishDiagnostics", lambda note: note["uri"] == shared.uri("closed.plan"))
    assert sent["diagnostics"] == []
    assert "version" not in sent or sent["version"] is None
    assert shared.on("hover", "closed.plan", position={"line": 0, "character": 0}) is None


def test_unused_let_has_the_unnecessary_tag(editor: tuple[Client, str]):
    server, name = editor
    server.change(name, GOOD + "let hosts = 4\n")
    [found] = server.diagnostics(name)
    assert found["code"] == "LP901"
    assert found["tags"] == [1]
    assert found["severity"] == 2


def test_positions_are_utf_16_and_line_ends_are_kept(editor: tuple[Client, str]):
    server, name = editor
    text = GOOD.replace("plan small\n", "# 🚀 Größe\u2028 of one line\nplan small\n").replace("\n", "\r\n")
    text += 'data (source = "🚀🚀.jsonl", fild = "x")\r\n'
    server.change(name, text)
    found = next(item for item in server.diagnostics(name) if "fild" in item["message"])
    line = text.count("\r\n") - 1
    assert found["range"]["start"] == {"line": line, "character": len('data (source = "🚀🚀.jsonl", ') + 2}
    assert found["range"]["end"]["character"] - found["range"]["start"]["character"] == len("fild")


def test_a_document_without_a_file_is_linted_in_the_workspace(shared: Client, folder: Path):
    (folder / "base.plan").write_text(GOOD, encoding="utf-8")
    assert shared.open("untitled:Untitled-1", 'plan other\nextends "base.plan"\nclip (norm = 1.0)\n') == []
    shared.close("untitled:Untitled-1")


def test_base_plan_is_read_from_its_buffer(shared: Client, folder: Path):
    (folder / "below.plan").write_text(GOOD, encoding="utf-8")
    assert shared.open("above.plan", '# above\nplan above\nextends "below.plan"\n') == []
    assert shared.open("below.plan", BAD)
    [found] = shared.diagnostics("above.plan")
    assert found["code"] == "LP210"
    # It is shown where the base is named, and says where it stands.
    assert found["range"]["start"] == {"line": 2, "character": 8}
    assert found["relatedInformation"][0]["location"]["uri"] == shared.uri("below.plan")
    shared.close("below.plan")
    assert shared.diagnostics("above.plan") == []
    shared.close("above.plan")


def test_nearest_configuration_selects_diagnostics(shared: Client, folder: Path):
    (folder / "quiet").mkdir()
    (folder / "quiet" / "pyproject.toml").write_text('[tool.legoai]\nignore = ["unused-let"]\n', encoding="utf-8")
    text = GOOD + "let hosts = 4\n"
    assert shared.open("quiet/a.plan", text) == []
    assert codes(shared.open("loud.plan", text)) == ["LP901"]
    (folder / "quiet" / "pyproject.toml").write_text('[tool.legoai]\nignored = ["LP9"]\n', encoding="utf-8")
    shared.save("quiet/a.plan")
    assert codes(shared.diagnostics("quiet/a.plan")) == ["LP901"]
    assert "no key `ignored`" in shared.note("window/showMessage")["message"]
    for name in ("quiet/a.plan", "loud.plan"):
        shared.close(name)


def test_formatting_equals_fmt_and_skips_broken_text(editor: tuple[Client, str]):
    server, name = editor
    text = "# 🚀\n" + GOOD.replace("   ", " ")
    server.change(name, text)
    options = {"tabSize": 2, "insertSpaces": True}
    edits = server.on("formatting", name, options=options)
    assert applied(text, edits) == format_text(text, name).text
    assert edits[0]["range"]["start"]["line"] > 1
    server.change(name, "plan x\nfsdp (\n")
    assert server.on("formatting", name, options=options) is None


def test_changes_reach_documents_with_any_uri(shared: Client, folder: Path):
    escaped = [shared.uri(name) for name in ("a b.plan", "é#.plan", "100%.plan", "plain.plan")]
    assert "%23" in escaped[1]
    for uri in (*escaped, f"file://{folder}/é b.plan", "untitled:a%20b"):
        assert shared.open(uri, GOOD) == []
        text = GOOD.replace("   ", " ")
        shared.change(uri, text)
        edits = shared.on("formatting", uri, options={"tabSize": 2, "insertSpaces": True})
        assert applied(text, edits) == GOOD, uri
        shared.close(uri)


def test_offered_fix_removes_the_diagnostic(editor: tuple[Client, str]):
    server, name = editor
    server.change(name, BAD)
    [found] = server.diagnostics(name)
    context = {"diagnostics": [found]}
    actions = server.on("codeAction", name, range=found["range"], context=context)
    titles = [item["title"] for item in actions]
    assert titles == ["Write `layers.*` (unsafe: decides something)"]
    assert not actions[0]["isPreferred"]
    assert lint_codes(applied(BAD, actions[0]["edit"]["changes"][server.uri(name)])) == []


def lint_codes(text: str, directory: Path = Path()) -> list[str]:
    return [item.code for item in lint(text, "x.plan", directory=directory).diagnostics]


def test_suppression_comment_is_offered(editor: tuple[Client, str]):
    server, name = editor
    text = (GOOD + "let hosts = 4  # 🚀 so many\n").replace("\n", "\r\n")
    server.change(name, text)
    [found] = server.diagnostics(name)
    actions = server.on("codeAction", name, range=found["range"], context={"diagnostics": [found]})
    ignore = next(item for item in actions if item["title"] == "Ignore LP901 unused-let here")
    after = applied(text, ignore["edit"]["changes"][server.uri(name)])
    assert after == text[:-2] + "  # legoai: ignore[LP901]\r\n"
    assert lint_codes(after) == []


def test_suppression_comment_is_extended_by_a_second_code(editor: tuple[Client, str]):
    server, name = editor
    text = GOOD + "let hosts = 4  # legoai: ignore[LP803]\n"
    server.change(name, text)
    found = next(item for item in server.diagnostics(name) if item["code"] == "LP901")
    actions = server.on("codeAction", name, range=found["range"], context={"diagnostics": [found]})
    ignore = next(item for item in actions if item["title"].startswith("Ignore LP901"))
    after = applied(text, ignore["edit"]["changes"][server.uri(name)])
    assert after.endswith("# legoai: ignore[LP803, LP901]\n")


def test_all_safe_fixes_are_applied_at_once(editor: tuple[Client, str]):
    server, name = editor
    text = GOOD.replace("fsdp on", "fsdp") + 'attention "math"\n'
    server.change(name, text)
    assert codes(server.diagnostics(name)) == ["LP218", "LP207"]
    whole = {"start": {"line": 0, "character": 0}, "end": {"line": 99, "character": 0}}
    [action] = server.on("codeAction", name, range=whole, context={"diagnostics": [], "only": ["source.fixAll"]})
    assert action["kind"] == "source.fixAll.legoai"
    assert lint_codes(applied(text, action["edit"]["changes"][server.uri(name)])) == []
    assert server.on("codeAction", name, range=whole, context={"diagnostics": [], "only": ["refactor.extract"]}) == []


def test_standard_layout_can_be_expanded(editor: tuple[Client, str]):
    server, name = editor
    server.change(name, STANDARD)
    line = STANDARD.count("\n") - 1
    place = {"start": {"line": line, "character": 8}, "end": {"line": line, "character": 8}}
    actions = server.on("codeAction", name, range=place, context={"diagnostics": [], "only": ["refactor"]})
    [action] = actions
    after = applied(STANDARD, action["edit"]["changes"][server.uri(name)])
    assert "layers.*.attention.wo" in after
    before, behind = (lint(text, "x.plan", directory=Path()).plan for text in (STANDARD, after))
    assert before is not None and behind is not None
    assert [rule.path for rule in before.shard[0].rules] == [rule.path for rule in behind.shard[0].rules]
    assert before.shard == behind.shard


def test_every_standard_layout_that_a_selection_touches_can_be_expanded(editor: tuple[Client, str]):
    server, name = editor
    text = STANDARD + "\nfsdp blocks on dp_shard\nclip (norm = 1.0)\n"
    server.change(name, text)
    last = STANDARD.count("\n") - 1
    titles = ["Write out the rules of `standard`", "Write out the rules of `blocks`"]
    for first, end, offered in (
        ((0, 0), (99, 0), titles),
        ((last, 8), (last + 2, 4), titles),
        ((0, 0), (last, 8), titles[:1]),
        ((last + 1, 0), (last + 2, 0), titles[1:]),
        ((last + 3, 0), (99, 0), []),
    ):
        place = {key: dict(zip(("line", "character"), at, strict=True)) for key, at in (("start", first), ("end", end))}
        actions = server.on("codeAction", name, range=place, context={"diagnostics": [], "only": ["refactor"]})
        assert [item["title"] for item in actions] == offered


@pytest.mark.parametrize(("marked", "word"), [("fs|dp on", "fsdp"), ("un|it", "unit"), ("dp_sh|ard = 4", "dp_shard")])
def test_hover_shows_the_page_of_explain(editor: tuple[Client, str], marked: str, word: str):
    server, name = editor
    found = server.at("hover", name, GOOD.replace(marked.replace("|", ""), marked, 1))
    assert found["contents"]["kind"] == "markdown"
    assert found["contents"]["value"] in [item.page() for item in topics.found(word)]


def test_hover_over_a_path_lists_matches_and_treatments(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("hover", name, GOOD.replace("layers.*", "layers.|*"))
    assert "`layers.*` matches 4: `layers.0`, `layers.1`, `layers.2`, `layers.3`" in found["contents"]["value"]
    assert "is a unit" in found["contents"]["value"]
    assert (
        "tok_embeddings"
        in server.at("hover", name, GOOD + "checkpoint { tok_embe|ddings = full }\n")["contents"]["value"]
    )


def test_hover_explains_layout_options_and_values_in_context(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("hover", name, STANDARD.replace("standard", "stand|ard"))
    assert "layers.*.attention.wo           = rowwise(output = shard(1))" in found["contents"]["value"]
    found = server.at("hover", name, STANDARD.replace("(sequence", "(seq|uence"))
    assert found["contents"]["value"].startswith("`sequence`: ")
    assert "SequenceParallel" not in found["contents"]["value"]
    found = server.at("hover", name, GOOD + "precision (reduce = b|f16)\n")
    assert found["contents"]["value"].startswith("`bf16`: a value of `precision (reduce = …)`")
    assert "---" not in found["contents"]["value"]


def test_hover_over_a_hole_lists_its_values(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("hover", name, GOOD.replace("micro = 4", "micro = au|to"))
    assert "chooses among `1`, `2`, `4`, `8`, `16`" in found["contents"]["value"]


def test_hover_over_a_hole_in_a_plan_with_errors(editor: tuple[Client, str]):
    server, name = editor
    text = GOOD.replace("micro = 4", "micro = auto in [2, 4]") + "optimizer adamw(lr = auto)\n"
    found = server.at("hover", name, text.replace("lr = auto", "lr = au|to"))
    assert "`optimizer` decides what is learned or written, not what a step costs. Legal" in found["contents"]["value"]
    found = server.at("hover", name, text.replace("micro = auto", "micro = au|to"))
    assert found["contents"]["value"].endswith("\n`legoai solve` chooses among `2`, `4`.\n")


def test_hover_over_a_suppression_shows_the_rule_page(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("hover", name, GOOD + "let hosts = 4  # legoai: ignore[LP9|01]\n")
    assert found["contents"]["value"].startswith("LP901 unused-let")


def labels(found: dict[str, object]) -> list[str]:
    items = found["items"]
    assert isinstance(items, list)
    return [item["label"] for item in items]


def test_completion_offers_modules_while_the_text_is_broken(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("completion", name, GOOD + "checkpoint {\n  layers.{0..1}.atten|\n")
    assert labels(found) == ["attention_norm", "attention", "ffn_norm", "feed_forward"]
    edit = found["items"][1]["textEdit"]
    assert edit["newText"] == "attention"
    assert edit["range"]["start"]["character"] == len("  layers.{0..1}.")


def test_resolving_a_completion_adds_its_documentation(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("completion", name, GOOD + "checkp|\n")
    item = next(item for item in found["items"] if item["label"] == "checkpoint")
    page = server.ask("completionItem/resolve", item)["documentation"]["value"]
    assert page.startswith("`checkpoint")


def test_extends_completes_plan_paths(editor: tuple[Client, str], folder: Path):
    server, name = editor
    (folder / "bases").mkdir()
    for path in ("bases/first.plan", "bases/other.txt", "second.plan"):
        (folder / path).write_text(GOOD, encoding="utf-8")
    assert "second.plan" in labels(server.at("completion", name, 'plan x\nextends "|'))
    assert labels(server.at("completion", name, 'plan x\nextends "bases/f|"')) == ["bases/first.plan"]


def test_symbols_and_folds_follow_the_statements(editor: tuple[Client, str]):
    server, name = editor
    server.change(name, TINY)
    symbols = server.on("documentSymbol", name)
    assert [item["name"] for item in symbols][:5] == ["plan", "model", "cluster", "batch", "mesh"]
    shard = next(item for item in symbols if item["name"] == "shard on tp")
    assert shard["children"][0]["name"] == "tok_embeddings"
    folds = server.on("foldingRange", name)
    line = TINY.split("\n").index("shard on tp {")
    assert {"startLine": line, "endLine": line + 10} in [
        {key: item[key] for key in ("startLine", "endLine")} for item in folds
    ]


def test_requests_are_answered_while_a_large_plan_is_linted(shared: Client):
    """Linting takes a second of processor time here; the symbols of another document are given meanwhile."""
    rules = "".join(f"  layers.{{0..1}}.attention.w{n} = full\n" for n in range(1200))
    large = GOOD + "checkpoint {\n" + rules + "}\n"
    shared.open("quick.plan", GOOD)
    item = {"uri": shared.uri("large.plan"), "languageId": "plan", "version": 1, "text": large}
    shared.notify("textDocument/didOpen", {"textDocument": item})
    shared._versions[item["uri"]] = 1
    assert shared.on("documentSymbol", "quick.plan")
    assert not [note for note in shared.notes if note["params"].get("uri") == item["uri"]]
    assert shared.diagnostics("large.plan")
    for name in ("quick.plan", "large.plan"):
        shared.close(name)


def test_two_documents_have_separate_diagnostics(shared: Client):
    for name, text in (("one.plan", GOOD), ("two.plan", BAD), ("three.plan", GOOD + "let hosts = 4\n")):
        item = {"uri": shared.uri(name), "languageId": "plan", "version": 1, "text": text}
        shared._versions[item["uri"]] = 1
        shared.notify("textDocument/didOpen", {"textDocument": item})
    assert [codes(shared.diagnostics(f"{name}.plan")) for name in ("three", "one", "two")] == [["LP901"], [], ["LP210"]]
    for name in ("one.plan", "two.plan", "three.plan"):
        shared.close(name)
