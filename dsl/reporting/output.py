"""Writes diagnostics down: a table of formats, for people and for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from legoai.dsl.diagnostics.diagnostic import Diagnostic, Severity
from legoai.dsl.frontend.files.project import repository_root
from legoai.dsl.frontend.statements.merge import OF_SETTING
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.frontend.text import Lines
from legoai.dsl.reporting.snippets import Mark, Paint, Style, draw
from legoai.specs.span import Span
from legoai.specs.visible_text import visible, visible_line

JSON_FORMAT: Final = 1
"""The version of the `json` format. A field is added without a new version, and removed or changed only with one."""

Files = Mapping[str, PlanFile]
Format = Callable[[Sequence[Diagnostic], Files, bool], str]
"""Diagnostics, the files that they speak of, and whether colours are wanted, to a text that ends with a line's end."""

_COLORS: Final[dict[Style, str]] = {"gutter": "1;34", "secondary": "1;34", "message": "1"}
_SEVERITY_COLORS: Final[dict[Severity, str]] = {"error": "1;31", "warning": "1;33", "advice": "1;36"}


def render(name: str, diagnostics: Sequence[Diagnostic], files: Files, *, color: bool = False) -> str:
    """The diagnostics in the format ``name``, one of :data:`FORMATS`; for none, empty in the formats for people."""
    return FORMATS[name](diagnostics, files, color)


def render_full(diagnostics: Sequence[Diagnostic], files: Files, color: bool = False) -> str:
    """Return each diagnostic with its source lines, labels, and help.

    ``files`` are by the names in spans; a span in a file that is not among them is shown without its text.
    """
    texts = {name: Lines(file.text, file.name) for name, file in files.items()}
    return "\n".join(_full(diagnostic, texts, color) for diagnostic in diagnostics)


def _painter(severity: Severity, color: bool) -> Paint:
    if not color:
        return lambda text, _: text
    colors = {**_COLORS, "primary": _SEVERITY_COLORS[severity], "severity": _SEVERITY_COLORS[severity]}
    return lambda text, style: f"\x1b[{colors[style]}m{text}\x1b[0m" if style else text


def _full(diagnostic: Diagnostic, texts: Mapping[str, Lines], color: bool) -> str:
    paint = _painter(diagnostic.severity, color)
    head = paint(f"{diagnostic.severity}[{diagnostic.code}] {diagnostic.slug}", "severity")
    rows = [head + paint(f": {visible_line(diagnostic.message)}", "message")]
    marks = [Mark(diagnostic.label.span, visible_line(diagnostic.label.text), True)]
    marks += [Mark(label.span, visible_line(label.text), False) for label in diagnostic.others]
    by_file: dict[str, list[Mark]] = {}
    for mark in marks:
        by_file.setdefault(mark.span.file, []).append(mark)
    gutter = max(len(str(mark.span.end_line)) for mark in marks)
    for arrow, (file, here) in zip(["-->"] + [":::"] * len(by_file), by_file.items(), strict=False):
        place = str(here[0].span) if file in texts or here[0].span.end else file
        rows.append(f"{' ' * gutter}{paint(arrow, 'gutter')} {visible_line(place)}")
        if file not in texts:
            rows[-1] += "".join(f" {mark.text}" for mark in here if mark.text)
        else:
            rows.append(paint(f"{' ' * gutter} |", "gutter"))
            rows.extend(draw(here, texts[file], gutter, paint))
    notes = [*(("help", text) for text in diagnostic.help), *_fix_note(diagnostic)]
    if notes:
        rows.append(paint(f"{' ' * gutter} |", "gutter"))
    for kind, text in notes:
        indent = "\n" + " " * (gutter + len(f" = {kind}: "))
        rows.append(
            f"{' ' * gutter} {paint('=', 'gutter')} {paint(kind, 'message')}: " + visible(text).replace("\n", indent)
        )
    return "\n".join(rows) + "\n"


def _fix_note(diagnostic: Diagnostic) -> list[tuple[str, str]]:
    if diagnostic.fix is None:
        return []
    option = "--fix" if diagnostic.fix.safe else "--fix --unsafe-fixes"
    return [("fix", f"{diagnostic.fix.title} (`legoai lint {option}` does it)")]


def _concise(diagnostics: Sequence[Diagnostic], files: Files, color: bool) -> str:
    rows = []
    for item in diagnostics:
        paint = _painter(item.severity, color)
        head = paint(f"{item.severity}[{item.code}]", "severity")
        rows.append(f"{visible_line(str(item.label.span))}: {head} {visible_line(item.message)}\n")
    return "".join(rows)


def _json(diagnostics: Sequence[Diagnostic], files: Files, color: bool) -> str:
    body = {
        "format_version": JSON_FORMAT,
        "diagnostics": [
            {
                "code": item.code,
                "slug": item.slug,
                "severity": item.severity,
                "message": item.message,
                "label": {**_place(item.label.span), "text": item.label.text},
                "others": [{**_place(label.span), "text": label.text} for label in item.others],
                "help": list(item.help),
                "fix": None
                if item.fix is None
                else {
                    "title": item.fix.title,
                    "safe": item.fix.safe,
                    "edits": [{**_place(edit.span), "replacement": edit.replacement} for edit in item.fix.edits],
                },
            }
            for item in diagnostics
        ],
    }
    return json.dumps(body, indent=2) + "\n"


def _place(span: Span) -> dict[str, Any]:
    """A span for programs: lines and columns count characters from 1, offsets from 0; the end is excluded."""
    return {
        "file": span.file,
        "start": {"offset": span.start, "line": span.line, "column": span.column},
        "end": {"offset": span.end, "line": span.end_line, "column": span.end_column},
    }


