"""Tensors of a forward that differ from place to place, and whose length is that of what the forward is given.

A model runs at two numbers of tokens. `torch.arange(x.shape[1])` and `self.table[: x.shape[1]]` grow with that number,
are not computed from tokens, and differ from place to place: where they meet activations, forward counts places itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from legoai.specs.models.manifests.described.recorders.function_recorder import FunctionRecorder
from legoai.specs.models.manifests.described.recorders.functions import (
    function_name,
    operation_of,
    takes_only_shape,
    tensors_in,
    writes,
)
from legoai.specs.models.manifests.described.recorders.liveness import Liveness
from legoai.specs.models.manifests.shapes import Sizes
from legoai.specs.models.torch_internals import whole_of

_EVEN: Final = (
    *("zeros", "ones", "full", "empty", "empty_strided", "rand", "randn", "randint", "randperm", "normal", "bernoulli"),
    *("dropout", "expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat", "tile", "repeat_interleave"),
)
"""Functions whose results are as long as one wants, and tell no place."""
_UNEVEN: Final = ("cumsum", "cumprod", "logcumsumexp", "tril", "triu")
"""Functions whose results differ from place to place, whatever they are given."""
_BY_INDEX: Final = (
    *("getitem", "setitem", "gather", "take", "take_along_dim", "index_select", "index_add", "index_copy"),
    *("index_fill", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce"),
)
"""Functions of a tensor and an index, which may be counted: a token that is found by its own place stays as it is."""
_ATTENTION: Final = ("transformer_encoder_layer_fwd", "native_multi_head_attention")
"""Attention beside that which `operation_of` knows; a mask tells it places."""
_OF_SHAPES: Final = ("to", "type")

Dims = tuple[int, ...]
Call = tuple[str, int]
"""A module's path, and how often it was called before."""


class _Operation(NamedTuple):
    call: Call
    name: str
    taken: tuple[torch.Tensor, ...]
    """Those of its arguments of which it takes more than shape and dtype."""
    made: tuple[torch.Tensor, ...]
    """Results, and what is changed."""
    is_routed: bool
    """Whether a module sends tokens to experts in it."""
    may_do_more: bool
    """Whether nothing is known to be made."""


class Counted(NamedTuple):
    """A tensor that differs from place to place."""

    by: str
    """What made it, or a tensor that it is computed from, in words."""
    dims: Dims
    """Those that are as long as the sequence or follow its length, counted from the last (-1)."""


