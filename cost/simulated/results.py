"""Cache of fake-tensor outputs, keyed by operator and argument metadata.

A fake tensor mode computes shapes, strides and aliases of every call again, or looks them up in a cache that costs as
much. Here the outputs of a call on tensors of the simulated device are cached by the metadata of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.operators import Operator
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.operators import (
    DisableTorchDispatch,
    OpOverload,
    forget_data_pointer,
    make_subclass,
)

_NAMESPACES: Final = frozenset({"_c10d_functional", "aten", "fsdp"})
_CHANGES_SHAPE: Final = frozenset(
    {"aten.detach_", "aten.requires_grad_", "aten.resize_", "aten.resize_as_", "aten.set_", "aten.record_stream"}
)
_UNKNOWN: Final = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_PLAIN: Final = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Result(NamedTuple):
    """One output: an argument itself, a view of one, or a new tensor.

    ``argument`` is its index among the tensor arguments; -1 for a new tensor. ``shape`` is None for an argument itself.
    """

    argument: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None


class _Answer(NamedTuple):
    """Outputs of a call; ``kind`` is the type of a sequence of outputs, or None for a single one."""

    results: tuple[_Result | None, ...]
    kind: type | None


class Results:
    """Cache of outputs of calls."""

    def __init__(self) -> None:
        self.answers: dict[object, _Answer | None] = {}
        self.like: FakeTensor | None = None
        """One of the tensors of this simulation, from which outputs take their mode and device."""

    def of(self, func: OpOverload, known: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call, from the cache or the fake tensor mode."""
        if func.namespace not in _NAMESPACES or known.name in _CHANGES_SHAPE:
            return func(*args, **kwargs)
        parts: list[object] = [func]
        inputs: list[FakeTensor] = []
        if not (_describe(args, parts, inputs) and _describe(kwargs.items(), parts, inputs)):
            return func(*args, **kwargs)
        key = tuple(parts)
        if key in self.answers:
            answer = self.answers[key]
            return func(*args, **kwargs) if answer is None else self._again(answer, inputs)
        out = func(*args, **kwargs)
        self.answers[key] = None if any(tag in func.tags for tag in _UNKNOWN) else self._answer(out, inputs)
        return out

    def _answer(self, out: Any, inputs: Sequence[FakeTensor]) -> _Answer | None:
        """Return the cache entry of a call; None where the outputs of an equal call might differ."""
        kind = type(out) if isinstance(out, list | tuple) else None
        if kind not in (None, list, tuple):
            return None
        results: list[_Result | None] = []
        for item in out if kind is not None else (out,):
            if item is None:
                results.append(None)
                continue
            result = self._result(item, inputs) if type(item) is FakeTensor else None
            if result is None:
                return None
            results.append(result)
        return _Answer(tuple(results), kind)

    def _result(self, item: FakeTensor, inputs: Sequence[FakeTensor]) -> _Result | None:
        if item.fake_device.type != SIM or item.constant is not None or item.layout is not torch.strided:
            return None
        self.like = self.like if self.like is not None else _without_storage(item)
        storage = item.untyped_storage()
        shape, stride, offset = tuple(item.shape), item.stride(), int(item.storage_offset())
        for place, other in enumerate(inputs):
            if other is item:
                return _Result(place, None, (), 0, None)
            if other.untyped_storage()._cdata == storage._cdata:
                return _Result(place, shape, stride, offset, item.dtype)
        if offset or storage.nbytes() != _bytes(shape, stride, item.itemsize):
            return None
        return _Result(-1, shape, stride, 0, item.dtype)

    def _again(self, answer: _Answer, inputs: Sequence[FakeTensor]) -> Any:
        if answer.kind is None:
            return self._made(answer.results[0], inputs)
        return answer.kind([self._made(result, inputs) for result in answer.results])

    def _made(self, result: _Result | None, inputs: Sequence[FakeTensor]) -> FakeTensor | None:
        if result is None:
            return None
        if result.shape is None:
            return inputs[result.argument]
        assert self.like is not None
        with DisableTorchDispatch():
            if result.argument < 0:
                elem = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            else:
                elem = torch.empty((0,), dtype=result.dtype, device="meta")
                storage = inputs[result.argument].untyped_storage()
                elem.set_(storage, result.offset, result.shape, result.stride)
            return _fake(elem, self.like)


def tensor_like(like: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """Return a new tensor with the mode and device of another one, without recording it."""
    with DisableTorchDispatch():
        return _fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), like)


def _without_storage(tensor: FakeTensor) -> FakeTensor:
    """Return an empty tensor of the same mode and device, which keeps no storage alive."""
    with DisableTorchDispatch():
        return FakeTensor(tensor.fake_mode, torch.empty(0, device="meta"), tensor.fake_device)


def _fake(elem: torch.Tensor, like: FakeTensor) -> FakeTensor:
    """Return a fake tensor like its constructor, but without checking a dozen arguments again."""
    made: FakeTensor = make_subclass(
        FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=like.fake_device
    )
    forget_data_pointer(made)
    made.__dict__.update(like.__dict__)
    return made


def _bytes(shape: Sequence[int], stride: Sequence[int], item: int) -> int:
    """Return the bytes of the smallest storage that holds a tensor."""
    if 0 in shape:
        return 0
    return item * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))


def _describe(values: Any, parts: list[object], inputs: list[FakeTensor]) -> bool:
    """Append everything that the shapes of a call's outputs depend on; return whether that is complete."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_device.type != SIM or value.constant is not None:
                return False
            inputs.append(value)
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif kind in _PLAIN:
            parts += (kind, value)
        elif isinstance(value, list | tuple):
            parts += (kind, len(value))
            if not _describe(value, parts, inputs):
                return False
        else:
            return False
    return True
