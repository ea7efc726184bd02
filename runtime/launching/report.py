"""Report of the error that ended a run, printed once for all ranks."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Final

from legoai.runtime.attempt import attempt_key, launcher_store
from legoai.runtime.errors import AGENT, CONSEQUENCE, MARK, RunError, RunErrorCode
from legoai.runtime.launching.attendant import interval

_ERROR: Final = "legoai/error"


def report_error(error: RunError, cause: BaseException | None = None) -> None:
    """Print the error on the first rank that has one, and store it for torchrun's own summary.

    Args:
        error: of this rank.
        cause: the exception, where it is not a `RunError`; for an unexpected one the traceback is printed.
    """
    consequence = error.code == RunErrorCode.LOST_RANK and int(os.environ.get("WORLD_SIZE", "1")) > 1
    leave_for_the_launcher(error, CONSEQUENCE if consequence else MARK)
    if consequence:
        _wait_for_the_cause()
        if AGENT in os.environ:
            return
    if first_to_report():
        if cause is not None and error.code == RunErrorCode.FAILED:
            traceback.print_exception(cause)
        print(error, file=sys.stderr, flush=True)


def first_to_report() -> bool:
    """Return whether this rank is the first with an error to report."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    store = launcher_store()
    if store is None:
        return os.environ.get("RANK") == "0"
    try:
        return store.add(attempt_key(_ERROR), 1) == 1
    except RuntimeError:
        return os.environ.get("RANK") == "0"


def _wait_for_the_cause() -> None:
    """Wait until another rank has reported its error: when one leaves, the launcher ends all."""
    store, until = launcher_store(), time.monotonic() + interval() + 4.0
    try:
        while store is not None and time.monotonic() < until and not store.check([attempt_key(_ERROR)]):
            time.sleep(0.2)
    except RuntimeError:
        return


def leave_for_the_launcher(error: RunError, mark: str = MARK) -> None:
    """Store the error where torchrun looks for it, so that the launcher knows that it was printed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        detail = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  (torch gives a string)
            json.dump({"message": {"message": f"{mark}: {error}", "extraInfo": detail}}, file)
