"""Layouts that single operations of a forward leave, by those in which their operands arrive."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final, Literal, Protocol

from legoai.dsl.analysis.layouts.tensors import ANY, DTENSOR, PLAIN, UNKNOWN, Tensor, cut_alike, widest
from legoai.specs.record import replace

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Step

MismatchKind = Literal[
    "arrives",
    "unpaired",
    "piece",
    "summand",
    "mixed",
    "heads",
    "attends",
    "fused",
    "over_shard",
    "norm_dim",
    "norm_heads",
    "shared",
    "plain",
    "drawn",
    "counted",
    "result",
]

_LARGE: Final = frozenset(("arange", "linspace", "zeros", "ones", "full", "empty", "outer", "polar", "rand", "randn"))
"""Functions that create tensors, usually of more than one element."""

_OF_SHAPES: Final = ("view_as", "reshape_as", "expand_as")
"""Functions that use only the shape of their second argument."""

_BY_INDEX: Final = ("getitem", "index_select", "gather", "take", "take_along_dim")
"""Functions of a tensor and an index, which is not combined with the elements."""


class Find(Protocol):
    """Notes a mismatch at a module."""

    def __call__(self, kind: MismatchKind, path: str, got: Tensor, *, other: Tensor | None = None) -> Tensor:
        """Return the layout of the result in case of a conflict."""


def operation(path: str, step: Step, taken: list[Tensor], find: Find) -> Tensor:
    """Return the layout of an operation's result, and whether it depends on full parameters.

    A replicated parameter gets the gradient of what the rank computes with it. Where it meets a shard of a tensor, that
    is the gradient of the shard only.

    Args:
        path: of the module whose forward contains the operation.
        step: the operation.
        taken: layouts of its operands.
        find: called with conflicts between operands.
    """
    told: list[MismatchKind] = []

    def noting(kind: MismatchKind, path: str, got: Tensor, *, other: Tensor | None = None) -> Tensor:
        told.append(kind)
        return find(kind, path, got, other=other)

    of_shapes = step.op == "cast" or step.name in _OF_SHAPES
    if of_shapes:
        taken = [*taken[:1], *(replace(item, learned=False) for item in taken[1:] if not item.wrapped)]
    result = _computed(path, step, taken, noting)
    shared = next((item for item in taken if item.shared), None)
    if shared is not None and not told and not of_shapes and result.state in ("any", "replicate"):
        if result.state == "replicate":
            return find("shared", path, shared)
        return replace(result, shared=True, source=shared.source)
    learned = [item for item in taken if item.learned and item.state not in ("shard", "partial")]
    if told or step.name.startswith("new_") or step.name.endswith("_like"):
        return result
    # An unknown tensor may be a shard itself, except in attention to sharded heads, whose operands are all known.
    whole = [item for item in learned if not item.wrapped and (item.state != "unknown" or step.op == "attention")]
    piece = next((item for item in taken if item.state == "shard" and not item.wrapped), None)
    if piece is not None and whole and not of_shapes:
        return find("piece", path, piece, other=whole[0])
    if not of_shapes and step.op != "attention" and step.name not in _BY_INDEX:
        for item, other in product(taken, repeat=2):
            if other.counted_over(item):
                return find("counted", path, item, other=other)
    if not learned or result.state == "shard":
        return result
    return replace(result, learned=True, source=result.source or learned[0].source)


def _computed(path: str, step: Step, taken: list[Tensor], find: Find) -> Tensor:
    known = [item for item in taken if item.state != "any"]
    if not known:
        return _constant(step, taken)
    whole = next((item for item in taken if item.wrapped), None)
    if whole is not None and step.op != "cast":
        beside = next((item for item in taken if item.is_plain), None)
        if beside is not None and step.name not in _OF_SHAPES:
            return find("plain", path, whole, other=beside)
        if step.op == "attention":
            return find("attends", path, whole)
    if any(item.state == "unknown" for item in known):
        return replace(DTENSOR, source=whole.source) if whole is not None else UNKNOWN
    if step.op in ("add", "mul"):
        return _pointwise(path, step, known, find)
    if step.op == "attention":
        return _attention(path, known, find)
    if step.op in ("activation", "softmax", "normalize"):
        return _nonlinear(path, step, known[0], find)
    if step.op == "cast":
        return known[0]
    if step.op == "reshape":
        return _reshape(path, step, known, find)
    if all(item.state == "replicate" for item in known):
        return replace(known[0], moved=True, wrapped=any(item.wrapped for item in known))
    sums = step.op == "reduce" and step.name in ("sum", "mean") and known[0].state == "partial"
    return replace(known[0], moved=True) if sums else UNKNOWN


def _constant(step: Step, taken: list[Tensor]) -> Tensor:
    """A constant, or what is computed from constants; the dims of positions are counted."""
    made = PLAIN if step.name in _LARGE or any(item.plain for item in taken) else ANY
    if step.name == "arange":
        return replace(made, rank=1)
    [first, *others] = taken or [ANY]
    if step.name == "unsqueeze" and first.rank is not None and not others:
        return replace(made, rank=first.rank + 1)
    return made


def _pointwise(path: str, step: Step, known: list[Tensor], find: Find) -> Tensor:
    """A sum or a product."""
    last = known[-1]
    moved = any(item.moved for item in known)
    wrapped = any(item.wrapped for item in known)
    if step.name in ("square", "pow", "sqrt", "rsqrt"):
        return _nonlinear(path, step, last, find)
    states = {item.state for item in known}
    if states == {"partial"} and step.op == "mul" and len(known) > 1:
        return find("summand", path, known[0], other=last)
    if len(states) == 1:
        alike = [cut_alike(known[0], item) for item in known]
        if all(alike):
            return replace(widest(known), moved=moved, wrapped=wrapped)
        return _mixed(path, known, find) if not moved and None not in alike else UNKNOWN
    if states == {"partial", "replicate"}:
        if step.op == "mul":
            summand = next(item for item in known if item.state == "partial")
            return replace(summand, moved=moved, rank=widest(known).rank)
        return _mixed(path, known, find) if not moved else UNKNOWN
    widths = {item.width for item in known}
    same_shape = not moved and len(widths) == 1 and (step.op == "add" or None not in widths)
    return _mixed(path, known, find) if same_shape else UNKNOWN


def _mixed(path: str, known: list[Tensor], find: Find) -> Tensor:
    first = known[0]
    other = next(item for item in known if item.state != first.state or not cut_alike(first, item))
    kind: MismatchKind = "summand" if "partial" in (first.state, other.state) else "mixed"
    return find(kind, path, first, other=other)


def _nonlinear(path: str, step: Step, got: Tensor, find: Find) -> Tensor:
    if got.state == "partial" and step.name != "dropout":
        return find("summand", path, got)
    if got.state == "shard" and step.op != "activation" and got.cuts_features and not got.moved:
        return UNKNOWN
    return replace(got, width=None) if step.name == "glu" else got


def _attention(path: str, known: list[Tensor], find: Find) -> Tensor:
    """Scaled dot-product attention; queries, keys and values are its first arguments."""
    query, others = known[0], known[1:3]
    summands = [item for item in known[:3] if item.state == "partial"]
    if summands:
        return find("summand", path, summands[0])
    whole = [item for item in known[:3] if item.state == "replicate"]
    by_heads = [item for item in known[:3] if item.cuts_features]
    if len(known) >= 3 and whole and by_heads:
        return find("heads", path, by_heads[0], other=whole[0])
    pieces = [item for item in known[:3] if item.state == "shard" and not item.cuts_features and item.dim == 1]
    if pieces:
        return find("heads", path, pieces[0])
    alike = all((item.state, item.dim) == (query.state, query.dim) for item in others)
    return replace(query, moved=True) if alike else UNKNOWN


def _reshape(path: str, step: Step, known: list[Tensor], find: Find) -> Tensor:
    first = known[0]
    if step.name in ("contiguous", "clone", "detach"):
        return first
    if step.name in ("chunk", "split", "tensor_split") and first.cuts_features and not first.moved:
        return find("fused", path, first)
    if any((item.state, item.dim) != (first.state, first.dim) for item in known):
        return UNKNOWN
    return replace(first, moved=True)
