"""Constants of an optimizer by the parameters that have them, as a checkpoint records them, and their differences.

A record is a list of entries, in each of which are parameters with equal constants:

    {"parameters": ["layers.[0-15].attention_norm.weight", "norm.weight"], "constants": {"lr": 0.001}}

Names that differ only in a number are one, with the numbers in brackets.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from legoai.runtime.errors import listed

Record = list[dict[str, Any]]

_NUMBERS: Final = re.compile(r"\[\d+(-\d+)?(,\d+(-\d+)?)*\]")


def record_of(groups: Iterable[tuple[Iterable[str], Mapping[str, Any]]]) -> Record:
    """Return the record of groups, each with the names of its parameters and its constants, which are plain data."""
    names: dict[str, set[str]] = {}
    for parameters, constants in groups:
        names.setdefault(json.dumps(constants, sort_keys=True), set()).update(parameters)
    return sorted(
        ({"parameters": compact(own), "constants": json.loads(text)} for text, own in names.items() if own),
        key=lambda entry: entry["parameters"],
    )


def merged(records: Iterable[Record]) -> Record:
    """Return the record of all parameters of several, as of ranks that hold different ones."""
    texts = {json.dumps(entry, sort_keys=True) for record in records for entry in record}  # most ranks hold the same
    entries = map(json.loads, texts)
    return record_of((expanded(entry["parameters"]), entry["constants"]) for entry in entries)


def constants_in(record: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the constants in a record."""
    return {name for entry in record for name in entry["constants"]}


def listed_changes(before: Record, now: Record) -> list[str]:
    """Return what differs between two records, as in `lr 0.1 → 0.2 for norm.weight`, for all where no names follow.

    A parameter that only one of them has is trained there only.
    """
    old, new = _by_parameter(before), _by_parameter(now)
    found: dict[str, set[str]] = {}
    for parameter in sorted(old.keys() | new.keys()):
        was, becomes = old.get(parameter), new.get(parameter)
        if was is None or becomes is None:
            was, becomes = ({"trained": "no" if constants is None else "yes"} for constants in (was, becomes))
        for name in dict.fromkeys((*was, *becomes)):
            if was.get(name) != becomes.get(name):
                change = f"{name} {_shown(was.get(name))} → {_shown(becomes.get(name))}"
                found.setdefault(change, set()).add(parameter)
    concerned: dict[frozenset[str], list[str]] = {}
    for change, parameters in found.items():
        concerned.setdefault(frozenset(parameters), []).append(change)
    every = old.keys() & new.keys()
    return [
        ", ".join(own) if parameters == every else f"{' and '.join(own)} for {listed(compact(parameters))}"
        for parameters, own in concerned.items()
    ]


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def compact(names: Iterable[str]) -> list[str]:
    """Return names of parameters, of which those that differ only in a number are one.

    >>> compact(["layers.0.norm.weight", "layers.1.norm.weight", "layers.3.norm.weight", "norm.weight"])
    ['layers.[0-1,3].norm.weight', 'norm.weight']
    """
    split = {tuple(name.split(".")) for name in names}
    for place in reversed(range(max(map(len, split), default=0))):
        numbers: dict[tuple[tuple[str, ...], tuple[str, ...]], set[int]] = {}
        for name in [name for name in split if place < len(name) and _is_number(name[place])]:
            split.discard(name)
            numbers.setdefault((name[:place], name[place + 1 :]), set()).add(int(name[place]))
        split |= {(*head, _shown_numbers(own), *tail) for (head, tail), own in numbers.items()}
    return sorted(map(".".join, split))


def expanded(names: Iterable[str]) -> list[str]:
    """Return the names that :func:`compact` has made fewer."""
    found: list[str] = []
    for name in names:
        parts = [_numbers(part) if _NUMBERS.fullmatch(part) else [part] for part in name.split(".")]
        found += map(".".join, itertools.product(*parts))
    return found


def _by_parameter(record: Record) -> dict[str, Mapping[str, Any]]:
    return {name: entry["constants"] for entry in record for name in expanded(entry["parameters"])}


def _is_number(segment: str) -> bool:
    return segment.isdecimal() and str(int(segment)) == segment


def _shown_numbers(numbers: set[int]) -> str:
    """Return a set of numbers as in `[0-3,5]`; one number as it is."""
    if len(numbers) == 1:
        return str(*numbers)
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"[{','.join('-'.join(map(str, run)) for run in runs)}]"


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for run in text.strip("[]").split(","):
        first, _, last = run.partition("-")
        found += map(str, range(int(first), int(last or first) + 1))
    return found
