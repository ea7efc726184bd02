"""What does one rank of a lowered program do in a step?

The program's own `trainer()` is built on the simulated device, and the trainer's own step is taken there. Nothing is
known here of models or plans: what is recorded is what the program dispatches.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeWork, ProcessGroup, _resolve_process_group
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from legoai.cost.device import (
    READ_VALUE,
    SIM,
    Kind,
    Recorder,
    SimulationError,
    current_stream,
    read_from_device,
    simulated_device,
)
from legoai.cost.operators import Operator, UnknownCollective, attributes, flops, operator, tensors, traffic, type_of
from legoai.cost.replay import MICRO_BATCH, renumber, repeat_micro_batches
from legoai.cost.trace import (
    Allocate,
    Categorise,
    Category,
    Collective,
    Copy,
    Free,
    HostWaitStream,
    Kernel,
    Mark,
    Phase,
    Record,
    Resize,
    Trace,
    WaitWork,
)
from legoai.runtime import Trainer
from legoai.runtime.data import SequenceBatch
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError
from legoai.runtime.initialize import cast_parameters, plain_path
from legoai.runtime.kernels import attention_kernel
from legoai.runtime.step import OptimizerStep, Training

STEPS: Final = 2
"""Optimizer steps that are taken: the first makes the optimizer's state, the second is like all that follow."""


_DISTINCT: Final = 5
"""Micro batches of a step that are taken: the first, the last, and three of those between, which are equal."""


def capture(
    program: str | types.ModuleType | Trainer, *, world: int, rank: int = 0, kind: Kind = "cuda", replay: bool = True
) -> Trace:
    """Take the first two steps of a lowered program on the simulated device.

    The trace begins with the allocation of what is there before the first step. `Mark("step 1")` and `Mark("step 2")`
    stand before the steps, `Mark("end step 2")` is the last record; in each step `micro batch N`, `forward PATH` and
    `end PATH` mark where its parts begin and end.

    Args:
        program: its text, or its module, or what its `trainer()` returns.
        world: number of ranks for which it was lowered.
        rank: the one that is simulated.
        kind: whose kernels the device has.
        replay: whether micro batches that are equal are taken only once and then repeated. The trace is the same.

    Raises:
        SimulationError: the program fails, or does what cannot be recorded.
    """
    if not 0 <= rank < world:
        raise ValueError(f"a world of {world} ranks has no rank {rank}")
    trace, wanted = _taken(program, world=world, rank=rank, kind=kind, most=_DISTINCT if replay else None)
    if wanted == len([None for record in trace.records if _is_micro_batch(record)]) // STEPS:
        return dataclasses.replace(trace, records=renumber(trace.records))
    repeated = repeat_micro_batches(trace.records, wanted=wanted)
    if repeated is None:
        return capture(program, world=world, rank=rank, kind=kind, replay=False)
    return dataclasses.replace(trace, records=repeated)


def _is_micro_batch(record: Record) -> bool:
    return isinstance(record, Mark) and record.name.startswith(MICRO_BATCH)


def _taken(
    program: str | types.ModuleType | Trainer, *, world: int, rank: int, kind: Kind, most: int | None
) -> tuple[Trace, int]:
    """Return the trace of steps with at most so many micro batches, and how many they have."""
    recorder = Capture()
    with simulated_device(recorder, rank=rank, world=world, kind=kind) as fake, recorder.errors():
        trainer = _outside_of_fake(_trainer_of(program))
        device = Device(type=SIM, holds_values=False)
        if trainer.pipeline is not None:
            raise SimulationError("stages of a pipeline are not captured")
        if trainer.autocast_dtype is not None:
            # torch has no autocast for the simulated device: it would compute in the stored dtype without a word.
            raise SimulationError(
                "autocast is not captured; give the plan an `fsdp` statement, whose units carry the dtype"
            )
        with attention_kernel(trainer.attention_kernel), fake:
            training = trainer.prepare(device, seed=trainer.seed)
            wanted = training.accumulation
            if most is not None:
                training = dataclasses.replace(training, accumulation=min(most, wanted))
            _refuse(training)
            recorder.take_steps(trainer, training, device)
            stage = training.mesh.get_local_rank("pp") if "pp" in (training.mesh.mesh_dim_names or ()) else 0
            del training
    return Trace(rank=rank, world=world, stage=stage, records=tuple(recorder.records)), wanted


