"""Operations of a forward that combine tokens of a sequence outside of attention.

A model runs at two numbers of tokens; the dims whose lengths grow with that number are those through the sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from legoai.specs.models.manifests.described.forwards.token_indices import TokenIndices
from legoai.specs.models.manifests.described.recorders.feature_uses import OVER_DIMS, dims_over
from legoai.specs.models.manifests.described.recorders.function_recorder import FunctionRecorder
from legoai.specs.models.manifests.described.recorders.functions import function_name, operation_of, tensors_in, writes
from legoai.specs.models.manifests.described.recorders.liveness import Liveness
from legoai.specs.models.manifests.shapes import Sizes, compared
from legoai.specs.models.torch_internals import whole_of

Concrete = tuple[int, ...]

_REDUCTIONS: Final[Mapping[str, tuple[int, int | None]]] = {
    **OVER_DIMS,
    **dict.fromkeys(["sum", "cumprod", "logcumsumexp", "var_mean", "std_mean", "median"], (1, None)),
    **dict.fromkeys(["cummax", "cummin", "nansum", "nanmean", "nanmedian", "aminmax"], (1, None)),
    **dict.fromkeys(["quantile", "nanquantile", "linalg_vector_norm", "linalg_norm"], (2, None)),
    **dict.fromkeys(["diff", "kthvalue"], (2, -1)),
    "mode": (1, -1),
    "cosine_similarity": (2, 1),
    **dict.fromkeys(["fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"], (2, -1)),
}
_PRODUCTS: Final = ("linear", "matmul", "rmatmul", "mm", "bmm", "mv", "inner", "addmm", "addmv", "baddbmm")
_WITH_ADDEND: Final = ("addmm", "addmv", "baddbmm")
_OVER_LAST: Final = ("linear", "inner")
"""Products that sum over the last dims of both factors."""
_PAD: Final = ("pad", "constant_pad_nd")
_CONVOLUTION: Final = re.compile(r"conv(_transpose)?[123]d|convolution|conv_tbc")
_POOL: Final = re.compile(r"\w*pool[123]d(_with_indices)?|fold|interpolate|upsample\w*")
_UNFOLD: Final = ((1, "dimension"), (2, "size"))
"""Places and names of arguments of `Tensor.unfold`."""
_DIVISIONS: Final = ("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
_RECURRENT: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Operation(NamedTuple):
    """One call of a torch function on activations.

    Attributes:
        path: of the innermost module.
        name: of the function.
        given: shapes of the activations that it takes.
        combined: dims along which it combines or moves elements, each with the shape of its tensor.
        results: shapes.
        number: in the liveness of the forward.
        is_live: whether the result of the forward depends on it.
    """

    path: str
    name: str
    given: tuple[Concrete, ...]
    combined: tuple[tuple[Concrete, int], ...]
    results: tuple[Concrete, ...]
    number: int
    is_live: bool = True


class TokenRecorder(FunctionRecorder):
    """Records, while entered, the operations of a forward on activations: what is computed from its inputs.

    Those of routed feed-forwards are left out: they sort and count tokens, and the tokens stay apart.
    Tensors are kept alive until the recorder is deleted, so that identities stay unique: record on the meta device.

    Args:
        model: on the meta device.
        inputs: of its forward.
        routed: modules of `model` that send tokens to experts.
        beside: tensors that its forward is given and that are no activations: positions.
    """

    def __init__(
        self, model: nn.Module, inputs: Sequence[Any], routed: Sequence[nn.Module], beside: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(model)
        self.operations: list[_Operation] = []
        self._left_out = set(routed)
        self._kept: list[torch.Tensor] = tensors_in(inputs)
        self._activations = {id(tensor) for tensor in self._kept}
        self._indices = TokenIndices(self._kept)
        self._liveness = Liveness(model, [*self._kept, *beside])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function, and note what it does with activations."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken = tensors_in((args, kwargs))
        given = [tensor for tensor in taken if id(tensor) in self._activations]
        made, name = tensors_in(result), function_name(func)
        moved = [] if not given else list(self._indices.moving(name, args, kwargs))
        changed = [args[0], whole_of(args[0])] if writes(func) and isinstance(args[0], torch.Tensor) else []
        results = [tensor for tensor in (*made, *changed) if tensor is not None]
        self._indices.note(name, args, kwargs, results)
        number = self._liveness.note(taken, results, is_live=result is None and not changed)
        if not given:
            return result
        for tensor in results:
            self._kept.append(tensor)
            self._activations.add(id(tensor))
        numbers = [tensor for tensor in given if tensor.is_floating_point()]
        if numbers and self._left_out.isdisjoint(self._within):
            combined = [
                (tensor, dim)
                for tensor, dim in _combined(name, args, kwargs)
                if any(tensor is one for one in numbers) and 0 <= dim < tensor.dim()
            ]
            self.operations.append(
                _Operation(
                    path=self._paths[self._within[-1]] if self._within else "",
                    name=name,
                    given=tuple(tuple(tensor.shape) for tensor in numbers),
                    combined=tuple((tuple(tensor.shape), dim) for tensor, dim in (*combined, *moved)),
                    results=tuple(tuple(tensor.shape) for tensor in made),
                    number=number,
                )
            )
        return result

    def end(self, result: Any) -> None:
        """Note which operations the result of the forward depends on; others compute statistics that are kept aside."""
        live = self._liveness.live(result)
        self.operations = [item._replace(is_live=item.number in live) for item in self.operations]


def mixing(first: TokenRecorder, second: TokenRecorder, sizes: Sizes, others: Sizes) -> dict[str, str]:
    """Return the modules that combine tokens outside of attention, each with the first function that does.

    Args:
        first: of a forward of token ids of the shape `sizes`.
        second: of one of the shape `others`, which are `other_sizes(sizes)`.
        sizes: samples and tokens of the first.
        others: those of the second.
    """
    found: dict[str, str] = {}
    for one, other in zip(first.operations, second.operations, strict=False):
        if (one.path, one.name) != (other.path, other.name):
            break  # a loop over tokens, which has begun with one of them
        if not (one.is_live or other.is_live):
            continue
        if _combines(one, other, sizes, others) or _cuts(one, other, sizes, others):
            found.setdefault(one.path, one.name)
    return found


def _combines(one: _Operation, other: _Operation, sizes: Sizes, others: Sizes) -> bool:
    """Whether elements along the sequence are combined, other than to one number, such as a further loss."""
    if one.results and all(math.prod(shape) == 1 for shape in one.results):
        return False
    for (shape, dim), (again, _) in zip(one.combined, other.combined, strict=False):
        lengths = compared(shape, again, sizes, others)
        if lengths is not None and lengths[dim].tokens:
            return True
    return False


def _cuts(one: _Operation, other: _Operation, sizes: Sizes, others: Sizes) -> bool:
    """Whether a part of a sequence is taken, or a sequence is made longer: the beginning of zeros, the last token.

    Pieces that make the whole, as of a feed-forward that computes one after another, cut nothing yet.
    """
    if operation_of(one.name) not in ("reshape", "index") or one.name in _DIVISIONS:
        return False
    given = [compared(*pair, sizes, others) for pair in zip(one.given, other.given, strict=False)]
    results = [compared(*pair, sizes, others) for pair in zip(one.results, other.results, strict=False)]
    if None in given or not any(length.tokens for shape in given if shape is not None for length in shape):
        return False
    return any(shape is None or not any(length.tokens for length in shape) for shape in results)


def _combined(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the dims along which a function combines elements of its arguments."""
    if name == "einsum":
        yield from _summed(args)
    elif name == "tensordot":
        yield from _contracted(args, kwargs)
    elif name in _PRODUCTS:
        yield from _multiplied(name, [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)])
    elif args and isinstance(args[0], torch.Tensor):
        yield from ((args[0], dim) for dim in _combined_of_first(name, args, kwargs))


