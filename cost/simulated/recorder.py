"""Recorder of one rank: its phases, modules, storages and process groups.

The recorder collects the trace while the program runs. It tracks the running module, the phase, and which storages are
alive.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from legoai.cost.simulated.device import (
    SIM,
    Recorder,
    SimulationError,
    current_stream,
)
from legoai.cost.simulated.operators.properties import UnknownCollective
from legoai.cost.simulated.process_groups import Group, group_of
from legoai.cost.simulated.units import noted_units
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.records import (
    EACH,
    LOSS,
    Allocate,
    Call,
    Calls,
    Categorise,
    Category,
    Free,
    Mark,
    Phase,
    Record,
    Resize,
)
from legoai.cost.trace.segments import Item
from legoai.lowering.graph.step.places import Makes, Place, place_of
from legoai.runtime.checkpoint.checkpoint import cause
from legoai.runtime.errors import RunError, unwrapped
from legoai.runtime.initialize import plain_path
from legoai.runtime.last_layer import OF_LOSS
from legoai.runtime.torch_internals.distributed.collectives import resolve_process_group
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.operators import (
    autograd_sequence_number,
    called_from_python,
    current_autograd_node,
    is_traceable_wrapper_subclass_type,
    running_backward,
)
from legoai.runtime.torch_internals.patching import patched
from legoai.runtime.training.state import Training

_SIMULATOR: Final = __name__.rpartition(".")[0]
"""Package whose code runs where a device would compute."""

_ACCUMULATION: Final = 2**64 - 1
"""Sequence number of every node that accumulates a gradient (`torch/csrc/autograd/functions/accumulate_grad.cpp`)."""

_OF_MODEL: Final[frozenset[Phase]] = frozenset({"forward", "backward", "recompute"})


@functools.cache
def _same(calls: Calls) -> Calls:
    """Return equal calls as one object, of which traces have many."""
    return calls


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference that reports when the last tensor on a storage is gone."""

    __slots__ = ("key", "number")
    key: int
    number: int


