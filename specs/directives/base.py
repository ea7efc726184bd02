"""Declarations of directive families: options, treatments and axes, as typed models with documentation.

One declaration serves the resolver, the linter's messages, completion, the language reference, ``legoai explain`` and
the test that every option is lowered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

from legoai.specs.directives.hole import Hole
from legoai.specs.directives.kinds import Integer, Kind, either_of
from legoai.specs.record import Record
from legoai.specs.span import DEFAULT, Origin, Span

T = TypeVar("T")


class _Missing:
    """The default of a required option."""


MISSING = _Missing()


class Option:
    """One named value of a directive or treatment: its name in the language, kind, default and documentation."""

    __slots__ = ("default", "doc", "field", "kind", "name")

    def __init__(self, kind: Kind, doc: str, default: Any, name: str | None) -> None:
        self.kind = kind
        self.doc = doc
        self.default = default
        self.name = name or ""
        self.field = ""

    def __set_name__(self, owner: type, field: str) -> None:
        self.field = field
        self.name = self.name or field

    @property
    def required(self) -> bool:
        """Whether the option is required."""
        return self.default is MISSING

    def is_default(self, described: Any) -> bool:
        """Whether ``described``, a value in the form of :func:`describe` without defaults, is the default."""
        return not self.required and bool(described == describe(self.default, defaults=False))


def option(kind: Kind, *, doc: str, default: Any = MISSING, name: str | None = None) -> Any:
    """Declare a field as an option; ``name`` where the language's word is not a Python identifier."""
    return Option(kind, doc, default, name)


class AxisUse(Record):
    """The mesh axes that a statement accepts after ``on``, and how many."""

    names: tuple[str, ...]
    minimum: int = 1
    maximum: int = 1


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
class Declared:
    """Base of directives and treatments: options with documentation, and the origin of each value.

    To a type checker a subclass is a frozen, keyword-only dataclass. It is not implemented as one, because a plan uses
    some fifty of them, and generating a dataclass takes half a millisecond, together a third of the time that linting a
    plan may take.
    """

    origins: Mapping[str, Origin] = {}
    options: ClassVar[tuple[Option, ...]] = ()
    """Every option, in the order of declaration, which is also the order of positional arguments."""
    _extra: ClassVar[Mapping[str, Any]] = {"origins": {}}
    """Fields that are no options, with their defaults."""

    def __init_subclass__(cls) -> None:
        own = tuple(value for value in cls.__dict__.values() if isinstance(value, Option))
        cls.options = cls.options + own

    def __init__(self, **values: Any) -> None:
        fields = self.__dict__
        for item in self.options:
            value = values.pop(item.field, item.default)
            if value is MISSING:
                raise TypeError(f"{type(self).__name__} needs {item.field}")
            fields[item.field] = value
        for name, default in self._extra.items():
            fields[name] = values.pop(name, default)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return other is self or (type(other) is type(self) and describe(other) == describe(self))

    def __hash__(self) -> int:
        return hash((type(self).__name__, repr(describe(self))))

    def __repr__(self) -> str:
        values = ", ".join(f"{item.field}={getattr(self, item.field)!r}" for item in self.options)
        return f"{type(self).__name__}({values})"

    @classmethod
    def option(cls, field: str) -> Option:
        """Return the option of ``field``."""
        return next(item for item in cls.options if item.field == field)

    @classmethod
    def summary(cls) -> str:
        """The first line of the class's documentation."""
        return (cls.__doc__ or "").strip().partition("\n")[0]

    def origin(self, field: str) -> Origin:
        """Return the origin of the value of ``field``."""
        return self.origins.get(field, DEFAULT)

    def span_of(self, field: str) -> Span | None:
        """Return the span of the value of ``field``, or else of its owner; None where it is in no text."""
        spans = (self.origin(name).span for name in (field, "keyword", ""))
        return next((span for span in spans if span is not None), None)


class Treatment(Declared):
    """A named value with arguments: what a rule does to the modules that it matches, or one choice of an option."""

    name: ClassVar[str]

    @classmethod
    def signature(cls) -> str:
        """The treatment as it is written, with ``…`` for required arguments: ``colwise``, ``every(…)``."""
        return f"{cls.name}(…)" if any(item.required for item in cls.options) else cls.name

    def __eq__(self, other: object) -> bool:
        return other is self or (type(other) is type(self) and other._text == self._text)

    def __hash__(self) -> int:
        return hash(self._text)

    @functools.cached_property
    def _text(self) -> str:
        """What it says, by which results are kept."""
        return f"{type(self).__name__} {describe(self)}"


