"""Fragments of the optimizer's state that are copied to host memory and back while a traced step runs.

A fragment is the optimizer's state of a parameter. Scalars, such as Adam's count of steps, stay on the device. There is
no state before the first step, in which nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from legoai.runtime.offloading.host_copies import Arriving, HostCopies, OnHost
from legoai.runtime.offloading.offload import replace_part
from legoai.runtime.wrapped import local_part

_Values = list[tuple[dict[str, Any], str, Any]]
"""Values of a fragment: the state of its parameter, the name there, and the copy."""


class StateCopies:
    """Copies of fragments, by the names of their parameters; called by nodes of a step's graph.

    A step calls :meth:`begin` before each of its micro batches. Fragments leave in the first of these, and return in
    the last.
    """

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._optimizer: Optimizer | None = None
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._is_first = True
        self._is_last = False
        self._leaving: dict[str, _Values] = {}
        self._away: dict[str, _Values] = {}
        self._arriving: dict[str, _Values] = {}

    def begin(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, is_last: bool) -> None:
        """Set the optimizer, and whether the micro batch that begins is the last of its step."""
        self._optimizer, self._parameters = optimizer, parameters
        self._is_first, self._is_last = not self._away, is_last

    def state_to_host(self, parameter: str) -> None:
        """Begin to copy a fragment to the host, in the first micro batch of a step."""
        assert self._optimizer is not None, "`begin` comes before"
        if not self._is_first:
            return
        state = self._optimizer.state.get(self._parameters[parameter], {})
        self._leaving[parameter] = [
            (state, name, self._copies.to_host(local_part(value)))
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.ndim
        ]

    def free_state(self, parameter: str) -> None:
        """Wait for the end of the copy, and free the memory of a fragment."""
        for state, name, made in self._leaving.get(parameter, ()):
            assert isinstance(made, OnHost)
            self._copies.wait_on_host(made, made.tensor)
            replace_part(state, name, made.tensor)
        if parameter in self._leaving:
            self._away[parameter] = self._leaving.pop(parameter)

    def state_to_device(self, parameter: str) -> None:
        """Begin to copy a fragment back, in the last micro batch of a step."""
        if self._is_last:
            self._arriving[parameter] = [
                (state, name, self._copies.to_device(made)) for state, name, made in self._away.pop(parameter, ())
            ]

    def wait_for_state(self, parameter: str) -> None:
        """Wait for the end of the copy, and return a fragment to the optimizer."""
        for state, name, made in self._arriving.pop(parameter, ()):
            assert isinstance(made, Arriving)
            replace_part(state, name, self._copies.wait_on_device(made))
