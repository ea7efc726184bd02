"""Outline of a plan: symbols and foldable ranges, from its syntax tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lsprotocol import types

from legoai.dsl.frontend.statements.merge import head_of
from legoai.dsl.frontend.syntax import AnyStatement, Let, Node, Require, SolvedLine, Statement, Unset, Variant, children
from legoai.dsl.server.documents import Document
from legoai.specs.record import Record
from legoai.specs.span import Span

_Kinds = types.SymbolKind


def symbols(document: Document) -> list[types.DocumentSymbol]:
    """The statements of a document, with their rules and the statements of its variants inside."""
    return [_symbol(statement, document) for statement in document.file.statements]


class _Title(Record):
    """Presentation of a symbol."""

    name: str
    detail: str
    kind: types.SymbolKind


def _symbol(statement: AnyStatement, document: Document) -> types.DocumentSymbol:
    inside: list[types.DocumentSymbol] = []
    if isinstance(statement, Variant):
        inside = [_symbol(item, document) for item in statement.statements]
    elif isinstance(statement, Statement) and statement.block is not None:
        for rule in statement.block.rules:
            title = _Title(_text(document, rule.path.span), _text(document, rule.value.span), _Kinds.Property)
            inside.append(_made(title, rule.span, rule.path.span, document))
    made = _made(_titled(statement, document), statement.span, head_of(statement), document)
    made.children = inside or None
    return made


def _titled(statement: AnyStatement, document: Document) -> _Title:
    if isinstance(statement, Let):
        return _Title(statement.name.text, _text(document, statement.value.span), _Kinds.Constant)
    if isinstance(statement, Require):
        return _Title(f"require {statement.metric.text}", _text(document, statement.bound.span), _Kinds.Boolean)
    if isinstance(statement, Variant):
        return _Title(f"variant {statement.name.text}", "", _Kinds.Namespace)
    if isinstance(statement, SolvedLine):
        return _Title("solved", "", _Kinds.Event)
    if isinstance(statement, Unset):
        return _Title(_text(document, statement.span), "", _Kinds.Null)
    keyword = statement.keyword.text
    axes = f" on {', '.join(axis.text for axis in statement.axes)}" if statement.axes else ""
    subject = "" if statement.subject is None else _text(document, statement.subject.span)
    kind = _Kinds.Module if keyword == "plan" else _Kinds.Class if keyword == "model" else _Kinds.Function
    return _Title(f"{keyword}{axes}", subject, kind)


def _made(title: _Title, span: Span, head: Span, document: Document) -> types.DocumentSymbol:
    positions = document.positions
    return types.DocumentSymbol(
        title.name, title.kind, positions.of(span), positions.of(head), detail=title.detail or None
    )


def _text(document: Document, span: Span) -> str:
    """Return the text of a span on one line."""
    return " ".join(document.text[span.start : span.end].split())


def folds(document: Document) -> list[types.FoldingRange]:
    """Return the statements, brackets and runs of comments that span several lines."""
    found = {(start, end): kind for start, end, kind in _folds(document)}
    return [types.FoldingRange(start, end, kind=kind) for (start, end), kind in sorted(found.items())]


def _folds(document: Document) -> Iterator[tuple[int, int, types.FoldingRangeKind | None]]:
    positions = document.positions
    yield from _comments(document)
    for node in _nodes(document.file.statements):
        first, last = positions.line_of(node.span.start), positions.line_of(node.span.end)
        # The line with the closing bracket stays visible.
        last -= document.text[node.span.start : node.span.end].endswith((")", "}", "]"))
        if last > first:
            yield first, last, None


def _comments(document: Document) -> Iterator[tuple[int, int, types.FoldingRangeKind | None]]:
    """Comments on consecutive lines of their own."""
    lines = [document.positions.line_of(comment.span.start) for comment in document.file.comments if comment.alone]
    first = previous = None
    for line in [*lines, None]:
        if first is not None and previous is not None and (line is None or line != previous + 1):
            if previous > first:
                yield first, previous, types.FoldingRangeKind.Comment
            first = None
        first = line if first is None else first
        previous = line


def _nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _nodes(children(node))
