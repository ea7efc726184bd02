"""Probes: candidates that are simulated because their observations tighten the bounds of many others.

The kernels of a block do not depend on its pipeline stage, on the form of the loss, or on how parameters are sharded
(:mod:`legoai.cost.search.lower_bounds.observed.blocks`). A candidate without a pipeline is simulated in about a second,
and bounds all candidates with the same blocks, and the nodes above them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.search.candidates import Choices, order_of
from legoai.cost.search.lower_bounds.observed.blocks import block_key, one_treatment, text_of
from legoai.cost.search.lower_bounds.shared_work import DEGREES
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import samples_at_once
from legoai.lowering.shrink_rules import changed
from legoai.specs.record import replace

_MOST_TRIED: Final = 64
"""Partial answers that are tried for a candidate without a pipeline."""


@dataclass(slots=True)
class Probes:
    """Candidates whose blocks were not observed yet, each given once.

    Args:
        state: of the search.
    """

    state: SearchState
    _given: dict[str, Choices | None] = field(default_factory=dict)
    """By what was not known, the candidate that was given for it."""
    _first: dict[str, Choices] = field(default_factory=dict)
    """By blocks of which nothing was known, the candidate that was given first."""

    def awaited(self, choices: Choices, asked: Collection[Choices]) -> bool:
        """Whether the blocks of some answers are observed by what was asked for."""
        analysis = self.state.candidate(choices).analysis if asked else None
        if analysis is None:
            return False
        if self._first.get(self._new(analysis) or "") in asked:
            return True
        key = self._unknown(analysis, complete=None not in choices)
        keys = [key] if key is not None else self._of_treatments(analysis) if None in choices else []
        return any(self._given.get(one) in asked for one in keys)

    def of(self, choices: Choices) -> Choices | None:
        """A candidate without a pipeline with the blocks of some answers; None where these are known, or open.

        Where nothing is open, blocks of which another treatment was observed are not known. Where their treatment is
        open, it is those treatments that determine the bound.
        """
        analysis = self.state.candidate(choices).analysis
        if analysis is None:
            return None
        key = self._unknown(analysis, complete=None not in choices)
        if key is None and None in choices:
            return self._of_treatment(choices, analysis)
        if key is None or key in self._given or self._new(analysis) in self._first:
            return None
        self._given[key] = None
        reopened = [one for one in order_of(self.state.plan.holes) if choices[one] is None or self._is_of_ranks(one)]
        start = tuple(None if hole in reopened else value for hole, value in enumerate(choices))
        for found in itertools.islice(self._completed(start, reopened, choices), _MOST_TRIED):
            candidate = self.state.candidate(found).analysis
            if None in found or candidate is None or candidate.plan.pipeline is not None:
                continue
            if self._unknown(candidate, complete=None not in choices) == key:
                self._given[key] = found
                if (blocks := self._new(candidate)) is not None:
                    self._first[blocks] = found
                return found
        return None

    def _new(self, analysis: Analysis) -> str | None:
        """What decides the kernels of blocks of which nothing was observed; None where that is open, or something was.

        Under any treatment they show most of the bounds under the others, so that one of these is simulated first.
        """
        key = block_key(analysis)
        return key if key is not None and self.state.bounds.layers.observed.of(analysis) is None else None

    def _of_treatment(self, choices: Choices, analysis: Analysis) -> Choices | None:
        """A candidate whose blocks all have a treatment that was not observed; None where all are known."""
        new = {key: one for key, one in self._of_treatments(analysis).items() if key not in self._given}
        left = [one for one in order_of(self.state.plan.holes) if choices[one] is None]
        for key, treatment in new.items():
            self._given[key] = None
            for found in itertools.islice(self._completed(choices, left, choices), _MOST_TRIED):
                candidate = self.state.candidate(found).analysis
                if None not in found and candidate is not None and one_treatment(candidate) == treatment:
                    self._given[key] = found
                    return found
        return None

    def _of_treatments(self, analysis: Analysis) -> dict[str, str]:
        """The treatments that decide how much is recomputed and were not observed, by what is not known with each."""
        steady = self.state.bounds.layers.steady
        if (key := steady.key(analysis)) is None:
            return {}
        texts = (
            text_of(analysis, treatment)
            for treatment in self.state.bounds.recomputation.treatments(analysis)
            if steady.of(analysis, treatment) is None
        )
        return {f"{key} {text}": text for text in texts}

    def _unknown(self, analysis: Analysis, *, complete: bool) -> str | None:
        """What is not known of blocks; None where that is nothing, or they are open."""
        seen = self.state.bounds.layers.observed
        if complete:
            return seen.unobserved(analysis)
        return block_key(analysis) if seen.of(analysis) is None else None

    def _is_of_ranks(self, hole: int) -> bool:
        """Whether a hole is a degree of what shares no block: pipeline and data-parallel ranks."""
        return self.state.plan.holes[hole].axis in DEGREES

    def _completed(self, way: Choices, holes: Sequence[int], wanted: Choices) -> Iterator[Choices]:
        """The way with answers for some holes that lint allows, one hole after another, those without a pipeline."""
        candidate = self.state.candidate(way)
        if candidate.errors:
            return
        yield way
        if not holes:
            return
        [hole, *others] = holes
        one = self.state.plan.holes[hole]
        values = list(range(one.listed))
        if self._is_of_ranks(hole):
            own = wanted[hole]
            if one.axis == "pp":
                values = [value for value in values if one.choices[value] == "1"]
            elif own is not None:
                values.sort(key=lambda value: (value != own, value))
        for value in values:
            yield from self._completed((*way[:hole], value, *way[hole + 1 :]), others, wanted)


def with_one_micro_batch(analysis: Analysis) -> Analysis:
    """The candidate with one micro batch in a step, which shows as much of its blocks in less time."""
    plan = analysis.plan
    batch = changed(plan.batch, global_batch=samples_at_once(plan), ramp=None)
    return Analysis(replace(plan, batch=batch), analysis.manifest, analysis.directory)
