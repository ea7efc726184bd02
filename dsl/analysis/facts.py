"""Helpers that several families share: rules and units by module path, explicit values, and names for messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from legoai.dsl.analysis.analysis import is_open, parts_of
from legoai.dsl.diagnostics.diagnostic import Edit, Fix
from legoai.specs.directives.base import Declared, Directive, PathRule
from legoai.specs.directives.hole import Undecided

if TYPE_CHECKING:
    from legoai.dsl.analysis.analysis import Analysis
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo

T = TypeVar("T")

_LARGEST_TRIED: Final = 10**6
"""Factors of a number are tried up to this one: a plan may state a number of any size."""
_MOST_PATHS: Final = 2**14
"""Size of the cache of ancestors: more than a model has modules and parameters."""


def written(declared: Declared, field: str) -> bool:
    """Whether the plan gives the value of ``field`` explicitly, rather than by default."""
    return declared.origin(field).decider != "default"


def replacement(declared: Declared, field: str, text: str) -> Fix | None:
    """Return the fix that replaces the value of ``field`` by ``text``, where the plan states that value literally.

    A value that is computed, or named by a `let`, has other uses or a reason, which a number in its place would lose.
    """
    origin = declared.origin(field)
    if origin.decider != "human" or origin.span is None or not origin.direct:
        return None
    return Fix(f"write `{text}`", (Edit(origin.span, text),), safe=False)


def decided(directive: Directive) -> None:
    """Stop the check where a rule of ``directive`` is undecided, since such a rule could decide any module.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    for rule in directive.rules:
        if is_open(rule.treatment):
            raise Undecided(f"the rule for {rule.path} is not decided yet")


def each_rule(directive: Directive | None) -> Iterator[PathRule[Any]]:
    """Yield the rules of a statement; a divided rule as two."""
    for rule in directive.rules if directive is not None else ():
        yield from parts_of(rule)


def below(path: str, above: str) -> bool:
    """Whether ``path`` is inside the module ``above``, and not the module itself."""
    return path != above and (above == "" or path.startswith(f"{above}."))


def is_within(path: str, module: str) -> bool:
    """Whether ``path`` is the module, or inside of it."""
    return path == module or below(path, module)


def modules_inside(analysis: Analysis, above: str) -> dict[str, ModuleInfo]:
    """Return the modules inside one, by path, in the model's order; computed once for an analysis."""
    manifest = analysis.manifest
    assert manifest is not None, "a model that can be inspected"
    return analysis.once(
        (modules_inside, above),
        lambda: {path: module for path, module in manifest.modules.items() if below(path, above)},
    )


@lru_cache(maxsize=_MOST_PATHS)
def holders(path: str) -> tuple[str, ...]:
    """Return the ancestors of ``path``, innermost first, the model itself last."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return tuple(found)


def of_innermost(path: str, values: Mapping[str, T]) -> T | None:
    """Return the value of the module at ``path``, else that of its innermost ancestor with one; None without any."""
    return next((values[above] for above in (path, *holders(path)) if above in values), None)


def grouped(paths: Iterable[tuple[str, PathRule[Any]]]) -> Iterator[tuple[PathRule[Any], list[str]]]:
    """Each rule once, with the paths that came with it, in order."""
    found: dict[int, tuple[PathRule[Any], list[str]]] = {}
    for path, rule in paths:
        found.setdefault(id(rule), (rule, []))[1].append(path)
    yield from found.values()


def following(
    analysis: Analysis, directive: Directive | None, treatment: type | tuple[type, ...]
) -> dict[str, PathRule[Any]]:
    """Return the modules to which ``directive`` gives a treatment of one of these types, with their rules."""
    if directive is None or analysis.manifest is None:
        return {}
    decided(directive)
    winners = analysis.assigned(directive).by_path
    return {path: rule for path, rule in winners.items() if isinstance(rule.treatment, treatment)}


def name_of(path: str) -> str:
    """The module's path as a plan writes it."""
    return path or "root"


def listed(items: Sequence[object], limit: int = 4) -> str:
    """Return the items in backticks, with a count instead of those beyond ``limit``: a, b and 3 more."""
    words = [f"`{item}`" for item in items]
    if len(words) > limit:
        return f"{', '.join(words[: limit - 1])} and {len(words) - limit + 1} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def has_operator(
    manifest: Manifest, path: str, ops: frozenset[str], kinds: frozenset[str], aside: Collection[str] = ()
) -> bool:
    """Whether the module or one inside it is of one of these kinds, or computes one of these operations itself.

    ``aside`` are modules that do not count.
    """
    for inner, module in manifest.modules.items():
        inside = is_within(inner, path) and inner not in aside
        if inside and (module.kind in kinds or any(step.op in ops for step in module.flow)):
            return True
    return False


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending; not all where several of its prime factors exceed a million."""
    found, rest, factor = [1], number, 2
    while rest > 1:
        if factor * factor > rest or factor > _LARGEST_TRIED:
            factor = rest
        power, before = 1, found
        while rest % factor == 0:
            rest, power = rest // factor, power * factor
            found = found + [value * power for value in before]
        factor += 1 + (factor > 2)
    return sorted(found)
