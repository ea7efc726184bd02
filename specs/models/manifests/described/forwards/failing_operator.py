"""The operator at which a forward on the meta device fails."""

from __future__ import annotations

from typing import Any

import torch

from legoai.specs.models.torch_internals import OperatorMode, OpOverload


class FailingOperator(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes, while entered, the first operator that fails and that torch tags as one whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shaped_by: str | None = None
        """A function such as `bincount`, whose result has a shape that depends on values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            is_operator = isinstance(func, OpOverload)
            if is_operator and torch.Tag.dynamic_output_shape in func.tags and self.shaped_by is None:
                name = func._schema.name.partition("::")[2].strip("_0123456789")  # `_unique2`
                self.shaped_by = "nonzero" if name == "index" else name  # an index by a mask is one by these
            raise
