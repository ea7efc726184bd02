"""Placeholders for the modules of other stages, in a model whose forward calls all modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from legoai.runtime.errors import RunError, RunErrorCode


class Placeholder(nn.Module):
    """A module without parameters that replaces one of another stage.

    Args:
        crossing: of the stage.
        later: whether the other stage is a later one.
        in_front: whether its output is the input of the stage's first module.
        result: shape of its output, where that is laid out otherwise than the input of the stage.
    """

    def __init__(
        self, crossing: Crossing, *, later: bool, in_front: bool = False, result: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self._crossing = crossing
        self._later = later
        self._in_front = in_front
        self._result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input from the previous stage, or record the output for the next one and pass it on."""
        if not self._later:
            return self._crossing.arrived if self._in_front else self._crossing.as_if_whole(self._result)
        first = next(iter((*args, *kwargs.values())), None)
        if self._crossing.left is None:
            self._crossing.left = first
        return first


class Crossing:
    """The tensors that enter and leave one stage during one forward, and its forward.

    The model's own forward runs on token ids of zero, which only provide the shape: their embedding is dropped, since
    the module before the stage returns the received input.

    Args:
        model: the stage.
        number: of the stage, from 0.
        count: of stages.
        tokens: shape of the token ids of one micro batch on this rank.
        dtype: of what enters and leaves; None where that has one dtype anyway.
    """

    def __init__(
        self, model: nn.Module, number: int, count: int, tokens: tuple[int, int], dtype: torch.dtype | None = None
    ) -> None:
        self.number = number
        self.count = count
        self.tokens = tokens
        self.dtype = dtype
        self.arrived: torch.Tensor | None = None
        self.left: torch.Tensor | None = None
        self._forward: Callable[..., torch.Tensor] = model.forward

    def forward(self, given: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Run the stage: token ids [B, T] on the first, otherwise the previous stage's output; to logits on the last.

        Raises:
            RunError: the model computes something between its modules that placeholders do not support.
        """
        first = self.number == 0
        tokens = given if first else torch.zeros(self.tokens, dtype=torch.int64, device=given.device)
        self.arrived, self.left = None if first else given, None
        if not first and given.requires_grad:
            # What is sent back has to be contiguous, as what is sent forward.
            given.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        try:
            output = self._forward(tokens, **keywords)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if self.left is None:
                raise
            raise self._misfit(f"after its last module: {error}") from error
        arrived, left = self.arrived, self.left
        self.arrived = self.left = None
        if self.number == self.count - 1:
            return output
        if not isinstance(left, torch.Tensor) or (arrived is not None and left.shape != arrived.shape):
            raise self._misfit("and gives the next stage no tensor of the shape that it got itself")
        # The next stage receives into memory of the declared dtype, whatever the last operator before it returns.
        return left.to(self.dtype).contiguous()

    def as_if_whole(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The received input; zeros where that is a shard of the sequence, in the full one's shape, or of `shape`.

        Models count positions, and build masks, by the length of their embedding's output.

        Args:
            shape: of what is returned, where it is laid out otherwise than the received input.
        """
        arrived = self.arrived
        assert arrived is not None, "the first stage has no stage in front"
        if shape is not None:
            return arrived.new_zeros(()).expand(shape)
        if arrived.dim() == 1 or arrived.shape[1] == self.tokens[1] or arrived.shape[0] != self.tokens[0]:
            return arrived  # whole; a program tells shapes where shards are laid out otherwise than [batch, length, …]
        return arrived.new_zeros(()).expand(arrived.shape[0], self.tokens[1], *arrived.shape[2:])

    def check(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the stage's first module: its input must be the received one, not a part of it."""
        first = next(iter((*args, *kwargs.values())), None)
        if self.arrived is None:
            return  # the module is recomputed, in the backward pass
        if not isinstance(first, torch.Tensor) or first.shape != self.arrived.shape:
            raise self._misfit("and its first module does not take what arrived from the stage before")

    def _misfit(self, what: str) -> RunError:
        return RunError(
            RunErrorCode.STAGES,
            f"the forward of stage {self.number} of {self.count} fails {what}",
            help="a module at a split point has to take and return one tensor; split elsewhere, or without a pipeline",
        )


def put_placeholders(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    number: int,
    tokens: tuple[int, int],
    *,
    results: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None = None,
) -> None:
    """Make a stage of a full model: replace the modules of other stages by placeholders.

    Args:
        model: changed in place.
        stages: the modules of each stage, in execution order; modules in several stages stay in each.
        number: of the stage, from 0.
        tokens: shape of the token ids of one micro batch on this rank.
        results: shapes of modules that return something laid out otherwise than the tensor between stages.
        dtype: of the tensor between stages; None where that has one dtype anyway.
    """
    crossing = Crossing(model, number, len(stages), tokens, dtype)
    kept = frozenset(stages[number])
    before = [path for path in stages[number - 1] if path not in kept] if number else []
    for index, stage in enumerate(stages):
        for path in stage:
            if path not in kept:
                in_front = index == number - 1 and path == before[-1]
                made = Placeholder(crossing, later=index > number, in_front=in_front, result=results.get(path))
                model.set_submodule(path, made)
    if number > 0:
        model.get_submodule(stages[number][0]).register_forward_pre_hook(crossing.check, with_kwargs=True)
    model.forward = crossing.forward


def is_held(module: nn.Module) -> bool:
    """Whether a module is on this stage."""
    return not isinstance(module, Placeholder)


def held_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module that are on this stage, by name."""
    return ((name, child) for name, child in module.named_children() if is_held(child))