def _trainer_of(program: str | types.ModuleType | Trainer) -> Trainer:
    if isinstance(program, str):
        module = types.ModuleType("lowered_program")
        sys.modules[module.__name__] = module
        try:
            exec(compile(program, "<lowered program>", "exec"), module.__dict__)
        except SyntaxError as error:
            raise SimulationError(f"the program is no Python: {error}") from error
        program = module
    if isinstance(program, types.ModuleType):
        made = getattr(program, "trainer", None)
        if not callable(made):
            raise SimulationError("the program has no trainer()")
        program = made()
    if not isinstance(program, Trainer):
        raise SimulationError(f"trainer() returned {type(program).__name__}, not a Trainer")
    return program


def _outside_of_fake(trainer: Trainer) -> Trainer:
    """Let a program build its mesh and its model on the meta device without fake tensors, which is faster."""

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args)

        return call

    def build_model() -> nn.Module:
        with unset_fake_temporarily():
            model = trainer.build_model()
            cast_parameters(model, trainer.master_dtype)
            return model

    return dataclasses.replace(
        trainer,
        build_model=build_model,
        build_mesh=outside(trainer.build_mesh),
    )


def _refuse(training: Training) -> None:
    """Refuse what would be recorded wrongly."""
    for part in training.parts:
        for path, module in part.named_modules():
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                raise SimulationError(f"{plain_path(path) or 'the model'} is compiled, which is not captured")
        for path, parameter in part.named_parameters():
            if parameter.device.type != SIM:
                raise SimulationError(f"{plain_path(path)} is on {parameter.device.type}, which is not captured")


