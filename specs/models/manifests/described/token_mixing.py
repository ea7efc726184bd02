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
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.described.feature_uses import OVER_DIMS, dims_over
from legoai.specs.models.manifests.described.functions import function_name, operation_of, tensors_in, writes
from legoai.specs.models.manifests.shapes import Sizes, compared
from legoai.specs.models.torch_internals import whole_of

Concrete = tuple[int, ...]

_REDUCTIONS: Final[Mapping[str, tuple[int, int | None]]] = {
    **OVER_DIMS,
    **dict.fromkeys(["sum", "cumprod", "logcumsumexp", "var_mean", "std_mean", "median"], (1, None)),
    **dict.fromkeys(["fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"], (2, -1)),
}
_PRODUCTS: Final = ("linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm")
_SECOND_FIRST: Final = ("rmatmul", "addmm", "baddbmm")
"""Products whose left factor is the second argument."""
_CONVOLUTION: Final = re.compile(r"conv(_transpose|_tbc)?[123]?d?")
_POOL: Final = re.compile(r"\w*pool[123]d(_with_indices)?|unfold|fold|interpolate|upsample\w*")
_DIVISIONS: Final = ("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
_RECURRENT: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Operation(NamedTuple):
    """One call of a torch function on activations.

    Attributes:
        path: of the innermost module.
        name: of the function.
        given: shapes of the activations that it takes.
        combined: dims along which it combines elements, each with the shape of its tensor.
        results: shapes.
    """

    path: str
    name: str
    given: tuple[Concrete, ...]
    combined: tuple[tuple[Concrete, int], ...]
    results: tuple[Concrete, ...]


class TokenRecorder(TorchFunctionMode):
    """Records, while entered, the operations of a forward on activations: what is computed from its inputs.

    Those of routed feed-forwards are left out: they sort and count tokens, and the tokens stay apart.
    Tensors are kept alive until the recorder is deleted, so that identities stay unique: record on the meta device.

    Args:
        model: on the meta device.
        inputs: of its forward.
        routed: modules of `model` that send tokens to experts.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any], routed: Sequence[nn.Module]) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._paths = {module: path for path, module in model.named_modules()}
        self._left_out = set(routed)
        self._within: list[nn.Module] = []
        self._kept: list[torch.Tensor] = tensors_in(inputs)
        self._activations = {id(tensor) for tensor in self._kept}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> TokenRecorder:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(lambda entered, _: self._within.append(entered)))
            self._handles.append(module.register_forward_hook(self._leave))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _leave(self, *_: Any) -> None:
        self._within.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function, and note what it does with activations."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self._activations]
        if not given:
            return result
        made = tensors_in(result)
        changed = [args[0], whole_of(args[0])] if writes(func) and isinstance(args[0], torch.Tensor) else []
        for tensor in (*made, *changed):
            if tensor is not None:
                self._kept.append(tensor)
                self._activations.add(id(tensor))
        numbers = [tensor for tensor in given if tensor.is_floating_point()]
        if numbers and self._left_out.isdisjoint(self._within):
            name = function_name(func)
            self.operations.append(
                _Operation(
                    path=self._paths[self._within[-1]] if self._within else "",
                    name=name,
                    given=tuple(tuple(tensor.shape) for tensor in numbers),
                    combined=tuple(
                        (tuple(tensor.shape), dim)
                        for tensor, dim in _combined(name, args, kwargs)
                        if any(tensor is one for one in numbers)
                    ),
                    results=tuple(tuple(tensor.shape) for tensor in made),
                )
            )
        return result


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
        return
    given = args[1] if name in _SECOND_FIRST and len(args) > 1 else args[0] if args else None
    if not isinstance(given, torch.Tensor):
        return
    rank = given.dim()
    dims: Sequence[int] = ()
    if name in _REDUCTIONS:
        dims = dims_over(_REDUCTIONS[name], rank, args, kwargs)
    elif name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        dims = range(rank - len(shape), rank)
    elif name in _PRODUCTS:
        dims = (rank - 1,)
    elif name in ("group_norm", "instance_norm") or _POOL.fullmatch(name):
        dims = range(min(2, rank), rank)
    elif _CONVOLUTION.fullmatch(name):
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        kernel = weight.shape[2:] if isinstance(weight, torch.Tensor) else ()
        dims = [rank - len(kernel) + place for place, length in enumerate(kernel) if length > 1]
    elif name in _RECURRENT:
        dims = range(rank - 1)
    yield from ((given, dim) for dim in dims if 0 <= dim < rank)


def _summed(args: Sequence[Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the dims over which `einsum` sums."""
    operands = [item for one in args[1:] for item in (one if isinstance(one, tuple | list) else (one,))]
    if not args or not isinstance(args[0], str) or "." in args[0]:
        return
    before, _, after = args[0].replace(" ", "").partition("->")
    for letters, operand in zip(before.split(","), operands, strict=False):
        if isinstance(operand, torch.Tensor) and len(letters) == operand.dim():
            yield from ((operand, dim) for dim, letter in enumerate(letters) if letter not in after)
