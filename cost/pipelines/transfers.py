"""Sends and receives of a pipeline's schedule.

They are recorded with the phase of the action that they serve: the schedule issues them between actions, such as the
receive of a micro batch's activations after the backward of another. Those that torch issues as one batch, which NCCL
runs as one operation, are recorded between `Mark("batch")` and `Mark("end batch")`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from legoai.cost.simulated.device import backend, current_stream
from legoai.cost.simulated.operators.properties import type_of
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.marks import BATCH, END_BATCH
from legoai.cost.trace.records import Collective, Mark, Phase, WaitWork
from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.patching import original, override, patched

SCHEDULES: Final = "torch.distributed.pipelining.schedules"
STAGE: Final = "torch.distributed.pipelining.stage:_PipelineStageBase"

_PHASES: Final[dict[str, Phase]] = {
    "get_fwd_recv_ops": "forward",
    "get_fwd_send_ops": "forward",
    "get_bwd_recv_ops": "backward",
    "get_bwd_send_ops": "backward",
}
"""Phase of the transfers that a method of a stage returns."""


def name_phases(stage: Any) -> None:
    """Let a stage of torch return its transfers with their phase."""

    def with_phase(method: Callable[[int], list[Any]], phase: Phase) -> Callable[[int], list[Any]]:
        @functools.wraps(method)
        def operations(micro_batch: int) -> list[Any]:
            found = method(micro_batch)
            for operation in found:
                operation.phase = phase
            return found

        return operations

    for name, phase in _PHASES.items():
        override(stage, f"{STAGE}.{name}", with_phase(getattr(stage, name), phase))


def _phase_of(operation: dist.P2POp) -> Phase | None:
    """Return the phase of a transfer; None where no stage issues it."""
    return getattr(operation, "phase", None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    """A send or receive for which the schedule can wait.

    Attributes:
        work: its number.
        tensor: the tensor that is sent or received. A work keeps it alive, and torch's schedules keep the works of
            sends until the end of a step. Gloo's work holds the tensor (`SendWork::tensor_` in `ProcessGroupGloo.hpp`),
            and so does that of NCCL (`ProcessGroupNCCL::pointToPoint` puts it into `outputs_` of a work outside a
            batch).
    """

    work: int
    tensor: torch.Tensor

    def wait(self) -> bool:
        """Make the current stream wait for the transfer."""
        backend.record(WaitWork(current_stream(), self.work))
        return True


def _transferred(recorder: Capture, operation: Any) -> _Transfer:
    """Record a send or receive directly, without the dispatch of `dist.isend` through all modes."""
    tensor = operation.tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    recorder.locate()
    group = recorder.group(operation.group.group_name)
    here, there = dist.get_rank(), group.ranks[operation.group_peer]
    sends = operation.op is dist.isend
    work = recorder.work_count
    recorder.work_count += 1
    recorder.record(
        Collective(
            work=work,
            stream=current_stream(),
            kind="send" if sends else "receive",
            ranks=(here, there) if sends else (there, here),
            axis=group.axis,
            bytes=tensor.numel() * tensor.itemsize,
            dtype=type_of(tensor).dtype,
            module=recorder.module,
            phase=_phase_of(operation) or recorder.phase,
            issuer=recorder.issuer,
            calls=recorder.take_calls(),
        )
    )
    return _Transfer(work, tensor)


@contextlib.contextmanager
def hooked_transfers(recorder: Capture) -> Iterator[None]:
    """While entered, record transfers with their phases, and batches of them as such."""

    def in_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        recorder.record(Mark(BATCH))
        recorder.batch = [_phase_of(operation) for operation in reversed(operations)]
        works = batch(operations)
        recorder.batch = []
        recorder.record(Mark(END_BATCH))
        return works

    def in_order(operations: list[dist.P2POp], desc: str | None = None) -> Any:
        if len({operation.op for operation in operations}) != 1:
            return batched(operations, desc)
        return [_transferred(recorder, operation) for operation in operations]

    batch, batched = dist.batch_isend_irecv, original(f"{SCHEDULES}:_batch_p2p")
    with (
        patched("torch.distributed:batch_isend_irecv", in_batch),
        patched(f"{SCHEDULES}:_batch_p2p", in_order),
    ):
        yield