def name_of(value: object) -> str:
    """Return how a plan writes a value, but for the arguments of a treatment."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.name if isinstance(value, Treatment) else str(value)


class Divided(Treatment):
    """One treatment for the first modules that a rule matches, and another for the others.

    A family that can divide its modules declares a treatment of this class, with the options ``these`` and ``others``.
    :meth:`legoai.dsl.analysis.analysis.Analysis.assigned` selects one of the two for each module.
    """

    name: ClassVar[str] = "first"

    n: int = option(
        Integer(minimum=1),
        doc=(
            "How many modules, counted over all that the rule matches, those included that another rule wins; inside "
            "of `stages`, over those of the stage."
        ),
    )
    these: Any
    others: Any


class Staged(Treatment):
    """A treatment of its own for the modules of each pipeline stage.

    A family that supports this declares a treatment of this class, with the option ``each``, whose items may be
    :class:`Divided`. :meth:`legoai.dsl.analysis.analysis.Analysis.assigned` selects the item of each module's stage.
    """

    name: ClassVar[str] = "stages"

    each: tuple[Any, ...]


class Calls(Kind):
    """A treatment: a name, or a name with arguments."""

    treatments: tuple[type[Treatment], ...]

    def describe(self) -> str:
        """The legal treatments, as the end of the sentence "expected …"."""
        return either_of([f"`{treatment.signature()}`" for treatment in self.treatments])


class PathRule(Record, Generic[T], kw_only=True):
    """One line of a block: a path pattern, and the treatment of the modules or parameters that it matches."""

    path: str
    treatment: T
    origin: Origin = DEFAULT
    """The whole line."""
    path_origin: Origin = DEFAULT
    """The pattern alone."""


class Directive(Declared):
    """One statement of a plan."""

    origins: Mapping[str, Origin] = {}
    axes: tuple[str, ...] = ()
    rules: tuple[PathRule[Any], ...] = ()
    arguments: Mapping[str, Any] = {}
    _extra: ClassVar[Mapping[str, Any]] = {"origins": {}, "axes": (), "rules": (), "arguments": {}}

    keyword: ClassVar[str]
    axis_use: ClassVar[AxisUse | None] = None
    treatments: ClassVar[Calls | None] = None
    """The treatments of the statement's block; None where the statement has no block."""
    names_parameters: ClassVar[bool] = False
    """Whether the paths of its rules may be of parameters too, beside those of modules."""
    subject: ClassVar[str | None] = None
    """The option that is written right after the keyword (``attention flash``), if any."""
    subject_holds_options: ClassVar[bool] = False
    """Whether the subject's arguments are the statement's own options (``cluster h100_sxm(hosts = 4)``)."""
    open_options: ClassVar[bool] = False
    """Whether arguments beyond the declared options are stored in ``arguments``."""
    layouts: ClassVar[tuple[type[Treatment], ...]] = ()
    """Standard layouts, which may be named in place of a value: sets of rules that the model's family declares.
    Resolution expands them into rules."""
    rules_may_be_open: ClassVar[bool] = False
    """Whether `auto` may replace a standard layout: the rules of all other modules are then to be found."""
    repeats_by_axis: ClassVar[bool] = False
    """Whether a plan may have one such statement for each axis."""
    absent: ClassVar[Mapping[str, Any] | None] = None
    """The values of required options that a plan without the statement has, which has the defaults of the others; None
    where the statement has an effect by itself."""
    unruled: ClassVar[type[Treatment] | None] = None
    """The treatment that modules without a rule have, where it has a name."""

    @property
    def is_neutral(self) -> bool:
        """Whether a plan without the statement means the same."""
        if self.absent is None or any(type(rule.treatment) is not self.unruled for rule in self.rules):
            return False
        described = describe(self, defaults=False)
        described.pop("rules", None)
        return bool(described == self.absent)

    def bare(self) -> Self:
        """Return the statement without rules, with the defaults, and with what :attr:`absent` has."""
        required = {item.field: getattr(self, item.field) for item in self.options if item.required}
        return type(self)(**required | dict(self.absent or {}), axes=self.axes)


def describe(value: Any, *, defaults: bool = True) -> Any:
    """The value as plain JSON data, under the language's own names and without origins.

    Args:
        value: a directive, a treatment, a rule, or a value of one of their options.
        defaults: whether options that have their default are written out.
    """
    if isinstance(value, Declared):
        body = {item.name: describe(getattr(value, item.field), defaults=defaults) for item in value.options}
        if not defaults:
            body = {item.name: body[item.name] for item in value.options if not item.is_default(body[item.name])}
        if isinstance(value, Treatment):
            return {"treatment": value.name, **body}
        assert isinstance(value, Directive)
        extra = {"on": value.axes, "rules": value.rules, "arguments": value.arguments}
        return body | {name: describe(item, defaults=defaults) for name, item in extra.items() if item}
    if isinstance(value, PathRule):
        return {"path": value.path, **describe(value.treatment, defaults=defaults)}
    if isinstance(value, Mapping):
        return {str(key): describe(item, defaults=defaults) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item, defaults=defaults) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    described = getattr(value, "describe", None)
    assert described is not None, f"a plan holds no {type(value).__name__}"
    return described()


def walk(value: Any) -> Iterator[Declared | PathRule[Any]]:
    """Every directive, treatment and rule inside ``value``, outermost first."""
    if isinstance(value, Declared):
        yield value
        for item in value.options:
            yield from walk(getattr(value, item.field))
        if isinstance(value, Directive):
            yield from walk(value.rules)
    elif isinstance(value, PathRule):
        yield value
        yield from walk(value.treatment)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)


def has_hole(value: Any) -> bool:
    """Whether ``value``, or something inside of it, is still to be decided."""
    if isinstance(value, Declared):
        parts = [getattr(value, item.field) for item in value.options]
        return has_hole(parts) or (isinstance(value, Directive) and has_hole(value.rules))
    if isinstance(value, PathRule):
        return has_hole(value.treatment)
    return isinstance(value, Hole) or (isinstance(value, list | tuple) and any(map(has_hole, value)))
