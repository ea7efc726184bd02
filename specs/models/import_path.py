"""Import path for the module of a model factory."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path


def author_folder(family: str, directory: Path) -> Path | None:
    """Return the plan's folder where its model is imported from there, as that of a factory is; else None.

    Beside a plan that names no factory, no file is ever run: one called `torch.py` would replace the library.

    Args:
        family: of the model: `python` for a factory.
        directory: of the plan.
    """
    return directory if family == "python" else None


def add_author_folder(directory: str | Path | None, *, others: Iterable[str] = ()) -> None:
    """Make the modules beside a plan importable in this process.

    The folder comes after the standard library, so that a file called `random.py` or `types.py` beside the plan does
    not replace it, and before installed packages, one of which may have the factory's name.

    Args:
        directory: of :func:`author_folder`.
        others: further folders, searched last.
    """
    place = "" if directory is None else str(Path(directory).resolve())
    if place and place not in sys.path:
        library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        found = [index for index, entry in enumerate(sys.path) if entry in library or Path(entry).name == "lib-dynload"]
        sys.path.insert(found[-1] + 1 if found else 0, place)
    sys.path += [entry for entry in dict.fromkeys(others) if entry not in sys.path]