_IN_NO_FILE: Final = (OF_SETTING, "<stdin>")
"""How the names begin of what is no file: a value from the command line, and standard input."""

_GITHUB: Final[dict[Severity, str]] = {"error": "error", "warning": "warning", "advice": "notice"}


_SARIF_ROOT: Final = "%SRCROOT%"
"""The name that SARIF's readers give the root of the repository."""


def in_repository(file: str) -> tuple[str, bool]:
    """Return a file's path from the root of the repository, as GitHub takes paths, and whether it is in one.

    The root is the folder that GitHub checks out into, or that of the repository of the working folder. A file outside
    of both is named as it is.
    """
    if file.startswith(_IN_NO_FILE):
        return file, False
    checkout = os.environ.get("GITHUB_WORKSPACE")
    roots = [] if not checkout else [checkout, os.path.realpath(checkout)]
    for root in (*roots, repository_root(Path())):
        if root is not None:
            path = os.path.relpath(file, root)
            if path.partition(os.sep)[0] != os.pardir:
                return path.replace(os.sep, "/"), True
    return file, False


def _github(diagnostics: Sequence[Diagnostic], files: Files, color: bool) -> str:
    """GitHub Actions workflow commands. The text after the title appears in the log, so it repeats the position."""
    rows = []
    for item in diagnostics:
        span = item.label.span
        file, _ = in_repository(span.file)
        properties: dict[str, str | int] = {"title": f"{item.code} {item.slug}"}
        if not span.file.startswith(_IN_NO_FILE):
            properties |= {"file": file, "line": span.line, "endLine": span.end_line}
            if span.line == span.end_line:
                properties |= {"col": span.column, "endColumn": span.end_column}
        listed = ",".join(f"{name}={_github_property(str(value))}" for name, value in properties.items())
        text = f"{visible_line(str(span))}: {item.code} {visible(message_of(item))}"
        rows.append(f"::{_GITHUB[item.severity]} {listed}::{_github_data(text)}\n")
    return "".join(rows)


def _github_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(text).replace(":", "%3A").replace(",", "%2C")


_SARIF_LEVELS: Final[dict[Severity, str]] = {"error": "error", "warning": "warning", "advice": "note"}


def _sarif(diagnostics: Sequence[Diagnostic], files: Files, color: bool) -> str:
    """SARIF 2.1.0 (OASIS): one run, with the rules of its diagnostics and their pages as help."""
    from legoai import __version__

    codes = sorted({item.code for item in diagnostics})
    driver = {"name": "legoai", "semanticVersion": __version__, "rules": [_sarif_rule(code) for code in codes]}
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {_SARIF_ROOT: {"description": {"text": "the root of the repository"}}},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(item, codes) for item in diagnostics],
    }
    schema = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _sarif_rule(code: str) -> dict[str, Any]:
    from inspect import cleandoc

    from legoai.dsl.rules import rule_of

    rule = rule_of(code)
    assert rule is not None, f"{code} belongs to no rule"
    page = cleandoc(rule.__doc__ or "")
    return {
        "id": code,
        "name": rule.slug,
        "shortDescription": {"text": _without_placeholders(page.partition("\n")[0])},
        "help": {"text": _without_placeholders(page), "markdown": _without_placeholders(page)},
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
    }


def message_of(item: Diagnostic) -> str:
    """Return the message with its help, one per line, for viewers that show the source themselves."""
    return "\n".join([item.message, *(f"help: {line}" for line in item.help)])


def _sarif_result(item: Diagnostic, codes: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": item.code,
        "ruleIndex": codes.index(item.code),
        "level": _SARIF_LEVELS[item.severity],
        "message": {"text": _sarif_text(message_of(item))},
        "locations": [_sarif_location(item.label.span, item.label.text)],
    }
    if item.others:
        result["relatedLocations"] = [
            {"id": number, **_sarif_location(label.span, label.text)} for number, label in enumerate(item.others)
        ]
    if item.fix is not None:
        result["fixes"] = [_sarif_fix(item)]
    return result


def _sarif_fix(item: Diagnostic) -> dict[str, Any]:
    assert item.fix is not None
    by_file: dict[str, list[dict[str, Any]]] = {}
    for edit in item.fix.edits:
        change = {"deletedRegion": _region(edit.span), "insertedContent": {"text": edit.replacement}}
        by_file.setdefault(edit.span.file, []).append(change)
    changes = [{"artifactLocation": _sarif_file(file), "replacements": list(edits)} for file, edits in by_file.items()]
    return {"description": {"text": _sarif_text(item.fix.title)}, "artifactChanges": changes}


def _sarif_text(text: str) -> str:
    """A plain text message without placeholders, and without links, which no text of a plan may make (3.11.6)."""
    return _without_placeholders(text).replace("](", "\\](")


def _without_placeholders(text: str) -> str:
    """A message in which braces are no placeholders but braces (3.11.5)."""
    return text.replace("{", "{{").replace("}", "}}")


def _sarif_location(span: Span, text: str) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": _sarif_file(span.file), "region": _region(span)}
    }
    if text:
        location["message"] = {"text": _sarif_text(text)}
    return location


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
        "charOffset": span.start,
        "charLength": span.end - span.start,
    }


def _sarif_file(file: str) -> dict[str, str]:
    from urllib.parse import quote

    path, is_inside = in_repository(file)
    uri = ("file://" if path.startswith("/") else "") + quote(path, errors="surrogateescape")
    return {"uri": uri, "uriBaseId": _SARIF_ROOT} if is_inside else {"uri": uri}


FORMATS: Final[dict[str, Format]] = {
    "full": render_full,
    "concise": _concise,
    "json": _json,
    "github": _github,
    "sarif": _sarif,
}
"""Every format, by its name for `--format`."""
