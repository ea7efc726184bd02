"""Open plan: the holes of a plan, the values that each may take, and the plans that result from answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.domains import RULES, Use, is_item, values_of
from legoai.dsl.analysis.parallelism.styles import styles_for
from legoai.dsl.diagnostics.codes.lowering import HoleNotSearched
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.unparse import value_on_one_line
from legoai.dsl.frontend.kept import Kept
from legoai.dsl.frontend.merge import Reads
from legoai.dsl.frontend.parse import parse
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.dsl.frontend.syntax import Auto, Let, ListValue, Node, Statement, Value, children
from legoai.dsl.lint import Announce, Linted, errors, manifest_of
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Declared, Directive, PathRule, has_hole
from legoai.specs.directives.batch import Batch, Stages
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.comm import Comm
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.pipeline import Pipeline
from legoai.specs.directives.shard import Shard
from legoai.specs.plan import Plan
from legoai.specs.record import Record, replace
from legoai.specs.span import Span

_LEARNED: Final = ("model", "optimizer", "schedule", "clip", "data", "weights", "steps", "seed", "save",
                   "evaluate")  # fmt: skip
"""Statements that affect what is learned, or what is written, but not the cost of a step."""

_MOST_CHOICES: Final = 4096
"""Members of a domain: more than the divisors of any number of devices, and few enough to be looked at."""


_MOST_CANDIDATES: Final = 8192
"""Size of the cache of candidates: the same ones are requested a few times in succession."""


class OpenHole(Record, kw_only=True):
    """A hole to be filled.

    ``what`` describes it, and ``option`` is the name of the option that it is the value of, if any; ``choices`` are the
    values to choose from, as a plan writes them, and ``nodes`` the same as syntax trees; the first ``listed`` are its
    domain, and the others were added by :meth:`OpenPlan.add`. ``answer`` is the text of the plan's answer for it, if
    there is one. ``owner`` is the enclosing statement or treatment; None for an option of a standard layout, whose
    rules depend on the answer. ``assigns`` is whether it is a split into stages without a domain, of which there are
    more than are listed; ``buckets`` the same for buckets of units. ``free`` is whether it has no domain of its own,
    and ``path`` the path of the rule whose treatment it is, if any. ``line`` is the line of a rule on `tp` whose style
    is open: such holes are decided together by a program, and not searched one by one.
    """

    span: Span
    what: str
    option: str | None
    owner: type[Declared] | None
    choices: tuple[str, ...]
    nodes: tuple[Value, ...]
    listed: int
    answer: str | None
    assigns: bool
    buckets: bool = False
    free: bool = False
    path: str | None = None
    line: Span | None = None

    @property
    def axis(self) -> str | None:
        """The axis of the mesh whose size it is, if it is one."""
        return self.option if self.owner is Mesh else None


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
        linted: of the plan, without errors.
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
        self.directory = directory
        self._settings = settings
        self._read = read
        open_answers: dict[Span, Value | None] = dict.fromkeys(self.resolution.scope.asked)
        found = self._resolve(open_answers)
        while found.scope.asked.keys() - open_answers.keys():
            open_answers |= dict.fromkeys(found.scope.asked)
            found = self._resolve(open_answers)
        self._open = open_answers
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
        self.holes = tuple(self._holes(found))

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
        mistakes = tuple(item for item in resolution.diagnostics if item.severity == "error")
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
        return plan is None or any(True for _ in _uses(plan, self.holes[hole].span)) or not plan.idle

    def add(self, hole: int, text: str) -> int:
        """Add a value to those of a hole, unless it has it, and return its index.

        Args:
            hole: index of the hole.
            text: of the value, as a plan writes it.
        """
        found = self.holes[hole]
        if text not in found.choices:
            more = replace(found, choices=(*found.choices, text), nodes=(*found.nodes, _value(text)))
            self.holes = (*self.holes[:hole], more, *self.holes[hole + 1 :])
        return self.holes[hole].choices.index(text)

    def reread(self, text: str) -> Resolution:
        """The plan of another text in this one's place."""
        return resolve(
            text, self.resolution.file.name, directory=self.directory, settings=self._settings,
            variant=self.resolution.variant, read=self._read,
        )  # fmt: skip

    def _resolve(self, answers: Mapping[Span, Value | None], kept: Kept | None = None) -> Resolution:
        file = self.resolution.file
        return resolve(
            file.text, file.name, directory=self.directory, settings=self._settings, variant=self.resolution.variant,
            read=self._read, answers=answers, kept=kept,
        )  # fmt: skip

    def _holes(self, found: Resolution) -> Iterator[OpenHole]:
        text = found.file.text
        for span, (node, asked) in sorted(found.scope.asked.items()):
            uses = list(_uses(found.plan, span)) if found.plan is not None else []
            problem = _never(span, found, uses)
            line, styles = self._styles(uses, node)
            if problem is None and node.domain is not None:
                choices = self._written(node, found)
            elif problem is None and styles:
                choices = styles
            elif problem is None:
                lists = [values_of(use, kind, self.analysis) for use, kind in _paired(uses, asked)]
                choices = [item for item in lists[0] if all(item in other for other in lists[1:])]
            if problem is None and not choices:
                problem = "holes of this kind are not searched without a domain"
            elif problem is None and len(choices) > _MOST_CHOICES:
                problem = f"the domain has {len(choices)} values, more than the {_MOST_CHOICES} that are searched"
            if problem is not None:
                self.refused.append(_refusal(span, problem))
                continue
            answer = value_on_one_line(found.file, node.answer) if node.answer is not None else None
            yield OpenHole(
                span=span,
                what=_named(uses, node, text),
                option=_option_of(*uses[0]) if uses else None,
                owner=type(uses[0][0]) if uses else None,
                choices=tuple(choices),
                nodes=tuple(map(_value, choices)),
                listed=len(choices),
                answer=answer,
                assigns=node.domain is None and bool(uses) and all(map(_is_split, uses)),
                buckets=node.domain is None and bool(uses) and all(map(_is_bucket, uses)),
                free=node.domain is None,
                path=_path_of(uses, node),
                line=line,
            )
        asked_for = found.scope.asked
        for statement in found.statements:
            if not isinstance(statement, Let):
                self.refused.extend(
                    _refusal(node.span, "this hole stands where nothing is searched")
                    for node in _autos(statement)
                    if node.span not in asked_for
                )

    def rules_of(self, index: int) -> tuple[PathRule[Any], ...]:
        """The rule that a hole with a ``line`` is the style of, with each of its styles."""
        hole = self.holes[index]
        found = []
        for node in hole.nodes:
            plan = self._resolve({**self._open, hole.span: node}).plan
            assert plan is not None, "a style leaves every statement readable"
            found.append(next(rule for shard in plan.shard for rule in shard.rules if rule.origin.span == hole.line))
        return tuple(found)

    def _styles(self, uses: Sequence[Use], node: Auto) -> tuple[Span | None, list[str]]:
        """Return the line and the choices of style, where the hole is that of a rule on `tp` without a domain."""
        if len(uses) != 1 or node.domain is not None or self.analysis is None or self.analysis.manifest is None:
            return None, []
        [(owner, field)] = uses
        if not isinstance(owner, Shard) or field != RULES or owner.axes != ("tp",):
            return None, []
        rule = _rule_at(owner, node.span)
        styles = styles_for(self.analysis.manifest, self.analysis.paths_for(owner), rule.path)
        return rule.origin.span if styles else None, list(styles)

    def _written(self, node: Auto, found: Resolution) -> list[str]:
        """The members of the hole's own domain."""
        if isinstance(node.domain, ListValue):
            file = found.files[node.span.file]
            return list(dict.fromkeys(value_on_one_line(file, item) for item in node.domain.items))
        assert node.domain is not None
        ends = [found.scope.arithmetic(end) for end in (node.domain.first, node.domain.last)]
        first, last = (0 if isinstance(end, Diagnostic) else int(end[0]) for end in ends)
        return [str(value) for value in range(first, min(last, first + _MOST_CHOICES) + 1)]


