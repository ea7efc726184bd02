"""Where Python looks for the module of a model factory."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path


def add_author_folder(directory: str | Path, *, others: Iterable[str] = ()) -> None:
    """Let the modules beside a plan be imported, in this process.

    The folder comes behind the standard library, which a file called `random.py` or `types.py` beside the plan would
    otherwise replace for all modules, and before installed packages, of which one may be called like the factory.

    Args:
        directory: the plan's.
        others: further places, looked at last.
    """
    place = str(Path(directory).resolve())
    if place not in sys.path:
        library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        found = [index for index, entry in enumerate(sys.path) if entry in library or Path(entry).name == "lib-dynload"]
        sys.path.insert(found[-1] + 1 if found else 0, place)
    sys.path += [entry for entry in dict.fromkeys(others) if entry not in sys.path]
