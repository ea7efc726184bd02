"""Dispatch mode of the simulated device, which records every operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from legoai.cost.simulated.device import (
    current_stream,
    read_from_device,
    read_value,
)
from legoai.cost.simulated.operators.grouped_products import is_by_group, products
from legoai.cost.simulated.operators.operands import operands_of, shares_of
from legoai.cost.simulated.operators.properties import (
    ASKS_DEVICE,
    Operator,
    description,
    operator,
    permutes,
    tensors,
    type_of,
    whole_buffer,
    wraps,
)
from legoai.cost.simulated.operators.results import FUSED_UPDATES, Answer, Results, asked
from legoai.cost.simulated.recorder import Capture, is_simulated
from legoai.cost.trace.records import (
    EACH,
    PART_OF,
    POINT_TO_POINT,
    UNDER_POLICY,
    Categorise,
    Category,
    Collective,
    CollectiveKind,
    Copy,
    HostKernel,
    HostWaitStream,
    Kernel,
    Phase,
    WaitWork,
)
from legoai.runtime.torch_internals.distributed.fake_world import FakeWork
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.operators import OpOverload, TorchDispatchMode, adds_gradients_in_place
from legoai.runtime.wrapped import local_part

NEW_CATEGORY: Final[Mapping[Phase, Category]] = {
    "setup": "other",
    "forward": "activation",
    "recompute": "activation",
    "backward": "temporary",
    "optimizer": "temporary",
    "other": "other",
}


c10d = torch.ops.c10d

_SUM: Final = torch.ops.aten.add.Tensor
_SUM_IN_PLACE: Final = torch.ops.aten.add_.Tensor


_OF_PARAMETERS: Final[tuple[CollectiveKind, ...]] = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that hooks issue for parameters and gradients; where the step is no graph, others are functional."""


def _with_handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a collective, and a handle."""
    return args[0], FakeWork().boxed()


_ON_GIVEN_TENSORS: Final[dict[OpOverload, Callable[[tuple[Any, ...], dict[str, Any]], Any]]] = {
    c10d._allgather_base_.default: _with_handle,
    c10d._reduce_scatter_base_.default: _with_handle,
    c10d.allreduce_.default: _with_handle,
    torch.ops._c10d_functional.all_gather_into_tensor_out.default: lambda _, kwargs: kwargs["out"],
}
"""Results of collectives that return what they are given. For the last one, torch's fake kernel has a new tensor."""


def _lists_of_dtensors(args: tuple[Any, ...]) -> list[Sequence[DTensor]]:
    return [item for item in args if isinstance(item, list | tuple) and item and isinstance(item[0], DTensor)]


