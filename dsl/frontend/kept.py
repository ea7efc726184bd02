"""Cache of results keyed by the inputs that their computation read, so that similar plans share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from legoai.specs.directives.hole import Hole
from legoai.specs.record import Record

T = TypeVar("T")

_PLAIN: Final = (int, str, float, type(None), Record)


class Result:
    """A cached result, or exception, with the inputs that its computation read, in order.

    Each input has the number of its value (:meth:`Kept.number`).
    """

    __slots__ = ("error", "reads", "value")

    def __init__(self, value: Any, error: Exception | None, reads: dict[Hashable, int]) -> None:
        self.value = value
        self.error = error
        self.reads = reads


class _Branch:
    """The input that is read next, and the branch for each of its values."""

    __slots__ = ("name", "next")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.next: dict[Hashable, _Branch | Result] = {}


class Inputs(dict[Hashable, int]):
    """The inputs of one plan: the number of each value by its name, looked up on first use.

    Args:
        kept: results of computations on this plan and others.
        value_of: returns the value of a named input, which does not change.
    """

    __slots__ = ("_results", "compared", "kept", "value_of")

    def __init__(self, kept: Kept, value_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept = kept
        self.value_of = value_of
        self.compared = 0
        """How many of the inputs known to :class:`Kept` were compared with those of other plans."""
        self._results: dict[Hashable, Result] = {}

    def __missing__(self, name: Hashable) -> int:
        number = self[name] = self.kept.number(self.value_of(name))
        return number

    def once(self, what: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, or raise its exception, for these inputs, as :meth:`Kept.result` does."""
        result = self._results.get(what)
        if result is None:
            result = self._results[what] = self.kept.result(what, self, compute)
        if not self.kept.open and result.error is None:
            value: T = result.value
            return value
        found: T = self.kept.use(result)
        return found

    def unlike(self, other: Inputs) -> set[Hashable]:
        """Return the keys of another plan's results that may differ for these inputs."""
        self.kept.compare(self)
        return set().union(*[self.kept.readers[name] for name in self.kept.varied if self[name] != other[name]])


class Kept:
    """Cached results of computations on plans that differ in a few values.

    While a result is computed, every input that it reads is recorded with :meth:`note`. Which input a computation reads
    next depends on those read before, so its results form a decision tree, whose branches are the values read. A later
    plan follows the tree by its own values; if they end at a result, that is its own. A result may be an exception, for
    example if it depends on a hole.

    Most inputs have the same value in all plans, and need no branches: a plan is compared with the others in these
    inputs once, before it follows the first tree. When such an input turns out to have another value, the trees whose
    results have read it are rebuilt, with branches for it.

    Callers must not change results.

    Args:
        varies: whether an input is expected to have other values, given its first one.
    """

    def __init__(self, varies: Callable[[Any], bool] = lambda value: False) -> None:
        self.varies = varies
        self.open: list[tuple[dict[Hashable, int], set[Result]]] = []
        """The current computations: the inputs that they have read, and their results."""
        self._trees: dict[Hashable, _Branch | Result] = {}
        self._results: dict[Hashable, list[Result]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._values: list[Any] = []
        """Values by number. References are held, so that no other object gets the same `id`."""
        self._of_objects: dict[int, int] = {}
        """The numbers by `id`, which is faster to look up than the value."""
        self._known: dict[Hashable, int] = {}
        """Each input that was read for a result, with the number of its value at that time."""
        self.varied: set[Hashable] = set()
        """Inputs with more than one value, as far as is known or expected."""
        self.readers: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
        """Results that depend on each input."""

    def number(self, value: Any) -> int:
        """Return a number that is the same for equal values only, by :func:`identity`."""
        number = self._of_objects.get(id(value))
        if number is None:
            number = self._numbers.setdefault(identity(value), len(self._values))
            if number == len(self._values):
                self._values.append(value)
                self._of_objects[id(value)] = number
        return number

    def note(self, name: Hashable) -> None:
        """Note that an input was read, where something is being computed."""
        if self.open:
            self.open[-1][0][name] = 0

    def result(self, what: Hashable, inputs: Inputs, compute: Callable[[], Any]) -> Result:
        """Return the result of ``compute``, or of an earlier one for the same inputs; :meth:`use` returns its value.

        Args:
            what: key of the computation.
            inputs: of the plan.
            compute: called where the result is not known. It notes all inputs that it reads.
        """
        self.compare(inputs)
        found = self._trees.get(what)
        while isinstance(found, _Branch):
            found = found.next.get(inputs[found.name])
        if found is None:
            found = self._computed(inputs, compute)
            self._results.setdefault(what, []).append(found)
            for name, number in found.reads.items():
                self.readers[name].add(what)
                if name not in self._known:
                    if self.varies(self._values[number]):
                        self.varied.add(name)
                    self._known[name] = number
            self._plant(what, found)
        return found

    def use(self, result: Result) -> Any:
        """Return the value of a result, and record the current computation's dependence on it.

        Raises:
            Exception: the cached exception.
        """
        if self.open:
            reads, used = self.open[-1]
            if result not in used:
                used.add(result)
                reads.update(result.reads)
        if result.error is not None:
            raise result.error.with_traceback(None)
        return result.value

    def _computed(self, inputs: Inputs, compute: Callable[[], Any]) -> Result:
        reads: dict[Hashable, int] = {}
        value, raised = None, None
        self.open.append((reads, set()))
        try:
            value = compute()
        except Exception as error:
            raised = error
        finally:
            self.open.pop()
        return Result(value, raised, {name: inputs[name] for name in reads})

    def compare(self, inputs: Inputs) -> None:
        """Add branches for the inputs in which a plan differs from those before it."""
        if inputs.compared == len(self._known):
            return
        for name in [*self._known][inputs.compared :]:
            if name not in self.varied and inputs[name] != self._known[name]:
                stale = [what for what, found in self._results.items() if any(name in one.reads for one in found)]
                # In this order an interruption leaves no result that is found by too few values.
                for what in stale:
                    self._trees.pop(what, None)
                self.varied.add(name)
                for what in stale:
                    for result in self._results[what]:
                        self._plant(what, result)
        inputs.compared = len(self._known)

    def _plant(self, what: Hashable, result: Result) -> None:
        table: dict[Hashable, _Branch | Result] = self._trees
        key = what
        for name, number in result.reads.items():
            if name in self.varied:
                branch = table.get(key)
                if not isinstance(branch, _Branch) or branch.name != name:
                    branch = table[key] = _Branch(name)
                table, key = branch.next, number
        table[key] = result


def identity(value: Any) -> Hashable:
    """Return a key of a value: plain values and records by content, others by identity.

    Holes have equal keys: two at the same place are the same question.
    """
    if isinstance(value, bool | float):
        return type(value), value  # which would equal an integer, and may mean something else: a share, or bytes
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Hole):
        return Hole
    if isinstance(value, tuple):
        return tuple(map(identity, value))
    return ~id(value)  # negative, which no number of a plan of this size is
