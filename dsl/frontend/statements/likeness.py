"""Keys of statements: of two statements with equal keys the later one replaces the earlier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from legoai.dsl.diagnostics.codes.statements import DuplicateStatement
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.frontend.syntax import AnyStatement, Let, Require, SolvedLine, Unset, Variant
from legoai.dsl.frontend.values.scope import MEASURES, Definition, Scope
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.require import METRICS, Requirement
from legoai.specs.record import replace


def likeness(statement: AnyStatement) -> tuple[str, ...]:
    """Return the key of a statement; that of a requirement is complete after :func:`with_dimensions`.

    Args:
        statement: any but `unset`.
    """
    assert not isinstance(statement, Unset), "what takes a statement away decides nothing itself"
    if isinstance(statement, Let):
        return "let", statement.name.text
    if isinstance(statement, Require):
        return "require", statement.metric.text, statement.comparison[0], statement.dimension
    if isinstance(statement, SolvedLine):
        return ("solved",)
    if isinstance(statement, Variant):
        return "variant", statement.name.text
    keyword = statement.keyword.text
    if keyword in ("minimize", "maximize"):
        return ("objective",)
    if keyword in FAMILIES and family(keyword).repeats_by_axis:
        return keyword, *(axis.text for axis in statement.axes)
    return (keyword,)


def with_dimensions(own: Sequence[AnyStatement], below: Sequence[AnyStatement], text: str) -> Iterator[AnyStatement]:
    """Yield statements of one file, the requirements with the dimensions of their bounds.

    Some figures may be bounded as a share of the step and as a time: these are two quantities. Which of them a bound
    is in follows from the `let` names that its file sees. It stays so where a variant, an extending plan or the command
    line gives these another dimension, so that what a statement replaces is seen where it is written.

    Args:
        own: the statements.
        below: those of the file's bases, or of the plan around a variant.
        text: of the file.
    """
    names: Scope | None = None
    for statement in own:
        if isinstance(statement, Variant):
            inside = tuple(with_dimensions(statement.statements, [*below, *own], text))
            yield replace(statement, statements=inside)
        elif isinstance(statement, Require) and statement.metric.text in METRICS:
            names = _names_of(below, own) if names is None else names
            yield replace(statement, dimension=_dimension(statement, names, text))
        else:
            yield statement


def _names_of(*statements: Iterable[AnyStatement]) -> Scope:
    """Return the scope of the `let` statements among some, of which later ones replace earlier ones."""
    lets = (item for item in chain(*statements) if isinstance(item, Let))
    return Scope({item.name.text: Definition(let=item, decider="human") for item in lets})


def _dimension(statement: Require, names: Scope, text: str) -> str:
    """Return the dimension of a bound; where it has none that is legal, its text, which is like no dimension."""
    metric = METRICS[statement.metric.text]
    if len(metric.dimensions) == 1:
        return metric.dimensions[0]
    bound = names.arithmetic(statement.bound)
    dimension = None if isinstance(bound, Diagnostic) else metric.dimension_of(*bound)
    return dimension or f"`{text[statement.bound.span.start : statement.bound.span.end]}`"


def bounded_twice(requirements: Sequence[Requirement]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each requirement that bounds what another bounds, though neither replaces the other.

    Each is written in a dimension of its own, and a later `let` gives both the same.
    """
    held: dict[tuple[str, str, str], Requirement] = {}
    for item in requirements:
        first = held.setdefault(item.key, item)
        if first is not item:
            yield DuplicateStatement.at(
                item.origin.written,
                f"`require {item.metric}` is decided twice: both bounds are {MEASURES[item.dimension]} here",
                label="decided again",
                others=[Label(first.origin.written, "first decided here")],
                help=["leave one of them out, or give the `let` names in them values of two kinds"],
            )
