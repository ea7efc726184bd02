"""Forwards of a model that takes positions, as on ranks that hold pieces of sequences, at two numbers of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from legoai.specs.models.manifests.counted_places import CountedPlaces
from legoai.specs.models.manifests.described.forwards.token_mixing import TokenRecorder, mixing
from legoai.specs.models.manifests.described.recorders.place_recorder import PlaceRecorder, Places
from legoai.specs.models.manifests.shapes import Sizes, other_sizes


@dataclass(frozen=True, slots=True)
class PiecesOfSequences:
    """What keeps a model from computing pieces of sequences."""

    mixing: Mapping[str, str] = field(default_factory=dict)
    """The modules that combine tokens outside of attention, by path, each with the first function that does."""
    counting: Mapping[str, str] = field(default_factory=dict)
    """The modules that count places although they are given, by path, each with what counts, in words."""
    ignores_positions: bool = False
    """As `CountedPlaces.ignores_positions`."""

    def places(self, path: str, steps: Mapping[int, tuple[int, ...]]) -> CountedPlaces:
        """What a module's forward counts, among it `steps` of its flow."""
        return CountedPlaces(self.counting.get(path, ""), self.ignores_positions and not path, tuple(steps.items()))


def token_ids(inputs: Sequence[Any]) -> torch.Tensor | None:
    """Return the token ids among the inputs of a forward."""
    return next((item for item in inputs if isinstance(item, torch.Tensor) and item.dim() == 2), None)


def of_other_sizes(inputs: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
    """Return the inputs with token ids of `other_sizes(sizes)`."""
    others = other_sizes(sizes)
    return tuple(
        item.new_zeros(others) if isinstance(item, torch.Tensor) and item.shape == sizes else item for item in inputs
    )


def pieces_of_sequences(model: nn.Module, inputs: tuple[Any, ...], routed: Sequence[nn.Module]) -> PiecesOfSequences:
    """Run a forward on the meta device at two numbers of tokens, and return what pieces of sequences do not allow.

    Only a model that takes positions can compute these; of one that runs at a single size little is known.

    Args:
        model: on the meta device.
        inputs: of its forward.
        routed: modules of `model` that send tokens to experts.
    """
    ids = token_ids(inputs)
    if ids is None or "positions" not in inspect.signature(model.forward).parameters:
        return PiecesOfSequences()
    sizes = (ids.shape[0], ids.shape[1])
    given = (inputs, of_other_sizes(inputs, sizes))
    first = _try(model, given[0], routed, is_given=True)
    if first is None:  # it may read the values of positions
        one, other = (_try(model, item, routed, is_given=False) for item in given)
        return PiecesOfSequences(mixing=_mixing(one, other, sizes))
    second = _try(model, given[1], routed, is_given=True)
    live = first.places.live(first.result)
    is_used = first.places.uses_positions(live)
    if second is None:  # it may run at one size alone
        return PiecesOfSequences(ignores_positions=not is_used)
    places = Places(first.places, second.places, sizes, other_sizes(sizes))
    counting: dict[str, str] = {}
    for path, by, index in places.meetings:
        if index in live:
            counting.setdefault(path, by)
    mixed = _mixing(first, second, sizes)
    # A model without any positions is right; that it is one is known only if all of its operations are.
    return PiecesOfSequences(mixed, counting, not is_used and not places.is_followed)


@dataclass(frozen=True, slots=True)
class _Trace:
    tokens: TokenRecorder
    places: PlaceRecorder
    result: Any


def _try(model: nn.Module, inputs: tuple[Any, ...], routed: Sequence[nn.Module], *, is_given: bool) -> _Trace | None:
    """Run a forward, given positions or not; return None where it fails."""
    ids = token_ids(inputs)
    assert ids is not None
    positions = torch.arange(ids.shape[1], device=ids.device) if is_given else None
    args, kwargs = _with_positions(model, inputs, positions)
    beside = [] if positions is None else [positions]
    tokens, places = TokenRecorder(model, inputs, routed, beside), PlaceRecorder(model, inputs, positions, routed)
    try:
        with torch.no_grad(), tokens, places:
            result = model(*args, **kwargs)
    except Exception:
        return None
    tokens.end(result)
    return _Trace(tokens, places, result)


def _with_positions(
    model: nn.Module, inputs: tuple[Any, ...], positions: torch.Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward by position and by keyword; its own example may have positions already."""
    if positions is None:
        return inputs, {}
    place = list(inspect.signature(model.forward).parameters).index("positions")
    if place < len(inputs):
        return (*inputs[:place], positions, *inputs[place + 1 :]), {}
    return inputs, {"positions": positions}


def _mixing(first: _Trace | None, second: _Trace | None, sizes: Sizes) -> dict[str, str]:
    if first is None or second is None:
        return {}
    return mixing(first.tokens, second.tokens, sizes, other_sizes(sizes))
