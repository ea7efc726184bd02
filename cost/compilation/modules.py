"""Compiled modules on the simulated device.

The hooks of FSDP units, which dynamo leaves out of the graph, run before and after it. Structurally equal modules share
one graph. Where units or experts inside of a module break its graph, the largest modules without a break are compiled
one by one, and what lies between them runs operator by operator (:func:`parts_of`). Of a checkpoint in the graph around
a break nothing is compiled. Modules that a real run would compute wrongly are rejected.
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
from torch.distributed.tensor import DTensor, Placement

from legoai.cost.compilation.async_tp import symmetric_memory
from legoai.cost.compilation.graphs import Call, Graph, Options, is_of_unit
from legoai.cost.compilation.regions import compiled_regions
from legoai.cost.simulated.device import SIM, Kind, SimulationError
from legoai.cost.simulated.recorder import Capture
from legoai.runtime.initialize import tensors_of
from legoai.runtime.parallelism.experts import runs_uncompiled
from legoai.runtime.torch_internals.compiler.graphs import (
    forward_hooks_of_all_modules,
    forward_pre_hooks_of_all_modules,
)
from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.distributed.fake_world import CheckpointWrapper
from legoai.runtime.torch_internals.operators import OpOverload, tree_flatten
from legoai.runtime.torch_internals.patching import patched
from legoai.runtime.wrapped import local_part
from legoai.specs.cluster import Device
from legoai.specs.models.mixtral import Experts


@contextlib.contextmanager
def compilation(capture: Capture, kind: Kind, gpu: Device | None = None) -> Iterator[None]:
    """While entered, let compiled modules, and compiled regions of a step's graph, run as compiled.

    Args:
        capture: recorder of the rank.
        kind: of device, which decides the kernels.
        gpu: the plan's device, whose properties inductor needs; None if the program does not use inductor.
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
        raise SimulationError(f"torch.compile with options {', '.join(options)} is not supported")
    return Options.of(backend, mode, kind)


_MANAGED: Final = "_is_fsdp_managed_module"

_GRAPHS: Final[dict[Any, Graph]] = {}
"""The graphs of this process; graphs over DTensors belong to one simulation, whose process groups they name."""

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

        Shapes do not vary in a simulation, so `dynamic` makes no difference.
        """
        if disable:
            return model
        if others:
            raise SimulationError(f"torch.compile with {', '.join(others)} is not supported")
        chosen = _options(backend, mode, options, self.kind)
        _import_compiler(chosen)
        module = getattr(model, "__self__", None)
        if isinstance(model, types.FunctionType):
            module = _Function(model)
            model = module._call_impl
        if not isinstance(module, nn.Module) or getattr(model, "__name__", "") != "_call_impl":
            raise SimulationError("only functions, and modules compiled by `module.compile()`, are supported")
        arguments = {"backend": backend, "mode": mode}
        return _CompiledModule(self, module, model, chosen, fullgraph=fullgraph, arguments=arguments)


def _import_compiler(options: Options) -> None:
    """Import the compiler's modules before the first step, as `torch.compile` does.

    `torch.fx.wrap`, which these modules call, leaves its frame in a reference cycle, and with it the frames of all
    callers. In the middle of a step these would keep activations alive until the cyclic garbage collector runs.
    """
    importlib.import_module("legoai.runtime.torch_internals.compiler.aot")
    if options.inductor:
        importlib.import_module("legoai.runtime.torch_internals.compiler.inductor")


class _Function(nn.Module):
    """A function without parameters, such as a loss, as a module that can be compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


