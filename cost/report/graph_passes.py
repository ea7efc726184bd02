"""Effects of the passes over a step's graph on time, memory and communication, as text and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from legoai.cost import words
from legoai.cost.estimate import Estimate
from legoai.cost.graph_passes import PassEstimate
from legoai.cost.report.terminal import title
from legoai.cost.timing.breakdown import collective_costs

FORMAT_VERSION: Final = 1
"""Adding a field keeps the version; removing or changing one increments it."""

COLUMNS: Final = ("step time", "peak active", "exposed comm", "collectives")


def document(found: Sequence[PassEstimate]) -> dict[str, Any]:
    """Return the passes as plain data: seconds, bytes and counts of collectives; differences are to the step before."""
    return {
        "format_version": FORMAT_VERSION,
        "plan": {
            "name": found[0].estimate.plan,
            "hash": found[0].estimate.digest,
            "variant": found[0].estimate.variant,
        },
        "traced": _figures(found[0].estimate),
        "passes": [
            {
                "name": after.name,
                "after": _figures(after.estimate),
                "difference": _difference(before.estimate, after.estimate),
            }
            for before, after in itertools.pairwise(found)
        ],
        "difference": _difference(found[0].estimate, found[-1].estimate),
    }


def _figures(estimate: Estimate) -> dict[str, float]:
    return {
        "step_time_s": estimate.step_time,
        "peak_active_bytes": estimate.peak_active,
        "exposed_communication_s": estimate.exposed_communication,
        "collectives": sum(item.count for item in collective_costs(estimate.slowest.intervals)),
    }


def _difference(before: Estimate, after: Estimate) -> dict[str, float]:
    one, other = _figures(before), _figures(after)
    return {name: other[name] - value for name, value in one.items()}


def terminal(found: Sequence[PassEstimate]) -> str:
    """Return the passes as lines of text, each with its difference from the previous pass."""
    first, last = found[0].estimate, found[-1].estimate
    rows = [
        ("passes over the graph of a step", *COLUMNS),
        (f"  {found[0].name}", *_absolute(first)),
        *(
            (f"    {after.name}", *_relative(before.estimate, after.estimate, first))
            for before, after in itertools.pairwise(found)
        ),
        ("  after all passes", *_absolute(last)),
        ("    in all", *_relative(first, last, first)),
    ]
    return "\n".join([title(last), "", *map(str.rstrip, words.columns(rows)), *_unfit(last)]) + "\n"


def _absolute(estimate: Estimate) -> tuple[str, ...]:
    figures = _figures(estimate)
    return (
        words.seconds(figures["step_time_s"]),
        words.size(figures["peak_active_bytes"]),
        words.seconds(figures["exposed_communication_s"]),
        f"{figures['collectives']:,}",
    )


def _relative(before: Estimate, after: Estimate, first: Estimate) -> tuple[str, ...]:
    figures = _difference(before, after)
    return (
        words.signed_share(figures["step_time_s"], first.step_time, words.seconds),
        words.signed(figures["peak_active_bytes"], words.size),
        words.signed(figures["exposed_communication_s"], words.seconds),
        words.signed(figures["collectives"], lambda count: f"{count:,}"),
    )


def _unfit(estimate: Estimate) -> Iterator[str]:
    if estimate.fits is False:
        yield f"{estimate.plan} does not fit the memory of its devices"