class PlaceRecorder(FunctionRecorder):
    """Records, while entered, the operations of a forward.

    Tensors are kept alive until the recorder is deleted, so that identities stay unique: record on the meta device.

    Args:
        model: on the meta device.
        inputs: of its forward, without positions.
        positions: that the forward is given, if any.
        routed: modules of `model` that send tokens to experts.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        positions: torch.Tensor | None = None,
        routed: Collection[nn.Module] = (),
    ) -> None:
        super().__init__(model)
        self.operations: list[_Operation] = []
        self.inputs = {id(tensor) for tensor in tensors_in(inputs)}
        self.owned = {id(tensor): path for path, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._positions = positions
        self._model, self._given = model, [*tensors_in(inputs), *(() if positions is None else (positions,))]
        self._routed = set(routed)
        self._entered: list[Call] = []
        self._calls: dict[str, int] = {}

    def _enter(self, module: nn.Module, _: Any) -> None:
        super()._enter(module, _)
        path = self._paths[module]
        self._calls[path] = self._calls.get(path, -1) + 1
        self._entered.append((path, self._calls[path]))

    def _leave(self, *_: Any) -> None:
        super()._leave(*_)
        self._entered.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function, and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [result] if isinstance(result, torch.Tensor) else tensors_in(result)
        changed: list[torch.Tensor] = []
        if writes(func) and isinstance(args[0], torch.Tensor):
            changed = [item for item in (args[0], whole_of(args[0])) if item is not None]
        if not made and not changed and result is not None:
            return result  # most calls read a shape or a dtype
        # Nothing is asked of the tensors here: each question would be a call that recorders outside of this one note.
        name, taken = function_name(func), tensors_in((args, kwargs))
        if takes_only_shape(name):
            taken = []
        elif name in _OF_SHAPES or name.endswith("_as"):
            taken = taken[:1]
        self.operations.append(
            _Operation(
                call=self._entered[-1] if self._entered else ("", 0),
                name=name,
                taken=tuple(taken),
                made=(*made, *changed),
                is_routed=not self._routed.isdisjoint(self._within),
                may_do_more=not made and not changed,
            )
        )
        return result

    def live(self, result: Any) -> set[int]:
        """Return the indices of the operations that the result of the forward depends on."""
        liveness = Liveness(self._model, self._given)
        for item in self.operations:
            liveness.note(item.taken, item.made, is_live=item.may_do_more)
        return liveness.live(result)

    def uses_positions(self, live: Collection[int]) -> bool:
        """Whether the result of the forward depends on the positions, by the indices of its live operations."""
        return any(tensor is self._positions for index in live for tensor in self.operations[index].taken)


class Places:
    """What a forward counts, by its records at two sizes.

    Args:
        first: of a forward of token ids of the shape `sizes`.
        second: of one of the shape `others`, which are `other_sizes(sizes)`.
        sizes: samples and tokens of the first.
        others: those of the second.
    """

    def __init__(self, first: PlaceRecorder, second: PlaceRecorder, sizes: Sizes, others: Sizes) -> None:
        self.counted: dict[int, Counted] = {}
        """By the identity of the tensors of the first forward."""
        self.meetings: list[tuple[str, str, int]] = []
        """Operations that combine activations with what is counted: the module's path, what counts, in words, and the
        index of the operation in the first forward."""
        self._owned = first.owned
        self._sizes, self._others = sizes, others
        self._activations = set(first.inputs)
        by_call: dict[Call, list[_Operation]] = {}
        for item in second.operations:
            by_call.setdefault(item.call, []).append(item)
        again = {call: iter(items) for call, items in by_call.items()}
        self.is_followed = True
        """Whether both forwards have the same operations."""
        for index, item in enumerate(first.operations):
            other = next(again.get(item.call, iter(())), None)
            if other is None or other.name != item.name:
                self.is_followed = False  # a loop over tokens, or a table that the first forward made
                again.pop(item.call, None)
            self._note(index, item, other if other is not None and other.name == item.name else None)
        self.is_followed &= all(next(items, None) is None for items in again.values())

    def _note(self, index: int, item: _Operation, other: _Operation | None) -> None:
        given = next((self.counted[id(tensor)] for tensor in item.taken if id(tensor) in self.counted), None)
        active = [tensor for tensor in item.taken if id(tensor) in self._activations]
        if active:
            self._activations.update(map(id, item.made))
            numbers = any(tensor.is_floating_point() for tensor in active)
            attends = operation_of(item.name) == "attention" or item.name in _ATTENTION
            if given is None or item.is_routed or attends or (numbers and item.name in _BY_INDEX):
                return
            if any(tensor.is_floating_point() for tensor in item.made):
                self.meetings.append((item.call[0], given.by, index))
                return
        if other is None:
            return
        grown = [self._grown(*pair) for pair in zip(item.made, other.made, strict=False)]
        by = given.by if given is not None else self._made_by(item, other)
        if by is not None:
            for made, dims in zip(item.made, grown, strict=False):
                if dims:
                    self.counted[id(made)] = Counted(by, dims)

    def _made_by(self, item: _Operation, other: _Operation) -> str | None:
        """What makes a result that differs from place to place out of what does not; None where it does not differ."""
        if item.name in _UNEVEN:
            return f"`{item.name}`"
        if item.name in _EVEN or takes_only_shape(item.name):
            return None
        if any(self._grown(*pair) for pair in zip(item.taken, other.taken, strict=False)):
            return None
        table = next((self._owned[id(tensor)] for tensor in item.taken if id(tensor) in self._owned), None)
        if table is not None:
            return f"a part of `{table.rpartition('.')[2]}`"
        return "a part of a table" if item.name == "getitem" else f"`{item.name}`"

    def _grown(self, one: torch.Tensor, other: torch.Tensor) -> Dims:
        """Return the dims whose lengths follow the number of tokens, counted from the last."""
        if len(one.shape) != len(other.shape):
            return ()
        samples, rank = (self._sizes[0], self._others[0]), len(one.shape)
        return tuple(
            dim - rank
            for dim, (size, again) in enumerate(zip(one.shape, other.shape, strict=True))
            if size != again and size * samples[1] != again * samples[0]
        )


def counted_dims(places: Places, made: Mapping[int, Sequence[int]]) -> dict[int, Dims]:
    """Return the steps of a flow whose results are all counted, with the dims along which all are.

    Args:
        places: of a forward that the flow was recorded of.
        made: identities of the results of each step.
    """
    found = {}
    for step, tensors in made.items():
        dims = [set(places.counted[tensor].dims) if tensor in places.counted else set[int]() for tensor in tensors]
        if dims and (common := set.intersection(*dims)):
            found[step] = tuple(sorted(common))
    return found
