"""Unsharded gradients that the actions of a pipeline's stages leave for later ones.

Where FSDP sums gradients in another type than they are computed in, half a backward leaves those of the weights at
their parameters, and a later action takes them into the sums. What an action finds there has to be what all actions
before it leave, of which some were not run: it is put there before the action runs, and nothing of that is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from legoai.cost.pipelines.patterns import KEPT, STORAGE, Gradient, Own, Result, UnequalError
from legoai.cost.pipelines.tensors import Tensors
from legoai.cost.trace.segments import Instance
from legoai.runtime.torch_internals.units import FSDPParam, summed_in_other_type, unsharded_gradients


@dataclass(slots=True)
class Gradients:
    """The unsharded gradients of a rank's stages as all actions leave them, whether they were run or not.

    Args:
        tensors: of the rank.
        parameters: by stage, those whose gradients are summed in another type than they are computed in.
    """

    tensors: Tensors
    parameters: dict[int, list[FSDPParam]] = field(default_factory=dict)
    _there: dict[int, list[tuple[Result, Own] | None]] = field(default_factory=dict)
    """By stage, what describes each gradient that is there, and the numbers of what the action made that made it."""

    def watch(self, stage: int, model: nn.Module) -> None:
        """Keep track of the gradients of a stage, where they are summed in another type."""
        parameters = summed_in_other_type(model)
        if parameters:
            self.parameters[stage] = parameters

    def left(self, stage: int, instance: Instance) -> tuple[Gradient, ...]:
        """Return what an action that was run left at each place.

        Raises:
            UnequalError: what it left cannot be told from what it made.
        """
        found: list[Gradient] = []
        there: list[tuple[Result, Own] | None] = []
        for value, before in self._places(stage):
            number = None if value is None else self.tensors.number(value)
            if number == (None if before is None else _number(before)):
                found.append(KEPT)
                there.append(before)
                continue
            result = self.tensors.described(value, instance)
            found.append(result)
            there.append(None if result is None else (result, instance.own))
        numbers = [_number(item) for item in there if item is not None]
        if len(set(numbers)) < len(numbers) or any(item is not None and item[0].work is not None for item in there):
            raise UnequalError("gradients share a storage, or are not there yet")
        self._there[stage] = there
        return tuple(found)

    def are_there(self, stage: int) -> bool:
        """Whether any are there of a stage."""
        return any(item is not None for item in self._there.get(stage, ()))

    def wrote(self, stage: int, left: Sequence[Gradient], own: Own) -> None:
        """Take what an action left that was not run."""
        before = self._there.get(stage, [None] * len(left))
        self._there[stage] = [
            known if item == KEPT else None if item is None else (item, own)
            for item, known in zip(left, before, strict=True)
        ]

    def put_back(self, stage: int) -> None:
        """Let the gradients of a stage be there, or not, as they are if all actions before the next one are run."""
        if stage not in self._there:
            return
        recorder = self.tensors.recorder
        start, before, recorder.paused = len(recorder.records), recorder.paused, True
        try:
            for (owner, name), item in zip(self._attributes(stage), self._there[stage], strict=True):
                value = getattr(owner, name)
                if (None if value is None else self.tensors.number(value)) != (None if item is None else _number(item)):
                    del value
                    setattr(owner, name, None)  # ends what is there before another tensor takes its number
                    setattr(owner, name, None if item is None else self.tensors.made(*item))
        finally:
            recorder.paused = before
            del recorder.records[start:]

    def _places(self, stage: int) -> Iterator[tuple[torch.Tensor | None, tuple[Result, Own] | None]]:
        """Yield for each place what is there, and what was there before the last action that was run."""
        attributes = self._attributes(stage)
        before = self._there.get(stage, [None] * len(attributes))
        for (owner, name), known in zip(attributes, before, strict=True):
            yield getattr(owner, name), known

    def _attributes(self, stage: int) -> list[tuple[object, str]]:
        return unsharded_gradients(self.parameters[stage]) if stage in self.parameters else []


def _number(item: tuple[Result, Own]) -> int:
    result, own = item
    return own[STORAGE][result.place]
