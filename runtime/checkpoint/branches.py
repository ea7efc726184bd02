"""Record beside a run's checkpoints: where each branch began, and who began the last."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from legoai.runtime.durable import write_durably
from legoai.runtime.json_object import read_json_object
from legoai.specs.visible_text import visible_line

BRANCHES: Final = "branches.json"

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,13}")
"""Of a branch; a checkpoint's name has no larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Content of the file.

    Attributes:
        beginnings: by branch, the name of a checkpoint beside the file's or the path of another one.
        asked: the request by which the last branch began, as an option's value and torchrun's job; None for none.
        problem: why the file is ignored, as a sentence; empty where it is not.
    """

    beginnings: Mapping[int, str] = field(default_factory=dict)
    asked: object = None
    problem: str = ""


def read_branches(folder: Path) -> Branches:
    """Read the file of a run's folder; one that is missing or damaged is ignored."""
    file = folder / BRANCHES
    try:
        found = read_json_object(file)
        return Branches(beginnings=_beginnings(found.get("beginnings", {})), asked=found.get("asked"))
    except (FileNotFoundError, NotADirectoryError):
        return Branches()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        problem = f"is damaged: {error}"
    return Branches(
        problem=visible_line(
            f"{file} {problem}; it is ignored, and the last branch is that of the checkpoints' names, "
            "of which it is not known where it began"
        )
    )


def write_branches(folder: Path, branches: Branches, *, suffix: str) -> None:
    """Write the file of a run's folder at once; a draft of it ends in ``suffix``."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{BRANCHES}{suffix}"
    beginnings = {str(branch): place for branch, place in branches.beginnings.items()}
    write_durably(draft, json.dumps({"beginnings": beginnings, "asked": branches.asked}, indent=1))
    draft.rename(folder / BRANCHES)


def _beginnings(found: object) -> dict[int, str]:
    if not isinstance(found, dict):
        raise ValueError("its beginnings are no JSON object")
    for branch, place in found.items():
        if not _NUMBER.fullmatch(branch):
            raise ValueError(f"{branch!r} is no number of a branch")
        if not _is_path(place):
            raise ValueError(f"{place!r} is no path of a checkpoint")
    return {int(branch): place for branch, place in found.items()}


def _is_path(place: object) -> bool:
    try:
        return isinstance(place, str) and b"\0" not in os.fsencode(place)
    except UnicodeEncodeError:  # JSON can hold half a surrogate pair
        return False
