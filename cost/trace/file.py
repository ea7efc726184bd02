"""Traces as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from legoai.cost.trace.records import RECORDS, Record, TensorType
from legoai.cost.trace.trace import Trace


def save(trace: Trace) -> str:
    """The trace as JSON lines: a head, then a record in each line."""
    head = {"format": 1, "rank": trace.rank, "world": trace.world, "stage": trace.stage}
    lines = [head, *({"record": type(record).__name__, **asdict(record)} for record in trace.records)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def load(text: str) -> Trace:
    """The trace that :func:`save` wrote.

    Raises:
        ValueError: the text is no trace.
    """
    lines = iter(text.splitlines())
    try:
        head = json.loads(next(lines))
        if head["format"] != 1:
            raise ValueError(f"a trace of format {head['format']}")
        items = tuple(_records(lines))
        return Trace(rank=head["rank"], world=head["world"], stage=head["stage"], items=items)
    except (StopIteration, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace: {error!r}") from error


def _records(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        fields = json.loads(line)
        record = RECORDS[fields.pop("record")]
        for name in ("inputs", "outputs"):
            if name in fields:
                fields[name] = tuple(TensorType(tuple(item["shape"]), item["dtype"]) for item in fields[name])
        for name in ("ranks", "members"):
            if name in fields:
                fields[name] = tuple(fields[name])
        if "calls" in fields:
            fields["calls"] = tuple(map(tuple, fields["calls"]))
        yield record(**fields)
