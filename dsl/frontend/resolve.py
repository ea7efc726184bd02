"""Resolution of syntax trees to a plan: bases, variants and `let` applied, values read, defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from legoai.dsl.diagnostics.cascade import without_consequences
from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.codes.statements import (
    CannotExtend,
    MisplacedPart,
    MissingStatement,
    PlanNotFirst,
    UnknownStatement,
)
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.suggestion import option_elsewhere, suggestion, translation
from legoai.dsl.frontend import solved
from legoai.dsl.frontend.files.contents import with_files
from legoai.dsl.frontend.files.sources import read_base
from legoai.dsl.frontend.kept import Inputs, Kept
from legoai.dsl.frontend.parsing.parse import KEYWORDS
from legoai.dsl.frontend.statements.effective_statements import merged
from legoai.dsl.frontend.statements.layouts import layout_named, with_rules
from legoai.dsl.frontend.statements.likeness import bounded_twice
from legoai.dsl.frontend.statements.merge import Reads, head_of
from legoai.dsl.frontend.statements.statement import EXAMPLES, StatementReader
from legoai.dsl.frontend.syntax import (
    AnyStatement,
    Auto,
    Binary,
    Let,
    Name,
    Negation,
    PlanFile,
    Require,
    SolvedLine,
    Statement,
    Variant,
)
from legoai.dsl.frontend.values.rest import with_rest
from legoai.dsl.frontend.values.scope import MEASURES, Answers, Scope, is_function
from legoai.specs.directives import DEFAULTED, FAMILIES, REQUIRED, family
from legoai.specs.directives.base import Directive
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.kinds import Kind
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.model import Model
from legoai.specs.directives.require import METRICS, Objective, Requirement
from legoai.specs.plan import Plan, Solved
from legoai.specs.record import Record
from legoai.specs.span import Origin, Span

T = TypeVar("T")


@dataclass(slots=True)
class Resolution:
    """Result of resolving a plan file and its bases.

    ``plan`` is None where a statement that every plan must have is missing or unreadable. ``statements`` are the
    effective ones, in order.
    """

    file: PlanFile
    files: dict[str, PlanFile]
    plan: Plan | None
    statements: list[AnyStatement]
    variants: dict[str, Variant]
    scope: Scope
    directory: Path
    """Base of relative file names in the plan."""
    diagnostics: list[Diagnostic] = field(default_factory=list)
    damaged: list[Span] = field(default_factory=list)
    """Statements with mistakes in their syntax."""
    variant: str | None = None
    """The variant that was applied."""
    unreadable: set[str] = field(default_factory=set)
    """Keywords of statements that exist but could not be read, so that the plan lacks their values."""

    @property
    def start(self) -> Span:
        """The span of a diagnostic about something missing in the plan: its first statement."""
        if self.statements:
            own = [item for item in self.file.statements if not isinstance(item, Variant)]
            return head_of(own[0] if own else self.statements[0])
        return Span(self.file.name, 0, 0, 1, 1, 1, 1)


def resolve(
    text: str,
    name: str,
    *,
    directory: Path,
    settings: Mapping[str, str] | None = None,
    variant: str | None = None,
    read: Reads | None = None,
    answers: Answers | None = None,
    kept: Kept | None = None,
) -> Resolution:
    """Resolve the plan with this text and file name. Never raises for any text.

    Args:
        text: the plan.
        name: of its file in diagnostics.
        directory: base of relative file names in the plan.
        settings: values that replace those of `let` names (``--set``).
        variant: the variant to apply.
        read: reads a base plan; by default from disk as UTF-8.
        answers: of holes, in place of those in the text.
        kept: cache of statements that were read with other answers; only for calls that are otherwise equal.
    """
    inputs = None if kept is None else Inputs(kept, lambda hole: hole if answers is None else answers.get(hole, hole))

    merging = partial(merged, text, name, directory, settings=settings or {}, variant=variant, read=read or read_base)
    found = merging() if inputs is None else inputs.once("text", merging)
    scope = Scope(dict(found.definitions), answers, kept)
    scope.used.update(found.reserved)
    resolution = Resolution(
        found.file, dict(found.files), None, list(found.statements), found.variants, scope, directory,
        list(found.diagnostics), list(found.damaged), variant, set(found.unreadable),
    )  # fmt: skip
    plan = _Resolver(resolution, variant, directory, inputs).plan()
    resolution.plan = None if plan is None else with_files(plan, directory)
    resolution.diagnostics = without_consequences(resolution.diagnostics, found.damaged)
    return resolution


class _Read(Record):
    """A statement that was read, with its diagnostics, the names that it uses and its holes.

    ``value`` is its directive, requirement, objective or solver's line; None where it is none of these, or could not be
    read.
    """

    value: Any
    diagnostics: tuple[Diagnostic, ...]
    used: set[str]
    asked: dict[Span, tuple[Auto, tuple[Kind, ...]]]


class _Resolver:
    """Turns the statements that took effect into the plan."""

    def __init__(
        self, resolution: Resolution, variant: str | None, directory: Path, inputs: Inputs | None = None
    ) -> None:
        self.resolution = resolution
        self.directory = directory
        self.variant = variant
        self.diagnostics = resolution.diagnostics
        self.scope = resolution.scope
        self.statements = StatementReader(resolution.scope, resolution.diagnostics)
        self.name: str | None = None
        self.found: dict[str, Directive] = {}
        self.shards: list[Directive] = []
        self.requirements: list[Requirement] = []
        self.objective: Objective | None = None
        self.solved: Solved | None = None
        self.unreadable = resolution.unreadable
        self._inputs = inputs
        self._places: dict[str, tuple[int, AnyStatement]] = {}
        """Return the span of the statement with a keyword."""

    def plan(self) -> Plan | None:
        self._check_first()
        for place, statement in enumerate(sorted(self.resolution.statements, key=_after_model)):
            found = self._apply(self._read(place, statement))
            if isinstance(statement, Statement):
                self._statement(place, statement, found)
            elif isinstance(found, Requirement):
                self.requirements.append(found)
            elif isinstance(found, Solved):
                self.solved = found
        missing = [keyword for keyword in REQUIRED if keyword not in self.found]
        if not any(item.code == CannotExtend.code for item in self.diagnostics):  # the base may have them
            self._missing([keyword for keyword in missing if keyword not in self.unreadable])
        if missing or self.name is None:
            return None
        self._fill_rest()
        for keyword in DEFAULTED:
            if keyword not in self.found:
                self.found[keyword] = self._once(("default", keyword), family(keyword))
        self.diagnostics.extend(bounded_twice(self.requirements))
        fields: dict[str, Any] = {**self.found, "shard": tuple(self.shards)}
        return Plan(
            name=self.name,
            require=tuple(self.requirements),
            objective=self.objective,
            variant=self.variant,
            solved=self.solved,
            **fields,
        )

    def _fill_rest(self) -> None:
        mesh, cluster = self.found.get("mesh"), self.found.get("cluster")
        if isinstance(mesh, Mesh) and isinstance(cluster, ClusterUse):
            self.found["mesh"], problem = self._once("rest", self._with_rest)
            if problem is not None:
                self.diagnostics.append(problem)

    def _with_rest(self) -> tuple[Mesh, Diagnostic | None]:
        mesh, cluster = (self._statement_found(keyword) for keyword in ("mesh", "cluster"))
        assert isinstance(mesh, Mesh) and isinstance(cluster, ClusterUse)
        return with_rest(mesh, cluster, self.directory)

    def _statement_found(self, keyword: str) -> Directive | None:
        """Return an earlier statement; its reader depends on everything that the statement depends on."""
        if self._inputs is not None and keyword in self._places:
            self._read(*self._places[keyword])
        return self.found.get(keyword)

    def _once(self, what: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, or the cached one for equal inputs."""
        return compute() if self._inputs is None else self._inputs.once(what, compute)

    def _missing(self, keywords: Sequence[str]) -> None:
        if keywords:
            named = [f"`{keyword}`" for keyword in keywords]
            listed = f"{', '.join(named[:-1])} and {named[-1]} statements" if named[1:] else f"{named[0]} statement"
            self.diagnostics.append(
                MissingStatement.at(
                    self.resolution.start,
                    f"the plan has no {listed}",
                    label="in this plan",
                    help=[f"for instance `{EXAMPLES[keyword]}`" for keyword in keywords],
                )
            )

    def _check_first(self) -> None:
        file = self.resolution.file
        for statement in file.statements:
            is_plan = isinstance(statement, Statement) and statement.keyword.text == "plan"
            if is_plan and statement is not file.statements[0]:
                self.diagnostics.append(
                    PlanNotFirst.at(
                        head_of(statement), "`plan` is not the first statement", label="move it to the top",
                        others=[Label(head_of(file.statements[0]), "the first statement")],
                    )
                )  # fmt: skip
            if is_plan:
                return
        self.name = Path(file.name).stem
        if "plan" in self.unreadable:
            return
        self.diagnostics.append(
            PlanNotFirst.at(
                self.resolution.start, "the plan has no name", label="the first statement must be `plan NAME`",
                help=[f"begin the file with `plan {_identifier(self.name)}`"],
            )
        )  # fmt: skip

    def _let(self, statement: Let) -> None:
        """Report a `let` with a name of the language, or with an invalid value, even if it is unused."""
        from legoai.dsl.frontend.values.reserved import reserved_names

        if statement.name.text in reserved_names():
            keyword = reserved_names()[statement.name.text]
            self.diagnostics.append(
                rules.ReservedName.at(
                    statement.name.span,
                    f"`{statement.name.text}` has a meaning of its own" + (f" in `{keyword}`" if keyword else ""),
                    label="a name of the language",
                    help=[f"give it another name, such as `our_{statement.name.text}`"],
                )
            )
            return
        scope = self.resolution.scope
        was_used = statement.name.text in scope.used
        value, _ = scope.look_up(statement.value)
        if isinstance(value, Binary | Negation) or is_function(value) or scope.circular(value):
            result = scope.arithmetic(Name(statement.name.text, statement.name.span))
            if isinstance(result, Diagnostic):
                self.diagnostics.append(result)
        if not was_used:
            scope.used.discard(statement.name.text)

    def _statement(self, place: int, statement: Statement, found: Any) -> None:
        keyword = statement.keyword.text
        if keyword == "plan":
            self.name = found
        elif keyword in ("minimize", "maximize"):
            self.objective = found or self.objective
        elif keyword in FAMILIES:
            if found is None:
                self.unreadable.add(keyword)
            elif found.repeats_by_axis:
                self.shards.append(found)
            else:
                self.found[keyword] = found
                self._places[keyword] = (place, statement)
        else:
            legal = (*FAMILIES, *KEYWORDS)
            close = suggestion(keyword, legal)
            self.unreadable.update([keyword], (name for name in legal if close and f"`{name}`" in close[0]))
            self.diagnostics.append(
                UnknownStatement.at(
                    statement.keyword.span,
                    f"there is no statement `{keyword}`",
                    label="unknown statement",
                    help=translation(keyword, legal)
                    or option_elsewhere(keyword)
                    or [f"statements are {', '.join(f'`{item}`' for item in legal)}"],
                )
            )

    def _read(self, place: int, statement: AnyStatement) -> _Read:
        return self._once(place, lambda: self._apart(statement))

    def _apart(self, statement: AnyStatement) -> _Read:
        """Read a statement, without adding its diagnostics and uses to the plan's."""
        scope, before = self.scope, len(self.diagnostics)
        used, asked, scope.used, scope.asked = scope.used, scope.asked, set(), {}
        value = self._value(statement)
        found = _Read(value, tuple(self.diagnostics[before:]), scope.used, scope.asked)
        scope.used, scope.asked = used, asked
        del self.diagnostics[before:]
        return found

    def _value(self, statement: AnyStatement) -> Any:
        if isinstance(statement, Require):
            return self._require(statement)
        if isinstance(statement, SolvedLine):
            return self._solved(statement)
        if isinstance(statement, Let):
            self._let(statement)
        elif isinstance(statement, Statement):
            keyword = statement.keyword.text
            if keyword == "plan":
                return self._plan_name(statement)
            if keyword in ("minimize", "maximize"):
                return self._objective(statement)
            if keyword in FAMILIES:
                return self._directive(statement, family(keyword))
        return None

    def _apply(self, read: _Read) -> Any:
        self.diagnostics.extend(read.diagnostics)
        self.scope.used |= read.used
        if self.scope.asked.keys().isdisjoint(read.asked):
            self.scope.asked |= read.asked
        else:
            for node, asked in read.asked.values():
                self.scope.ask(node, asked)
        return read.value

    def _directive(self, statement: Statement, declared: type[Directive]) -> Directive | None:
        if layout_named(statement, declared) is None:
            return self.statements.directive(statement, declared)
        assert statement.subject is not None
        model, place = self._statement_found("model"), statement.subject.span
        full = with_rules(
            statement, declared, model if isinstance(model, Model) else None, self.directory, self.statements.reader
        )
        return None if full is None else self.statements.directive(full, declared, layout=place)

    def _solved(self, statement: SolvedLine) -> Solved | None:
        line = solved.read(statement)
        if isinstance(line, Solved):
            return line
        self.diagnostics.append(line)
        return None

    def _plan_name(self, statement: Statement) -> str:
        bare = not (statement.axes or statement.options or statement.block)
        if isinstance(statement.subject, Name) and bare:
            return statement.subject.text
        self.diagnostics.append(
            MisplacedPart.at(
                statement.span, "`plan` takes a name and nothing else", label="not a plain name",
                help=["a name is letters, digits and `_`, and begins with no digit"],
            )
        )  # fmt: skip
        return Path(self.resolution.file.name).stem

    def _metric(self, node: Name) -> str | None:
        if node.text in METRICS:
            return node.text
        self.diagnostics.append(
            rules.UnknownName.at(
                node.span,
                f"there is no figure `{node.text}`",
                label="unknown figure",
                help=[
                    *translation(node.text, tuple(METRICS)),
                    f"figures are {', '.join(f'`{name}`' for name in METRICS)}",
                ],
            )
        )
        return None

    def _objective(self, statement: Statement) -> Objective | None:
        keyword = statement.keyword.text
        direction: Literal["minimize", "maximize"] = "minimize" if keyword == "minimize" else "maximize"
        if not isinstance(statement.subject, Name) or statement.axes or statement.options or statement.block:
            self.diagnostics.append(
                MisplacedPart.at(
                    statement.span, f"`{keyword}` takes one figure, such as `step_time`", label="not a figure"
                )
            )
            return None
        metric = self._metric(statement.subject)
        if metric is None:
            return None
        return Objective(direction=direction, metric=metric, origin=Origin("human", statement.span))

    def _require(self, statement: Require) -> Requirement | None:
        metric = self._metric(statement.metric)
        if metric is None:
            return None
        node, decider = self.resolution.scope.look_up(statement.bound)
        quantity = self.resolution.scope.arithmetic(node)
        if isinstance(quantity, Diagnostic):
            self.diagnostics.append(quantity)
            return None
        value, given = quantity
        legal, dimension = METRICS[metric].dimensions, METRICS[metric].dimension_of(value, given)
        if dimension is None:
            units = {"bytes": "`72GiB`", "seconds": "`1.5s`", "fraction": "`10%`", "number": "`9000`"}
            percent = "fraction" in legal and given == "number" and value <= 100
            self.diagnostics.append(
                rules.WrongValue.at(
                    statement.bound.span,
                    f"`{metric}` takes {' or '.join(MEASURES[item] for item in legal)}, not {MEASURES[given]}",
                    label=f"expected a value such as {' or '.join(units[item] for item in legal)}",
                    help=[f"did you mean `{value:g}%`?"] if percent else [],
                )
            )
            return None
        return Requirement(
            metric=metric,
            comparison=statement.comparison,
            bound=value,
            dimension=dimension,
            origin=Origin(decider, statement.span),
        )


def _after_model(statement: AnyStatement) -> bool:
    """Return the order in which statements are read: the model first, whose family declares standard layouts."""
    return not (isinstance(statement, Statement) and statement.keyword.text == "model")


def _identifier(text: str) -> str:
    cleaned = "".join(character if character.isalnum() else "_" for character in text) or "plan"
    return f"_{cleaned}" if cleaned[0].isdigit() else cleaned
