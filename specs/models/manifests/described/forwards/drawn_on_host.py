"""Random numbers that a forward draws on the host, and whether it decides by them which parameters it uses."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.models.manifests.described.forwards.restored import attributes_restored
from legoai.specs.models.manifests.host_draws import HostDraws
from legoai.specs.models.torch_internals import OperatorMode, tree_leaves

_NEAR_ONE: Final = 0x12DD9BB3
"""The word of a Mersenne Twister's state by which it draws 32 bits that are set."""
_NEAR_ZERO: Final = 0x04089132
"""The word by which it draws 32, so that a number in [0, 1) is small and yet not zero, which has no logarithm."""
_EXTREMES: Final = 312
"""Words of such a state that are one of these; others follow, lest a forward wait for another number for ever."""
_SEEDS: Final = 8
"""Seeds that are tried besides the extremes, for decisions that other numbers take."""


def states_of_generators() -> Mapping[str, Any]:
    """The states of the random number generators that a forward on the meta device has no other use for, by module."""
    states: dict[str, Any] = {"random": random.getstate(), "torch": torch.get_rng_state().tolist()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy.random"] = tuple(map(str, numpy.random.get_state(legacy=True)))
    return states


@contextlib.contextmanager
def numbers_near_one() -> Iterator[None]:
    """Let the host draw numbers near one, so that every inspection sees the modules that forward skips at random.

    The generators get their states back at the end.
    """
    with _generators_restored():
        _draw_words(_NEAR_ONE)
        yield


def draws_of(model: nn.Module, inputs: tuple[Any, ...], generators: tuple[str, ...]) -> HostDraws:
    """Return by what a forward decides that draws random numbers on the host.

    It is called with numbers near one and near zero, and with a few seeds, and the parameters that its operators take
    are compared.

    Args:
        model: on the meta device, whose forward is known to succeed.
        inputs: of the forward.
        generators: from which it draws.
    """
    with _generators_restored():
        _draw_words(_NEAR_ONE)
        first = _used(model, inputs)
        for number in range(-1, _SEEDS):
            torch.default_generator.manual_seed(number + 1)
            _draw_words(_NEAR_ZERO if number < 0 else None, seed=number + 1)
            try:
                found = _used(model, inputs)
            except Exception:  # it may be made for other numbers, as a logarithm is
                continue
            if found != first:
                return HostDraws(generators, _first_difference(first, found))
    return HostDraws(generators, "")


def _used(model: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """Return the parameters that the operators of a forward take, in order."""
    parameters = _Parameters({id(parameter): name for name, parameter in model.named_parameters()})
    with attributes_restored(model), torch.no_grad(), parameters:
        model(*inputs)
    return parameters.used


def _first_difference(own: list[str], other: list[str]) -> str:
    """Return the first parameter that is used more or less often, or, where none is, in another order."""
    counts, others = Counter(own), Counter(other)
    moved = (mine for mine, theirs in zip(own, other, strict=False) if mine != theirs)
    return next((name for name in (*own, *other) if counts[name] != others[name]), None) or next(moved)


class _Parameters(OperatorMode):
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: list[str] = []
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        self.used += [self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names]
        return func(*args, **(kwargs or {}))


def _draw_words(word: int | None, seed: int = 0) -> None:
    """Let Python and NumPy draw numbers of a seed, the first ones by a word of the state."""
    words = random.Random(seed).getstate()[1][:-1]
    if word is not None:
        words = (*[word] * _EXTREMES, *words[_EXTREMES:])
    random.setstate((3, (*words, 0), None))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0))


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state(legacy=True)
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
