"""Messages about exceptions: mistakes in LegoAI itself, and plans on which a command could not do its work."""

from __future__ import annotations

import os

from legoai import __version__
from legoai.commands import WrongUsage
from legoai.dsl.frontend.files.project import working_folder
from legoai.specs.visible_text import visible_line


def failure(error: Exception, plan: str) -> str:
    """What is said of an exception that ended the work on one of several plans."""
    if isinstance(error, WrongUsage):
        return visible_line(f"legoai: {error}")
    return (
        visible_line(f"legoai: {plan}: {reason_of(error)}")
        if isinstance(error, OSError)
        else internal_error(error, plan)
    )


def reason_of(error: OSError) -> str:
    """What is said of an error of the operating system."""
    if isinstance(error, FileNotFoundError) and error.filename is None and working_folder() is None:
        return "the working folder does not exist any more"
    return str(error)


def internal_error(error: Exception, plan: str | None = None) -> str:
    """What is said of an unexpected exception, with the plan where it is one of several.

    In debug mode, its traceback is printed.
    """
    if os.environ.get("LEGOAI_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    said = visible_line(" ".join(str(error).split())[:200])
    about = f"{visible_line(plan)}: " if plan is not None else ""
    return (
        f"legoai {__version__}: {about}internal error: {type(error).__name__}: {said}\n"
        "This is a mistake in LegoAI, not in the plan. Please report it with the plan and the command; "
        "LEGOAI_DEBUG=1 shows where it happened."
    )
