"""Costs caused by each line of a plan: time of kernels and collectives, and memory at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from legoai.cost import words
from legoai.cost.estimate import Estimate
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.report.holders import causes_of_categories
from legoai.cost.report.parts import COPIES, HOST, parts
from legoai.cost.trace.records import Category


@dataclass(slots=True)
class LineCost:
    """Costs that one line causes.

    Attributes:
        file: of the line.
        line: its number, from 1.
        compute: seconds of kernels, without recomputation.
        recompute: seconds of kernels in recomputation.
        communication: seconds of collectives.
        exposed: seconds of collectives during which nothing is computed.
        copies: seconds of copies between host and device during which nothing else runs.
        host: seconds of computation on the host for which the device waits.
        memory: bytes at the peak, by category.
        required: for a requirement: the value of the bounded figure, as text.
    """

    file: str
    line: int
    compute: float = 0.0
    recompute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    copies: float = 0.0
    host: float = 0.0
    memory: dict[Category, int] = field(default_factory=dict)
    required: str = ""

    def document(self) -> dict[str, Any]:
        """Return the line as plain data, with a text of the notable costs."""
        return {
            "file": self.file,
            "line": self.line,
            "compute_s": self.compute,
            "recompute_s": self.recompute,
            "communication_s": self.communication,
            "exposed_s": self.exposed,
            "exposed_copies_s": self.copies,
            "host_compute_s": self.host,
            "memory_bytes": self.memory,
            "text": ", ".join(self._words()),
        }

    def _words(self) -> Iterator[str]:
        if self.required:
            yield self.required
        if self.compute:
            yield f"{words.seconds(self.compute)} of kernels"
        if self.recompute:
            yield f"{words.seconds(self.recompute)} recomputed"
        if self.communication:
            hidden = "" if self.exposed else ", hidden"
            exposed = f", {words.seconds(self.exposed)} exposed" if self.exposed else hidden
            yield f"{words.seconds(self.communication)} of communication{exposed}"
        if self.copies:
            yield f"{words.seconds(self.copies)} of exposed copies"
        if self.host:
            yield f"{words.seconds(self.host)} of computation on the host"
        for category, size in self.memory.items():
            yield f"{words.size(size)} of {words.CATEGORIES[category]}"


def line_costs(estimate: Estimate, causes: Causes) -> list[LineCost]:
    """Return the lines that cause costs, in order: time on the busiest rank, memory on the fullest."""
    held: dict[tuple[str, int], LineCost] = {}

    def at(cause: Cause | None) -> LineCost:
        span = None if cause is None else cause.origin.span
        key = ("", 0) if span is None else (span.file, span.line)
        return held.setdefault(key, LineCost(*key))

    for item in causes.modules(estimate.slowest):
        first, *again = causes.of_module(item)
        once = item.seconds - item.recompute if again else item.seconds
        at(first).compute += once
        for cause in again:
            at(cause).recompute += item.recompute
    for collective in causes.collectives(estimate.slowest):
        line = at(causes.of_collective(collective))
        line.communication += collective.seconds
        line.exposed += collective.exposed
    of_parts = parts(estimate)
    at(causes.of_part(COPIES)).copies = of_parts[COPIES]
    at(causes.of_part(HOST)).host = of_parts[HOST]
    for category, by_cause in causes_of_categories(estimate.fullest.memory, causes).items():
        for cause, size in by_cause.items():
            line = at(cause)
            line.memory[category] = line.memory.get(category, 0) + size
    for result in estimate.requirements:
        required = result.requirement
        verdict = "" if result.ok else ", violated"
        line = at(Cause(required.metric, required.origin))
        line.required = f"{words.bound(result.value, required.dimension)}{verdict}"
    held.pop(("", 0), None)  # costs that no line causes
    return [held[key] for key in sorted(held)]


def summary(estimate: Estimate) -> str:
    """Return step time, utilisation and memory as one line."""
    fits = {True: "", False: ", does not fit", None: ""}[estimate.fits]
    return (
        f"{words.seconds(estimate.step_time)} a step, {words.share(estimate.mfu)} MFU, "
        f"{words.size(estimate.peak_active)} active{fits}"
    )