class _CompiledModule:
    """Call of a compiled module."""

    def __init__(
        self,
        compiler: _Compiler,
        module: nn.Module,
        forward: Callable[..., Any],
        options: Options,
        *,
        fullgraph: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        self.compiler = compiler
        self.module = module
        self.forward = forward
        self.options = options
        self.fullgraph = fullgraph
        self.arguments = arguments

    @functools.cached_property
    def _breaks(self) -> bool:
        """Whether the module runs as several graphs, which are then those of its parts."""
        if self.fullgraph or not has_graph_break(self.module):
            return False
        for part in parts_of(self.module):
            part.compile(fullgraph=True, **self.arguments)
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run hooks that observe every call, then those of FSDP units, and within them the graph."""
        module = self.module
        if self._breaks:
            return self.forward(*args, **kwargs)
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
        state = tensors_of(self.module)
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
            _structure(self.module), tuple(map(_tensor_key, given)), _constants(leaves), spec, _ambient(),
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
                f"a compiled module whose graph breaks at the unit {inside[0]} is not supported; compile the units"
            )
        # Dynamo identifies the modules that a unit manages in the same way.
        if self.options.replayed and any(getattr(inner, _MANAGED, False) for inner in self.module.modules()):
            raise SimulationError(
                "CUDA graphs of modules whose parameters units gather to another place each time are not captured "
                "[LP636]; choose a mode without CUDA graphs"
            )
        if any(map(_multiplies_one_by_one, self.module.modules())):
            raise SimulationError(
                "compiled experts multiply one after the other in a dtype other than bf16, which is not captured "
                "[LP637]; leave what holds the experts uncompiled, or give parameters bf16"
            )


def has_graph_break(module: nn.Module) -> bool:
    """Whether dynamo would break the graph of a module: at units inside of it, or at experts that it cannot trace."""
    return any(
        runs_uncompiled(inner) or (inner is not module and isinstance(inner, FSDPModule)) for inner in module.modules()
    )


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules inside of a module whose graphs do not break; dynamo's graphs contain them.

    Experts that break the graph disable dynamo for all that they call, and so does `torch.utils.checkpoint` where
    dynamo does not trace it as a whole (PyTorch 2.13).

    Args:
        module: whose graph breaks, or a list of modules.
    """
    if runs_uncompiled(module) or isinstance(module, CheckpointWrapper):
        return
    for child in module.children():
        if has_graph_break(child) or type(child).forward is nn.Module.forward:  # a list is never called
            yield from parts_of(child)
        else:
            yield child


def _multiplies_one_by_one(module: nn.Module) -> bool:
    """Whether a module holds experts in a dtype for which compilation has no grouped product."""
    if isinstance(module, Experts):
        autocast = torch.is_autocast_enabled(SIM)
        return (torch.get_autocast_dtype(SIM) if autocast else module.w1.dtype) != torch.bfloat16
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


def _distributed(given: list[torch.Tensor]) -> bool:
    return any(isinstance(item, DTensor) for item in given)


def _in_flight(tensor: torch.Tensor) -> bool:
    return isinstance(local_part(tensor), AsyncCollectiveTensor)


def _tensor_key(tensor: torch.Tensor) -> Any:
    """Return the properties of a tensor that affect its compilation."""
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
    """Return the properties of a module that dynamo would guard: classes, numbers, strings and functions.

    The index of a layer, under the name that Hugging Face's models give it, is left out: it selects the layer's entry
    in a cache, which training does not use.
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
    """Return the identity of a value for the module that holds it; for objects that is their class."""
    if isinstance(
        value,
        bool | int | float | str | type | torch.dtype | types.BuiltinFunctionType | OpOverload | Placement | None,
    ):
        return value
    if depth > 8:  # functions may reference each other
        return type(value)
    if isinstance(value, tuple):
        return tuple(_identity(item, depth + 1) for item in value)
    if isinstance(value, frozenset):
        return frozenset(_identity(item, depth + 1) for item in value)
    if isinstance(value, functools.partial):
        keywords = tuple((name, _identity(item, depth + 1)) for name, item in sorted(value.keywords.items()))
        return _identity(value.func, depth + 1), _identity(value.args, depth + 1), keywords
    if isinstance(value, types.FunctionType):
        # Functions created for each block, such as checkpoint policies, are equal if what they hold is equal.
        return value.__code__, tuple(
            _identity(item, depth + 1) for item in inspect.getclosurevars(value).nonlocals.items()
        )
    return type(value)
