"""Autocast on the simulated device: the dtype in which each operator runs.

PyTorch has autocast rules for its own device types, and none for a Python backend. Here the simulated device gets the
rules of the device type that it simulates, on its own autocast dispatch key. The dispatcher states which operators have
a rule; the rules themselves are listed in `aten/src/ATen/autocast_mode.h`, for the CPU in `autocast_mode.cpp`. A cast
is an operator like any other, so its time and memory are recorded. Casts of parameters are cached until the outermost
context ends, as PyTorch does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from legoai.cost.simulated.device import SIM, Kind, SimulationError
from legoai.runtime.torch_internals.operators import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    OpOverload,
    all_operator_names,
    has_kernel,
)
from legoai.runtime.torch_internals.patching import patched

Rule: TypeAlias = Literal["lower", "fp32", "set_dtype", "append_dtype", "promote", "banned"]
"""`lower` casts to autocast's dtype, `promote` to the widest among the arguments; two ask for an fp32 result."""

_LOWER: Final[dict[Kind, frozenset[str]]] = {
    "cuda": frozenset(
        {
            "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
            "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d",
            "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
            "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell",
            "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell",
            "rnn_tanh_cell", "scaled_dot_product_attention",
        }
    ),
    "cpu": frozenset(
        {
            "_addmm_activation", "_convolution.deprecated", "_native_multi_head_attention", "addbmm", "addmm",
            "baddbmm", "bmm", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding",
            "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linalg_vecdot",
            "linear", "matmul", "mkldnn_rnn_layer", "mm", "prelu", "scaled_dot_product_attention",
        }
    ),
}  # fmt: skip
_PROMOTE: Final[dict[Kind, frozenset[str]]] = {
    "cuda": frozenset(
        {
            "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
            "tensordot", "vdot",
        }
    ),
    "cpu": frozenset({"cat", "index_copy", "index_copy.dimname", "stack"}),
}  # fmt: skip
_SET_DTYPE: Final = frozenset(
    {
        "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm",
        "log_softmax.int", "prod", "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList",
    }
)  # fmt: skip
_APPEND_DTYPE: Final = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Operators without a dtype argument, and the overload with one that is called instead."""

_KEY: Final[dict[Kind, str]] = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_SIM_KEY: Final = "AutocastPrivateUse1"


def rules(kind: Kind) -> dict[str, Rule]:
    """Return autocast's rule for each operator of `aten` on a kind of device, by name and overload.

    >>> rules("cuda")["mm"], rules("cuda")["rms_norm"], rules("cpu").get("rms_norm")
    ('lower', 'fp32', None)
    """
    names = (
        name.removeprefix("aten::")
        for name in all_operator_names()
        if name.startswith("aten::") and has_kernel(name, _KEY[kind])
    )
    return {name: _rule(name, kind) for name in sorted(names)}


def _rule(name: str, kind: Kind) -> Rule:
    if name in _LOWER[kind]:
        return "lower"
    if name in _PROMOTE[kind]:
        return "promote"
    if kind == "cuda":
        if name in _SET_DTYPE:
            return "set_dtype"
        if name in _APPEND_DTYPE:
            return "append_dtype"
        if name == "binary_cross_entropy":
            return "banned"
    return "fp32"


@contextlib.contextmanager
def autocast_rules(kind: Kind) -> Iterator[None]:
    """Let `torch.autocast` of the simulated device follow the rules of the given kind."""
    casts = _Casts()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    others = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, _SIM_KEY)  # type: ignore[no-untyped-call]
    clear = torch.clear_autocast_cache
    for name, rule in rules(kind).items():
        packet, _, overload = name.partition(".")
        function: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _kernel(function, rule, casts), _SIM_KEY)  # type: ignore[no-untyped-call]

    def clear_all() -> None:
        casts.kept.clear()
        clear()

    try:
        with patched("torch:clear_autocast_cache", clear_all):
            yield
    finally:
        casts.kept.clear()
        others._destroy()  # type: ignore[no-untyped-call]
        library._destroy()  # type: ignore[no-untyped-call]


def may_autocast(model: nn.Module) -> bool:
    """Whether a model's forward may enter `torch.autocast` by itself: no built-in model and no module of torch does.

    The rules take time to install, and a capture is simulated often.
    """
    known = ("builtins", "legoai.", "torch.", "torchao.")
    classes = {base for module in model.modules() for base in type(module).__mro__}
    return any(not base.__module__.startswith(known) for base in classes)


class _Casts:
    """Cache of the casts of fp32 parameters to autocast's dtype, within one context."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument with its floating-point tensors on this device cast to a dtype; fp64 stays as it is."""
        if isinstance(value, list | tuple):
            return [self.cast(item, dtype) for item in value]
        if not isinstance(value, torch.Tensor) or not _eligible(value) or value.dtype == dtype:
            return value
        keeps = (
            dtype == torch.get_autocast_dtype(SIM)
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        # The parameter is stored beside its cast, so that no other tensor can reuse its `id`.
        if id(value) not in self.kept:
            self.kept[id(value)] = value, value.to(dtype)
        return self.kept[id(value)][1]


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == SIM
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _kernel(function: OpOverload, rule: Rule, casts: _Casts) -> Callable[..., Any]:
    """Return the function that runs instead of an operator while autocast is on."""
    excluded = DispatchKeySet(getattr(DispatchKey, _SIM_KEY))
    target = function
    dtype_place = next((i for i, item in enumerate(function._schema.arguments) if item.name == "dtype"), None)
    if rule == "append_dtype":
        name = function._schema.name.partition("::")[2]
        target = getattr(getattr(torch.ops.aten, name), _APPEND_DTYPE[f"{name}.{function._overloadname}"])

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(excluded):
            if rule == "banned":
                raise SimulationError(f"{function} does not run under autocast on a GPU")
            if rule in ("set_dtype", "append_dtype"):
                return asked(args, kwargs)
            dtype = torch.float32
            if rule == "lower":
                dtype = torch.get_autocast_dtype(SIM)
            elif rule == "promote":
                dtype = _widest((args, tuple(kwargs.values())))
            # From the last to the first, as the compiler of PyTorch's builds evaluates arguments: backward depends on
            # it.
            named = {name: casts.cast(item, dtype) for name, item in reversed(kwargs.items())}
            return target(*[casts.cast(item, dtype) for item in reversed(args)][::-1], **named)

    def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with an fp32 result, if the first argument can be cast and the caller specifies no dtype."""
        if args and _eligible(args[0]):
            if rule == "append_dtype":
                return target(*args, **kwargs, dtype=torch.float32)
            given = args[dtype_place] if dtype_place is not None and dtype_place < len(args) else kwargs.get("dtype")
            if given is None:
                if dtype_place is not None and dtype_place < len(args):
                    args = (*args[:dtype_place], torch.float32, *args[dtype_place + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
        return target(*args, **kwargs)

    return call


def _widest(value: Any) -> torch.dtype:
    """Return fp32 if a tensor among the arguments is, else autocast's dtype.

    PyTorch refuses other mixtures of half precision; operators refuse them here.
    """
    if isinstance(value, torch.Tensor):
        return torch.float32 if _eligible(value) and value.dtype == torch.float32 else torch.get_autocast_dtype(SIM)
    found = [_widest(item) for item in value] if isinstance(value, list | tuple) else []
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype(SIM)
