"""Recomputation within compiled modules: backends of `torch.compile` that keep a share of the activations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from legoai.runtime.torch_internals.compiler.dynamo import allow_backends, backend_of
from legoai.runtime.torch_internals.compiler.graphs import FakeScriptObject, functorch_config
from legoai.runtime.torch_internals.patching import original, patched

CompilerMethod = Literal["greedy", "knapsack"]

_SOLVERS: Final = {"greedy": "greedy", "knapsack": "dp"}

SIZE: Final = "torch._functorch.partitioners:_size_of"
"""The function by which the partitioner knows the bytes of a value."""


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

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While entered, let AOT autograd keep the budget; also of a graph that device meshes enter, as DTensors do."""
        settings = {"activation_memory_budget": self.amount, "activation_memory_budget_solver": _SOLVERS[self.by]}
        size = original(SIZE)

        def size_of(node: torch.fx.Node) -> int:
            return 0 if isinstance(node.meta.get("val"), FakeScriptObject) else size(node)

        with functorch_config.patch(settings), patched(SIZE, size_of):
            yield

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, mode: str = "default"
    ) -> Callable[..., Any]:
        """Compile a graph that dynamo has traced; the mode is that of `torch.compile`."""
        allow_backends(1 + compile_within.cache_info().currsize)  # blocks without a budget have one more
        options = {}
        if self.backend == "inductor":
            from legoai.runtime.torch_internals.compiler.regions import list_mode_options

            options["config_patches"] = list_mode_options(mode)
        with self.applied():
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