def _uses(value: Any, span: Span) -> Iterator[Use]:
    """Return the spans of a plan at which the hole occurs."""
    if isinstance(value, Plan):
        for directive in value.directives():
            yield from _uses(directive, span)
    elif isinstance(value, Declared):
        for item in value.options:
            held = getattr(value, item.field)
            if isinstance(held, Hole):
                if held.span == span:
                    yield value, item.field
            elif isinstance(held, tuple) and any(isinstance(part, Hole) for part in held):
                if any(isinstance(part, Hole) and part.span == span for part in held):
                    yield value, item.field
            else:
                yield from _uses(held, span)
        for rule in value.rules if isinstance(value, Directive) else ():
            if isinstance(rule.treatment, Hole):
                if rule.treatment.span == span:
                    yield value, RULES
            else:
                yield from _uses(rule.treatment, span)
    elif isinstance(value, tuple):
        for item in value:
            yield from _uses(item, span)
    elif isinstance(value, PathRule):
        yield from _uses(value.treatment, span)


def _is_split(use: Use) -> bool:
    owner, field = use
    return isinstance(owner, Pipeline) and field == "split" and isinstance(owner.split, Hole)


def _is_bucket(use: Use) -> bool:
    owner, field = use
    return isinstance(owner, Comm) and field == RULES


