"""Abstract tensor for layout propagation on `tp`: its layout, and its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

from legoai.specs.directives.base import PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.layouts import Layout, Partial, Replicated, Sharded
from legoai.specs.record import Record

T = TypeVar("T")

State = Literal["replicate", "shard", "partial", "unknown", "any"]


_USUAL_RANK: Final = 3
"""Dims of activations where that is not known: [samples, tokens, features]."""


class Source(Record):
    """The module that a tensor came from, and the rule that gave it its layout, if the module has a style."""

    path: str
    rule: PathRule[Any] | None


class Tensor(Record, kw_only=True):
    """Layout of one tensor, as far as it is known. Equality ignores the origin."""

    state: State
    """`any` is a tensor that fits every layout, such as a constant or a table of positions that is sliced as
    needed."""
    dim: int | None = None
    """Of a shard: the dim that is cut; negative counts from the last."""
    moved: bool = False
    """Whether dims were rearranged since; ``dim`` is the sharded dim before, and shapes are not comparable."""
    rank: int | None = None
    """Number of dims; of a tensor that was rearranged the number that it had before."""
    width: int | None = None
    """Length of the last dim, over all ranks."""
    wrapped: bool = False
    """Whether the tensor is a DTensor, which a style without an explicit input layout accepts as it is."""
    plain: bool = False
    """For `any`: whether it is known to be a plain tensor of several elements."""
    source: Source | None = None
    learned: bool = False
    """Whether it may be, or depend on, a parameter that is replicated on every rank."""
    shared: bool = False
    """For `any`: whether its gradient is summed over the ranks, so that it must meet the heads of a rank."""
    counted: tuple[int, ...] = ()
    """Dims, from the last (-1), along which it tells places by the length of what a forward was given; see
    `CountedPlaces`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self._layout() == other._layout()

    def __hash__(self) -> int:
        return hash(self._layout())

    def _layout(self) -> tuple[object, ...]:
        shape = self.dim, self.moved, self.rank, self.width
        return self.state, *shape, self.wrapped, self.plain, self.shared, self.counted

    @property
    def is_plain(self) -> bool:
        """Whether it is certainly a plain tensor of several elements."""
        return not self.wrapped and (self.plain or self.state not in ("any", "unknown"))

    @property
    def cut(self) -> int | None:
        """``dim`` counted from the front where the number of dims is known."""
        if self.dim is not None and self.dim < 0 and self.rank is not None and not self.moved:
            return self.dim + self.rank
        return self.dim

    @property
    def cut_from_last(self) -> int | None:
        """``dim`` counted from the last (-1), as operands are aligned; None where the number of dims is not known."""
        if self.dim is None or self.dim < 0:
            return self.dim
        return self.dim - self.rank if self.rank is not None and not self.moved else None

    def counted_over(self, piece: Tensor) -> bool:
        """Whether it tells places along the dim of which ``piece`` is a shard, where both are combined."""
        if piece.state != "shard" or piece.dim is None or piece.moved:
            return False
        dim = piece.dim if piece.dim < 0 else piece.dim - (piece.rank or _USUAL_RANK)
        return dim in self.counted

    @property
    def cuts_features(self) -> bool:
        """Whether the tensor is cut along its last dim, or was before it was rearranged."""
        if self.state != "shard":
            return False
        return self.dim == -1 or (self.rank is not None and self.dim == self.rank - 1)

    def describe(self) -> str:
        """The layout as a plan writes it."""
        return f"shard({self.dim})" if self.state == "shard" else self.state


UNKNOWN = Tensor(state="unknown")
DTENSOR = Tensor(state="unknown", wrapped=True)
"""A DTensor whose layout PyTorch chooses."""
ANY = Tensor(state="any")
PLAIN = Tensor(state="any", plain=True)
"""Like `ANY`, and known to be a plain tensor of several elements, which PyTorch does not accept beside a DTensor."""


def tensor_of(layout: Layout | Hole, like: Tensor, source: Source, *, wrapped: bool) -> Tensor:
    """A tensor in ``layout`` with the shape of ``like``; unknown where the layout is not decided."""
    if isinstance(layout, Hole):
        return UNKNOWN
    state: State = "replicate"
    dim = None
    if isinstance(layout, Sharded):
        state, dim = "shard", layout.dim
    elif isinstance(layout, Partial):
        state = "partial"
    return Tensor(
        state=state, dim=dim, moved=like.moved, rank=like.rank, width=like.width, wrapped=wrapped, source=source
    )


def cut_alike(one: Tensor, other: Tensor) -> bool | None:
    """Whether operands of a sum or a product are cut along one dim; None where that is not known.

    Operands are aligned at their last dims: dim 0 of [tokens, features] is dim 1 of [samples, tokens, features].
    """
    if one.moved or other.moved:
        return True if one.cut == other.cut else None
    first, second = one.cut_from_last, other.cut_from_last
    if first is not None and second is not None:
        return first == second
    if one.cut == other.cut:
        return True
    comparable = one.rank == other.rank and first is None and second is None
    return False if comparable and None not in (one.cut, other.cut) else None


def widest(tensors: Sequence[Tensor]) -> Tensor:
    """The tensor of the most dims, whose shape a sum or a product has; the last where that is not known."""
    last = tensors[-1]
    return max(reversed(tensors), key=lambda item: (item.rank or 0) if last.rank is not None else 0)


def agrees(tensor: Tensor, wanted: Layout | Hole) -> bool | None:
    """Whether the tensor has the layout ``wanted``; None where that is not known."""
    if tensor.state in ("unknown", "any") or isinstance(wanted, Hole):
        return None
    if isinstance(wanted, Replicated):
        return tensor.state == "replicate"
    if isinstance(wanted, Partial):
        return tensor.state == "partial"
    if tensor.state != "shard":
        return False
    wanted_dim = wanted.dim
    if wanted_dim < 0 and tensor.rank is not None:
        wanted_dim += tensor.rank
    if tensor.dim == wanted.dim or (tensor.cut == wanted_dim and not tensor.moved):
        return True
    comparable = tensor.cut is not None and (tensor.cut < 0) == (wanted_dim < 0)
    return False if comparable and not tensor.moved else None


def as_list(layouts: Layout | tuple[Layout | str, ...]) -> tuple[Layout | str, ...]:
    """One layout as a list of one."""
    return layouts if isinstance(layouts, tuple) else (layouts,)


def cut_dim(layout: Any, dims: int) -> int | None:
    """The dim that a placement cuts, counted from the first; None where it cuts none."""
    if not isinstance(layout, Sharded):
        return None
    return layout.dim if layout.dim >= 0 else layout.dim + dims


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a tensor as a plan writes it; None where it is not known or was rearranged."""
    if tensor.state == "replicate":
        return Replicated()
    return Sharded(dim=tensor.dim) if tensor.state == "shard" and tensor.dim is not None and not tensor.moved else None


def matched(arguments: Sequence[T], names: Sequence[str], unknown: T) -> Sequence[T]:
    """Return the arguments for the named inputs; ``unknown`` where they cannot be matched.

    A flow names a tensor only once if it is passed several times, and a module only once if it returned several
    tensors, which then count as one argument.
    """
    if len(arguments) == len(names):
        return arguments
    if len(arguments) == 1:
        return [arguments[0]] * len(names)
    distinct = list(dict.fromkeys(names))
    if len(arguments) == len(distinct):
        return [arguments[distinct.index(name)] for name in names]
    return [unknown] * len(names)
