"""Tracing and compilation of a module for the simulated device, and execution of the compiled graph.

Instead of dynamo, the module's own forward is traced with its parameters and arguments, which gives the graph that
dynamo produces where there is no graph break. The rest is PyTorch's own: AOT autograd makes the joint graph with
inductor's decompositions, the partitioner chooses saved tensors, and inductor schedules kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from legoai.cost.compilation import async_tp
from legoai.cost.compilation.schedule import MODULE, Given, Pieces, Schedule, Slot, Step, Work
from legoai.cost.compilation.schedule import Call as Communication
from legoai.cost.simulated.device import SIM, Kind, SimulationError, current_stream
from legoai.cost.simulated.dispatch import NEW_CATEGORY
from legoai.cost.simulated.process import collectives_as_traced
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Kernel
from legoai.runtime.recomputation.compiled import BackendWithin
from legoai.runtime.torch_internals.compiler.graphs import (
    TracingContext,
    disable_current_modes,
    functorch_config,
    reparametrize_module,
    tracing,
)
from legoai.runtime.torch_internals.distributed.fake_world import CheckpointWrapper, FSDPState
from legoai.runtime.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from legoai.runtime.torch_internals.operators import TreeSpec, tree_flatten, tree_unflatten
from legoai.runtime.torch_internals.patching import patched, patched_attribute, restored_items
from legoai.runtime.wrapped import local_part
from legoai.specs.cluster import Device

_BEFORE_ALL: Final = "torch.nn.modules.module:_global_forward_pre_hooks"
_AFTER_ALL: Final = "torch.nn.modules.module:_global_forward_hooks"

_WITH_CUDA_GRAPHS: Final = ("reduce-overhead", "max-autotune")

_AS_TRAINED: Final = {"donated_buffer": True, "force_non_lazy_backward_lowering": True, "unlift_effect_tokens": True}

_RECOMPUTE: Final = CheckpointPolicy.PREFER_RECOMPUTE

_COMPUTED: Final = object()
"""In place of a tensor among the constants that a module returns, of which None is one."""

Runner = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a module's compilation.

    Attributes:
        inductor: whether its kernels are inductor's; otherwise the graphs run operator by operator (`aot_eager`).
        replayed: whether the kernels of a call are launched as one CUDA graph, without host time for each.
        within: budget of what forward saves; None where there is none.
    """

    inductor: bool
    replayed: bool
    within: BackendWithin | None = None

    @classmethod
    def of(cls, backend: Any, mode: str | None, kind: Kind) -> Options:
        """Return the options for a backend and a mode of `torch.compile` on a kind of device.

        Modes that choose kernels by measuring are assumed to choose those of libraries; see
        `assumptions.of_kernels`.

        Raises:
            SimulationError: the combination is not supported.
        """
        within = backend if isinstance(backend, BackendWithin) else None
        name = backend if within is None else within.backend
        if name not in ("inductor", "aot_eager"):
            raise SimulationError(f"torch.compile with the backend {name} is not supported")
        return cls(
            inductor=name == "inductor",
            replayed=kind == "cuda" and mode in _WITH_CUDA_GRAPHS,
            within=within,
        )


def is_of_unit(hook: Any) -> bool:
    """Whether a hook belongs to an FSDP unit, which dynamo does not trace; hooks of joined units are wrapped."""
    while hook is not None:
        if isinstance(getattr(hook, "__self__", None), FSDPState):
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


@dataclass(slots=True)
class Call:
    """A call of a module's forward as a function of tensors alone."""

    module: nn.Module
    forward: Callable[..., Any]
    names: list[str]
    leaves: list[Any]
    places: list[int]
    spec: TreeSpec
    out_spec: TreeSpec | None = None
    constants: list[Any] = field(default_factory=list)

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """Call the module with these parameters, buffers and arguments, and return the tensors of its output."""
        state = dict(zip(self.names, given, strict=False))
        leaves = list(self.leaves)
        for place, value in zip(self.places, given[len(self.names) :], strict=True):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, self.spec)
        with reparametrize_module(self.module, state, tie_weights=True):
            out, self.out_spec = tree_flatten(self.forward(*args, **kwargs))
        self.constants = [_COMPUTED if isinstance(item, torch.Tensor) else item for item in out]
        return [item for item in out if isinstance(item, torch.Tensor)]


