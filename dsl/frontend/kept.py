"""Results that are kept by what was read to compute them, so that plans which share it compute them once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from legoai.specs.directives.hole import Hole
from legoai.specs.record import Record

T = TypeVar("T")

_PLAIN: Final = (int, str, float, type(None), Record)


class Result:
    """What was computed, or what computing it raised, with what was read for it, in order.

    The values read live as long as the result, so that no other object can have their identity.
    """

    __slots__ = ("error", "reads", "value")

    def __init__(self, value: Any, error: Exception | None, reads: dict[Hashable, Any]) -> None:
        self.value = value
        self.error = error
        self.reads = reads


class _Branch:
    """What is read next, and what follows from each of its values."""

    __slots__ = ("name", "next")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.next: dict[Hashable, _Branch | Result] = {}


class Kept:
    """Results of computations on plans that differ in a few values.

    While a result is computed, every input that is read for it is noted with :meth:`note`. What a computation reads
    next follows from what it has read before, so that its results make a tree, whose branches are the values read. A
    later plan is led down the tree by its own values; where they end at a result, that is its own. A result may be an
    exception, as of what depends on a hole.

    Results must not be changed by those who get them.
    """

    def __init__(self) -> None:
        self._trees: dict[Hashable, _Branch | Result] = {}
        self._open: list[tuple[dict[Hashable, Any], set[Result]]] = []
        """What is being computed: the inputs that were read for it, and the results."""

    @property
    def computes(self) -> bool:
        """Whether something is being computed, so that what is read has to be noted."""
        return bool(self._open)

    def note(self, name: Hashable, value: Any) -> None:
        """Note that an input was read, where something is being computed."""
        if self._open:
            self._open[-1][0].setdefault(name, value)

    def result(self, what: Hashable, identity_of: Callable[[Any], Hashable], compute: Callable[[], Any]) -> Result:
        """The result of ``compute``, or of an earlier one for the same inputs; :meth:`use` gives its value.

        Args:
            what: is computed.
            identity_of: :func:`identity` of the input of a name.
            compute: is called where the result is not known. It notes all that it reads.
        """
        found = self._trees.get(what)
        while isinstance(found, _Branch):
            found = found.next.get(identity_of(found.name))
        if found is None:
            found = self._computed(compute)
            self._plant(what, found)
        return found

    def use(self, result: Result) -> Any:
        """The value of a result, on which what is being computed then depends.

        Raises:
            Exception: what was raised in its place.
        """
        if self._open and result not in self._open[-1][1]:
            reads, used = self._open[-1]
            used.add(result)
            for name, value in result.reads.items():
                reads.setdefault(name, value)
        if result.error is not None:
            raise result.error.with_traceback(None)
        return result.value

    def _computed(self, compute: Callable[[], Any]) -> Result:
        reads: dict[Hashable, Any] = {}
        self._open.append((reads, set()))
        try:
            return Result(compute(), None, reads)
        except Exception as error:
            return Result(None, error, reads)
        finally:
            self._open.pop()

    def _plant(self, what: Hashable, result: Result) -> None:
        table: dict[Hashable, _Branch | Result] = self._trees
        key = what
        for name, value in result.reads.items():
            branch = table.get(key)
            if not isinstance(branch, _Branch) or branch.name != name:
                branch = table[key] = _Branch(name)
            table, key = branch.next, identity(value)
        table[key] = result


def identity(value: Any) -> Hashable:
    """What tells values apart: plain ones and records by what they are, others by which object they are.

    Holes are not told apart: two in the same place are the same question.
    """
    if isinstance(value, bool):
        return bool, value  # which would equal a number
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Hole):
        return Hole
    if isinstance(value, tuple):
        return tuple(map(identity, value))
    return ~id(value)  # negative, which no number of a plan of this size is
