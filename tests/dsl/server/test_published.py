"""Every diagnostic of the corpus comes out of the server as lint reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types

from legoai.dsl.config import Configuration
from legoai.dsl.diagnostics.diagnostic import apply_fixes
from legoai.dsl.lint import lint
from legoai.dsl.server.documents import Checked, Checking, Document, check, uri_of
from legoai.dsl.server.published import SEVERITIES, published
from legoai.dsl.server.requests.actions import actions
from support import ROOT, TESTS, VALID_PLANS, WORKED_PLANS
from support.commands.language_client import applied
from support.marks import some_slow

CORPUS = [*sorted(TESTS.glob("dsl/invalid/*/*.plan")), *VALID_PLANS, *WORKED_PLANS]
NOTHING = Checking({}, frozenset(), lambda message: None)


def checked(path: Path, text: str | None = None) -> Checked:
    text = path.read_text(encoding="utf-8") if text is None else text
    return check(Document(uri_of(path), 1, text, "utf-16", ROOT), NOTHING)


def offset(text: str, position: types.Position) -> int:
    """The character at a position, counted independently in the UTF-16 bytes of every line."""
    lines = text.split("\n")
    head = "".join(f"{line}\n" for line in lines[: position.line])
    return len(head) + len(lines[position.line].encode("utf-16-le")[: 2 * position.character].decode("utf-16-le"))


@pytest.mark.parametrize("folder", sorted({path.parent for path in CORPUS}), ids=lambda folder: folder.name)
def test_published_diagnostics_equal_lint_diagnostics(folder: Path):
    for path in [path for path in CORPUS if path.parent == folder]:
        text = path.read_text(encoding="utf-8")
        found = checked(path)
        assert found.configuration == Configuration()
        # No factory runs unasked; that one is not named or cannot be found is reported without running it.
        missing = folder.name in ("LP212", "LP213")
        expected = lint(
            text, str(path), directory=folder, factories=lambda model, run=missing: run or model.family != "python"
        ).diagnostics
        sent = published(found)
        assert [item.code for item in sent] == [item.code for item in dict.fromkeys(expected)]
        for item, of in zip(dict.fromkeys(expected), sent, strict=True):
            message, *rest = of.message.split("\n")
            assert message == item.message.split("\n")[0]
            assert of.severity == SEVERITIES[item.severity]
            assert [line for line in item.help if f"help: {line}" not in of.message] == []
            if item.label.span.file == str(path):
                place = offset(text, of.range.start), offset(text, of.range.end)
                end = text[item.label.span.start : item.label.span.end].rstrip("\r\n")
                assert place in [(item.label.span.start, item.label.span.end), (place[0], place[0] + len(end))]
                assert not item.label.text or item.label.text in rest


@pytest.mark.parametrize("part", some_slow(range(3), 1, 2))
def test_every_corpus_fix_is_offered_and_equals_lint_fix(part: int):
    count = 0
    for path in CORPUS[part::3]:
        text = path.read_text(encoding="utf-8")
        found = checked(path, "# 🚀\n" + text)
        document = found.document
        offered = list(actions(found, 0, len(document.text), ["quickfix"]))
        own = [item for item in found.diagnostics if item.fix is not None]
        changes = [changes_of(item, document) for item in offered if not item.title.startswith("Ignore ")]
        wanted = [apply_fixes(document.text, [item.fix]) for item in own if item.fix is not None]
        assert [applied(document.text, edits) for edits in changes if edits] == [
            text for text in wanted if text != document.text
        ]
        count += len(wanted)
    assert count > 50 // 3


def changes_of(action: types.CodeAction, document: Document) -> list[dict[str, Any]]:
    assert action.edit is not None and action.edit.changes is not None
    return [
        {
            "range": {
                "start": {"line": edit.range.start.line, "character": edit.range.start.character},
                "end": {"line": edit.range.end.line, "character": edit.range.end.character},
            },
            "newText": edit.new_text,
        }
        for edit in action.edit.changes.get(document.uri, ())
    ]


def test_offered_comment_suppresses_its_diagnostic():
    count = 0
    for path in [path for path in CORPUS if path.parent.name.startswith(("LP8", "LP9", "LP4"))]:
        found = checked(path)
        for action in actions(found, 0, len(found.document.text), ["quickfix"]):
            if not action.title.startswith("Ignore "):
                continue
            [diagnostic] = action.diagnostics or ()
            after = checked(path, applied(found.document.text, changes_of(action, found.document)))
            left = [item.message for item in published(after)]
            before = [item.message for item in published(found)]
            assert left.count(diagnostic.message) < before.count(diagnostic.message), (path, action.title)
            count += 1
    assert count > 20


def test_factory_with_a_stale_cache_is_not_run(monkeypatch: pytest.MonkeyPatch):
    """The cache is read before the model is inspected; a factory that would run after that is refused."""
    from legoai.dsl.server import documents

    text = (
        'plan x\nmodel python("os.path:join")\ncluster cpu(devices = 1)\nbatch (global = 1, micro = 1, seq_len = 8)\n'
    )
    announced: list[str] = []
    checking = Checking({}, frozenset(), announced.append)
    monkeypatch.setattr(documents, "is_cached", lambda source, base_directory: True)
    found = check(Document("untitled:x", 1, text, "utf-16", ROOT), checking)
    assert [item.code for item in found.diagnostics] == ["LP226"]
    assert announced == []
    # Nor is one that only a variant names.
    text = text.replace('python("os.path:join")', 'llama3("tiny")') + 'variant v { model python("os.path:join") }\n'
    found = check(Document("untitled:x", 1, text, "utf-16", ROOT), checking)
    assert "LP226" in [item.code for item in found.diagnostics]
    assert announced == []


def test_of_very_many_diagnostics_the_first_are_published_and_the_rest_counted():
    path = ROOT / "many.plan"
    text = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 1)\nbatch (global = 4, micro = 4, seq_len = 64)\n'
    found = checked(path, text + "".join(f"let a{number} = 1\n" for number in range(400)) + "clip (norm = x)\n")
    assert len(found.diagnostics) == 401
    sent = published(found)
    assert len(sent) == 301
    assert sent[0].severity == types.DiagnosticSeverity.Error
    assert sent[-1].message == "101 more diagnostics are not shown; `legoai lint` prints all"


@pytest.mark.parametrize("count", [300, 301, 302])
def test_actions_of_very_many_diagnostics_are_each_diagnostic_s_own(count: int):
    text = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 1)\nbatch (global = 4, micro = 4, seq_len = 64)\n'
    text += "".join(f"let a{number} = 1\n" for number in range(count - 1)) + "checkpoint { layer.* = full }\n"
    found = checked(ROOT / "many.plan", text)
    assert len(found.diagnostics) == count
    assert found.diagnostics[-1].severity == "error", "after the warnings, and published before them"
    assert found.diagnostics[-1].fix is not None
    for item in (found.diagnostics[0], found.diagnostics[-2], found.diagnostics[-1]):
        offered = list(actions(found, item.label.span.start, item.label.span.end, ["quickfix"]))
        about = [shown for action in offered for shown in action.diagnostics or ()]
        assert {(shown.code, shown.message.split("\n")[0]) for shown in about} == {(item.code, item.message)}
        made = [changes_of(action, found.document) for action in offered if not action.title.startswith("Ignore ")]
        assert [applied(text, edits) for edits in made] == ([apply_fixes(text, [item.fix])] if item.fix else [])
