"""Last layer of a model, computed with the loss chunk by chunk, so that the logits of only one chunk exist at a time.

The gradients of a chunk are computed as soon as its loss is, so that its logits are gone before those of the next one.
Backward of the loss only passes them on: the layer's weights and its logits are not needed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from legoai.runtime.loss import LossFunction, check_whole_sequences, chunks_of, local_value, summed_cross_entropy
from legoai.runtime.wrapped import local_part

Forward = Callable[[torch.Tensor], torch.Tensor]


class OfLoss(nn.Module):
    """Calls a function as a module, by which profilers and the simulator tell the loss from the layer around it."""

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the function's result."""
        return function(*args)


OF_LOSS: Final = OfLoss()


def last_layer_cross_entropy(model: nn.Module, path: str, *, pieces: int) -> LossFunction:
    """Take a model's last layer out of its forward, and return the cross entropy that computes it in chunks.

    The model then returns what the layer is given, [batch, sequence, features]. Its loss, the mean over tokens in nats,
    calls the layer as a module, so that hooks that gather its parameters and lay out its input run once. The layer
    computes in the modes in which the model's last forward called it.

    Args:
        model: changed in place, after everything that wraps its modules; it returns what the layer does.
        path: of the layer, which maps each token by itself to logits.
        pieces: number of chunks of the sequence.

    Returns:
        A function of what the model returns and of targets, [batch, sequence]. Its loss has one backward pass.
    """
    layer = model.get_submodule(path)
    compute_in_any_mode: Forward = layer.forward
    passed = _pass_over(layer, within=model)

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        with passed.modes.autocast():
            return compute_in_any_mode(hidden)

    def forward(hidden: torch.Tensor, *, targets: torch.Tensor) -> torch.Tensor:
        check_whole_sequences(hidden)
        if not (torch.is_grad_enabled() and passed.modes.computes_gradients):
            with torch.no_grad():
                return torch.stack([local_value(loss) for loss, _ in _losses(compute, hidden, targets, pieces)]).sum()
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        loss: torch.Tensor = _LossInChunks.apply(compute, pieces, targets, hidden, *trained)  # type: ignore[no-untyped-call]
        return loss

    layer.forward = forward

    def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(layer, FSDPModule):
            layer.unshard()  # its own hook would keep the buffer of the all-gather until the next unit's
        loss: torch.Tensor = layer(hidden, targets=targets)
        return loss

    return loss_of


@dataclass(frozen=True, slots=True)
class _Modes:
    """Modes of a thread that a layer's products follow: gradients, and autocast of its device type."""

    device_type: str
    computes_gradients: bool
    casts_to: torch.dtype | None
    """None without autocast."""

    @staticmethod
    def now(device_type: str) -> _Modes:
        """Return the modes of the calling thread."""
        casts = torch.is_autocast_enabled(device_type)
        return _Modes(device_type, torch.is_grad_enabled(), torch.get_autocast_dtype(device_type) if casts else None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with this autocast; where it is the present one, that one goes on, with what it has cast."""
        if self.casts_to == _Modes.now(self.device_type).casts_to:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.casts_to, enabled=self.casts_to is not None)


class _PassedOver(nn.Module):
    """A module whose calls return their argument while it is passed over, without hooks; its attributes stay."""

    passed_over = False
    modes: _Modes
    """Those of the last call that was passed over."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.passed_over:
            return super().__call__(*args, **kwargs)
        given = next(iter((*args, *kwargs.values())))
        self.modes = _Modes.now(given.device.type)
        return given


def _pass_over(layer: nn.Module, *, within: nn.Module) -> _PassedOver:
    """Pass over a layer during a model's forward, and return it."""
    layer.__class__ = type(f"PassedOver{type(layer).__name__}", (_PassedOver, type(layer)), {})
    assert isinstance(layer, _PassedOver)

    def passing(value: bool) -> Callable[..., None]:
        return lambda *_: setattr(layer, "passed_over", value)

    within.register_forward_pre_hook(passing(True))
    within.register_forward_hook(passing(False), always_call=True)
    return layer


def _losses(
    compute: Forward, hidden: torch.Tensor, targets: torch.Tensor, pieces: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each chunk's share of the mean loss, and the chunk of the layer's input that it is computed from."""
    for start, size in chunks_of(targets, pieces):
        part = hidden.detach().narrow(1, start, size).requires_grad_(hidden.requires_grad)
        yield OF_LOSS(_share, compute(part), targets.narrow(1, start, size), targets.numel()), part


def _share(logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    return summed_cross_entropy(logits, targets) / count


class _LossInChunks(torch.autograd.Function):
    """The loss of a layer's input, whose forward computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any, compute: Forward, pieces: int, targets: torch.Tensor, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=targets.device)
        of_hidden, of_trained, start = None, list[torch.Tensor](), 0
        with torch.enable_grad():
            for loss, part in _losses(compute, hidden, targets, pieces):
                leaves = [part, *trained] if part.requires_grad else trained
                with torch.autocast(part.device.type, enabled=False):  # backward runs outside of it
                    found = list(torch.autograd.grad(loss, leaves))
                total = total + local_value(loss)
                if part.requires_grad:
                    of_part = found.pop(0)
                    if of_hidden is None:
                        of_hidden = _laid_out_as(of_part, torch.empty_like(local_part(hidden)))
                    local_part(of_hidden).narrow(1, start, part.shape[1]).copy_(local_part(of_part))
                    start += part.shape[1]
                of_trained = OF_LOSS(_summed, of_trained, found)
        ctx.gradients = of_hidden, *of_trained
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the loss of a last layer in chunks has one backward pass")
        found, ctx.gradients = ctx.gradients, None
        for item in found:
            if item is not None:
                local_part(item).mul_(gradient)
        return None, None, None, *found


def _summed(total: list[torch.Tensor], found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Add gradients to those of earlier pieces, in place; each is as large as the layer, and ``found`` is emptied."""
    for one in total:
        local_part(one).add_(local_part(found.pop(0)))
    return total or list(found)


def _laid_out_as(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """This rank's part as a tensor with the layout of another; a sequence in chunks is whole on each rank."""
    if isinstance(like, DTensor):
        return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
    return local
