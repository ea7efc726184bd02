"""Results of actions: descriptions of their tensors, and fake tensors built from the descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from legoai.cost.pipelines.patterns import STORAGE, WORK, Result, UnequalError
from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.operators.results import tensor_like
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.segments import Instance
from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.wrapped import plain_local_part


@dataclass(slots=True)
class Tensors:
    """Describes the results of a rank's actions, and builds fake tensors from descriptions.

    Args:
        recorder: of the rank.
        like: a fake tensor from which others take their mode and device.
    """

    recorder: Capture
    like: torch.Tensor | None = None

    def number(self, value: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, if it has one."""
        return self.recorder.number_of(plain_local_part(value))

    def describe(self, value: Any, instance: Instance) -> Result | None:
        """Describe a result of an action.

        Raises:
            UnequalError: the action did not allocate the tensor.
        """
        if value is None:
            return None
        spec = value._spec if isinstance(value, DTensor) else None
        local, number = plain_local_part(value), self.number(value)
        if number is None or number not in instance.own[STORAGE]:
            raise UnequalError("an action returns a tensor that it did not allocate")
        work = self.recorder.pending.get(number)
        if work is not None and work not in instance.own[WORK]:
            raise UnequalError("an action returns the result of another action's collective")
        place, waits = instance.own[STORAGE].index(number), None if work is None else instance.own[WORK].index(work)
        return Result(tuple(local.shape), local.stride(), local.dtype, spec, place, waits)

    def fake(self, item: Result, own: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return a fake tensor on the storage that the records name.

        Args:
            item: its description.
            own: the numbers that the action defines.
        """
        recorder = self.recorder
        if self.like is None:
            before, recorder.paused = recorder.paused, True
            try:
                self.like = torch.empty(0, device=SIM)
            finally:
                recorder.paused = before
        assert isinstance(self.like, FakeTensor)
        tensor: torch.Tensor = tensor_like(self.like, item.shape, item.stride, item.dtype)
        number = own[STORAGE][item.place]
        recorder.adopt(tensor, number)
        if item.work is not None:
            recorder.pending[number] = own[WORK][item.work]
            tensor = AsyncCollectiveTensor(tensor)
        return tensor if item.spec is None else DTensor(tensor, item.spec, requires_grad=False)  # type: ignore[no-untyped-call]
