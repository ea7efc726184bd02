"""Parameters for which a model's forward asks a sparse gradient."""

from __future__ import annotations

from typing import Any

from torch import nn

from legoai.specs.models.manifests.described.recorders.functions import tensors_in
from legoai.specs.models.torch_internals import OperatorMode, OpOverload, storage_of


class SparseGradients(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes, while entered, the trained parameters that operators get with `sparse = True`, as `F.embedding` may."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._trained = {storage_of(item): name for name, item in model.named_parameters() if item.requires_grad}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and "embedding" in func._schema.name:
            names = (parameter.name for parameter in func._schema.arguments)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            found = [self._trained.get(storage_of(tensor)) for tensor in tensors_in(given.get("weight"))]
            if given.get("sparse"):
                self.names += [name for name in found if name is not None and name not in self.names]
        return func(*args, **kwargs)
