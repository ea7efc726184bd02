"""Recomputation within compiled modules: backends of `torch.compile` that keep a share of the activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from legoai.runtime.torch_internals.dynamo import backend_of
from legoai.runtime.torch_internals.graphs import functorch_config

CompilerMethod = Literal["greedy", "knapsack"]

_SOLVERS: Final = {"greedy": "greedy", "knapsack": "dp"}

_OF_MESHES: Final = "unsafe_treat_script_objects_as_zero_size"
"""Setting by which the device meshes that enter a graph over DTensors, which hold no tensors, have no size; without it
PyTorch 2.13 refuses to choose."""


@dataclass(frozen=True, slots=True)
class BackendWithin:
    """Backend whose partitioner chooses, operator by operator, what forward saves within a budget.

    It minimises the operations that backward computes again, by PyTorch's own count. The setting is torch's
    `activation_memory_budget`, which is one for a process; here each compiled module has its own.

    Attributes:
        amount: 0.0 saves nothing but what enters the module, 1.0 what the compiler would save by default.
        by: how operators are chosen.
        backend: that generates kernels.
    """

    amount: float
    by: CompilerMethod
    backend: str

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of AOT autograd while a module is compiled."""
        found = {"activation_memory_budget": self.amount, "activation_memory_budget_solver": _SOLVERS[self.by]}
        return {**found, _OF_MESHES: True} if hasattr(functorch_config, _OF_MESHES) else found

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, mode: str = "default"
    ) -> Callable[..., Any]:
        """Compile a graph that dynamo has traced; the mode is that of `torch.compile`."""
        options = {}
        if self.backend == "inductor":
            from legoai.runtime.torch_internals.regions import list_mode_options

            options["config_patches"] = list_mode_options(mode)
        with functorch_config.patch(self.settings):
            compiled: Callable[..., Any] = backend_of(self.backend)(graph, inputs, **options)
        return compiled


@functools.cache
def compile_within(amount: float, *, by: CompilerMethod, backend: str = "inductor") -> BackendWithin:
    """Return a `backend` for `torch.compile` that saves activations within a budget, and recomputes the others.

    Equal arguments return the same backend: dynamo compiles equal modules once for each backend.

    Args:
        amount: a share of what the compiler would save by default, beyond what enters the module; 0.0 to 1.0.
        by: `greedy` takes operators by operations per byte, `knapsack` the best set up to rounding of sizes.
        backend: `inductor` or `aot_eager`.
    """
    return BackendWithin(amount, by, backend)
