"""Kernel records of operator calls, reconstructed from the arguments that the profiler recorded.

The operator is called again on tensors of torch's `meta` device, which have shapes and no content. The record is made
by the simulator's own functions, so that a product in a trace is the product whose time `legoai cost` looks up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch

from legoai.cost.kernels.work import is_product
from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.operators.properties import (
    Operator,
    UnknownCollective,
    description,
    operator,
    tensors,
    type_of,
)
from legoai.cost.trace.records import Kernel
from legoai.runtime.torch_internals.operators import OpOverload, OpOverloadPacket, has_kernel

DTYPES: Final = {
    "float": torch.float32, "double": torch.float64, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16,
    "long int": torch.int64, "long": torch.int64, "int": torch.int32, "short int": torch.int16, "short": torch.int16,
    "signed char": torch.int8, "unsigned char": torch.uint8, "bool": torch.bool,
    "c10::complex<float>": torch.complex64, "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::Float8_e8m0fnu": torch.float8_e8m0fnu, "c10::Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "c10::Float8_e5m2fnuz": torch.float8_e5m2fnuz, "unsigned long int": torch.uint64, "unsigned long": torch.uint64,
    "unsigned int": torch.uint32, "unsigned short int": torch.uint16, "unsigned short": torch.uint16,
}  # fmt: skip
"""Dtypes by the profiler's names, which are those of their C++ types."""

_NAMESPACES: Final = frozenset({"aten", "fsdp"})
_OF_NO_COST: Final = frozenset({"alpha", "beta"})
"""Scalars that do not affect the time."""

Resolved: TypeAlias = Kernel | Literal["inner", "unknown"]
"""A kernel; `inner` for an operator that only calls others or computes nothing; `unknown` for one without a record."""


class _NoArgumentError(ValueError):
    """The trace does not record an argument."""


