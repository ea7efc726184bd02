"""Compiled modules on the simulated device.

The hooks of FSDP units, which dynamo leaves out of the graph, run before and after it, and modules that are alike share
one graph. What would break the graph, and what a real run would get wrong, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from legoai.cost.compilation.async_tp import symmetric_memory
from legoai.cost.compilation.graphs import Call, Graph, Options, is_of_unit
from legoai.cost.compilation.regions import compiled_regions
from legoai.cost.simulated.device import SIM, Kind, SimulationError
from legoai.cost.simulated.recorder import Capture
from legoai.runtime.torch_internals.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.graphs import forward_hooks_of_all_modules, forward_pre_hooks_of_all_modules
from legoai.runtime.torch_internals.operators import OpOverload, tree_flatten
from legoai.runtime.torch_internals.patching import patched
from legoai.specs.cluster import Device


@contextlib.contextmanager
def compilation(capture: Capture, kind: Kind, gpu: Device | None = None) -> Iterator[None]:
    """Let modules, and regions of a step's graph, that are compiled while this is entered run as compiled ones do.

    Args:
        capture: takes the records.
        kind: whose kernels are made.
        gpu: the plan's device, whose properties inductor asks for; a program that is not compiled by it needs none.
    """
    compiler = _Compiler(capture, kind, gpu)
    try:
        with (
            patched("torch:compile", compiler.compile),
            symmetric_memory(),
            compiled_regions(capture, kind, gpu),
        ):
            yield
    finally:
        for key in [key for key in _GRAPHS if key[2] == compiler.simulation]:
            del _GRAPHS[key]


def _options(backend: Any, mode: str | None, options: Mapping[str, Any] | None, kind: Kind) -> Options:
    if options:
        raise SimulationError(f"torch.compile with options {', '.join(options)} is not captured")
    return Options.of(backend, mode, kind)


_MANAGED: Final = "_is_fsdp_managed_module"

_GRAPHS: Final[dict[Any, Graph]] = {}
"""The graphs of this process; those over DTensors belong to one simulation, whose process groups they name."""

_SIMULATIONS: Final = itertools.count()


class _Compiler:
    """Stands for `torch.compile`."""

    def __init__(self, capture: Capture, kind: Kind, gpu: Device | None) -> None:
        self.capture = capture
        self.kind = kind
        self.gpu = gpu
        self.simulation = next(_SIMULATIONS)

    def compile(
        self,
        model: Any = None,
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        backend: Any = "inductor",
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        disable: bool = False,
        **others: Any,
    ) -> Any:
        """Return a callable that runs a module's forward as compiled; the arguments are those of `torch.compile`.

        Shapes do not vary in a simulation, so that `dynamic` makes no difference.
        """
        if disable:
            return model
        if others:
            raise SimulationError(f"torch.compile with {', '.join(others)} is not captured")
        _import_compiler(backend)
        module = getattr(model, "__self__", None)
        if isinstance(model, types.FunctionType):
            module = _Function(model)
            model = module._call_impl
        if not isinstance(module, nn.Module) or getattr(model, "__name__", "") != "_call_impl":
            raise SimulationError("only functions, and modules that are compiled by `module.compile()`, are captured")
        chosen = _options(backend, mode, options, self.kind)
        return _CompiledModule(self, module, model, chosen, fullgraph=fullgraph)


def _import_compiler(backend: Any) -> None:
    """Import what compiles before the first step, as `torch.compile` does.

    `torch.fx.wrap`, which these modules call, leaves its frame in a cycle, and with it the frames of all callers, which
    in the middle of a step hold activations until the cyclic garbage collector runs.
    """
    importlib.import_module("legoai.runtime.torch_internals.aot")
    if backend == "inductor":
        importlib.import_module("legoai.runtime.torch_internals.inductor")


class _Function(nn.Module):
    """A function without parameters, such as a loss, as the module that compilation asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


