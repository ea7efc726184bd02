"""Operators that draw random numbers, a watch for them, and the seeds of their generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from legoai.specs.models.torch_internals import OperatorMode, OpOverload


def is_random(operator: OpOverload, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether a call of the operator draws from the random generator. Attention does so only where it drops."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    parameters = operator._schema.arguments
    place = next((index for index, item in enumerate(parameters) if item.name == "dropout_p"), None)
    if place is None:
        return True
    given = arguments[place] if place < len(arguments) else options.get("dropout_p", parameters[place].default_value)
    return bool(given)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the host and of a device.

    `torch.manual_seed` seeds those of all kinds of devices, and formats the stack for each kind that is not in use:
    0.3 to 0.7 ms on a CPU, by the depth of the stack, where this takes 5 µs. That adds up over a model's parameters.

    Args:
        seed: of 64 bits.
        device: which operators draw on; on the host, no other generator is seeded.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)


class RandomOperators(OperatorMode):
    """Calls a function, while active, for each operator that draws random numbers."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and is_random(func, args, kwargs):
            self._note()
        return func(*args, **kwargs)
