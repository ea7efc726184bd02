"""Training without dropout: no mesh drops the same elements as one device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

_MODULES: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_OPERATORS: Final = (
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    torch.native_dropout,
)
_FUNCTIONS: Final = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def _place(function: Callable[..., Any], name: str) -> tuple[int, str]:
    return list(inspect.signature(function).parameters).index(name), name


_PROBABILITIES: Final[dict[Callable[..., Any], tuple[int, str]]] = {
    **dict.fromkeys(_OPERATORS, (1, "p")),
    **{function: _place(function, "p") for function in _FUNCTIONS},
    F.multi_head_attention_forward: _place(F.multi_head_attention_forward, "dropout_p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
}
"""Position and name of the argument that is the probability of dropping an element."""


def without_dropout(model: nn.Module, drawing: Iterable[str] = ()) -> nn.Module:
    """Disable dropout of a model, by modules and by functions.

    Args:
        model: changed in place, and so are the classes of its modules.
        drawing: paths of modules whose own forward draws random numbers.
    """
    for module in model.modules():
        if isinstance(module, _MODULES):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    for kind in dict.fromkeys(type(model.get_submodule(path)) for path in drawing):
        if not kind.__module__.startswith("torch."):
            _disable_in(kind)
    return model


def _disable_in(kind: type[nn.Module]) -> None:
    """Let the forward of a class of modules disable dropout.

    A mode around the whole training would not be active where a module is recomputed: torch leaves modes while it
    executes `backward`.
    """
    forward: Any = kind.forward
    if getattr(forward, "without_dropout", False):
        return

    @functools.wraps(forward)
    def without(*args: Any, **kwargs: Any) -> Any:
        with _WithoutDropout():
            return forward(*args, **kwargs)

    without.without_dropout = True  # type: ignore[attr-defined]
    kind.forward = without


class _WithoutDropout(TorchFunctionMode):
    """Disables, while active, dropout by functions of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        kwargs = kwargs or {}
        if func in _PROBABILITIES:
            place, name = _PROBABILITIES[func]
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        return func(*args, **kwargs)
