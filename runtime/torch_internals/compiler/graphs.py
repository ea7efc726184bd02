"""Private names of torch's graph compiler above inductor, which trace a module and split its graph.

`torch.compile` has no public parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

# Settings of AOT autograd, and the context in which it traces.
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing

# Stands for an object that is no tensor, such as a device mesh.
from torch._library.fake_class_registry import FakeScriptObject
from torch.nn.modules import module

# Calls a module with other parameters than its own, tied ones included.
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module

# Traces below the modes of a simulation.
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "FakeScriptObject",
    "TracingContext",
    "disable_current_modes",
    "forward_hooks_of_all_modules",
    "forward_pre_hooks_of_all_modules",
    "functorch_config",
    "reparametrize_module",
    "tracing",
]


def forward_pre_hooks_of_all_modules() -> Mapping[int, Callable[..., Any]]:
    """Return what `register_module_forward_pre_hook` registered, which runs outside of a compiled graph."""
    return module._global_forward_pre_hooks


def forward_hooks_of_all_modules() -> Mapping[int, Callable[..., Any]]:
    """Return what `register_module_forward_hook` has registered."""
    return module._global_forward_hooks
