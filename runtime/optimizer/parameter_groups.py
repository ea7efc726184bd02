"""Parameter groups of an optimizer, by what its kernels can update together and by their constants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from legoai.runtime.initialize import plain_path


class ParameterGroups(list[dict[str, Any]]):
    """Groups for the constructor of any `torch.optim` class, each of which one fused or foreach call can handle.

    Such a call cannot mix plain tensors with DTensors, or DTensors of different meshes, as a model has them under
    tensor parallel (plain norms, sharded matrices) and under FSDP with tensor parallel (one-axis norms, two-axis
    matrices). As a list it holds all parameters, in order of first appearance; `take` and `rest` divide them further.
    Without parameters, as in a stage that is frozen, it holds an empty group: no group makes no optimizer.

    Args:
        named_parameters: in the order of the model; frozen ones are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._left = {plain_path(name): item for name, item in named_parameters if item.requires_grad}
        super().__init__(self.rest())

    def take(self, *names: str, **options: Any) -> list[dict[str, Any]]:
        """Return groups of the parameters with these names, which have options of their own.

        Args:
            names: of parameters, in which `*` matches one segment. Names that are missing are skipped, since a stage of
                a pipeline holds only some.
            options: of the optimizer, for these parameters alone.
        """
        patterns = [name.split(".") for name in names]
        taken = [name for name in self._left if any(_matches(name.split("."), pattern) for pattern in patterns)]
        return [{**group, **options} for group in _groups(self._left.pop(name) for name in taken) or [{"params": []}]]

    def rest(self) -> list[dict[str, Any]]:
        """Return groups of the remaining parameters."""
        return _groups(self._left.values()) or [{"params": []}]


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(
        wanted in ("*", segment) for segment, wanted in zip(name, pattern, strict=True)
    )


def _groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": members} for members in groups.values()]
