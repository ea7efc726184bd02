"""Pages of words, as `legoai explain` prints them, narrowed to the word's context."""

from __future__ import annotations

import re
from typing import Final

from legoai.dsl.reporting.reference import legal_values
from legoai.dsl.reporting.topics import Topic, found
from legoai.dsl.server.cursor import Part, Place
from legoai.specs.directives.base import Treatment

_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "statement": ("Directives", "Statements of the language"),
    "axis": ("Axes of the mesh",),
    "argument": ("Options", "Axes of the mesh"),
    "head": ("Models", "Devices", "Treatments and values", "Figures of `require`", "Values of options"),
    "value": ("Treatments and values", "Fabrics", "Values of options"),
    "text": ("Presets",),
}
"""Parts of a plan that a word can be, with the groups of topics for them."""


def page_at(word: str, part: Part | None = None, owner: str = "", option: str = "") -> str | None:
    """Return the pages of a word as Markdown; None where it has none.

    Args:
        word: of the language, or a diagnostic.
        part: of the plan; every page of the word where it is not given.
        owner: the enclosing statement or treatment.
        option: whose value it is.
    """
    return "\n---\n\n".join(item.page() for item in _meant(word, part, owner, option)) or None


def page_of_option(word: str, place: Place) -> str | None:
    """Return the page of an option of a standard layout, which `legoai explain` does not list; None for other words."""
    holder = next((item for item in place.options if item.name == word), None)
    if place.part != "argument" or holder is None:
        return None
    if any(item.group == "Axes of the mesh" or _is_of(item, owner_of(place)) for item in found(word)):
        return None
    return f"`{holder.name}`: {holder.doc} {legal_values(holder)}\n"


def owner_of(place: Place) -> str:
    """Return the name of the enclosing statement or treatment."""
    owner = place.owner
    return owner.name if owner is not None and issubclass(owner, Treatment) else place.keyword


def _meant(word: str, part: Part | None, owner: str, option: str) -> list[Topic]:
    pages = found(word)
    for group in _GROUPS.get(part or "", ()):
        own = [item for item in pages if item.group == group]
        if group in ("Options", "Values of options"):
            own = [item for item in own if _is_of(item, owner)] or own
            own = [item for item in own if f"({option} = …)" in item.summary] or own
        if own:
            return own
    return list(pages)


def _is_of(item: Topic, owner: str) -> bool:
    """Whether an option, or a value of one, belongs to a statement or treatment."""
    return re.match(rf"of `?{re.escape(owner)}\b", item.summary) is not None
