"""Operations of a forward on a part of the features of a linear layer, or over all of them, whatever their shape then.

Views of a layer's output share its storage, in which the features of a token are next to each other. The strides of a
view therefore tell which of its dims run through features, and which of these is the outermost one: the one that
contiguous pieces of the features cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from legoai.specs.models.manifests.feature_use import UsedFeatures
from legoai.specs.models.manifests.manifest import StepOp
from legoai.specs.models.torch_internals import storage_of

_SAME_FEATURES: Final = ("add", "mul", "activation", "cast")
"""Operations whose result has the features of an argument of its shape."""
OVER_DIMS: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(["mean", "amax", "amin", "max", "min", "argmax", "argmin"], (1, None)),
    **dict.fromkeys(["std", "var", "prod", "logsumexp"], (1, None)),
    **dict.fromkeys(["softmax", "log_softmax", "cumsum", "flip"], (1, None)),
    **dict.fromkeys(["sort", "argsort"], (1, -1)),
    "norm": (2, None),
    "normalize": (2, 1),
    "roll": (2, None),
    "topk": (2, -1),
}
"""Functions that combine elements along dims: the place of these among the arguments, and their default."""


def dims_over(
    where: tuple[int, int | None], rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[int]:
    """Return the dims of a function's first argument over which it combines elements; none where they are no numbers.

    Args:
        where: the place of the dims among the arguments, and their default; None is all.
        rank: dims of the first argument.
        args: by position.
        kwargs: by name.
    """
    place, default = where
    by_name = [kwargs[name] for name in ("dim", "dims", "axis") if name in kwargs]
    dims = by_name[0] if by_name else args[place] if len(args) > place else default
    over = range(rank) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    return [dim % rank for dim in over] if rank and all(type(dim) is int for dim in over) else []


class FeaturesOf:
    """Where the features of linear layers are in the tensors of one forward of a model."""

    def __init__(self) -> None:
        self._widths: dict[int, int] = {}
        """Features of a token, by the storage that has all of them."""

    def made_by_layer(self, result: Any) -> None:
        """Note the output of a linear layer."""
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.is_contiguous():
            self._widths[storage_of(result)] = result.shape[-1]

    def made_by(self, op: StepOp, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Note the results of an operation that have the features of an argument."""
        if op not in _SAME_FEATURES:
            return
        for result in made:
            like = next((item for item in given if item.shape == result.shape and self.whole(item) is not None), None)
            if like is not None and result.is_contiguous():
                self._widths.setdefault(storage_of(result), result.shape[-1])

    def whole(self, tensor: torch.Tensor) -> int | None:
        """The key of the storage of a tensor that has all features of a layer as its last dim; None of others."""
        width = self._widths.get(storage_of(tensor))
        if width is None or tensor.dim() < 2 or tensor.shape[-1] != width or not tensor.is_contiguous():
            return None
        return storage_of(tensor)

    def used(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[torch.Tensor]
    ) -> list[tuple[int, UsedFeatures]]:
        """Return how a function uses features of layers, each with the key of its storage.

        Args:
            name: of the function.
            args: by position.
            kwargs: by name.
            made: its results.
        """
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if given is None or not self._spans(given):
            return []
        if name in ("matmul", "bmm"):
            return [(storage_of(item), "each") for item in args] if self._in_batches(args) else []
        use = self._used(name, given, args, kwargs, made)
        return [] if use is None else [use]

    def _used(
        self,
        name: str,
        given: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Sequence[torch.Tensor],
    ) -> tuple[int, UsedFeatures] | None:
        if name == "glu":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return self._part([given.narrow(dim, 0, given.shape[dim] // 2)])
        if name in OVER_DIMS:
            return self._over(given, dims_over(OVER_DIMS[name], given.dim(), args, kwargs))
        if name in ("layer_norm", "rms_norm"):
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
            return self._over(given, range(given.dim() - len(shape), given.dim()))
        return self._part(made)

    def _in_batches(self, matrices: Sequence[Any]) -> bool:
        """Whether the outermost dim through the features, such as that of heads, counts the matrices of both."""
        if not all(isinstance(item, torch.Tensor) and self._spans(item) for item in matrices):
            return False
        places = {(item.dim(), found[0]) for item in matrices if (found := self._outermost(item)) is not None}
        return all(0 <= place < rank - 2 for rank, place in places) and len(places) == 1

    def _part(self, made: Sequence[torch.Tensor]) -> tuple[int, UsedFeatures] | None:
        part = next((item for item in made if self._outermost(item) is not None and not self._spans(item)), None)
        return (storage_of(part), "part") if part is not None else None

    def _over(self, tensor: torch.Tensor, dims: Sequence[int]) -> tuple[int, UsedFeatures] | None:
        outermost = self._outermost(tensor)
        return (storage_of(tensor), "all") if outermost is not None and outermost[0] in dims else None

    def _spans(self, tensor: torch.Tensor) -> bool:
        outermost = self._outermost(tensor)
        return outermost is not None and outermost[1] >= self._widths[storage_of(tensor)]

    def _outermost(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The outermost of a view's dims through the features, with the features that it spans; None of other tensors.

        Without such a dim the view has one of the features.
        """
        width = self._widths.get(storage_of(tensor))
        if width is None or not tensor.numel():
            return None
        inside = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and 0 < tensor.stride(dim) < width]
        if not inside:
            return -1, 1
        dim = max(inside, key=tensor.stride)
        return dim, tensor.stride(dim) * tensor.shape[dim]
