"""Open plan: a plan with holes, and the plans that result from answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.question import solved_digest
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.files.sources import read_base
from legoai.dsl.frontend.kept import Kept
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.dsl.frontend.statements.merge import Reads
from legoai.dsl.frontend.syntax import Value
from legoai.dsl.holes import OpenHole, all_open, open_holes, refusals, uses_of, value_of
from legoai.dsl.lint import Announce, Linted, errors, manifest_of
from legoai.specs.directives.base import PathRule, has_hole
from legoai.specs.plan import Plan
from legoai.specs.record import Record, replace
from legoai.specs.span import Span

_MOST_CANDIDATES: Final = 8192
"""Size of the cache of candidates: the same ones are requested a few times in succession."""


class Candidate(Record, kw_only=True):
    """The plan that results from some answers.

    ``analysis`` is None where they result in no plan: then ``errors`` give the reasons, or more answers are needed.
    """

    analysis: Analysis | None
    errors: tuple[Diagnostic, ...]

    @property
    def plan(self) -> Plan:
        """The plan; only for candidates that have one."""
        assert self.analysis is not None
        return self.analysis.plan


class OpenPlan:
    """A plan with holes. Holes with answers in its text are open too: they are decided again.

    Args:
        linted: of the plan, without errors, at least with its holes open.
        directory: base of relative file names in the plan.
        settings: values of `let` names, as for linting.
        read: reads a base plan.
        announce: called before a model factory is run.
    """

    def __init__(
        self,
        linted: Linted,
        *,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        read: Reads | None = None,
        announce: Announce | None = None,
    ) -> None:
        self.resolution = linted.resolution
        self.files = linted.files
        self.directory = directory
        self._settings = settings
        self._read_now = read or read_base
        self._read = functools.cache(self._read_now)  # all candidates have the same bases, whoever edits one meanwhile
        self._unedited = linted.unedited
        found, self._open = all_open(linted.resolution, self._resolve)
        self._base = linted.analysis
        self._statements, self._facts = Kept(varies=lambda answer: True), Kept(varies=has_hole)
        self._legal: Analysis | None = None
        """The last candidate without errors, from which the next one differs in few values."""
        self._candidates: dict[tuple[tuple[int | None, ...], tuple[Span, ...]], Candidate] = {}
        self.refused: list[Diagnostic] = []
        """Diagnostics about holes that cannot be searched."""
        self.analysis: Analysis | None = None
        """Analysis of the plan with all its holes open; None where a statement cannot be read without an answer."""
        if found.plan is not None:
            if self._base is None:
                # A statement that needed an answer ended linting early.
                manifest = manifest_of(found.plan, found, directory, announce)
                if isinstance(manifest, Diagnostic):
                    self.refused.append(manifest)
                else:
                    self._base = Analysis(found.plan, manifest, directory, resolution=found)
            manifest = None if self._base is None else self._base.manifest
            self.analysis = Analysis(found.plan, manifest, directory, resolution=found, like=self._base)
        self.refused = self.as_written([*self.refused, *refusals(found, self.analysis)])
        self.holes = tuple(open_holes(found, self.analysis))

    def candidate(self, choices: Sequence[int | None], *, without: Sequence[Span] = ()) -> Candidate:
        """The plan in which each hole has the value of this index, or stays open, with the errors of linting it.

        Args:
            choices: for each of :attr:`holes`.
            without: spans of `require` lines that are left out.
        """
        key = tuple(choices), tuple(without)
        if key not in self._candidates:
            if len(self._candidates) >= _MOST_CANDIDATES:
                self._candidates.clear()
            self._candidates[key] = self._candidate(choices, without)
        return self._candidates[key]

    def _candidate(self, choices: Sequence[int | None], without: Sequence[Span]) -> Candidate:
        answers: dict[Span, Value | None] = dict(self._open)
        for hole, index in zip(self.holes, choices, strict=True):
            if index is not None:
                answers[hole.span] = hole.nodes[index]
        resolution = self._resolve(answers, self._statements)
        mistakes = tuple(errors_of(resolution.diagnostics))
        if mistakes or resolution.plan is None or resolution.unreadable:
            return Candidate(analysis=None, errors=mistakes)
        plan = resolution.plan
        if without:
            plan = replace(plan, require=tuple(item for item in plan.require if item.origin.span not in without))
        manifest = self._base.manifest if self._base is not None else None
        analysis = Analysis(plan, manifest, self.directory, resolution=resolution, like=self._base, kept=self._facts)
        found = tuple(errors(analysis, self._legal))
        if not found:
            self._legal = analysis
        return Candidate(analysis=analysis, errors=found)

    def matters(self, hole: int, candidate: Candidate) -> bool:
        """Whether a hole exists in a candidate's plan at all: options of an unused statement do not."""
        plan = None if candidate.analysis is None else candidate.analysis.plan
        return plan is None or any(True for _ in uses_of(plan, self.holes[hole].span)) or not plan.idle

    def add(self, hole: int, text: str) -> int:
        """Add a value to those of a hole, unless it has it, and return its index.

        Args:
            hole: index of the hole.
            text: of the value, as a plan writes it.
        """
        found = self.holes[hole]
        if text not in found.choices:
            more = replace(found, choices=(*found.choices, text), nodes=(*found.nodes, value_of(text)))
            self.holes = (*self.holes[:hole], more, *self.holes[hole + 1 :])
        return self.holes[hole].choices.index(text)

    def written(self, span: Span) -> Span:
        """The span in the plan as a person wrote it; of a rule that stands for `shard auto on tp`, this statement's."""
        return span if self._unedited is None else self._unedited.span(span)

    def as_written(self, found: Sequence[Diagnostic]) -> list[Diagnostic]:
        """Diagnostics with spans in the plan as a person wrote it."""
        return list(found if self._unedited is None else self._unedited.diagnostics(found))

    def reread(self, text: str) -> Resolution:
        """The plan of another text in this one's place."""
        return resolve(
            text, self.resolution.file.name, directory=self.directory, settings=self._settings,
            variant=self.resolution.variant, read=self._read,
        )  # fmt: skip

    def alone(self, text: str) -> Resolution:
        """The plan of another text in this one's place without variant and settings, as its files are now."""
        return resolve(text, self.resolution.file.name, directory=self.directory, read=self._read_now)

    @property
    def is_alone(self) -> bool:
        """Whether the plan is searched without a variant and settings."""
        return not self._settings and self.resolution.variant is None

    def is_shared(self, hole: OpenHole) -> bool:
        """Whether the plan has a hole without its variant and settings too."""
        variant = self.resolution.variants.get(self.resolution.variant or "")
        return variant is None or not hole.span.is_inside(variant.span)

    def moved(self, folder: Path) -> Resolution:
        """The plan with its holes open, in another folder, by which its relative file names are read then."""
        return self._resolve(self._open, directory=folder)

    def question(self) -> str | None:
        """The identity of what is asked, as the files that the plan is made of are now; None where they are no plan."""
        found = self._resolve(self._open, read=self._read_now)
        return None if found.plan is None else solved_digest(found)

    def _resolve(
        self,
        answers: Mapping[Span, Value | None],
        kept: Kept | None = None,
        *,
        directory: Path | None = None,
        read: Reads | None = None,
    ) -> Resolution:
        file = self.resolution.file
        return resolve(
            file.text, file.name, directory=directory or self.directory, settings=self._settings,
            variant=self.resolution.variant, read=read or self._read, answers=answers, kept=kept,
        )  # fmt: skip

    def rules_of(self, index: int) -> tuple[PathRule[Any], ...]:
        """The rule that a hole with a ``line`` is the style of, with each of its styles."""
        hole = self.holes[index]
        found = []
        for node in hole.nodes:
            plan = self._resolve({**self._open, hole.span: node}).plan
            assert plan is not None, "a style leaves every statement readable"
            found.append(next(rule for shard in plan.shard for rule in shard.rules if rule.origin.span == hole.line))
        return tuple(found)
