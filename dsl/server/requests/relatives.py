"""The plans of a workspace that share names with a document through `extends`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from legoai.dsl.frontend.files.project import plans_below
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.server.documents import Checked, Checking, extended, place_of


def relatives(
    checked: Checked, checking: Checking, folders: Iterable[Path], has: Callable[[PlanFile], bool]
) -> dict[Path, PlanFile]:
    """Return the document and its bases, and the plans that share a name with them, with their bases, by their paths.

    A plan shares the name with another if one of the two extends the other, or both extend a third, and the files
    between them have it too.

    Args:
        checked: the document.
        checking: reads plans.
        folders: where to look for plans besides those that are open.
        has: whether a file uses or defines the name.

    Raises:
        TooManyFoldersError: there are too many folders to look into.
    """
    own = {place_of(file.name): file for file in (*checked.files.values(), checked.document.file)}
    family = _Family(checking, own)
    others = [family.of(place) for place in dict.fromkeys([*checking.texts, *plans_below(folders)])]
    found = dict(own)
    while True:
        having = {place for place, file in found.items() if has(file)}
        related = [files for files in others if not files.keys() <= found.keys() and files.keys() & having]
        if not related:
            return found
        for files in related:
            found |= files


class _Family:
    """The plans that were read, with their bases."""

    def __init__(self, checking: Checking, files: dict[Path, PlanFile]) -> None:
        self._read = checking.read
        self._files: dict[Path, PlanFile | None] = dict(files)

    def of(self, place: Path) -> dict[Path, PlanFile]:
        """The plan of a path, and those that it extends; empty where it extends none, or cannot be read."""
        found: dict[Path, PlanFile] = {}
        waiting = [place_of(place)]
        while waiting:
            place = waiting.pop()
            file = None if place in found else self._file(place, alone=not found)
            if file is not None:
                found[place] = file
                waiting += [base for _, base in extended(file, place.parent)]
        return found

    def _file(self, place: Path, *, alone: bool) -> PlanFile | None:
        if place not in self._files:
            try:
                text = self._read(place)
            except (OSError, ValueError):
                text = ""
            if alone and "extends" not in text:
                return None  # parsing takes longer than reading
            self._files[place] = parse(text, str(place)).file
        return self._files[place]