def _on_local_tensors(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of an update with their DTensors replaced by local tensors.

    None where there are no DTensors, or where their placements differ.

    DTensor itself does the same, but it computes the placements of hundreds of results, which equal those of the
    arguments.
    """
    lists = _lists_of_dtensors(args)
    if not lists:
        return None
    for same in zip(*lists, strict=False):
        first = same[0]._spec
        where = first.placements, first.mesh
        if any(item.is_partial() for item in first.placements):
            return None
        if any(not isinstance(item, DTensor) or (item._spec.placements, item._spec.mesh) != where for item in same):
            return None
    return tuple([local_part(tensor) for tensor in item] if isinstance(item, list | tuple) else item for item in args)


def _simulated(value: Any) -> list[torch.Tensor]:
    """Return the tensors on the simulated device of an argument or result, in order."""
    return [item for item in tensors(value) if is_simulated(item)]


@functools.cache
def _pair(sender: int, receiver: int) -> tuple[int, int]:
    """Return two ranks as a tuple; the same two ranks give the same object."""
    return sender, receiver


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every operator on plain tensors of this rank."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capture = capture
        self.results = Results(capture.kernels)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let dynamo run with this mode on: it traces nothing here, and its guard costs more than a call."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and wraps(kind):
                local = _on_local_tensors(args) if func in FUSED_UPDATES else None
                if local is None:
                    if issubclass(kind, DTensor):
                        self.capture.call("dtensor")
                        if _lists_of_dtensors(args):
                            self.capture.call("listed dtensor", EACH)
                    return NotImplemented
                self.capture.call("listed dtensor", EACH)
                with self:
                    return func(*local, **(kwargs or {}))
        kwargs = kwargs or {}
        if is_by_group(func, args, kernel=self.capture.grouped_kernel) and is_simulated(args[0]):
            return self._by_group(func, args, kwargs)
        capture = self.capture
        if capture.paused:
            return func(*args, **kwargs)
        known = operator(func := self._without_modes(func, args, kwargs))
        if known.treatment == "read":
            if not is_simulated(args[0]):
                return func(*args, **kwargs)
            capture.locate()
            read_from_device(args[0].itemsize)
            return read_value(args[0].dtype)
        if known.treatment == "wait" and (waiting := _simulated((args, tuple(kwargs.values())))):
            # The real kernel returns its argument. The fake one would return a new tensor, and so end the argument's
            # lifetime.
            capture.locate()
            self._wait(waiting)
            return waiting[0]
        question = asked(func, known.name, args, kwargs)
        answer = self.results.known(question)
        inputs: Sequence[torch.Tensor]
        results: Sequence[torch.Tensor]
        fresh: Sequence[torch.Tensor]
        if question is not None and answer is not None:
            inputs = question.inputs
            out, results, fresh = self.results.again(answer, inputs)
        else:
            inputs = _simulated((args, tuple(kwargs.values())))
            before = {item.untyped_storage()._cdata for item in inputs}
            given = _ON_GIVEN_TENSORS.get(func) if inputs else None
            if given is not None:
                out = given(args, kwargs)
            else:
                out, answer = self.results.computed(func, question, args, kwargs)
            results = _simulated(out)
            fresh = [item for item in results if item.untyped_storage()._cdata not in before]
        if not inputs and not results:
            self._on_host(func, known, args, kwargs, out)
            return out
        capture.locate()
        if known.treatment == "collective":
            self._collective(known, args, out, inputs, results)
        elif known.treatment == "copy" and (moved := self._host_copy(known, args, kwargs, inputs, results)):
            capture.record(moved)
        else:
            self._compute(func, known, args, kwargs, inputs, fresh, out, answer or Answer((), None))
        return out

    def _without_modes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload:
        """Return the operator that autograd would call instead if no dispatch mode were active."""
        if func is not _SUM or kwargs or self.capture.compiled or not adds_gradients_in_place(args):
            return func
        return _SUM_IN_PLACE if self.capture.in_node() else func

    def _by_group(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return a grouped product, whose kernels name it: a policy sees it alone."""
        self.capture.part_of = operator(func).name
        try:
            with self:
                return products(*args, **kwargs)
        finally:
            self.capture.part_of = ""

    def _on_host(
        self, func: OpOverload, known: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Record an operator on tensors in host memory; scalars count as the program's own host work."""
        if known.treatment not in ("kernel", "copy") or func.namespace != "aten":
            return
        inputs = [item for item in tensors((args, tuple(kwargs.values()))) if isinstance(item, FakeTensor)]
        known_storages = {item.untyped_storage()._cdata for item in inputs}
        fresh = [
            item
            for item in tensors(out)
            if isinstance(item, FakeTensor) and item.untyped_storage()._cdata not in known_storages
        ]
        if not any(item.dim() and item.is_floating_point() for item in (*inputs, *fresh)):
            return
        capture = self.capture
        capture.locate()
        said = description(func, known, args, kwargs, inputs=inputs, fresh=fresh, out=out)
        capture.record(HostKernel(module=capture.module, phase=capture.phase, **said))

    def _wait(self, inputs: Sequence[torch.Tensor]) -> None:
        number = self.capture.number_of(inputs[0])
        work = self.capture.pending.pop(number, None) if number is not None else None
        if work is not None:
            self.capture.record(WaitWork(current_stream(), work))

    def _allocate(self, results: Sequence[torch.Tensor], category: Category | None = None) -> None:
        for result in results:
            self.capture.allocate(result, category or self.capture.makes or NEW_CATEGORY[self.capture.phase])

    def _compute(  # noqa: PLR0917
        self,
        func: OpOverload,
        known: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
        out: Any,
        answer: Answer,
    ) -> None:
        self._allocate(fresh)
        if known.treatment == "nothing" or not (fresh or known.written or known.name == "fsdp.all_gather_copy_in"):
            return
        said = answer.kernel
        if said is None:
            said = answer.kernel = description(func, known, args, kwargs, inputs=inputs, fresh=fresh, out=out)
        capture = self.capture
        if known.name == "fsdp.all_gather_copy_in":
            capture.call("gather")
            capture.call("gathered parameter", EACH)
        if known.name == "fsdp.chunk_cat":
            capture.call("reduction")
            capture.call("reduced parameter", EACH)
            for item in tensors(args[0]):
                number = capture.number_of(item)
                if number is not None:
                    capture.record(Categorise(number, "unsharded_gradient", capture.owner))
        if capture.operands is not None:
            shares = answer.shares
            # Of a tensor that a call has twice, the share depends on what it does with either.
            distinct = len(inputs) < 2 or len({id(item) for item in inputs}) == len(inputs)
            if shares is None or not distinct:
                moved = said["bytes_read"], said["bytes_written"]
                shares = shares_of(known, args, kwargs, inputs, fresh, moved)
                if distinct:
                    answer.shares = shares
            capture.operands[len(capture.records)] = operands_of(shares, inputs, fresh, capture.number_of)
        marks: tuple[tuple[str, Any], ...] = ()
        if capture.policy and capture.issuer == "python":
            marks = ((UNDER_POLICY, True),)
        if capture.part_of:
            marks = (*marks, (PART_OF, capture.part_of))
        if marks:
            if marks not in answer.marked:
                answer.marked[marks] = {**said, "attributes": {**said["attributes"], **dict(marks)}}
            said = answer.marked[marks]
        capture.record(
            Kernel(
                stream=current_stream(),
                module=capture.module,
                phase=capture.phase,
                issuer=capture.issuer,
                calls=capture.take_calls(len(inputs)),
                **said,
            )
        )

    def _host_copy(
        self,
        known: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> Copy | None:
        """Return the copy between host and device that a call performs, if any."""
        target, source = (args[0], args[1]) if known.name == "aten.copy_" else (None, args[0])
        arrives = is_simulated(target) if target is not None else bool(results)
        leaves = is_simulated(source)
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
            issuer=self.capture.issuer,
            calls=self.capture.take_calls(),
        )

    def _collective(
        self,
        known: Operator,
        args: tuple[Any, ...],
        out: Any,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        capture = self.capture
        kind = "permute" if permutes(known, args) else known.collective
        assert kind is not None
        group = capture.group(args[known.group])
        ranks, axis = group.ranks, group.axis
        if kind == "all_to_all" and capture.module in capture.experts:
            axis = "ep"  # also where one group serves several axes
        here, phase = dist.get_rank(), capture.phase
        members: tuple[int, ...] = ()
        if capture.batch and kind in POINT_TO_POINT:
            phase, members = capture.batch.pop() or phase, ranks
        if known.name == "c10d.send":
            ranks = _pair(here, ranks[args[2]])
        elif known.name == "c10d.recv_":
            ranks = _pair(ranks[args[2]], here)
        issued = known.name.startswith("c10d.")
        if not issued:
            capture.call("functional collective")
        self._allocate(results)
        whole = whole_buffer(known, args, out)
        work = capture.work_count
        capture.work_count += 1
        of_parameters = capture.moves_parameters(issued and kind in _OF_PARAMETERS)
        module = capture.owner if of_parameters else capture.module
        if capture.operands is not None and kind == "all_reduce":
            shares = shares_of(known, args, {}, inputs, results, (0, 0))
            capture.operands[len(capture.records)] = operands_of(shares, inputs, results, capture.number_of)
        capture.record(
            Collective(
                work=work,
                stream=current_stream(),
                kind=kind,
                ranks=ranks,
                axis=axis,
                bytes=sum(item.numel() * item.itemsize for item in whole),
                dtype=type_of(whole[0]).dtype if whole else "",
                module=module,
                phase=phase,
                issuer=capture.issuer,
                calls=capture.take_calls(),
                members=members,
                communicator=group.communicator if group.communicator != axis else "",
                of_parameters=of_parameters,
            )
        )
        if issued:
            handle = FakeWork.unbox(out[1] if isinstance(out, tuple) else out)
            assert isinstance(handle, FakeWork)
            handle.seq_id = work
            for item in inputs:
                number = capture.number_of(item)
                is_buffer = number not in capture.of_parameters  # a sharded optimizer gathers these in place
                if number is not None and is_buffer and kind in ("all_gather", "reduce_scatter"):
                    capture.record(Categorise(number, "communication", module))
        elif known.name == "_dtensor.shard_dim_alltoall":
            capture.record(WaitWork(current_stream(), work))  # torch waits within the operator
        else:
            for item in results or inputs:
                number = capture.number_of(item)
                if number is not None:
                    capture.pending[number] = work
