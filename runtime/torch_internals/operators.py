"""Private names of torch's dispatcher, autograd and pytrees, which torch itself imports on start.

Each name is here without its underscore, with the reason why no public one serves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

# Classes of `torch.ops.aten.add.Tensor` and `torch.ops.aten.add`, for annotations and `isinstance`.
from torch._ops import OpOverload, OpOverloadPacket

# The function that calls autograd's engine; its frame separates Python code called from C++ from other code.
from torch.autograd.graph import _engine_run_backward as engine_run_backward

# Kernels that attention may use here: what `torch.nn.attention.sdpa_kernel` has set.
from torch.nn.attention import _cur_sdpa_kernel_backends as allowed_attention_kernels

# The documented way to observe operators below autograd; torch has it only under a private name.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

# Nested arguments and results; only torch's own pytrees support the outputs of Hugging Face's models.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

# Registers the simulated device's backend; the public functions beside it want one written in C++.
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register_python_backend

__all__ = [
    "DisableTorchDispatch",
    "DispatchKey",
    "DispatchKeySet",
    "ExcludeDispatchKeyGuard",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "adds_gradients_in_place",
    "all_operator_names",
    "allowed_attention_kernels",
    "attention_kernel_of",
    "autograd_sequence_number",
    "call_behind_backward",
    "called_from_python",
    "current_autograd_node",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "forget_data_pointer",
    "fused_adamw_",
    "has_kernel",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "make_subclass",
    "register_python_backend",
    "running_backward",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]  # fmt: skip

_FORWARDING: Final = (__name__, "torch._ops")
"""Modules whose frames only forward a call."""

DispatchKey: Final[Any] = torch._C.DispatchKey
"""Keys of autocast, which a kernel of autocast must exclude to reach the operator itself."""
DispatchKeySet: Final[Any] = torch._C.DispatchKeySet
ExcludeDispatchKeyGuard: Final[Any] = torch._C._ExcludeDispatchKeyGuard

DisableTorchDispatch: Final[Any] = torch._C._DisableTorchDispatch
"""Context in which tensors on the meta device are created below all modes, for a new fake tensor."""

all_operator_names: Final[Callable[[], list[str]]] = torch._C._dispatch_get_all_op_names
"""Names of all operators, among which the simulated device finds those with an autocast rule."""
has_kernel: Final[Callable[[str, str], bool]] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel on a dispatch key."""

attention_kernel_of: Final[Callable[..., int]] = torch._fused_sdp_choice
"""The value of the `SDPBackend` that attention would use for its arguments; the public functions answer for one kernel,
without PyTorch's order."""

make_subclass: Final[Any] = torch.Tensor._make_subclass
"""Makes a tensor subclass of a tensor; the constructor of fake tensors checks its arguments every time."""
forget_data_pointer: Final[Callable[[torch.Tensor], None]] = torch._C._set_throw_on_mutable_data_ptr
"""Makes reading a fake tensor's data an error, as the constructor of fake tensors does."""

autograd_sequence_number: Final[Callable[[], int]] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Sequence number of autograd's next node, by which a node in backward is attributed to its module."""
current_autograd_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
"""The node whose backward runs."""

foreach_copy_: Final[Callable[..., None]] = torch._foreach_copy_
"""Copies of FSDP into the buffer of a collective, to measure them alone."""
foreach_norm: Final[Callable[..., tuple[torch.Tensor, ...] | list[torch.Tensor]]] = (
    torch._foreach_norm
)  # documented as beta
foreach_mul_: Final[Callable[..., None]] = torch._foreach_mul_  # documented as beta
fused_adamw_: Final[Any] = torch._fused_adamw_
"""Implementation of `torch.optim.AdamW(fused=True)`, to measure it alone."""


_UNSHARED_TENSOR: Final = 4
"""References to a gradient that only autograd's buffer holds, as a dispatch mode counts them in its call of the sum."""
_UNSHARED_STORAGE: Final = 2
"""References to its storage; a view has its base's too."""


def adds_gradients_in_place(arguments: Sequence[Any]) -> bool:
    """Whether autograd would add a gradient to the sum of those before it in place, if no dispatch mode were active.

    It makes no new tensor where nothing else holds the first one or its storage
    (`torch/csrc/autograd/input_buffer.cpp`), but always does under a mode. To be called from a mode, for `aten.add`. A
    sum in the backward of a node in C++ looks the same where its first operand is new.

    Args:
        arguments: of the operator.
    """
    if len(arguments) != 2 or not running_backward() or torch.is_grad_enabled():
        return False
    first, second = arguments
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first._use_count() == _UNSHARED_TENSOR  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) == _UNSHARED_STORAGE
    )


def running_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def call_behind_backward(function: Callable[[], None]) -> None:
    """Let autograd call a function when the backward that runs is done; no public name does."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def called_from_python(*packages: str) -> bool:
    """Whether Python code calls the current operator, rather than an autograd node written in C++.

    The engine is called by one function of `torch.autograd.graph`, on this thread: operators of C++ nodes are
    dispatched directly after that frame; otherwise, the frames of a Python autograd function's backward, of a hook, or
    of a tensor subclass are in between.

    Args:
        packages: whose frames do not count as Python code.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith((*packages, *_FORWARDING)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code is not engine_run_backward.__code__
