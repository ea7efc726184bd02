"""Errors of a run that a user can cause, each with a stable code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

MARK: Final = "legoai.RunError"
"""Prefix of the message in torchrun's error file by which the launcher knows that the error was already printed."""

CONSEQUENCE: Final = "legoai.Consequence"
"""Prefix for a rank that failed because another one ended; the launcher prints it where no other error is known."""

AGENT: Final = "LEGOAI_AGENT"
"""Set in the environment of ranks that LegoAI's own launcher has started."""

_IN_STAGE: Final = re.compile(r"\s*\[Stage \d+\] failed to run")
"""Beginning of the message of an error in which a stage of torch's pipelines wraps that of a module."""


class RunErrorCode(StrEnum):
    """Stable codes of users' mistakes at run time; a code is never given a second meaning."""

    WRONG_OPTION = "RUN001"
    WORLD_SIZE = "RUN002"
    DEVICE = "RUN003"
    BATCH = "RUN004"
    FOLDER_IN_USE = "RUN005"
    FOLDER_NOT_WRITABLE = "RUN006"
    FOLDER_GONE = "RUN007"
    NOT_MAIN_THREAD = "RUN008"
    DATA_MISSING = "RUN010"
    DATA_EMPTY = "RUN011"
    DATA_TOO_SHORT = "RUN012"
    DATA_FORMAT = "RUN013"
    DATA_KIND = "RUN014"
    VOCABULARY = "RUN015"
    TOKENIZER = "RUN016"
    DATA_UNREACHABLE = "RUN017"
    DATA_DIFFERS = "RUN018"
    CHECKPOINT_MISSING = "RUN020"
    CHECKPOINT_CORRUPT = "RUN021"
    CHECKPOINT_OTHER_MODEL = "RUN022"
    CHECKPOINT_UNSAFE = "RUN023"
    CHECKPOINT_NOT_WRITTEN = "RUN024"
    CHECKPOINT_OTHER_OPTIMIZER = "RUN025"
    WEIGHTS_MISSING = "RUN026"
    WEIGHTS_CORRUPT = "RUN027"
    WEIGHTS_OTHER_MODEL = "RUN028"
    NO_WEIGHT_MAP = "RUN029"
    NOT_FINITE = "RUN030"
    CHECKPOINT_NEWER = "RUN031"
    NO_INITIALISER = "RUN040"
    ATTENTION = "RUN041"
    POSITIONS = "RUN042"
    NO_OPERATOR = "RUN043"
    NO_FLOAT8 = "RUN044"
    STAGES = "RUN045"
    NO_SOLVER = "RUN046"
    PROFILE_UNUSABLE = "RUN047"
    NO_SAFETENSORS = "RUN048"
    NO_PYARROW = "RUN049"
    PROGRAM_MISSING = "RUN050"
    NO_TENSORBOARD = "RUN051"
    NO_DATASETS = "RUN052"
    UNFIT_RESULT = "RUN053"
    NO_MEMORY = "RUN060"
    NO_ANSWER = "RUN061"
    LOST_RANK = "RUN062"
    RANK_ENDED = "RUN063"
    AGENT_ENDED = "RUN064"
    FAILED = "RUN069"


class RunError(ValueError):
    """A mistake that the user who started the run can correct.

    The trainer prints it once, without a traceback, and leaves with status 1.

    Attributes:
        code: the stable code.
        message: what is wrong, in one sentence that names the values.
        help: a remedy; empty where the message implies it.
    """

    def __init__(self, code: RunErrorCode, message: str, *, help: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.help = help

    def __str__(self) -> str:
        text = f"error[{self.code}]: {self.message}"
        return f"{text}\n  help: {self.help}" if self.help else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.code, self.message, self.help))


def _rebuild(code: RunErrorCode, message: str, help: str) -> RunError:
    return RunError(code, message, help=help)


def listed(names: Iterable[str], *, most: int = 3) -> str:
    """Names for a message: the first few, and how many more there are."""
    found = sorted(names)
    more = len(found) - most
    return ", ".join(found[:most]) + (f" and {more} more" if more > 0 else "")


def unwrapped(error: BaseException) -> BaseException:
    """Return what a module raised within a stage of a pipeline, whose error shows arguments only; any other error."""
    while _IN_STAGE.match(str(error)) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
