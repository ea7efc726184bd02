"""Translation of any exception that ends a rank into one error with a code."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import Final

import torch

from legoai.runtime.durable import RAISE_LIMIT, is_full, is_too_large
from legoai.runtime.errors import RunError, RunErrorCode, unwrapped
from legoai.runtime.launching.attendant import LOOK_THERE, silent_ranks, unanswered
from legoai.runtime.process_group import patience

_TIMED_OUT: Final = re.compile(r"timed? ?out|wait timeout", re.IGNORECASE)
_LOST: Final = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|socket|remote process exited|pair closure|"
    r"application timeout|nccl.*(?:abort|remote)",
    re.IGNORECASE,
)
_NO_MEMORY: Final = re.compile(
    r"can't allocate memory|not enough memory|out of memory|STATUS_ALLOC_FAILED", re.IGNORECASE
)
_OF_CUDA: Final = ("CUDA error", "ncclUnhandledCudaError")
"""Beginnings of errors of a GPU itself, where a kernel may have timed out."""
_EXAMPLES: Final = " (e.g. socket, malloc)"
"""In torch's explanation of any `ncclSystemError`."""


def explained(error: BaseException) -> RunError:
    """Return the error to report for an exception that ended this rank; a `RunError` is returned as it is.

    A `SystemExit` is one too: only the model's code raises it where this is called.
    """
    error = unwrapped(error)
    if isinstance(error, RunError):
        return error
    who, text = f"rank {os.environ.get('RANK', '0')}", _cause(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error, text):
        return RunError(
            RunErrorCode.NO_MEMORY,
            f"{who} has no memory left: {_first_sentences(text) or 'the host gives no more'}",
            help="shard over more devices, recompute more activations, or take a smaller micro batch; "
            "`legoai cost` shows where a plan's memory goes",
        )
    if isinstance(error, OSError) and (is_full(error) or is_too_large(error)):
        where, full = f" for {error.filename}" if error.filename else "", is_full(error)
        return RunError(
            RunErrorCode.FOLDER_NOT_WRITABLE,
            f"{who}: {'the disk is full' if full else 'a file may not be as large as it needs to be'}{where}",
            help="free space there" if full else RAISE_LIMIT,
        )
    if _is_of_a_collective(error, text):
        if _LOST.search(text) and not text.lower().startswith("timed out"):
            return RunError(
                RunErrorCode.LOST_RANK,
                f"{who} lost the connection to another rank: {text[:200]}",
                help="look for what that rank said last",
            )
        if _TIMED_OUT.search(text):
            return _no_answer(who)
    cause, last = f"{type(error).__name__}: {text[:400]}", _own_frame(error)
    if isinstance(error, SystemExit):
        cause = f"the model's code called sys.exit({'' if error.code is None else repr(error.code)[:400]})"
    return RunError(RunErrorCode.FAILED, f"{who} failed: {cause}{f' ({last})' if last else ''}")


def _no_answer(who: str) -> RunError:
    """Return an error that names the ranks that did not respond while this one waited."""
    silent = silent_ranks()
    seconds, starting = patience()
    waited = f"{who} waited {seconds:g} s in a collective{' before the first step was done' if starting else ''}"
    if silent:
        return RunError(RunErrorCode.NO_ANSWER, f"{waited}, and {unanswered(silent)}", help=LOOK_THERE)
    alive = "" if silent is None else "; all ranks are alive, and some are somewhere else, or slow"
    return RunError(
        RunErrorCode.NO_ANSWER,
        f"{waited} that not all ranks entered{alive}",
        help=f"raise --timeout if a rank may take that long {'to start' if starting else 'in one step'}",
    )


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(text) is not None
    )


def _cause(error: BaseException) -> str:
    """Return the error's text in one line; of an error of NCCL its kind, and what NCCL says of this one.

    Before that torch explains the kind, by causes that it may have.
    """
    text = " ".join(str(error).split()).replace(_EXAMPLES, "")
    explained, _, last = text.partition("Last error:")
    kind = re.search(r"\bnccl\w+", explained)
    return f"{kind[0]}: {last.strip()}" if kind and last.strip() else text


def _is_of_a_collective(error: BaseException, text: str) -> bool:
    """Whether it comes from a backend of process groups; gloo raises plain runtime errors, from its own sources."""
    if text.startswith(_OF_CUDA):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return (
        "DistError" in names
        or (isinstance(error, RuntimeError) and "gloo" in text.lower())
        or (isinstance(error, RuntimeError) and (_LOST.search(text) or _TIMED_OUT.search(text)) is not None)
    )


def _first_sentences(text: str) -> str:
    return ". ".join(re.split(r"\.\s", text)[:3])[:300]


def _own_frame(error: BaseException) -> str:
    """The innermost line that is neither of torch nor of this package, as `file:line`."""
    here = Path(__file__).resolve().parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if "torch" not in path.parts and path.is_file() and not path.resolve().is_relative_to(here):
            return f"{path.name}:{frame.lineno}"
    return ""