def inside(inner: Span, outer: Span) -> bool:
    """Whether a span is within another one."""
    return inner.file == outer.file and outer.start <= inner.start and inner.end <= outer.end


def _paired(uses: Sequence[Use], asked: Sequence[kinds.Kind]) -> Iterator[tuple[Use | None, kinds.Kind]]:
    """Yield each use with its kind; a hole that a `let` names may have several."""
    if not uses:
        yield from ((None, kind) for kind in asked)
        return
    for owner, field in uses:
        treated = owner.treatments if field == RULES and isinstance(owner, Directive) else None
        kind: kinds.Kind = treated or type(owner).option(field).kind
        if is_item((owner, field)):
            kind = next(part.item for part in kinds.parts_of(kind) if isinstance(part, kinds.ListOf))
        yield (owner, field), kind


def _never(span: Span, found: Resolution, uses: Sequence[Use]) -> str | None:
    """Return why a hole cannot be searched whatever its domain."""
    if span.file != found.file.name:
        return "the hole stands in the file of a base plan: solve that plan, or decide the value in this one"
    statement = next((item for item in found.statements if inside(span, item.span)), None)
    directives = () if found.plan is None else found.plan.directives()
    keywords = {directive.keyword for directive in directives if any(True for _ in _uses(directive, span))}
    if isinstance(statement, Statement):
        keywords.add(statement.keyword.text)
    learned = next((keyword for keyword in _LEARNED if keyword in keywords), None)
    if learned is not None:
        return f"`{learned}` decides what is learned or written, not what a step costs"
    for owner, field in uses:
        name = _option_of(owner, field)
        if (isinstance(owner, Batch) and field != "micro_batch") or isinstance(owner, Stages):
            return f"`{name}` decides what is learned, not what a step costs"
        if isinstance(owner, Checkpoint) and field == "preserve_rng":
            return f"`{name}` decides what is learned, not what a step costs"
    return None


def _refusal(span: Span, problem: str) -> Diagnostic:
    help = ["name the values to choose from: `auto in [a, b]`"] if "without" in problem else ["give the value"]
    return HoleNotSearched.at(span, problem, label="not searched", help=help)


def _named(uses: Sequence[Use], node: Auto, text: str) -> str:
    if not uses:
        words = re.findall(r"\w+", text[: node.span.start].rpartition("\n")[2])
        return words[-1] if words else "hole"
    owner, field = uses[0]
    if field == RULES:
        assert isinstance(owner, Directive)
        return f"{owner.keyword} {_rule_at(owner, node.span).path}"
    name = _option_of(owner, field)
    assert name is not None, "a field other than the rules is an option"
    return f"{owner.keyword} {name}" if isinstance(owner, Directive) else name


def _option_of(owner: Declared, field: str) -> str | None:
    """The name of the option that a field holds; None for the rules of a statement."""
    return None if field == RULES else type(owner).option(field).name


def _path_of(uses: Sequence[Use], node: Auto) -> str | None:
    """Return the path of the rule whose treatment is the hole; None where there is none, or several."""
    if len(uses) != 1 or uses[0][1] != RULES:
        return None
    owner = uses[0][0]
    assert isinstance(owner, Directive)
    return _rule_at(owner, node.span).path


def _rule_at(owner: Directive, span: Span) -> PathRule[Any]:
    """Return the rule of a statement whose treatment is the hole at ``span``."""
    return next(rule for rule in owner.rules if isinstance(rule.treatment, Hole) and rule.treatment.span == span)


def _autos(node: Node) -> Iterator[Auto]:
    if isinstance(node, Auto):
        yield node
        return
    for child in children(node):
        yield from _autos(child)


def _value(text: str) -> Value:
    """The tree of a value's text."""
    [statement] = parse(f"let answer = auto -> {text}", "an answer").file.statements
    assert isinstance(statement, Let)
    assert isinstance(statement.value, Auto)
    assert statement.value.answer is not None
    return statement.value.answer