class Graph:
    """The compiled graph of structurally equal modules."""

    def __init__(self, capture: Capture, kind: Kind, gpu: Device | None, options: Options) -> None:
        self.capture = capture
        self.kind = kind
        self.gpu = gpu
        self.options = options
        self.compiled: Callable[..., Any]
        self.call: Call

    def trace(self, call: Call, given: list[torch.Tensor]) -> None:
        """Trace a call of a module, and compile its forward and backward, without recording anything."""
        from legoai.runtime.torch_internals.compiler.aot import aot_function, min_cut_rematerialization_partition

        def partition(graph: Any, inputs: Any, **options: Any) -> Any:
            # A recomputed random operator would save the generator's state, a few bytes on the host.
            with patched("torch._functorch.partitioners:functionalize_rng_ops", lambda _, *graphs: graphs[:2]):
                return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

        decompositions = None
        if self.options.inductor:
            from legoai.cost.compilation.inductor import prepare
            from legoai.runtime.torch_internals.compiler.inductor import select_decomp_table

            decompositions = select_decomp_table()

            def partition_prepared(graph: Any, inputs: Any, **options: Any) -> Any:
                prepare(graph, self.kind, self.gpu)
                return partition(graph, inputs, **options)

        self.call = call
        self.compiled = aot_function(
            call,
            fw_compiler=functools.partial(self._compile_part, is_backward=False),
            bw_compiler=functools.partial(self._compile_part, is_backward=True),
            partition_fn=partition_prepared if self.options.inductor else partition,
            decompositions=decompositions,
            num_params_buffers=len(call.names),
        )
        capture = self.capture
        before, capture.paused = capture.paused, True
        try:
            # A module may take no tensor, as one of positions that are counted from a length.
            mode = next(mode for item in (*given, torch.empty(0, device=SIM)) if (mode := _mode_of(item)) is not None)
            with (
                disable_current_modes(),
                mode,
                _tracing_hooks(call.module),
                _tagged_checkpoints(call.module),
                tracing(TracingContext(mode)),
                saved_tensors_hooks(_as_it_is, _as_it_is),
                functorch_config.patch(_AS_TRAINED),
                contextlib.nullcontext() if self.options.within is None else self.options.within.applied(),
            ):
                self.compiled(*_copies(given))
        finally:
            capture.paused = before
        call.module = call.forward = None  # type: ignore[assignment]
        call.leaves = []

    def run(self, given: list[torch.Tensor]) -> Any:
        """Call the compiled graph."""
        call = self.call
        results = iter(self.compiled(*given))
        assert call.out_spec is not None
        out = [next(results) if constant is _COMPUTED else constant for constant in call.constants]
        return tree_unflatten(out, call.out_spec)

    def compile(self, graph: torch.fx.GraphModule, *, is_backward: bool) -> Runner:
        """Compile a graph of `aten` operators; return a runner that takes its arguments in a list, which it empties.

        Args:
            graph: of forward, of backward, or of both; changed.
            is_backward: whether inputs may be overwritten where autograd no longer needs them.
        """
        if not self.options.inductor:
            runner: Runner = functools.partial(_run_operators, graph)
        else:
            from legoai.cost.compilation.inductor import schedule

            # Some backward graphs are compiled on their first call, in the middle of a step.
            before, self.capture.paused = self.capture.paused, True
            try:
                planned = schedule(graph, self.kind, self.gpu, is_backward=is_backward)
            finally:
                self.capture.paused = before
            runner = functools.partial(self._run_kernels, planned)
        runner._boxed_call = True  # type: ignore[attr-defined]
        return runner

    def _compile_part(self, graph: torch.fx.GraphModule, _: Any, *, is_backward: bool) -> Runner:
        _keep_strides(graph, None if is_backward else self.call.constants.count(_COMPUTED))
        return self.compile(graph, is_backward=is_backward)

    def _run_kernels(self, planned: Schedule, args: list[Any]) -> list[Any]:
        return _Run(self.capture, planned, args, replayed=self.options.replayed).take()


