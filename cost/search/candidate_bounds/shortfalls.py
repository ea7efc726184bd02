"""Time by which simulated steps exceed their lower bounds, which is the same whatever their blocks recompute.

What the bounds of :mod:`legoai.cost.search.candidate_bounds.bounds` leave out lies at the ends of a step: its
optimizer, what is gathered before the first block and reduced behind the last, and copies beside these. In the steady
state of a step the treatment of blocks decides nothing of that. So once steps with at least two treatments of all
blocks were simulated, those with any other treatments exceed their bounds by as much: by the least that was seen, less
the range of all. Where activations are offloaded, treatments decide what is copied, and nothing is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from legoai.cost.search.lower_bounds.observed.blocks import keeps_on_device, one_treatment
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.specs.directives.hole import Hole
from legoai.specs.plan import holes_of


@dataclass(slots=True)
class Shortfalls:
    """Shortfalls of the bounds of one plan's candidates.

    Args:
        bound: seconds of a candidate without a shortfall, of which recomputation is a summand.

    Attributes:
        revision: number of times that something new was observed.
    """

    bound: Callable[[Analysis], float]
    revision: int = 0
    _seen: dict[str, dict[str, tuple[Analysis, float]]] = field(default_factory=dict)
    """Simulated candidates and their seconds, by what they have in common and by the treatment of their blocks."""
    _most_seen: dict[str | None, dict[str, tuple[Analysis, float]]] = field(default_factory=dict)
    """Those of one form of the loss, of which most treatments were simulated, by what others have in common."""

    def observe(self, analysis: Analysis, work: MicroBatchWork, seconds: float) -> None:
        """Note the step of a simulated candidate whose blocks reach a steady state."""
        key = all_but_treatments(analysis) if work.steady is not None and keeps_on_device(analysis) else None
        treatment = None if key is None else one_treatment(analysis)
        known = {} if key is None else self._seen.setdefault(key, {})
        if treatment is not None and treatment not in known:
            known[treatment] = analysis, seconds
            self.revision += 1
            beside = all_but_treatments_and_loss(analysis)
            if len(known) > len(self._most_seen.get(beside, {})):
                self._most_seen[beside] = known

    def of(self, analysis: Analysis) -> float:
        """Least seconds by which the step of a candidate exceeds its bound; 0 where that is not known."""
        if len(found := self._under_treatments(analysis)) < 2:
            return 0.0
        least = min(found.values())
        return max(0.0, least - (max(found.values()) - least))

    def are_known(self, analysis: Analysis) -> bool:
        """Whether it is known by how much steps exceed their bounds, whatever the treatment of their blocks is."""
        return len(self._under_treatments(analysis)) > 1

    def _under_treatments(self, analysis: Analysis) -> dict[str, float]:
        """Seconds by which steps that differ in the treatment of all blocks only exceed their bounds."""
        key = all_but_treatments(analysis) if self._seen else None
        seen = self._seen.get(key, {}) if key is not None else {}
        found = self._beyond(seen)
        if len(found) == 1:  # treatments decide as little under another form of the loss
            others = self._beyond(self._most_seen.get(all_but_treatments_and_loss(analysis), {}))
            [(treatment, own)] = found.items()
            found |= {one: own + other - others[treatment] for one, other in others.items() if treatment in others}
        return found

    def _beyond(self, seen: Mapping[str, tuple[Analysis, float]]) -> dict[str, float]:
        """Seconds by which simulated steps exceed their bounds, by their treatments."""
        return {treatment: seconds - self.bound(analysis) for treatment, (analysis, seconds) in seen.items()}


@fact
def all_but_treatments_and_loss(analysis: Analysis) -> str | None:
    """The same but for the form of the loss too; None where anything else is open, or stages share the loss."""
    body = beside_treatments_and_loss(analysis)
    return None if body is None else as_key(body)


def beside_treatments_and_loss(analysis: Analysis) -> dict[str, Any] | None:
    """The statements that :func:`all_but_treatments_and_loss` is the text of."""
    body = _beside_treatments(analysis) if analysis.plan.pipeline is None else None
    return None if body is None else {name: value for name, value in body.items() if name != "loss"}


@fact
def all_but_treatments(analysis: Analysis) -> str | None:
    """What a plan says but for how its blocks are recomputed; None where anything else is open."""
    body = _beside_treatments(analysis)
    return None if body is None else as_key(body)


def _beside_treatments(analysis: Analysis) -> dict[str, Any] | None:
    plan = analysis.plan
    checkpoint = plan.checkpoint
    open_rules = sum(isinstance(rule.treatment, Hole) for rule in checkpoint.rules) if checkpoint is not None else 0
    if sum(1 for directive in plan.directives() for _ in holes_of(directive)) > open_rules:
        return None
    body = plan.canonical()
    described = body.pop("checkpoint", None) or {}
    return body | {"checkpoint": {name: value for name, value in described.items() if name != "rules"}}


def as_key(body: Mapping[str, Any]) -> str:
    """The text of some statements, equal for equal ones."""
    return json.dumps(body, sort_keys=True, default=str)
