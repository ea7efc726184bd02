"""Report of a user's mistake, printed once however many ranks make it."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

from legoai.runtime.errors import RunError

MARK = "legoai.RunError"
"""Starts the message in torchrun's error file, by which the launcher knows that the user has been told."""


def report_error(error: RunError) -> None:
    """Print the error on the first rank that has one, and leave it for torchrun's own summary."""
    if _first_to_report():
        print(error, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        detail = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  (torch gives a string)
            json.dump({"message": {"message": f"{MARK}: {error}", "extraInfo": detail}}, file)


def _first_to_report() -> bool:
    """Ask the agent's store, which stands before and after the process group does."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from torch.distributed import TCPStore

    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"legoai/error/{attempt}", 1) == 1
    except (RuntimeError, KeyError, ValueError):
        return os.environ.get("RANK") == "0"
