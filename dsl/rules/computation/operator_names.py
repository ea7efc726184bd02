"""`checkpoint`: names of operators whose results are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import each_rule
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.computation.checkpoint import OPERATOR_WORDS
from legoai.specs.directives.checkpoint import Selective
from legoai.specs.operators import COMPOSED, keepable_operators

_OPERATOR = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
_NO_NAMESPACE: Final = ("torch", "nn", "F", "functional", "Tensor")
"""Names of Python modules and classes that people write in place of a namespace of `torch.ops`."""


class OperatorName(Check):
    """A name in `selective` that no operator has, or one whose results cannot be kept.

    Operators are named as `torch.ops` names them: namespace, operator, and the overload if only one is meant.
    Without an overload all are meant. What changes its input in place or draws random numbers is always computed again,
    and of an operator that torch computes by others, such as `aten.linear`, only these are ever called: `legoai cost`
    lists them.
    Linting does not import torch, and knows the names of `aten` in torch 2.13; those of other namespaces are looked up
    when the program starts.

    ## Example
    ```
    checkpoint { layers.* = selective(["torch.mm"]) }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = selective(["aten.mm"]) }
    ```
    """

    code = "LP653"
    slug = "operator-name"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for rule in each_rule(analysis.plan.checkpoint):
            if not isinstance(rule.treatment, Selective):
                continue
            for name in rule.treatment.keep:
                if name in OPERATOR_WORDS or name == "collective":
                    continue
                place = analysis.span_of(rule.treatment, "keep")
                if is_operator_name(name):
                    if _is_unknown(name):
                        yield self.at(
                            place,
                            f'"{name}" is no operator of torch whose results can be kept',
                            label="not in torch 2.13, or in place, random, or computed by other operators",
                            help=_help(name),
                        )
                    continue
                last = re.split(r"[.:]+", name.strip())[-1] or "mm"
                yield self.at(
                    place,
                    f'"{name}" is no name of an operator',
                    label='expected a name such as "aten.mm" or "aten.mm.default"',
                    help=[f'did you mean "aten.{last}"?'] if last.isidentifier() else [],
                )


def is_operator_name(name: str) -> bool:
    """Whether the name has the form of an operator of `torch.ops`: `namespace.name` or `namespace.name.overload`."""
    return _OPERATOR.fullmatch(name) is not None and name.partition(".")[0] not in _NO_NAMESPACE


def _is_unknown(name: str) -> bool:
    """Whether `aten` has no such operator, or no such overload of it."""
    namespace, operator, *overload = name.split(".")
    known = keepable_operators().get(operator) if namespace == "aten" else frozenset(overload)
    return known is None or not known.issuperset(overload)


def _help(name: str) -> list[str]:
    """What to write in place of a wrong name."""
    namespace, operator, *_ = name.split(".")
    of = COMPOSED.get(operator) if namespace == "aten" else None
    return suggestion(name, _alike(name)) if of is None else [f"torch computes it by other operators: write `{of}`"]


def _alike(name: str) -> list[str]:
    """The names among which a wrong one is meant: of overloads, where the operator exists."""
    operator = name.split(".")[1]
    overloads = keepable_operators().get(operator)
    if overloads is None:
        return [f"aten.{known}" for known in keepable_operators()]
    return [f"aten.{operator}.{overload}" for overload in overloads]