def _combined_of_first(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the dims of a function's first argument along which it combines elements."""
    rank = args[0].dim()
    if name in _REDUCTIONS:
        return dims_over(_REDUCTIONS[name], rank, args, kwargs)
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return range(rank - len(shape), rank)
    if name in _PAD:
        amounts = kwargs.get("pad", args[1] if len(args) > 1 else ())
        return [rank - 1 - place // 2 for place, amount in enumerate(amounts) if amount != 0]
    if name == "unfold" and "stride" not in kwargs:  # `Tensor.unfold`; that of images always has a `stride`
        dim, size = (kwargs.get(key, args[place] if len(args) > place else 0) for place, key in _UNFOLD)
        return [dim % rank] if rank and size > 1 else []
    if name in ("group_norm", "instance_norm", "unfold") or _POOL.fullmatch(name):
        return range(min(2, rank), rank)
    if _CONVOLUTION.fullmatch(name):
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        kernel: Sequence[int] = weight.shape if isinstance(weight, torch.Tensor) else ()
        if name == "conv_tbc":
            return [0] if kernel and kernel[0] > 1 else []
        kernel = kernel[2:]
        return [rank - len(kernel) + place for place, length in enumerate(kernel) if length > 1]
    return range(rank - 1) if name in _RECURRENT else ()


def _multiplied(name: str, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the dims over which a product of matrices sums."""
    factors = tensors[1:3] if name in _WITH_ADDEND else tensors[:2]
    if len(factors) < 2:
        return
    left, right = factors[::-1] if name == "rmatmul" else factors
    yield left, left.dim() - 1
    yield right, right.dim() - (1 if right.dim() == 1 or name in _OVER_LAST else 2)


def _contracted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the dims over which `tensordot` sums: the last and first ones of its tensors, or those that it is told."""
    dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)
    for place, tensor in enumerate(args[:2]):
        rank = tensor.dim()
        over: Sequence[int] = dims[place] if isinstance(dims, tuple | list) else ()
        if isinstance(dims, int):
            over = range(dims) if place else range(rank - dims, rank)
        yield from ((tensor, dim % rank) for dim in over if rank)


def _summed(args: Sequence[Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the dims over which `einsum` sums."""
    operands = [item for one in args[1:] for item in (one if isinstance(one, tuple | list) else (one,))]
    if not args or not isinstance(args[0], str):
        return
    before, arrow, after = args[0].replace(" ", "").partition("->")
    if not arrow:
        after = "..." + "".join(letter for letter in before if before.count(letter) == 1)
    for letters, operand in zip(before.split(","), operands, strict=False):
        if not isinstance(operand, torch.Tensor):
            continue
        first, dots, last = letters.partition("...")
        others = operand.dim() - len(first) - len(last)
        if others and not dots:
            continue
        named = [*first, *["..."] * others, *last]
        yield from ((operand, dim) for dim, letter in enumerate(named) if letter not in after)
