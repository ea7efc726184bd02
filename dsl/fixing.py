"""Fixing of a plan: applies the fixes of its diagnostics until none is left."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final

from legoai.dsl.diagnostics.cascade import is_cause
from legoai.dsl.diagnostics.diagnostic import Diagnostic, apply_fixes, errors_of
from legoai.dsl.frontend.files.sources import Source
from legoai.dsl.lint import Linted

_MOST_ROUNDS: Final = 50
"""Most rounds of fixing: a fix may cause another diagnostic."""


def fixed(
    source: Source,
    linted: Linted,
    again: Callable[[str], Linted],
    wanted: Callable[[Diagnostic], bool],
    *,
    unsafe: bool,
) -> tuple[str, Linted]:
    """Return the plan's text after its fixes, and the result of linting it.

    Safe fixes are applied together. An unsafe one is applied alone, causes before their consequences, and is kept only
    if its diagnostic disappears and no new error appears.

    Args:
        source: the plan.
        linted: the result of linting it.
        again: lints another text of the plan.
        wanted: whether to fix a diagnostic.
        unsafe: whether to apply fixes that make a decision.
    """
    text = source.text
    refused: set[tuple[str, str, str]] = set()
    for _ in range(_MOST_ROUNDS):
        mistakes = [item for item in linted.diagnostics if wanted(item) and has_fix(item, source.name)]
        safe = list(dict.fromkeys(item.fix for item in mistakes if item.fix is not None and item.fix.safe))
        changed = apply_fixes(text, safe)
        if changed != text:
            after = again(changed)
            if _unreadable(after) > _unreadable(linted):
                raise AssertionError(f"a fix broke {source.name}: {[fix.title for fix in safe]}")
            text, linted = changed, after
            continue
        chosen = next(iter(_unsafe(linted, mistakes, refused)), None) if unsafe else None
        if chosen is None:
            break
        assert chosen.fix is not None
        changed = apply_fixes(text, [chosen.fix])
        after = again(changed)
        if _is_better(chosen, linted, after):
            text, linted = changed, after
        else:
            refused.add(_identity(chosen))
    return text, linted


def has_fix(item: Diagnostic, name: str) -> bool:
    """Whether a fix changes the plan's own file; base plans are fixed when they are named themselves."""
    return item.fix is not None and all(edit.span.file == name for edit in item.fix.edits)


def _unsafe(linted: Linted, mistakes: Sequence[Diagnostic], refused: Container[object]) -> Sequence[Diagnostic]:
    """Return the diagnostics to fix next: first those about names, then those that may follow from one."""
    causes = any(map(is_cause, linted.diagnostics))
    open_to_it = [item for item in mistakes if _identity(item) not in refused and (is_cause(item) or not causes)]
    return sorted(open_to_it, key=lambda item: (item.severity != "error", item.code, item.order))


def _is_better(chosen: Diagnostic, before: Linted, after: Linted) -> bool:
    if _identity(chosen) in set(map(_identity, after.diagnostics)) or _causes(after) > _causes(before):
        return False
    return is_cause(chosen) or _errors(after) <= _errors(before)


def _identity(item: Diagnostic) -> tuple[str, str, str]:
    return item.code, item.message, item.fix.title if item.fix is not None else ""


def _causes(linted: Linted) -> int:
    return sum(map(is_cause, linted.diagnostics))


def _errors(linted: Linted) -> int:
    return len(errors_of(linted.diagnostics))


def _unreadable(linted: Linted) -> int:
    return sum(item.code.startswith("LP1") for item in linted.diagnostics)