def _keep_strides(graph: torch.fx.GraphModule, number: int | None) -> None:
    """Mark outputs, of all or of a number of first ones, whose strides inductor's passes may not change.

    In a run inductor does so itself: the other outputs of forward are saved for backward.
    """
    *_, output = graph.graph.nodes
    values = [item.meta.get("val") if isinstance(item, torch.fx.Node) else None for item in output.args[0]]
    strides = [value.stride() if isinstance(value, torch.Tensor) else None for value in values]
    output.meta["original_output_strides"] = strides
    output.meta["user_visible_output_idxs"] = [index for index, held in enumerate(strides[:number]) if held is not None]


def _copies(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors on other memory: a graph keeps its example inputs, and outlives the simulation."""
    memory: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        ends = [(length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)]
        least = (tensor.storage_offset() + sum(ends) + 1) * tensor.itemsize
        storage = tensor.untyped_storage()
        held = memory.get(storage._cdata)
        if held is None:
            size = max(storage.nbytes(), least)
            held = memory[storage._cdata] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        whole = held[: held.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is DTensor:
            local = plain(tensor._local_tensor)
            return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)  # type: ignore[no-untyped-call]
        if type(tensor) is not FakeTensor:
            return tensor
        found = plain(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(found, requires_grad=tensor.requires_grad)
        return found.requires_grad_(tensor.requires_grad)

    for tensor in given:
        made.setdefault(id(tensor), copy_of(tensor))
    return [made[id(tensor)] for tensor in given]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Run before the hooks of a checkpoint around the module, which count saved tensors."""
    return tensor


def _mode_of(tensor: torch.Tensor) -> FakeTensorMode | None:
    local = local_part(tensor)
    return local.fake_mode if isinstance(local, FakeTensor) else None


def _run_operators(graph: torch.fx.GraphModule, args: list[Any]) -> list[Any]:
    return list(torch.fx.Interpreter(graph).boxed_run(args))


class _Run:
    """One execution of a schedule: allocates the tensors that its kernels would allocate, and records the kernels."""

    def __init__(self, capture: Capture, planned: Schedule, args: list[Any], *, replayed: bool) -> None:
        self.capture = capture
        self.schedule = planned
        self.attributes = {"replayed": True} if replayed else {}
        self.tensors: dict[str, Any] = dict(zip(planned.inputs, args, strict=True))
        self.paused = capture.paused
        args.clear()

    def take(self) -> list[Any]:
        """Execute all steps, and return the outputs."""
        capture = self.capture
        outside, capture.compiled = capture.compiled, True
        capture.paused = True
        try:
            for step in self.schedule.steps:
                self._take(step)
            return [self._value(item) for item in self.schedule.outputs]
        finally:
            capture.paused, capture.compiled = self.paused, outside
            self.tensors.clear()

    def _take(self, step: Step) -> None:
        capture = self.capture
        if not self.paused:
            capture.locate()
        for slot in step.makes:
            made = self.tensors[slot.name] = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=SIM)
            if not self.paused:
                capture.allocate(made, NEW_CATEGORY[capture.phase])
        for new, old in step.aliases:
            self.tensors[new] = self.tensors[old]
        if isinstance(step.work, Communication):
            self._communicate(step.work)
        elif isinstance(step.work, Pieces):
            self._run_in_pieces(step.work)
        elif step.work is not None and not self.paused:
            self._record(step.work)
        for name in step.drops:
            self.tensors.pop(name, None)

    def _value(self, item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [self._value(one) for one in item]
        if isinstance(item, Given):
            return self.tensors[item.name]
        if not isinstance(item, Slot):
            return item
        found = self.tensors[item.name]
        if found.dtype != item.dtype:
            found = found.view(item.dtype)
        if found.shape == item.shape and found.stride() == item.stride and found.storage_offset() == item.offset:
            return found
        return found.as_strided(item.shape, item.stride, item.offset)

    def _communicate(self, call: Communication) -> None:
        """Call a collective, or the wait for one, so that it is recorded as without compilation."""
        args, kwargs = self._value(call.args), {name: self._value(item) for name, item in call.kwargs.items()}
        self.capture.paused = self.paused
        try:
            result = call.function(*args, **kwargs)
        finally:
            self.capture.paused = True
        if call.result is not None:
            self.tensors[call.result] = result

    def _run_in_pieces(self, pieces: Pieces) -> None:
        capture = self.capture
        if self.paused:
            return
        capture.paused = False
        try:
            temporary = async_tp.temporary_of(pieces)
            if temporary is not None:
                capture.allocate(temporary, NEW_CATEGORY[capture.phase])
            async_tp.run(capture, pieces, self._record)
            del temporary
        finally:
            capture.paused = True

    def _record(self, work: Work) -> None:
        capture = self.capture
        capture.record(
            Kernel(
                stream=current_stream(),
                op=work.op,
                inputs=work.inputs,
                outputs=work.outputs,
                flops=work.flops,
                bytes_read=work.bytes_read,
                bytes_written=work.bytes_written,
                attributes={**work.attributes, **self.attributes},
                module=".".join(part for part in (capture.module, work.module) if part),
                phase=capture.phase,
                # There is little Python around fused kernels; other kernels are called from Python code.
                issuer="node" if capture.phase == "backward" or work.op.startswith("fused(") else "python",
                calls=capture.take_calls(),
            )
        )


@contextlib.contextmanager
def _tracing_hooks(module: nn.Module) -> Iterator[None]:
    """While a module is traced, leave out hooks outside its graph, and note the module of each node."""
    kept = []
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        own = {key: hook for key, hook in hooks.items() if is_of_unit(hook)}
        kept.append((hooks, dict(hooks)))
        for key in own:
            del hooks[key]
    paths = {id(inner): path for path, inner in module.named_modules()}
    entered: list[Any] = []

    def enter(inner: nn.Module, _: Any) -> None:
        context = traceback.annotate({MODULE: paths.get(id(inner), "")})
        context.__enter__()
        entered.append(context)

    def leave(inner: nn.Module, _: Any, __: Any) -> None:
        entered.pop().__exit__(None, None, None)

    try:
        # Global hooks and a module's own hooks share numbers; each module counts from 0.
        with (
            patched(_BEFORE_ALL, OrderedDict({-1: enter})),
            patched(_AFTER_ALL, OrderedDict({-1: leave})),
            collectives_as_traced(),
        ):
            yield
    finally:
        for hooks, all_of_them in kept:
            hooks.clear()
            hooks.update(all_of_them)


@contextlib.contextmanager
def _tagged_checkpoints(module: nn.Module) -> Iterator[None]:
    """While a module is traced, let checkpoints within it tag nodes for the partitioner, as dynamo does."""
    wrappers = [inner for inner in module.modules() if isinstance(inner, CheckpointWrapper)]
    with contextlib.ExitStack() as stack:
        for number, wrapper in enumerate(wrappers):
            tagged = functools.partial(_tag, number, wrapper.checkpoint_fn)
            stack.enter_context(patched_attribute(wrapper, "checkpoint_fn", tagged))
        yield


def _tag(number: int, checkpoint: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed function with the tags of `torch._higher_order_ops.wrap.TagActivationCheckpoint`.

    The entered context tags each operator by its policy, and with the number of its checkpoint. A checkpoint without a
    policy recomputes everything.
    """
    contexts = getattr(checkpoint, "keywords", {}).get("context_fn")
    if contexts is None:
        contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: _RECOMPUTE)
    forward = contexts()[0]
    forward.ac_graph_id = number
    # The context sets both on entry, and does not reset them.
    with restored_items("torch.fx.traceback:current_meta", "ac_graph_id", "recompute"), forward:
        return function(*args, **kwargs)