class Capture(Recorder):
    """Recorder of the ops of one rank."""

    def __init__(self, *, grouped_kernel: bool = True, kernels: Hashable = None) -> None:
        self.grouped_kernel = grouped_kernel
        """Whether the device has a kernel of grouped products."""
        self.kernels = kernels
        """What decides the kernels of the device; None where it is not known."""
        self.records: list[Item] = []
        self.operands: dict[int, Operands] | None = None
        """The operands of kernels, by the index of their record; None where they are not needed."""
        self.closed = False
        self.storages: dict[int, StorageRef] = {}
        self.storage_count = 0
        self.of_parameters: set[int] = set()
        """Numbers of the storages of parameters, gradients and optimizer state."""
        self.work_count = 0
        self.pending: dict[int, int] = {}
        self.paths: dict[int, str] = {id(OF_LOSS): LOSS}
        self.running: list[str] = []
        self.of_forward = 0
        """How many of these began outside of a backward."""
        self.outside: Phase = "setup"
        self.micro_batch = 0
        self.staged = False
        self.step = 0
        self.starts: list[int] = []
        self.started: list[str] = []
        self.gradient_module = ""
        self.outer = ""
        """Module of ops outside all modules: none before the model runs, the loss after it."""
        self.of_node: Place | None = None
        """Index of the running node, where the step is a graph."""
        self.makes: Makes = ""
        self.compiled = False
        """Whether a compiled graph is running."""
        self.part_of = ""
        """The operator for which the host issues several others, if it does."""
        self.batch: list[Phase | None] = []
        """Phases of the sends and receives of a batch that are not issued yet, last first; None for the current one."""
        self.calls: dict[Call, int] = {}
        """Calls of the host since the last operation that it issued."""
        self.groups: dict[str, Group] = {}
        self.experts: set[str] = set()
        """Modules of which different ranks hold different experts."""
        self.mesh: DeviceMesh | None = None

    def record(self, record: Record) -> None:
        """Add a record."""
        self.records.append(record)

    def call(self, kind: Call, number: int = 1) -> None:
        """Note calls that the host makes; compiled graphs, and what is traced for them, make none."""
        if not (self.paused or self.compiled) and self.of_node is None:
            self.calls[kind] = EACH if number == EACH else self.calls.get(kind, 0) + number

    def take_calls(self, inputs: int = 0) -> Calls:
        """Return the calls since the operation before, for the next one, which has a number of inputs.

        Outside of the model their number depends on that of the parameters, and only those for each input count.
        """
        self.issued += 1
        if not self.calls:
            return ()
        found = sorted(self.calls.items())
        self.calls.clear()
        if self.phase not in _OF_MODEL:
            found = [(call, EACH) for call, number in found if number in (EACH, inputs)]
        return _same(tuple(found))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn exceptions that a program may raise into SimulationError."""
        try:
            yield
        except (Exception, SystemExit) as wrapped:
            error = unwrapped(wrapped)
            if isinstance(error, SimulationError):
                raise error from error.__cause__
            raise SimulationError(self._why(error)) from error

    def _why(self, error: BaseException) -> str:
        """What went wrong in a program, in words."""
        if isinstance(error, RunError):
            return str(error)
        if isinstance(error, UnknownCollective):
            return f"{error} communicates in a way that is not supported"
        where = f" in {self.module}" if self.module else ""
        return f"the program failed{where}: {cause(error)}"

    def next_batch(self) -> None:
        """Begin the next micro batch. A pipeline reads all of a pass at once, and marks its actions instead."""
        self.outside = "forward"
        self.phase = "forward"
        self.outer = ""
        if self.staged:
            return
        self.starts, self.started = [], []
        self.record(Mark(f"{MICRO_BATCH}{self.micro_batch}"))
        self.micro_batch += 1

    def begin_step(self, number: int) -> None:
        """Begin a step."""
        self.micro_batch = 0
        self.step = number
        if number == 1:
            self.calls.clear()  # of the set-up
        self.record(Mark(f"step {number}"))
        if self.staged:
            self.starts, self.started = [], []
            self.begin_pass()

    def begin_pass(self) -> None:
        """Begin a pass of a pipeline: receives before its first action belong to the forward phase."""
        self.outside = self.phase = "forward"

    def end_pass(self) -> None:
        """End a pass of a pipeline: what follows belongs to the optimizer."""
        self.outside = "optimizer"

    def begin_action(self, phase: Phase) -> None:
        """Begin a forward or a backward of a pipeline stage."""
        self.outside = phase
        self.outer = self.gradient_module = ""

    def end_action(self) -> None:
        """End it: what autograd records from here on belongs to no module."""
        self.outer = ""
        self._begin("")

    def at_node(self, node: fx.Node) -> None:
        """Set the node of a step's graph that runs next; after the output of a whole step the optimizer follows."""
        self.of_node = place_of(node)
        self.makes = ""
        if node.op == "output" and not self.staged:
            self.outside = "optimizer"

    def at_sum(self, node: fx.Node, gradient: torch.Tensor) -> None:
        """Note an unsharded gradient computed in a compiled region with others, and the node that will return it."""
        place = place_of(node)
        assert place is not None, "a gradient was computed"
        self._categorise(gradient, "unsharded_gradient", place.module)

    def locate(self) -> None:
        """Determine the current phase, the module, and what issues the ops."""
        self._locate()
        if self.compiled:
            self.issuer = "node"
        elif self.phase == "backward":
            self.issuer = "node" if self.in_node() else "function" if self.function else "python"
        else:
            self.issuer = "python"

    def in_node(self) -> bool:
        """Whether a node of autograd in C++, or autograd itself, calls the current operator, if in backward."""
        return not (running_backward() and called_from_python(_SIMULATOR))

    def _locate(self) -> None:
        if self.of_node is not None:
            self.module, self.phase, self.makes = self.of_node[:3]
            return
        if not running_backward():
            if self.phase in ("backward", "recompute") and not self.staged and not self.running:
                self.outside = "optimizer"
            self.phase = self.outside
            outer = self.outer if self.phase == "forward" else ""
            self.module = self.running[-1] if self.running else outer
            return
        if len(self.running) > self.of_forward:
            self.phase = "recompute"
            self.module = self.running[-1]
            return
        # Gradients are not differentiated: where autograd records within a backward, a forward is recomputed.
        self.phase = "recompute" if torch.is_grad_enabled() else "backward"
        node = current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number != _ACCUMULATION:  # accumulation belongs to the module whose gradient it is
                place = bisect.bisect_right(self.starts, number) - 1
                if place >= 0:
                    self.gradient_module = self.started[place]
        self.module = self.gradient_module

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """While entered, observe calls of modules and resizes of storages."""
        resize = torch.UntypedStorage.resize_

        def enter(module: nn.Module, _: Any) -> None:
            path = self.paths.get(id(module))
            if path is None:
                return
            if not running_backward():
                self.of_forward += 1
            self.running.append(path)
            self._begin(path)
            if len(self.running) < 2 or self.running[-2] != path:
                self.record(Mark(f"forward {path}"))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if (path := self.paths.get(id(module))) is None or not self.running:
                return
            assert self.running.pop() == path
            self.of_forward = min(self.of_forward, len(self.running))
            if not running_backward():
                self.outer = "" if self.running else LOSS
            outer = self.running[-1] if self.running else self.outer
            self._begin(outer)
            if outer != path or not self.running:
                self.record(Mark(f"end {path}"))

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ref = self.storages.get(storage._cdata)
            if ref is not None and not self.closed:
                self.record(Resize(ref.number, size, current_stream()))
                self.record(Categorise(ref.number, "unsharded_parameter", ""))
            return result

        with (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            patched("torch:UntypedStorage.resize_", resize_),
            noted_units(self, self.paths, self.number_of),
        ):
            yield

    def _begin(self, path: str) -> None:
        """Attribute to a module what autograd records from here on."""
        self.starts.append(autograd_sequence_number())
        self.started.append(path)

    def adopt_state(self, training: Training) -> None:
        """Record the storages that exist before any step: parameters, buffers, and inputs given to every stage."""
        for part in training.parts:
            for path, parameter in part.named_parameters():
                category: Category = "sharded_parameter" if isinstance(parameter, DTensor) else "parameter"
                module = plain_path(path).rpartition(".")[0]
                self._adopt(parameter, category, module)
                if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
                    self.experts.add(module)
            for path, buffer in part.named_buffers():
                self._adopt(buffer, "other", plain_path(path).rpartition(".")[0])
        for tensor in training.staged.given.values() if training.staged is not None else ():
            self._adopt(tensor, "other", "")

    def _adopt(self, tensor: torch.Tensor, category: Category, module: str) -> None:
        for local in locals_of(tensor):
            if is_simulated(local):
                self.module = module
                if self.allocate(local, category) and category != "other":
                    self.of_parameters.add(self.storage_count - 1)

    def categorise_gradients(self, training: Training) -> None:
        """Record which storages are gradients of parameters."""
        for part in training.parts:
            for path, parameter in part.named_parameters():
                if parameter.grad is not None:
                    category: Category = "sharded_gradient" if isinstance(parameter, DTensor) else "gradient"
                    self._categorise(parameter.grad, category, plain_path(path).rpartition(".")[0])

    def categorise_optimizer(self, training: Training) -> None:
        """Record which storages are state of the optimizer."""
        names: dict[torch.Tensor, str] = {
            parameter: plain_path(path).rpartition(".")[0]
            for part in training.parts
            for path, parameter in part.named_parameters()
        }
        for parameter, state in training.optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._categorise(value, "optimizer_state", names.get(parameter, ""))

    def _categorise(self, tensor: torch.Tensor, category: Category, module: str) -> None:
        for local in locals_of(tensor):
            if is_simulated(local):
                number = self.number_of(local)
                if number is not None:
                    self.of_parameters.add(number)
                    self.record(Categorise(number, category, module))

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, if it has one."""
        ref = self.storages.get(tensor.untyped_storage()._cdata)
        return None if ref is None else ref.number

    def allocate(self, tensor: torch.Tensor, category: Category) -> bool:
        """Record the storage of a tensor, if it is new, and return whether it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return False
        ref = StorageRef(storage, self._freed)
        ref.key, ref.number = key, self.storage_count
        self.storage_count += 1
        self.storages[key] = ref
        self.record(
            Allocate(
                storage=ref.number,
                bytes=storage.nbytes(),
                stream=current_stream(),
                category=category,
                module=self.module,
                phase=self.phase,
            )
        )
        return True

    def adopt(self, tensor: torch.Tensor, number: int) -> None:
        """Assign to the storage of a tensor a number whose allocation is already recorded."""
        storage = tensor.untyped_storage()
        ref = StorageRef(storage, self._freed)
        ref.key, ref.number = storage._cdata, number
        self.storages[ref.key] = ref

    def _freed(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(ref, StorageRef)
        del self.storages[ref.key]
        self.pending.pop(ref.number, None)
        if not self.closed:
            self.record(Free(ref.number))

    @property
    def owner(self) -> str:
        """Path of the unit that is gathered or reduced; else that of the module that runs."""
        return self.module if self.unit is None else self.unit

    def moves_parameters(self, by_hooks: bool) -> bool:
        """Whether a collective gathers parameters or reduces gradients.

        Args:
            by_hooks: whether it does where the step is no graph.
        """
        return by_hooks if self.of_node is None else self.of_node.of_unit

    def group(self, value: Any) -> Group:
        """Return a process group of the program, given as such or by its name."""
        group = resolve_process_group(GroupName(value)) if isinstance(value, str) else dist.ProcessGroup.unbox(value)
        known = self.groups.get(group.group_name)
        if known is None:
            assert self.mesh is not None
            found = group_of(group, self.mesh)
            same = next((other.ranks for other in self.groups.values() if other.ranks == found.ranks), found.ranks)
            known = self.groups[group.group_name] = found._replace(ranks=same)
        return known


def locals_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain local tensors that a tensor consists of on this rank."""
    if is_traceable_wrapper_subclass_type(type(tensor)):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from locals_of(inner)
    else:
        yield tensor


def is_simulated(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the simulated device."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == SIM
