"""Unsharded gradients that the actions of a pipeline's stages leave for later actions.

Where FSDP reduces gradients in another dtype than they are computed in, half a backward leaves the weight gradients at
their parameters, and a later action adds them to the sums. Some of the actions before an executed one were replayed,
and so left no gradients. The gradients that they would have left are therefore put in place before the action is
executed, without being recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from legoai.cost.pipelines.patterns import KEPT, STORAGE, Gradient, Own, Result, UnequalError
from legoai.cost.pipelines.tensors import Tensors
from legoai.cost.trace.segments import Instance
from legoai.runtime.torch_internals.distributed.units import FSDPParam, summed_in_other_type, unsharded_gradients


@dataclass(slots=True)
class Gradients:
    """The unsharded gradients of a rank's stages, as all executed and replayed actions leave them.

    Args:
        tensors: of the rank.
        parameters: by stage, the parameters whose gradients are summed in another dtype than they are computed in.
    """

    tensors: Tensors
    parameters: dict[int, list[FSDPParam]] = field(default_factory=dict)
    _there: dict[int, list[tuple[Result, Own] | None]] = field(default_factory=dict)
    """By stage and parameter: description of the gradient, and the numbers defined by the action that computed it."""

    def watch(self, stage: int, model: nn.Module) -> None:
        """Track the gradients of a stage, where they are summed in another dtype."""
        parameters = summed_in_other_type(model)
        if parameters:
            self.parameters[stage] = parameters

    def add_executed(self, stage: int, instance: Instance) -> tuple[Gradient, ...]:
        """Return the gradient that an executed action left at each parameter.

        Raises:
            UnequalError: gradients cannot be identified by the storages that the action allocated.
        """
        found: list[Gradient] = []
        there: list[tuple[Result, Own] | None] = []
        for value, before in self._places(stage):
            number = None if value is None else self.tensors.number(value)
            if number == (None if before is None else _number(before)):
                found.append(KEPT)
                there.append(before)
                continue
            result = self.tensors.describe(value, instance)
            found.append(result)
            there.append(None if result is None else (result, instance.own))
        numbers = [_number(item) for item in there if item is not None]
        if len(set(numbers)) < len(numbers) or any(item is not None and item[0].work is not None for item in there):
            raise UnequalError("gradients share a storage, or are still being reduced")
        self._there[stage] = there
        return tuple(found)

    def any_left(self, stage: int) -> bool:
        """Whether a stage has any unsharded gradients."""
        return any(item is not None for item in self._there.get(stage, ()))

    def add_replayed(self, stage: int, left: Sequence[Gradient], own: Own) -> None:
        """Note the gradients that a replayed action left."""
        before = self._there.get(stage, [None] * len(left))
        self._there[stage] = [
            known if item == KEPT else None if item is None else (item, own)
            for item, known in zip(left, before, strict=True)
        ]

    def restore(self, stage: int) -> None:
        """Set or clear the gradients of a stage, as all actions before the next one would have left them."""
        if stage not in self._there:
            return
        recorder = self.tensors.recorder
        start, before, recorder.paused = len(recorder.records), recorder.paused, True
        try:
            for (owner, name), item in zip(self._attributes(stage), self._there[stage], strict=True):
                value = getattr(owner, name)
                if (None if value is None else self.tensors.number(value)) != (None if item is None else _number(item)):
                    del value
                    setattr(owner, name, None)  # frees the present gradient before another tensor takes its number
                    setattr(owner, name, None if item is None else self.tensors.fake(*item))
        finally:
            recorder.paused = before
            del recorder.records[start:]

    def _places(self, stage: int) -> Iterator[tuple[torch.Tensor | None, tuple[Result, Own] | None]]:
        """Yield for each parameter the present gradient, and the one before the last executed action."""
        attributes = self._attributes(stage)
        before = self._there.get(stage, [None] * len(attributes))
        for (owner, name), known in zip(attributes, before, strict=True):
            yield getattr(owner, name), known

    def _attributes(self, stage: int) -> list[tuple[object, str]]:
        return unsharded_gradients(self.parameters[stage]) if stage in self.parameters else []


def _number(item: tuple[Result, Own]) -> int:
    result, own = item
    return own[STORAGE][result.place]