class _CompiledModule:
    """What a compiled module is called by."""

    def __init__(
        self, compiler: _Compiler, module: nn.Module, forward: Callable[..., Any], options: Options, *, fullgraph: bool
    ) -> None:
        self.compiler = compiler
        self.module = module
        self.forward = forward
        self.options = options
        self.fullgraph = fullgraph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run hooks that see every call, then those of FSDP units, and inside of them the graph."""
        module = self.module
        before, after = _unit_hooks(module)
        for hook in forward_pre_hooks_of_all_modules().values():
            hook(module, args)
        out = None
        try:
            for unit in before:
                changed = unit(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            out = self._run(args, kwargs)
        finally:
            for seen in forward_hooks_of_all_modules().values():
                seen(module, args, out)
        for unit in after:
            changed = unit(module, args, out)
            if changed is not None:
                out = changed
        return out

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = _state_of(self.module)
        leaves, spec = tree_flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = [*state.values(), *(leaves[index] for index in places)]
        if any(map(_in_flight, given)):
            raise SimulationError(
                "a collective that nothing has waited for enters a compiled module, where PyTorch computes wrong "
                "gradients; let the module before it return `wait_tensor(output)`"
            )
        compiler = self.compiler
        key = (
            (compiler.kind, compiler.gpu), self.options, compiler.simulation if _distributed(given) else None,
            _structure(self.module), tuple(map(_told, given)), _constants(leaves), spec, _ambient(),
        )  # fmt: skip
        graph = _GRAPHS.get(key)
        if graph is None:
            self._refuse()
            graph = Graph(compiler.capture, compiler.kind, compiler.gpu, self.options)
            graph.trace(Call(self.module, self.forward, list(state), leaves, places, spec), given)
            _GRAPHS[key] = graph
        graph.capture = compiler.capture
        return graph.run(given)

    def _refuse(self) -> None:
        inside = [path for path, inner in self.module.named_modules() if path and isinstance(inner, FSDPModule)]
        if inside:
            raise SimulationError(
                f"a compiled module whose graph breaks at the unit {inside[0]} is not captured; compile the units"
            )
        # As dynamo knows the modules that a unit manages.
        if self.options.replayed and any(getattr(inner, _MANAGED, False) for inner in self.module.modules()):
            raise SimulationError(
                "CUDA graphs of modules whose parameters units gather to another place each time are not captured "
                "[LP636]; choose a mode without CUDA graphs"
            )
        if any(map(_multiplies_by_group, self.module.modules())):
            raise SimulationError(
                "compiled experts of `transformers` multiply one after the other in a dtype other than bf16, which is "
                "not captured [LP637]; leave what holds the experts uncompiled, or give parameters bf16"
            )


def _multiplies_by_group(module: nn.Module) -> bool:
    """Whether a module holds experts of `transformers`, of a dtype in which compiled ones have no grouped product."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return (
        chosen == "grouped_mm"
        and hasattr(module, "num_experts")
        and any(item.dim() == 3 and item.dtype != torch.bfloat16 for item in module.parameters(recurse=False))
    )


def _unit_hooks(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the hooks of an FSDP unit, which dynamo does not trace."""
    return [hook for hook in module._forward_pre_hooks.values() if is_of_unit(hook)], [
        hook for hook in module._forward_hooks.values() if is_of_unit(hook)
    ]


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _distributed(given: list[torch.Tensor]) -> bool:
    return any(isinstance(item, DTensor) for item in given)


def _in_flight(tensor: torch.Tensor) -> bool:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return isinstance(local, AsyncCollectiveTensor)


def _told(tensor: torch.Tensor) -> Any:
    """Return what of a tensor decides how it is compiled."""
    common = type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.device
    if isinstance(tensor, DTensor):
        return *common, tensor.placements, tensor.device_mesh, tensor._local_tensor.shape
    return common


def _constants(leaves: list[Any]) -> tuple[Any, ...]:
    return tuple(None if isinstance(leaf, torch.Tensor) else _comparable(leaf) for leaf in leaves)


def _comparable(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | torch.dtype | None) else id(value)


def _ambient() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled(SIM), torch.get_autocast_dtype(SIM)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return what of a module dynamo would guard: classes, and the numbers, words and functions that they hold.

    The number of a layer, under the name that Hugging Face's models give it, is left out: it finds the layer's place in
    a cache, which training has not.
    """
    found: list[Any] = []
    for path, inner in module.named_modules():
        held = tuple((name, _identity(value)) for name, value in sorted(vars(inner).items()) if name != "layer_idx")
        hooks = tuple(
            getattr(hook, "__qualname__", type(hook).__name__)
            for hooks in (inner._forward_pre_hooks, inner._forward_hooks)
            for hook in hooks.values()
        )
        found.append((path, type(inner), held, hooks))
    return tuple(found)


def _identity(value: Any, depth: int = 0) -> Any:
    """Return what makes two values the same to a module that holds them; of objects that is their class."""
    if isinstance(value, bool | int | float | str | type | torch.dtype | types.BuiltinFunctionType | OpOverload | None):
        return value
    if depth > 8:  # functions may hold each other
        return type(value)
    if isinstance(value, tuple):
        return tuple(_identity(item, depth + 1) for item in value)
    if isinstance(value, frozenset):
        return frozenset(_identity(item, depth + 1) for item in value)
    if isinstance(value, functools.partial):
        keywords = tuple((name, _identity(item, depth + 1)) for name, item in sorted(value.keywords.items()))
        return _identity(value.func, depth + 1), _identity(value.args, depth + 1), keywords
    if isinstance(value, types.FunctionType):
        # Functions that are made anew for each block, such as policies of checkpoints, are equal in what they hold.
        return value.__code__, tuple(
            _identity(item, depth + 1) for item in inspect.getclosurevars(value).nonlocals.items()
        )
    return type(value)