class _Batches:
    """Micro batches without values."""

    def __init__(self, shape: tuple[int, int], on_next: Callable[[], None]) -> None:
        self.shape = shape
        self.on_next = on_next

    def next(self) -> SequenceBatch:
        """Return tokens and targets on the host."""
        self.on_next()
        return SequenceBatch(
            tokens=torch.zeros(self.shape, dtype=torch.int64), targets=torch.zeros(self.shape, dtype=torch.int64)
        )

    def skip(self, batches: int) -> None:
        """Read nothing."""


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Tells when the last tensor on a storage is gone."""

    __slots__ = ("key", "number")
    key: int
    number: int


class Capture(Recorder):
    """Keeps what one rank does."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False
        self.storages: dict[int, _StorageRef] = {}
        self.storage_count = 0
        self.work_count = 0
        self.pending: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        self.running: list[str] = []
        self.outside: Phase = "setup"
        self.micro_batch = 0
        self.recomputing = 0
        self.starts: list[int] = []
        self.started: list[str] = []
        self.gradient_module = ""
        self.groups: dict[str, tuple[tuple[int, ...], str]] = {}
        self.mesh: DeviceMesh | None = None

    def record(self, record: Record) -> None:
        """Take the next record."""
        self.records.append(record)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what a program may raise into a simulation's error."""
        try:
            yield
        except SimulationError:
            raise
        except RunError as error:
            raise SimulationError(str(error)) from error
        except UnknownCollective as error:
            raise SimulationError(f"{error} communicates in a way that is not captured") from error
        except Exception as error:
            where = f" in {self.module}" if self.module else ""
            raise SimulationError(f"the program failed{where}: {type(error).__name__}: {error}") from error

    def take_steps(self, trainer: Trainer, training: Training, device: Device) -> None:
        """Record what is there, and then the steps."""
        self.mesh = training.mesh
        for part in training.parts:
            self.paths.update({id(module): plain_path(path) for path, module in part.named_modules()})
        self._adopt_state(training)
        step = OptimizerStep(trainer, training, device)
        batches = _Batches((trainer.micro_batch, trainer.seq_len), self._next_batch)
        try:
            with self._hooks(), _Dispatch(self):
                for index in range(STEPS):
                    self.micro_batch = 0
                    self.record(Mark(f"step {index + 1}"))
                    gradient = step.gradient(index, batches, stop=False)
                    self._categorise_gradients(training)
                    step.update(gradient, step=index)
                    self._categorise_optimizer(training)
                    device.synchronize()
                    self.record(Mark(f"end step {index + 1}"))
                    self.outside = "other"
        finally:
            self.closed = True

    def _next_batch(self) -> None:
        self.outside = "forward"
        self.phase = "forward"
        self.starts, self.started = [], []
        self.record(Mark(f"{MICRO_BATCH}{self.micro_batch}"))
        self.micro_batch += 1

    def locate(self) -> None:
        """Find out where the program is: the phase, and the module on whose behalf it works."""
        if torch._C._current_graph_task_id() == -1:
            if self.phase in ("backward", "recompute"):
                self.outside = "optimizer"
            self.phase = self.outside
            self.module = self.running[-1] if self.running else ""
            return
        if self.running:
            self.phase = "recompute"
            self.module = self.running[-1]
            return
        self.phase = "backward"
        node = torch._C._current_autograd_node()
        if node is not None:
            place = bisect.bisect_right(self.starts, node._sequence_nr()) - 1
            if 0 <= place < len(self.starts) - 1:  # an accumulation of gradients has the highest number
                self.gradient_module = self.started[place]
        self.module = self.gradient_module

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def enter(module: nn.Module, _: Any) -> None:
            path = self.paths.get(id(module))
            if path is None:
                return
            self.running.append(path)
            self._begin(path)
            if len(self.running) < 2 or self.running[-2] != path:
                self.record(Mark(f"forward {path}"))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            path = self.paths.get(id(module))
            if path is None or not self.running:
                return
            assert self.running.pop() == path
            outer = self.running[-1] if self.running else ""
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

        handles = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    def _begin(self, path: str) -> None:
        """Note that what autograd records from here on belongs to a module."""
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.started.append(path)

    def _adopt_state(self, training: Training) -> None:
        for part in training.parts:
            for path, parameter in part.named_parameters():
                category: Category = "sharded_parameter" if isinstance(parameter, DTensor) else "parameter"
                self._adopt(parameter, category, plain_path(path).rpartition(".")[0])
            for path, buffer in part.named_buffers():
                self._adopt(buffer, "other", plain_path(path).rpartition(".")[0])

    def _adopt(self, tensor: torch.Tensor, category: Category, module: str) -> None:
        for local in _locals(tensor):
            self.module = module
            self.allocate(local, category)

    def _categorise_gradients(self, training: Training) -> None:
        for part in training.parts:
            for path, parameter in part.named_parameters():
                if parameter.grad is not None:
                    category: Category = "sharded_gradient" if isinstance(parameter, DTensor) else "gradient"
                    self._categorise(parameter.grad, category, plain_path(path).rpartition(".")[0])

    def _categorise_optimizer(self, training: Training) -> None:
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
        for local in _locals(tensor):
            if _is_simulated(local):
                number = self.number_of(local)
                if number is not None:
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
        ref = _StorageRef(storage, self._freed)
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

    def _freed(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(ref, _StorageRef)
        del self.storages[ref.key]
        self.pending.pop(ref.number, None)
        if not self.closed:
            self.record(Free(ref.number))

    def group(self, value: Any) -> tuple[tuple[int, ...], str]:
        """Return the global ranks of a process group, and the mesh axes that it spans."""
        group = _resolve_process_group(GroupName(value)) if isinstance(value, str) else ProcessGroup.unbox(value)
        known = self.groups.get(group.group_name)
        if known is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            known = self.groups[group.group_name] = ranks, self._axes(ranks, group)
        return known

    def _axes(self, ranks: Sequence[int], group: dist.ProcessGroup) -> str:
        """Return the axes of the program's mesh along which the ranks differ."""
        assert self.mesh is not None
        names, shape = self.mesh.mesh_dim_names or (), self.mesh.shape
        varying, size, stride = [], 1, self.mesh.size()
        for name, length in zip(names, shape, strict=True):
            stride //= length
            if len({rank // stride % length for rank in ranks}) > 1:
                varying.append(name)
                size *= length
        if size == len(ranks):
            return "+".join(varying)
        return group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else ""


def _locals(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which one consists on this rank."""
    if is_traceable_wrapper_subclass_type(type(tensor)):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from _locals(inner)
    else:
        yield tensor


def _is_simulated(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == SIM


@functools.cache
def _wraps(kind: type) -> bool:
    return is_traceable_wrapper_subclass_type(kind)


_NEW_CATEGORY: Final[Mapping[Phase, Category]] = {
    "setup": "other",
    "forward": "activation",
    "recompute": "activation",
    "backward": "temporary",
    "optimizer": "temporary",
    "other": "other",
}


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator on plain tensors of this rank."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capture = capture

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not FakeTensor and _wraps(kind):
                return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        capture = self.capture
        if capture.paused:
            return func(*args, **kwargs)
        known = operator(func)
        if known.treatment == "read":
            if not _is_simulated(args[0]):
                return func(*args, **kwargs)
            capture.locate()
            read_from_device(args[0].itemsize)
            return READ_VALUE
        inputs = [item for item in tensors((args, tuple(kwargs.values()))) if _is_simulated(item)]
        before = {item.untyped_storage()._cdata for item in inputs}
        out = func(*args, **kwargs)
        results = [item for item in tensors(out) if _is_simulated(item)]
        if not inputs and not results:
            return out
        capture.locate()
        if known.treatment == "wait":
            self._wait(inputs)
        elif known.treatment == "collective":
            self._collective(known, args, out, inputs, results)
        elif known.treatment == "copy" and (moved := self._host_copy(known, args, kwargs, inputs, results)):
            capture.record(moved)
        else:
            self._compute(func, known, args, kwargs, inputs, results, before, out)
        return out

    def _wait(self, inputs: list[torch.Tensor]) -> None:
        number = self.capture.number_of(inputs[0])
        work = self.capture.pending.pop(number, None) if number is not None else None
        if work is not None:
            self.capture.record(WaitWork(current_stream(), work))

    def _allocate(self, results: Sequence[torch.Tensor], category: Category | None = None) -> None:
        for result in results:
            self.capture.allocate(result, category or _NEW_CATEGORY[self.capture.phase])

    def _compute(  # noqa: PLR0917
        self,
        func: OpOverload,
        known: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
        before: set[int],
        out: Any,
    ) -> None:
        fresh = [item for item in results if item.untyped_storage()._cdata not in before]
        self._allocate(fresh)
        if known.treatment == "nothing" or not (fresh or known.written or known.name == "fsdp.all_gather_copy_in"):
            return
        new = sum(item.numel() * item.itemsize for item in fresh)
        read, written = traffic(known, args, kwargs, inputs, new)
        capture = self.capture
        if known.name == "fsdp.chunk_cat":
            for item in tensors(args[0]):
                number = capture.number_of(item)
                if number is not None:
                    capture.record(Categorise(number, "unsharded_gradient", capture.module))
        capture.record(
            Kernel(
                stream=current_stream(),
                op=known.name,
                inputs=tuple(map(type_of, inputs)),
                outputs=tuple(map(type_of, fresh)),
                flops=flops(func, known, args, kwargs, out),
                bytes_read=read,
                bytes_written=written,
                attributes=attributes(known, func, args, kwargs),
                module=capture.module,
                phase=capture.phase,
            )
        )

    def _host_copy(
        self,
        known: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> Copy | None:
        """Return the copy between host and device that a call is, if it is one."""
        target, source = (args[0], args[1]) if known.name == "aten.copy_" else (None, args[0])
        arrives = _is_simulated(target) if target is not None else bool(results)
        leaves = _is_simulated(source)
        if arrives and leaves:
            return None
        self._allocate(results, "input")
        blocking = not kwargs.get("non_blocking", args[2] if known.name == "aten.copy_" and len(args) > 2 else False)
        if leaves and blocking:
            self.capture.record(HostWaitStream(current_stream()))
        return Copy(
            stream=current_stream(),
            direction="host_to_device" if arrives else "device_to_host",
            bytes=source.numel() * source.itemsize,
            blocking=blocking,
            module=self.capture.module,
            phase=self.capture.phase,
        )

    def _collective(
        self,
        known: Operator,
        args: tuple[Any, ...],
        out: Any,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        capture = self.capture
        kind = known.collective
        assert kind is not None
        ranks, axis = capture.group(args[known.group])
        here = dist.get_rank()
        if known.name == "c10d.send":
            ranks = (here, ranks[args[2]])
        elif known.name == "c10d.recv_":
            ranks = (ranks[args[2]], here)
        issued = known.name.startswith("c10d.")
        self._allocate(results)
        whole = _whole_buffer(known, args, out, inputs)
        work = capture.work_count
        capture.work_count += 1
        capture.record(
            Collective(
                work=work,
                stream=current_stream(),
                kind=kind,
                ranks=ranks,
                axis=axis,
                bytes=sum(item.numel() * item.itemsize for item in whole),
                dtype=type_of(whole[0]).dtype if whole else "",
                module=capture.module,
                phase=capture.phase,
            )
        )
        if issued:
            handle = FakeWork.unbox(out[1] if isinstance(out, tuple) else out)
            assert isinstance(handle, FakeWork)
            handle.seq_id = work
            for item in inputs:
                number = capture.number_of(item)
                if number is not None and kind in ("all_gather", "reduce_scatter"):
                    capture.record(Categorise(number, "communication", capture.module))
        else:
            for item in results or inputs:
                number = capture.number_of(item)
                if number is not None:
                    capture.pending[number] = work


def _whole_buffer(known: Operator, args: tuple[Any, ...], out: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that together are the buffer whose size a collective's record tells."""
    if known.collective == "barrier":
        return []
    if known.name.startswith("c10d."):
        output_first = known.group == 2
        if output_first:
            place = 0 if known.collective == "all_gather" else 1
            return list(tensors(args[place]))
        return list(tensors(args[0]))
    if known.collective == "all_gather":
        return list(tensors(out))
    return list(tensors(args[0]))
