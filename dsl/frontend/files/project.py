"""The project around a plan: the root of its repository, and the plans below a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from legoai.dsl.frontend.files.sources import is_skipped

MOST_FOLDERS: Final = 20_000
"""Folders that a search looks into, in a few seconds. A home folder may have any number."""

_FEW_FOLDERS: Final = 1000
"""Folders that a search looks into while a plan is linted."""
_MOST_SIMILAR: Final = 3


class TooManyFoldersError(Exception):
    """A search for plans ended before it had looked into every folder."""


def working_folder() -> Path | None:
    """The working folder; None where it has been deleted, which leaves only whole paths."""
    try:
        return Path.cwd()
    except OSError:
        return None


def repository_root(folder: Path) -> Path | None:
    """The nearest folder upward that git calls the top level: `.git` is a folder there, or a file in worktrees."""
    here = folder if folder.is_absolute() else working_folder()
    if here is None:
        return None
    folder = Path(os.path.normpath(here / folder))
    upward = (folder, *folder.parents)
    return next((place for place in upward if os.path.exists(place / ".git")), None)  # noqa: PTH110 - false if it may not look


def plans_below(folders: Iterable[Path], most: int = MOST_FOLDERS) -> Iterator[Path]:
    """The plans in the folders and below them, each once; hidden folders and other people's packages are left out.

    Raises:
        TooManyFoldersError: there are more than ``most`` folders.
    """
    seen: set[str] = set()
    for start in folders:
        for folder, inside, files in os.walk(os.path.normpath(start)):
            if folder in seen:
                inside.clear()
                continue
            seen.add(folder)
            if len(seen) > most:
                raise TooManyFoldersError
            inside[:] = sorted(name for name in inside if not is_skipped(folder, name))
            yield from (Path(folder, name) for name in sorted(files) if name.endswith(".plan"))


def similar_plans(directory: Path, missing: Path) -> list[Path]:
    """Return the plans of a project that a missing one may be, nearest first: some of its name, or one of a like name.

    Args:
        directory: of the plan that names it.
        missing: the path where it is not.
    """
    root = repository_root(directory)
    found: list[Path] = []
    with contextlib.suppress(TooManyFoldersError):
        found.extend(plans_below([directory, missing.parent, *([] if root is None else [root])], _FEW_FOLDERS))
    found = [Path(os.path.abspath(path)) for path in found]  # noqa: PTH100 - Path.absolute() keeps `..`
    same = [path for path in dict.fromkeys(found) if path.name == missing.name]
    if not same:
        from difflib import get_close_matches

        beside = {path.name: path for path in found if path.parent.resolve() == missing.parent.resolve()}
        same = [beside[name] for name in get_close_matches(missing.name, beside, 1)]
    near = sorted(same, key=lambda path: (len(Path(os.path.relpath(path, directory)).parts), path))
    return near[:_MOST_SIMILAR]
