"""Initial values of a model that was constructed on the meta device, as recorded from its constructor.

A constructor fills parameters and buffers by operators: `normal_`, `copy_`, `arange`. On the meta device these compute
nothing; they are recorded, and executed later for one parameter at a time, on its device. Each operator that draws
random numbers has a seed of its own, so that a parameter's values depend neither on which others are initialised, nor
on the mesh.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from legoai.specs.models.random_operators import is_random, seed_generators
from legoai.specs.models.torch_internals import (
    IS_META,
    OperatorMode,
    has_gradient_hooks,
    import_compiler,
    meta_device,
    storage_key,
    tree_leaves,
    tree_map,
)

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_OVERWRITES = frozenset(
    [
        "normal_",
        "uniform_",
        "zero_",
        "fill_",
        "copy_",
        "exponential_",
        "bernoulli_",
        "random_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    ]
)
"""Operators that do not read the tensor that they write."""

META = torch.device("meta")


class _View(NamedTuple):
    """A tensor, as a part of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(slots=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[_View | None]
    """The storages of the views that it returns; None for other results."""
    reads: frozenset[int]
    writes: tuple[_View, ...]
    makes: frozenset[int]
    overwrites: bool
    """Whether it does not read the tensor that it writes."""
    draw: int | None
    """Number among the operators that draw random numbers."""


def construct(build: Callable[[], nn.Module], *, seed: int = 0) -> tuple[nn.Module, FirstValues]:
    """Build a model on the meta device, and record its initial values.

    Args:
        build: constructs the model.
        seed: of random numbers that the constructor draws on the CPU, whose values are stored.
    """
    import_compiler()
    recorder = _Recorder()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with meta_device(), _Functions(recorder), recorder, warnings.catch_warnings():
            # torch warns that loading into meta parameters has no effect; the recorded operators load the values later.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter in the checkpoint to a meta")
            model = build()
    found = FirstValues(recorder, model)
    move_to_meta(model)
    return model, found


def unfilled_by(
    initialise: Callable[[str, dict[str, torch.Tensor], dict[str, torch.Tensor]], None],
    path: str,
    module: nn.Module,
    names: Sequence[str],
) -> list[str]:
    """Return those of a module's parameters and buffers that a model's `initialise_module` leaves empty.

    Args:
        initialise: the method.
        path: of the module.
        module: on the meta device.
        names: of the parameters and buffers in question.
    """

    def drawn() -> nn.Module:
        holder = nn.Module()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
                holder.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                holder.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
        with torch.no_grad():
            initialise(path, dict(holder._parameters), dict(holder._buffers))  # type: ignore[arg-type]
        return holder

    try:
        holder, values = construct(drawn)
    except Exception:  # it reads values, which there are none of on the meta device
        return []
    shapes = {name: tensor.shape for name, tensor in (*holder.named_parameters(), *holder.named_buffers())}
    return [name for name in names if not values.holds(name, shapes[name])]


def move_to_meta(model: nn.Module) -> None:
    """Replace parameters and buffers that the constructor has put on another device, keeping tied ones tied."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        holders: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in holders:
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    meta: torch.Tensor = tensor.detach().to(META)
                    if isinstance(tensor, nn.Parameter):
                        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = meta
                tensors[name] = moved[id(tensor)]


class FirstValues:
    """Initial values of the parameters and buffers of a model, computed on demand."""

    def __init__(self, recorder: _Recorder, model: nn.Module) -> None:
        self.hooked = tuple(name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter))
        """Paths of the parameters with hooks, which no parameter has that replaces one."""
        self._operations = recorder.operations
        self._nbytes = {key: storage.nbytes() for key, storage in recorder.storages.items()}
        self._tensors: dict[str, _View | torch.Tensor] = {}
        for path, module in model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    # Tensors that the constructor put on another device have their values already.
                    view = _view(tensor) if tensor.is_meta else tensor.detach()
                    self._tensors[f"{path}.{name}" if path else name] = view
        self._filled = self._filled_storages()

    def holds(self, name: str, shape: torch.Size) -> bool:
        """Whether the constructor filled the parameter or buffer of that name, and it has that shape."""
        found = self._tensors.get(name)
        if found is None or tuple(found.shape if isinstance(found, torch.Tensor) else found.size) != tuple(shape):
            return False
        return isinstance(found, torch.Tensor) or found.storage in self._filled or not found.nbytes

    def value(self, name: str, *, device: torch.device, seed_of: Callable[[int], int]) -> torch.Tensor:
        """Return the value of a parameter or buffer.

        Args:
            name: its path; `holds` returns whether there is a value.
            device: of the result.
            seed_of: returns the seed for the number of a random operator.

        Returns:
            A tensor of the constructor's dtype. NaN marks a floating-point parameter that the constructor left
            uninitialised. parameter unfilled.
        """
        found = self._tensors[name]
        if isinstance(found, torch.Tensor):
            return found.to(device, copy=True)
        return _Replay(self._nbytes, device, seed_of).run(*self._needed(found), found)

    def _filled_storages(self) -> set[int]:
        """Storages with a value: allocated by an operator that computes one, or fully written."""
        filled, parts = set[int](), dict[int, set[_View]]()
        for operation in self._operations:
            filled |= operation.makes
            for view in operation.writes:
                parts.setdefault(view.storage, set()).add(view)
        for storage, views in parts.items():
            if sum(view.nbytes for view in views) >= self._nbytes[storage]:
                filled.add(storage)
        return filled

    def _needed(self, wanted: _View) -> tuple[list[_Operation], set[int]]:
        """Return the operations on which a value depends, in order, and storages whose initial contents are unused."""
        alive, overwritten, kept = {wanted.storage}, set[int](), list[_Operation]()
        for operation in reversed(self._operations):
            touched = {view.storage for view in operation.writes} | operation.makes
            if not touched & alive:
                continue
            kept.append(operation)
            alive -= operation.makes
            for view in operation.writes:
                if operation.overwrites and view.nbytes == self._nbytes[view.storage]:
                    alive.discard(view.storage)
                    overwritten.add(view.storage)
            alive |= operation.reads
            overwritten -= operation.reads
        return kept[::-1], overwritten


class _Recorder(OperatorMode):
    """Records the operators that allocate or write tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        """Keeps the tensors alive, so that their keys stay unique."""
        self._draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator and record it."""
        kwargs = kwargs or {}
        written = [tensor for tensor in _written(func, args, kwargs) if tensor.is_meta]
        for tensor in (*written, *(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))):
            if tensor.is_meta:
                self._know(tensor)
        reads = _views(args, kwargs)
        result = func(*args, **kwargs)
        outputs: list[_View | None] = []
        makes = set[int]()
        for leaf in tree_leaves(result):
            made = isinstance(leaf, torch.Tensor) and leaf.is_meta and self._know(leaf)
            outputs.append(_view(leaf) if made else None)
            if made:
                makes.add(_view(leaf).storage)
        if (not written and not makes) or func.overloadpacket.__name__ in _ALLOCATIONS:
            return result
        draw = None
        if is_random(func, args, kwargs):
            draw, self._draws = self._draws, self._draws + 1
        overwrites = func.overloadpacket.__name__ in _OVERWRITES
        if overwrites:
            reads = _views(args[1:], kwargs)
        self.operations.append(
            _Operation(
                function=func,
                args=tree_map(_kept, args),
                kwargs=tree_map(_kept, kwargs),
                outputs=outputs,
                reads=frozenset(view.storage for view in reads),
                writes=tuple(_view(tensor) for tensor in written),
                makes=frozenset(makes),
                overwrites=overwrites,
                draw=draw,
            )
        )
        return result

    def record_filling(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Record a function that fills its argument `tensor` with values that are not known before."""
        view = _view(arguments["tensor"])
        self.operations.append(
            _Operation(
                function=function,
                args=(),
                kwargs=tree_map(_kept, arguments),
                outputs=[],
                reads=frozenset(),
                writes=(view,),
                makes=frozenset(),
                overwrites=True,
                draw=self._draws,
            )
        )
        self._draws += 1

    def _know(self, tensor: torch.Tensor) -> bool:
        """Keep a tensor's storage alive; return whether it is new."""
        storage = tensor.untyped_storage()
        if storage_key(storage) in self.storages:
            return False
        self.storages[storage_key(storage)] = storage
        return True


class _Functions(TorchFunctionMode):
    """Mode for two kinds of functions that operators do not represent sufficiently.

    Tensors of given numbers are created on the CPU first, since the numbers of a meta tensor are not visible. Functions
    of `torch.nn.init` that read values do nothing on the meta device, and are recorded as calls.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        kwargs = kwargs or {}
        if func == IS_META:
            result = func(*args, **kwargs)
            # They check whether the tensor is on the meta device before they fill it.
            here = inspect.currentframe()
            asking = here.f_back if here is not None else None
            if result and asking is not None and asking.f_globals.get("__name__") == "torch.nn.init":
                name, given = asking.f_code.co_name, asking.f_locals
                arguments = asking.f_code.co_varnames[: asking.f_code.co_argcount]
                self._recorder.record_filling(getattr(nn.init, name), {item: given[item] for item in arguments})
            return result
        device = kwargs.get("device")
        numbers = func in (torch.tensor, torch.as_tensor, torch.asarray) and not _is_tensor(args)
        if not numbers or (device is not None and torch.device(device) != META):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(META)


class _Replay:
    """The storages of one value, while the operations on which it depends are done."""

    def __init__(self, nbytes: Mapping[int, int], device: torch.device, seed_of: Callable[[int], int]) -> None:
        self._nbytes = nbytes
        self._device = device
        self._seed_of = seed_of
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._overwritten: set[int] = set()

    @torch.no_grad()
    def run(self, operations: list[_Operation], overwritten: set[int], wanted: _View) -> torch.Tensor:
        """Execute operations, and return the resulting tensor."""
        self._overwritten = overwritten
        for operation in operations:
            if operation.draw is not None:
                seed_generators(self._seed_of(operation.draw), self._device)
            args, kwargs = tree_map(self._given, operation.args), tree_map(self._given, operation.kwargs)
            result = operation.function(*args, **kwargs)
            if operation.makes:
                for view, leaf in zip(operation.outputs, tree_leaves(result), strict=True):
                    if view is not None:
                        self._bind(view, leaf)
        return self._tensor(wanted)

    def _given(self, value: Any) -> Any:
        if isinstance(value, _Reference):
            return self._tensor(value.view)
        if isinstance(value, torch.Tensor):
            return value
        return self._device if value == META else value

    def _tensor(self, view: _View) -> torch.Tensor:
        storage = self._storages.get(view.storage)
        if storage is None:
            storage = self._allocate(view)
        return torch.empty(0, dtype=view.dtype, device=self._device).set_(storage, view.offset, view.size, view.stride)

    def _allocate(self, view: _View) -> torch.UntypedStorage:
        whole = torch.empty(self._nbytes[view.storage] // view.dtype.itemsize, dtype=view.dtype, device=self._device)
        if view.storage not in self._overwritten and view.dtype.is_floating_point:
            whole.fill_(math.nan)
        self._storages[view.storage] = whole.untyped_storage()
        return self._storages[view.storage]

    def _bind(self, view: _View, made: torch.Tensor) -> None:
        """Use a new tensor as a storage; a device may lay it out differently from the meta device."""
        if made.stride() == view.stride and made.storage_offset() == view.offset:
            self._storages[view.storage] = made.untyped_storage()
        else:
            self._tensor(view).copy_(made)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A recorded tensor among an operator's arguments; no tuple, which trees would look into."""

    view: _View


def _is_tensor(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor)


def _kept(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Reference(_view(value)) if value.is_meta else value.detach().clone()


def _view(tensor: torch.Tensor) -> _View:
    key = storage_key(tensor.untyped_storage())
    return _View(key, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def _views(*values: Any) -> list[_View]:
    return [_view(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_meta]


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that an operator writes to."""
    for index, parameter in enumerate(function._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(parameter.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
