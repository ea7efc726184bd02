"""Cache of fake-tensor outputs, keyed by operator and argument metadata.

A fake tensor mode computes shapes, strides and aliases of every call again, or looks them up in a cache that costs as
much. Here the outputs of a call on tensors of the simulated device are cached by the metadata of its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.operators.operands import Shares
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
PLAIN: Final = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that are equal if their values are."""


aten = torch.ops.aten

FUSED_UPDATES: Final = frozenset(
    {aten._fused_adagrad_.default, aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default}
)
"""Elementwise updates of lists of tensors; they return nothing."""


class _Result(NamedTuple):
    """One output: an argument itself, a view of one, or a new tensor.

    ``argument`` is its index among the tensor arguments; -1 for a new tensor. ``shape`` is None for an argument itself.
    """

    argument: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None


class _Number(NamedTuple):
    """One output that is a number, such as the length of attention's longest sequence."""

    value: int


@dataclass(slots=True)
class Answer:
    """Outputs of a call, and what is recorded of it.

    Attributes:
        results: the outputs.
        kind: the type of a sequence of outputs, or None for a single one.
        kernel: the fields of the record of such a call; None where none was recorded yet.
        marked: the same fields with further attributes, by these.
        shares: the traffic of its tensors; None where it was not needed yet.
    """

    results: tuple[_Result | _Number | None, ...]
    kind: type | None
    kernel: Mapping[str, Any] | None = None
    marked: dict[tuple[tuple[str, Any], ...], Mapping[str, Any]] = field(default_factory=dict)
    shares: Shares | None = None


class Question(NamedTuple):
    """A call whose outputs may be known: all that they depend on, and its tensors in order."""

    key: tuple[object, ...]
    inputs: list[FakeTensor]


_MOST_ANSWERS: Final = 2**15
"""Answers above which those of earlier simulations are dropped; a simulation adds some hundred of 1 kB."""
_DEVICES: Final = 4
"""Kinds of devices of which answers are kept."""


@functools.lru_cache(_DEVICES)
def _answers_on(kernels: Hashable) -> dict[object, Answer | None]:
    """Return the answers on devices with the same kernels; empty at first."""
    return {}


class Results:
    """Cache of outputs of calls.

    Args:
        kernels: what decides the kernels of the simulated device; answers are shared with all simulations in this
            process on such a device. None where it is not known: answers serve this simulation alone.
    """

    def __init__(self, kernels: Hashable = None) -> None:
        self.answers = {} if kernels is None else _answers_on(kernels)
        if len(self.answers) > _MOST_ANSWERS:
            self.answers.clear()
        self.like: FakeTensor | None = None
        """One of the tensors of this simulation, from which outputs take their mode and device."""

    def of(self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call of a named operator, from the cache or the fake tensor mode."""
        question = asked(func, name, args, kwargs)
        answer = self.known(question)
        if question is None or answer is None:
            return self.computed(func, question, args, kwargs)[0]
        return self.again(answer, question.inputs)[0]

    def known(self, question: Question | None) -> Answer | None:
        """Return the answer to a question; None where it has none, or none yet."""
        if question is None or not self._knows_tensor(question.inputs):
            return None
        return self.answers.get(question.key)

    def computed(
        self, func: OpOverload, question: Question | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Answer | None]:
        """Return the outputs of a call from the fake tensor mode, and the answer for later ones."""
        if question is None:
            return func(*args, **kwargs), None
        out = None if func in FUSED_UPDATES else func(*args, **kwargs)
        known, inputs = self.answers, question.inputs
        if question.key not in known:
            known[question.key] = None if any(tag in func.tags for tag in _UNKNOWN) else self._answer(out, inputs)
        return out, known[question.key]

    def again(self, answer: Answer, inputs: Sequence[FakeTensor]) -> tuple[Any, list[FakeTensor], list[FakeTensor]]:
        """Return the outputs of an answer; those that are tensors; and those of them that are new."""
        found: list[FakeTensor | int | None] = []
        results: list[FakeTensor] = []
        fresh: list[FakeTensor] = []
        for result in answer.results:
            if type(result) is not _Result:
                found.append(result.value if isinstance(result, _Number) else None)
                continue
            made = self._made(result, inputs)
            found.append(made)
            results.append(made)
            if result.argument < 0:
                fresh.append(made)
        return found[0] if answer.kind is None else answer.kind(found), results, fresh

    def on_device(self, elem: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return a tensor on the simulated device with the metadata of one on the meta device."""
        if self.like is None:
            self.like = _without_storage(torch.empty(0, device=device))
        with DisableTorchDispatch():
            return _fake(elem, self.like)

    def _knows_tensor(self, inputs: Sequence[FakeTensor]) -> bool:
        """Whether a tensor of this simulation is known, be it one of these."""
        if self.like is None and inputs:
            self.like = _without_storage(inputs[0])
        return self.like is not None

    def _answer(self, out: Any, inputs: Sequence[FakeTensor]) -> Answer | None:
        """Return the cache entry of a call; None where the outputs of an equal call might differ."""
        kind = type(out) if isinstance(out, list | tuple) else None
        if kind not in (None, list, tuple):
            return None
        results: list[_Result | _Number | None] = []
        for item in out if kind is not None else (out,):
            if item is None:
                results.append(None)
                continue
            if type(item) is int:
                results.append(_Number(item))
                continue
            result = self._result(item, inputs) if type(item) is FakeTensor else None
            if result is None:
                return None
            results.append(result)
        return Answer(tuple(results), kind)

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

    def _made(self, result: _Result, inputs: Sequence[FakeTensor]) -> FakeTensor:
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


def asked(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Question | None:
    """Return the question that a call of a named operator asks; None where its outputs cannot be looked up."""
    if func.namespace not in _NAMESPACES or name in _CHANGES_SHAPE:
        return None
    parts: list[object] = [func, torch.get_default_dtype()]  # of new tensors, and of integers times a number
    inputs: list[FakeTensor] = []
    if not (_describe(args, parts, inputs) and (not kwargs or _describe(kwargs.items(), parts, inputs))):
        return None
    return Question(tuple(parts), inputs)


def tensor_like(like: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """Return a new tensor with the mode and device of another one, without recording it."""
    with DisableTorchDispatch():
        return _fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), like)


def _without_storage(tensor: torch.Tensor) -> FakeTensor:
    """Return an empty tensor of the same mode and device, which keeps no storage alive."""
    assert isinstance(tensor, FakeTensor)
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
        elif kind in PLAIN:
            parts += (kind, value)
        elif isinstance(value, list | tuple):
            parts += (kind, len(value))
            if not _describe(value, parts, inputs):
                return False
        else:
            return False
    return True
