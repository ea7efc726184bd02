"""Identity of a solved question: the plan with its answers, its holes' domains, its requirements and its objective."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.syntax import Auto, Binary, Name, Negation, Node, Number, children
from legoai.dsl.frontend.values.scope import Scope

if TYPE_CHECKING:
    from legoai.dsl.frontend.resolve import Resolution


def solved_digest(resolution: Resolution) -> str:
    """The identity of a plan with its answers and of the question to which they are the answers, as ``sha256:…``.

    Unlike the plan's own identity, it changes with what decides which answers are best.
    """
    plan, scope = resolution.plan, resolution.scope
    assert plan is not None, "a plan with errors is not solved"
    domains = [_domain(hole, scope) for _, (hole, _) in sorted(scope.asked.items())]
    question = json.dumps([plan.canonical(), plan.goals(), domains], sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(question.encode()).hexdigest()


def _domain(hole: Auto, scope: Scope) -> Any:
    return None if hole.domain is None else [_plain(item, scope) for item in children(hole.domain)]


def _plain(node: Node, scope: Scope) -> Any:
    """A value as plain data, with the values of names and of arithmetic."""
    if isinstance(node, Name):
        node = scope.look_up(node)[0]
    if isinstance(node, Number | Binary | Negation):
        found = scope.arithmetic(node)
        if not isinstance(found, Diagnostic):
            return list(found)
    words = [value for name in node.fields_ if isinstance(value := getattr(node, name), str | bool)]
    return [type(node).__name__, *words, *(_plain(child, scope) for child in children(node))]
