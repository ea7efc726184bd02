"""Keys of statements: of two statements with equal keys the later one replaces the earlier."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.scope import Definition, Scope
from legoai.dsl.frontend.syntax import AnyStatement, Let, Require, SolvedLine, Unset, Variant
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.require import METRICS


def likeness(statement: AnyStatement, names: Scope | None = None) -> tuple[str, ...]:
    """Return the key of a statement.

    Args:
        statement: any but `unset`.
        names: of the `let` statements around it, with which the bounds of requirements may be written.
    """
    assert not isinstance(statement, Unset), "what takes a statement away decides nothing itself"
    if isinstance(statement, Let):
        return "let", statement.name.text
    if isinstance(statement, Require):
        return "require", statement.metric.text, statement.comparison[0], _dimension(statement, names or Scope({}))
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


def names_of(*statements: Iterable[AnyStatement]) -> Scope:
    """Return the scope of the `let` statements among some, of which later ones replace earlier ones."""
    lets = (item for item in chain(*statements) if isinstance(item, Let))
    return Scope({item.name.text: Definition(let=item, decider="human") for item in lets})


def _dimension(statement: Require, names: Scope) -> str:
    """In what a figure is bounded, where it may be a share of the step or a time: these are two quantities."""
    metric = METRICS.get(statement.metric.text)
    if metric is None or len(metric.dimensions) == 1:
        return ""
    found = names.arithmetic(statement.bound)
    dimension = "" if isinstance(found, Diagnostic) else found[1]
    return next((legal for legal in metric.dimensions if legal == dimension), metric.dimensions[0])
