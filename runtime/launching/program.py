"""Start of a lowered program on a rank, such that modules beside its plan are importable and those beside it are not.

    python -P -m legoai.runtime.launching.program FOLDERS PROGRAM [ARGUMENT ...]

FOLDERS are the plan's and other module folders, joined like `PATH`. A program that Python starts by its file name has
its folder before the standard library: a file there called `random`, or like the factory, would be imported instead.
"""

from __future__ import annotations

import os
import runpy
import sys

from legoai.specs.models.import_path import add_author_folder


def main() -> None:
    """Run the program that the command line names, as `__main__`."""
    folders, program, *arguments = sys.argv[1:]
    directory, *others = folders.split(os.pathsep)
    add_author_folder(directory, others=others)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
