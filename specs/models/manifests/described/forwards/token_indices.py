"""Index tensors of a forward that move tokens to other places.

An index by which tokens are sent somewhere else and brought back, as experts are given theirs, is computed from the
activations or token ids. One that is computed from lengths alone takes the same places of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from legoai.specs.models.manifests.described.recorders.functions import takes_only_shape, tensors_in

_ALONG_DIM: Final = (
    *("gather", "scatter", "scatter_add", "scatter_reduce"),
    *("index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
)
"""Functions of a tensor, a dim and an index."""
_SAME_ORDER: Final = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze"),
    *("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "meshgrid"),
    *("contiguous", "clone", "detach", "to", "type", "type_as", "int", "long"),
)
"""Functions whose result counts elements as their argument does."""
_SHIFT: Final = ("add", "radd", "iadd", "sub", "isub", "subtract")
_CLAMP: Final = {"clamp": (1, 2), "clip": (1, 2), "clamp_min": (1, 9), "clamp_max": (9, 1)}
"""Functions that limit numbers, each with the places of the least and the greatest."""
_FLOOR: Final = ("floordiv", "floor_divide", "div", "divide")
_WHOLE: Final = (None, Ellipsis, slice(None))


class TokenIndices:
    """Which tensors of one forward are computed from its inputs, and which count elements: 0, 1, 2 and so on.

    Tensors are kept alive until it is deleted, so that identities stay unique.

    Args:
        inputs: tensors that the forward is given.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._computed = {id(tensor) for tensor in inputs}
        self._counting: dict[int, int] = {}
        """How far each counts."""
        self._kept = list(inputs)

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> None:
        """Note the results of a function, among them a tensor that it changes in place."""
        given = tensors_in((args, kwargs))
        self._kept += results
        for place, result in enumerate(results):
            source = given[place : place + 1] if name == "meshgrid" else given[:1]
            count = _counted(name, args, kwargs, self._counting.get(id(source[0])) if source else None)
            self._counting.pop(id(result), None)
            if count is not None:
                self._counting[id(result)] = count
        if takes_only_shape(name):
            return
        if name == "to" or name.endswith("_as"):  # the others tell a shape, or a dtype
            given = given[:1]
        if any(id(tensor) in self._computed for tensor in given):
            self._computed.update(map(id, results))

    def moving(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the dims along which a function takes or puts elements by an index that is the same for all sequences.

        An index that counts all elements of its dim moves none.
        """
        numbers = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, torch.Tensor) or not any(id(tensor) in self._computed for tensor in numbers):
            return
        for dim, index in _indices(name, given.dim(), args[1:], kwargs):
            if isinstance(index, list):
                stays = index == list(range(given.shape[dim]))
            else:
                stays = id(index) in self._computed or self._counting.get(id(index)) == given.shape[dim]
            if not stays:
                yield given, dim


def _counted(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], count: int | None) -> int | None:
    """Return how far the result of a function counts, whose argument counts so far; None where it does not count."""
    if name == "arange":
        bounds = [0, *args] if len(args) == 1 else list(args)
        start, end, step = (
            kwargs.get(bound, bounds[place] if place < len(bounds) else default)
            for place, (bound, default) in enumerate((("start", 0), ("end", None), ("step", 1)))
        )
        return end if start == 0 and step == 1 and type(end) is int else None
    if count is None:
        return None
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return count if all(any(item is one for one in _WHOLE[:2]) or item == _WHOLE[2] for item in index) else None
    if name in _FLOOR and (name.startswith("floor") or kwargs.get("rounding_mode")):
        by = args[1] if len(args) > 1 else None
        return count // by if type(by) is int and by > 0 and count % by == 0 else None
    if name in _SHIFT:
        by = args[1] if len(args) > 1 else kwargs.get("other")
        return count if isinstance(by, int | float) and by == 0 else None
    if name in _CLAMP:
        least, most = (
            kwargs.get(bound, args[place] if len(args) > place else None)
            for bound, place in zip(("min", "max"), _CLAMP[name], strict=True)
        )
        if isinstance(least, torch.Tensor) or isinstance(most, torch.Tensor):
            return None
        return count if (least or 0) <= 0 and (most is None or most >= count - 1) else None
    return count if name in _SAME_ORDER else None


def _indices(name: str, rank: int, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield each index, a tensor or a list of numbers, that a function of a tensor applies, with its dim.

    Args:
        name: of the function.
        rank: dims of the tensor.
        rest: arguments after the tensor.
        kwargs: by name.
    """
    if name in _ALONG_DIM:
        given = [(kwargs.get("dim", rest[0] if rest else None), kwargs.get("index", rest[1] if rest[1:] else None))]
    elif name == "take_along_dim":
        dim, index = kwargs.get("dim", rest[1] if rest[1:] else None), kwargs.get("indices", rest[0] if rest else None)
        given = [(dim, index)] if dim is not None else [(dim, index) for dim in range(rank)]
    elif name == "take":
        given = [(dim, kwargs.get("index", rest[0] if rest else None)) for dim in range(rank)]
    elif name in ("getitem", "setitem", "index_put") and rest:
        given = _places(rest[0], rank)
    else:
        given = []
    for dim, index in given:
        if type(dim) is int and -rank <= dim < rank and (_is_index(index) or isinstance(index, list)):
            yield dim % rank, index


def _places(index: Any, rank: int) -> list[tuple[int, Any]]:
    """Return the items of an index as in `x[index]`, each with the first dim that it takes."""
    items = index if isinstance(index, tuple) else (index,)
    taken = [_dims_of(item) for item in items]
    found, dim = [], 0
    for item, dims in zip(items, taken, strict=True):
        found.append((dim, item))
        dim += rank - sum(taken) if item is Ellipsis else dims
    return found


def _dims_of(item: Any) -> int:
    """Return how many dims an item of an index takes; `...` takes those that are left."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1


def _is_index(item: Any) -> bool:
    """Whether an item is a tensor of numbers of elements, and no mask."""
    return isinstance(item, torch.Tensor) and item.dtype in (torch.int64, torch.int32, torch.int16)
