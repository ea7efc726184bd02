"""Conversion of linear layers to float8."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

from torch import nn

from legoai.runtime.errors import RunError, RunErrorCode


def convert_to_float8(module: nn.Module, paths: Sequence[str], *, recipe: str) -> None:
    """Let linear layers inside of a module compute in float8 with dynamic scaling, by torchao.

    Their parameters stay as they are stored, and are drawn as before.

    Args:
        module: what holds the layers.
        paths: of the layers, from ``module``.
        recipe: a name of `torchao.float8.Float8LinearRecipeName`.

    Raises:
        RunError: torchao is not installed.
    """
    try:
        from torchao.float8 import (  # type: ignore[import-not-found]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError as error:
        raise RunError(
            RunErrorCode.NO_FLOAT8,
            f"the plan computes in float8, which needs torchao, and importing torchao.float8 fails: {error}",
            help="install torchao, or take the float8 rules out of the plan",
        ) from error
    before = {path: module.get_submodule(path) for path in paths}
    convert_to_float8_training(
        module,
        module_filter_fn=lambda _, path: path in before,
        config=Float8LinearConfig.from_recipe_name(recipe),
    )
    for path, layer in before.items():
        _draw_as_before(module.get_submodule(path), layer)


def _draw_as_before(converted: nn.Module, layer: nn.Module) -> None:
    """Give a layer the method that draws the other's parameters, and what that method reads."""
    for name, value in vars(layer).items():
        converted.__dict__.setdefault(name, value)
    initialise = getattr(type(layer), "reset_parameters", None)
    if initialise is not None:
        object.__setattr__(converted, "reset_parameters", MethodType(initialise, converted))
