"""Start of a lowered program on a rank, such that modules beside its plan are importable and those beside it are not.

    python -P -m legoai.runtime.launching.program FOLDERS PROGRAM [ARGUMENT ...]

FOLDERS are the plan's and other module folders, joined like `PATH`. A program that Python starts by its file name has
its folder before the standard library: a file there called `random`, or like the factory, would be imported instead.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from legoai.runtime.launching.signals import end_at_interruptions
from legoai.specs.models.import_path import add_author_folder

DIGEST = "LEGOAI_PROGRAM_DIGEST"
"""Set in the environment of ranks: the digest of the program that they are to run."""


def digest(text: str) -> str:
    """Return the digest of a program."""
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Run the program that the command line names, as `__main__`, unless another start has replaced it."""
    end_at_interruptions()
    folders, program, *arguments = sys.argv[1:]
    directory, *others = folders.split(os.pathsep)
    add_author_folder(directory, others=others)
    sys.argv = [program, *arguments]
    if DIGEST in os.environ and os.environ[DIGEST] != digest(Path(program).read_text(encoding="utf-8")):
        _report_replaced(program)
        sys.exit(1)
    try:
        runpy.run_path(program, run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        if stop.code or not _is_of_an_import(stop):  # a launcher reports other statuses
            raise
        _report_exit(stop)
        sys.exit(1)


def _is_of_an_import(stop: SystemExit) -> bool:
    """Whether a module that the program imports, such as the factory's, ends the process."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(stop.__traceback__)].count("<module>") > 1


def _report_exit(stop: SystemExit) -> None:
    from legoai.runtime.launching.failures import explained
    from legoai.runtime.launching.report import report_error

    report_error(explained(stop), stop)


def _report_replaced(program: str) -> None:
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.runtime.launching.report import report_error

    report_error(
        RunError(
            RunErrorCode.FOLDER_IN_USE,
            f"another run has written its program to {program} since this one was started",
            help="give each run its own --out",
        )
    )


if __name__ == "__main__":
    main()
