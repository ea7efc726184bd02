"""Names of a plan in an editor: where they are defined and used, and how they are renamed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legoai.dsl.server.documents import uri_of
from support.commands.command_line import GOOD
from support.commands.language_client import Client, applied


def test_definition_and_references_of_names_are_found(editor: tuple[Client, str], folder: Path):
    server, name = editor
    text = "plan small\nlet n = 4\n" + GOOD.partition("\n")[2].replace("micro = 4", "micro = n")
    [found] = server.at("definition", name, text.replace("micro = n", "micro = |n"))
    assert found["range"]["start"] == {"line": 1, "character": 4}
    found = server.at("references", name, text.replace("let n", "let |n"), context={"includeDeclaration": False})
    assert len(found) == 1
    [found] = server.at("definition", name, GOOD.replace("fsdp on dp_", "fsdp on |dp_"))
    line = GOOD.split("\n").index("mesh    (dp_shard = 4)")
    assert found["range"] == {"start": {"line": line, "character": 9}, "end": {"line": line, "character": 17}}
    (folder / "root.plan").write_text(GOOD, encoding="utf-8")
    [found] = server.at("definition", name, 'plan x\nextends "roo|t.plan"\n')
    assert found["uri"] == uri_of(folder / "root.plan")
    found = server.at("documentHighlight", name, GOOD.replace("fsdp on dp_", "fsdp on |dp_"))
    assert len(found) == 2


def test_rename_changes_every_use(editor: tuple[Client, str]):
    server, name = editor
    text = "# 🚀\nplan small\nlet n = 4\n" + GOOD.partition("\n")[2].replace("micro = 4", "micro = n")
    edit = server.at("rename", name, text.replace("micro = n", "micro = |n"), newName="batches")
    after = applied(text, edit["changes"][server.uri(name)])
    assert after == text.replace("let n", "let batches").replace("micro = n", "micro = batches")
    for new in ("unit", "asynchronous", "a b"):
        with pytest.raises(AssertionError, match="a name of the language, or no name"):
            server.at("rename", name, text.replace("micro = n", "micro = |n"), newName=new)
    assert server.at("prepareRename", name, text.replace("micro = n", "mic|ro = n")) is None


IN_PATH = (
    "# 🚀\nplan small\nlet n = 4\n"
    + GOOD.partition("\n")[2]
    + "checkpoint { layers.{0..n - 1}.{attention, n} = full, layers.{n - 4..max(n, 2) - 1}.feed_forward = full }\n"
)


def test_names_inside_of_paths_are_renamed_and_followed(editor: tuple[Client, str]):
    server, name = editor
    marked = IN_PATH.replace("max(n", "max(|n")
    [found] = server.at("definition", name, marked)
    assert found["range"]["start"] == {"line": 2, "character": 4}
    assert len(server.at("references", name, marked, context={"includeDeclaration": True})) == 4
    edit = server.at("rename", name, IN_PATH.replace("let n", "let |n"), newName="blocks")
    after = applied(IN_PATH, edit["changes"][server.uri(name)])
    for old, new in (
        ("let n", "let blocks"),
        ("0..n -", "0..blocks -"),
        ("{n - 4", "{blocks - 4"),
        ("(n,", "(blocks,"),
    ):
        assert after.count(new) == IN_PATH.count(old) == 1
    assert after == IN_PATH.replace("let n", "let blocks").replace("0..n", "0..blocks").replace(
        "{n -", "{blocks -"
    ).replace("max(n", "max(blocks")


def test_hover_inside_of_a_path_shows_the_name_and_around_it_the_modules(editor: tuple[Client, str]):
    server, name = editor
    found = server.at("hover", name, IN_PATH.replace("max(n", "max(|n"))
    assert found["contents"]["value"] == "```\nlet n = 4\n```\n"
    line = IN_PATH.split("\n").index(next(line for line in IN_PATH.split("\n") if line.startswith("checkpoint")))
    start = IN_PATH.split("\n")[line].index("n, 2)")
    assert found["range"] == {
        "start": {"line": line, "character": start}, "end": {"line": line, "character": start + 1},
    }  # fmt: skip
    found = server.at("hover", name, IN_PATH.replace("layers.{n", "lay|ers.{n"))
    assert "matches 4: `layers.0.feed_forward`" in found["contents"]["value"]


def test_variant_is_not_renamed_to_another(editor: tuple[Client, str]):
    server, name = editor
    text = GOOD + "variant big { clip (norm = 1.0) }\nvariant small { clip (norm = 2.0) }\n"
    with pytest.raises(AssertionError, match="the plan has a variant of the name `small`"):
        server.at("rename", name, text.replace("variant big", "variant b|ig"), newName="small")
    edit = server.at("rename", name, text.replace("variant big", "variant b|ig"), newName="large")
    assert applied(text, edit["changes"][server.uri(name)]) == text.replace("big", "large")


def test_rename_reaches_every_plan_that_shares_the_name(shared: Client, folder: Path):
    base = GOOD.replace("plan small\n", "plan small\nlet rate = 1e-3\n") + "optimizer adamw(lr = rate)\n"
    texts = {
        "shared/base.plan": base,
        "shared/deep/exp.plan": 'plan exp\nextends "../base.plan"\nclip (norm = rate * 1e3)\n',
        "sib.plan": 'plan sib\nextends "shared/base.plan"\nlet rate = 5e-3\n',
        "of_sib.plan": 'plan of_sib\nextends "sib.plan"\nvariant fast { let rate = 6e-3 }\n',
        "joined.plan": 'plan joined\nextends "shared/base.plan"\nextends "rated.plan"\nlet rate = 2e-3\n',
        "rated.plan": "plan rated\nlet rate = 2e-3\n",
        "apart.plan": "plan apart\nlet rate = 7e-3\n",
        "silent.plan": 'plan silent\nextends "shared/base.plan"\n',
        ".hidden/copy.plan": 'plan copy\nextends "../shared/base.plan"\nlet rate = 8e-3\n',
    }
    for name, text in texts.items():
        (folder / "rename" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "rename" / name).write_text(text, encoding="utf-8")
    buffer = texts["sib.plan"] + "# in the buffer\nclip (norm = rate)\n"
    shared.open("rename/sib.plan", buffer)
    for name, marked in (
        ("shared/deep/exp.plan", texts["shared/deep/exp.plan"].replace("= rate", "= ra|te")),
        ("shared/base.plan", base.replace("let rate", "let |rate")),
        ("rated.plan", texts["rated.plan"].replace("let rate", "let |rate")),
    ):
        shared.open(f"rename/{name}", texts[name])
        edit = shared.at("rename", f"rename/{name}", marked, newName="lr_top")["changes"]
        changed = ["shared/base.plan", "shared/deep/exp.plan", "sib.plan", "of_sib.plan", "joined.plan", "rated.plan"]
        assert edit.keys() == {shared.uri(f"rename/{item}") for item in changed}
        for item in changed:
            text = buffer if item == "sib.plan" else texts[item]
            after = applied(text, edit[shared.uri(f"rename/{item}")])
            assert after == re.sub(r"\brate\b", "lr_top", text)
        shared.close(f"rename/{name}")
    (folder / "rename" / "joined.plan").write_text(texts["joined.plan"] + "let lr_top = 1\n", encoding="utf-8")
    shared.open("rename/shared/base.plan", base)
    marked = base.replace("let rate", "let |rate")
    with pytest.raises(AssertionError, match=r"`../joined.plan` has a `let` of the name `lr_top`"):
        shared.at("rename", "rename/shared/base.plan", marked, newName="lr_top")
    for name in ("shared/base.plan", "sib.plan"):
        shared.close(f"rename/{name}")


def test_rename_is_refused_where_an_unreadable_statement_has_the_name(shared: Client, folder: Path):
    """Its uses of the name would be left out; statements with errors that lack the name are no obstacle."""
    base = GOOD.replace("plan small\n", "plan small\nlet rate = 1e-3\n") + "optimizer adamw(lr = rate)\n"
    extending = 'plan extending\nextends "unread.plan"\nclip (norm = {})\noptimizer adamw(lr = {}\n'
    marked, beside = base.replace("let rate", "let |rate"), folder / "rename" / "beside.plan"
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(extending.format("rate", "1e-3"), encoding="utf-8")
    shared.open("rename/unread.plan", base)
    edit = shared.at("rename", "rename/unread.plan", marked, newName="speed")["changes"]
    assert edit.keys() == {shared.uri("rename/unread.plan"), shared.uri("rename/beside.plan")}
    beside.write_text(extending.format("rate", "rate"), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"`beside.plan` has a syntax error in the statement of line 4"):
        shared.at("rename", "rename/unread.plan", marked, newName="speed")
    beside.unlink()
    with pytest.raises(AssertionError, match="the plan has a syntax error in the statement of line"):
        shared.at("rename", "rename/unread.plan", marked + "clip (norm = rate\n", newName="speed")
    shared.close("rename/unread.plan")