class Calls:
    """Records of the calls in a trace, each computed once.

    Args:
        dtype: of tensors in lists, for which the profiler records no dtype; None where a run has several.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._known: dict[str, Resolved] = {}

    def __call__(self, name: str, arguments: tuple[Any, Any, Any, Any] | None, *, launches: bool = False) -> Resolved:
        """Return the operator of a call; with ``launches`` the call launches kernels itself, and is no composite."""
        namespace, _, short = name.partition("::")
        if namespace not in _NAMESPACES or not short.isidentifier():
            return "inner"
        key = f"{launches} {name} {arguments}"
        if key not in self._known:
            self._known[key] = self._resolved(namespace, short, arguments, launches)
        return self._known[key]

    def _resolved(
        self, namespace: str, short: str, arguments: tuple[Any, Any, Any, Any] | None, launches: bool
    ) -> Resolved:
        packet = getattr(getattr(torch.ops, namespace), short, None)
        if not isinstance(packet, OpOverloadPacket):
            return "inner"
        if arguments is None:
            every = [getattr(packet, overload) for overload in _names(packet)]
            return "inner" if all(_is_inner(func, launches=launches) for func in every) else "unknown"
        dims, types, strides, values = (item if isinstance(item, list) else [] for item in arguments)
        func = next(_overloads(packet, types), None)
        if func is None:
            return "unknown"
        if _is_inner(func, launches=launches):
            return "inner"
        if not values and not is_product(short):
            return "unknown"  # torch before 2.1 recorded neither scalars nor their types
        try:
            return self._recorded(func, operator(func), _Arguments(dims, types, strides, values))
        except (_NoArgumentError, SimulationError, UnknownCollective):
            return "unknown"
        except Exception:  # operators reject unsupported arguments with exceptions of any type
            return "unknown"

    def _recorded(self, func: OpOverload, known: Operator, found: _Arguments) -> Resolved:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for index, argument in enumerate(func._schema.arguments):
            value = found.value(index, argument, self._dtype)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        inputs = list(tensors((args, tuple(kwargs.values()))))
        if not inputs:
            return "unknown"
        target = kwargs.get("out")
        fresh: list[torch.Tensor] = []
        out: Any = None
        if any(result.alias_info is None for result in func._schema.returns):
            with torch.no_grad():
                out = func(*args, **kwargs)
            before = {item.untyped_storage()._cdata for item in inputs}
            fresh = [item for item in tensors(out) if item.untyped_storage()._cdata not in before]
        said = description(func, known, args, kwargs, inputs=inputs, fresh=fresh, out=target if out is None else out)
        record = Kernel(stream=0, module="", phase="other", **said)
        if isinstance(target, torch.Tensor):
            own = tuple(type_of(item) for item in inputs if item is not target)
            record = dataclasses.replace(record, inputs=own, outputs=(type_of(target),))
        return record


@dataclasses.dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of one call, as the profiler wrote them."""

    dims: list[Any]
    types: list[Any]
    strides: list[Any]
    values: list[Any]

    def value(self, index: int, argument: Any, dtype: torch.dtype | None) -> Any:
        """Return the argument of the schema at ``index``.

        Raises:
            _NoArgumentError: the trace does not record it.
        """
        kind = self.types[index]
        if kind == "TensorList":
            return self._list(index, argument, dtype)
        if kind in DTYPES:
            return _tensor(self.dims[index], self._at(self.strides, index), DTYPES[kind])
        if _is_tensor(argument):
            if kind:
                raise _NoArgumentError(argument.name)
            return torch.empty(0, device="meta")  # undefined, such as the ends of sequences that are equally long
        text = self._at(self.values, index)
        if kind in ("Scalar", "ScalarList") and isinstance(text, str) and text:
            return _parsed(text)
        if kind in ("Scalar", "ScalarList") and argument.name not in _OF_NO_COST:
            raise _NoArgumentError(argument.name)
        return argument.default_value if argument.has_default_value() else None

    def _list(self, index: int, argument: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
        if "Optional[Tensor]" in str(argument.type):
            dtype = torch.int64  # indices
        else:
            beside = (DTYPES[kind] for kind in self.types if kind in DTYPES)
            dtype = next((one for one in beside if one.is_floating_point), dtype)
        shapes = self.dims[index]
        # For a long list the profiler writes no shapes, as if it were empty.
        if dtype is None or not any(self.dims) or not all(isinstance(shape, list) for shape in shapes):
            raise _NoArgumentError(argument.name)
        strides = self._at(self.strides, index) or []
        return [
            _tensor(shape, strides[place] if place < len(strides) else None, dtype)
            for place, shape in enumerate(shapes)
        ]

    @staticmethod
    def _at(column: list[Any], index: int) -> Any:
        return column[index] if index < len(column) else None


def _tensor(shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
    if strides is None or len(strides) != len(shape):
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _parsed(text: str) -> Any:
    words = {"True": True, "False": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
    if text in words:
        return words[text]
    try:
        return json.loads(text.replace("True", "true").replace("False", "false").replace(".,", ".0,"))
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError as error:
        raise _NoArgumentError(text) from error


def _overloads(packet: OpOverloadPacket, types: Sequence[Any]) -> Iterator[OpOverload]:
    """Yield the overloads that accept arguments of these types; a trace does not name the overload.

    Overloads that would take a tensor where the trace has none come last: it may have been an undefined tensor.
    """
    every = [getattr(packet, name) for name in _names(packet)]
    fitting = [
        func
        for func in every
        if len(func._schema.arguments) == len(types) and all(map(_fits, func._schema.arguments, types))
    ]
    yield from sorted(fitting, key=lambda func: _lacks_tensor(func, types))


def _lacks_tensor(func: OpOverload, types: Sequence[Any]) -> bool:
    return any(
        kind == "" and _is_tensor(argument) for argument, kind in zip(func._schema.arguments, types, strict=True)
    )


def _is_tensor(argument: Any) -> bool:
    """Whether an argument is one tensor, and not optional."""
    return str(argument.type) == "Tensor"


def _names(packet: OpOverloadPacket) -> list[str]:
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    return names


def _fits(argument: Any, kind: Any) -> bool:
    declared = str(argument.type)
    is_list, of_tensors = "List[" in declared, "Tensor" in declared
    if kind == "":
        return not is_list or not of_tensors or declared.startswith("Optional[")
    if kind == "TensorList":
        return is_list and of_tensors
    if kind == "ScalarList":
        return is_list and not of_tensors
    if kind == "Scalar":
        return not is_list and not of_tensors
    return of_tensors and not is_list


def _is_inner(func: OpOverload, *, launches: bool) -> bool:
    """Whether an operator is only composed of others, or computes nothing."""
    try:
        name: str = func.name()  # type: ignore[no-untyped-call]
        is_made = has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")
    except RuntimeError:  # an operator of TorchScript, such as list slicing
        return True
    if is_made and not launches:
        return True
    try:
        return operator(func).treatment not in ("kernel", "copy")
    except (SimulationError, UnknownCollective):
        return True
