"""Recorder of the operators that get tensors of two floating-point dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.described.recorders.functions import function_name, tensors_in
from legoai.specs.models.manifests.mixed_dtypes import MixedDtypes
from legoai.specs.models.torch_internals import OperatorMode, OpOverload, storage_of, tree_map

# Operators that kernels of a CPU (PyTorch 2.13) refuse where their tensors are of two dtypes; those of CUDA do too. Not
# all of them are checked on the meta device.
_EQUAL: Final = frozenset(
    {
        *("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot", "linalg_cross", "convolution"),
        *("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only", "grid_sampler_2d", "grid_sampler_3d"),
        *("index_add", "index_copy", "index_put", "_index_put_impl", "_unsafe_index_put", "index_reduce", "put"),
        *("scatter", "scatter_add", "scatter_reduce", "masked_scatter", "heaviside", "lerp"),
    }
)
# These take wider parameters than their input, on a CPU at least.
_NORMS: Final = frozenset(
    {
        *("native_layer_norm", "native_group_norm"),
        *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    }
)
_MOST: Final = 32
"""Operators that are noted; the others are like them."""


class _Origin(NamedTuple):
    """Where a wide tensor comes from, and the modules that it passed; see `MixedDtypes`."""

    source: str
    entered: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()


_Origins = tuple[_Origin, ...]


class DtypeRecorder:
    """Records, while entered, the operators that get tensors of half precision beside wider ones.

    Such an operator is executed with all of its tensors in one dtype, so that forward goes on: record on the meta
    device, with parameters in half precision and buffers as they are. Tensors are kept alive until the recorder is
    deleted, so that their storages stay distinct. Nothing is noted within `torch.autocast`, which casts by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mixed: dict[MixedDtypes, None] = {}
        self._paths = {module: path for path, module in model.named_modules()}
        buffers = {storage_of(buffer): path for path, buffer in model.named_buffers()}
        self._frames: list[dict[int, _Origins]] = [
            {storage: (_Origin(f"the buffer `{path}`"),) for storage, path in buffers.items()}
        ]
        """Wide tensors by storage: of the model, then of each forward that runs, outermost first."""
        self._entered: list[str] = []
        self._kept: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._modes = _Functions(self), _Operators(self)
        self.function = ""
        """The torch function that is executed."""
        self.casts = False
        """Whether it is executed within `torch.autocast`, which operators do not see."""

    def __enter__(self) -> DtypeRecorder:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = self._paths[module]
        # What a unit casts is another tensor: the caller's stays as it is.
        given = {
            storage: tuple(origin._replace(entered=origin.entered | {path}) for origin in origins)
            for storage, origins in self._known(tensors_in((args, kwargs))).items()
        }
        self._entered.append(path)
        self._frames.append(given)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        known = self._known(tensors_in(result))
        path, _ = self._entered.pop(), self._frames.pop()
        for storage, origins in known.items():
            self._frames[-1][storage] = tuple(origin._replace(left=origin.left | {path}) for origin in origins)

    def _known(self, tensors: Iterable[torch.Tensor]) -> dict[int, _Origins]:
        """Return the origins of wide tensors, by storage."""
        found = {}
        for storage in map(storage_of, filter(_is_wide, tensors)):
            frame = next((frame for frame in reversed(self._frames) if storage in frame), None)
            if frame is not None:
                found[storage] = frame[storage]
        return found

    def made(self, given: Sequence[torch.Tensor], results: Iterable[torch.Tensor], operator: str) -> None:
        """Note what an operator made."""
        wide = [tensor for tensor in results if _is_wide(tensor)]
        if not wide or not self._entered:
            return
        known = self._known(given)
        origins = _merged(known.values())
        if not any(map(_is_wide, given)):
            where = f" in `{self._entered[-1]}`" if self._entered[-1] else ""
            origins = (_Origin(f"the result of `{self.function or operator}`{where}"),)
        for tensor in wide:
            if storage_of(tensor) not in known and origins:
                self._kept.append(tensor)
                self._frames[-1][storage_of(tensor)] = origins

    def note(self, tensors: Iterable[torch.Tensor], operator: str) -> None:
        """Note an operator that gets tensors of two dtypes."""
        if not self._entered or self.casts:
            return
        for origin in _merged(self._known(tensors).values()):
            entered, left = tuple(sorted(origin.entered)), tuple(sorted(origin.left))
            mixed = MixedDtypes(self._entered[-1], self.function or operator, origin.source, entered, left)
            if len(self.mixed) < _MOST:
                self.mixed[mixed] = None


class _Functions(TorchFunctionMode):
    """Executes torch functions, again with tensors in one dtype where that of several is refused."""

    def __init__(self, recorder: DtypeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        kwargs = kwargs or {}
        before, self._recorder.function = self._recorder.function, function_name(func)
        self._recorder.casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            tensors = tensors_in((args, kwargs))
            if not _are_mixed(tensors):
                raise
            result = func(*_in_dtype(args, torch.bfloat16), **_in_dtype(kwargs, torch.bfloat16))
            self._recorder.note(tensors, "")
            return result
        finally:
            self._recorder.function = before


class _Operators(OperatorMode):  # type: ignore[no-untyped-call]
    """Executes operators, some of them with all tensors in one dtype."""

    def __init__(self, recorder: DtypeRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        name = func._schema.name.partition("::")[2] if isinstance(func, OpOverload) else ""
        plain = name.removesuffix("_")
        if _are_mixed(given) and (plain in _EQUAL or (plain in _NORMS and _is_wide(given[0]))):
            self._recorder.note(given, plain)
            dtype = given[0].dtype if func._schema.is_mutable else torch.bfloat16
            args, kwargs = _in_dtype((args, kwargs), dtype)
        result = func(*args, **kwargs)
        self._recorder.made(tensors_in((args, kwargs)), tensors_in(result), plain)
        return result


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > torch.bfloat16.itemsize


def _are_mixed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some tensors are in half precision, and some wider."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return len({_is_wide(tensor) for tensor in floating}) > 1


def _in_dtype(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating and value.dtype != dtype else value

    return tree_map(cast, values)


def _merged(several: Iterable[_Origins]) -> _Origins:
    """Return the origins of what is computed from several tensors, but for those that pass more modules than another.

    Where such an origin is still wide, the other is.
    """
    every = list(dict.fromkeys(origin for origins in several for origin in origins))
    return tuple(
        origin
        for index, origin in enumerate(every)
        if not any(_covers(other, origin, place < index) for place, other in enumerate(every) if other is not origin)
    )


def _covers(one: _Origin, other: _Origin, is_earlier: bool) -> bool:
    """Whether one origin passes fewer modules than another; of two that pass the same, the earlier one does."""
    if not (one.entered <= other.entered and one.left <= other.left):
        return False
    return is_earlier or (one.entered, one.left) != (other.entered, other.left)
