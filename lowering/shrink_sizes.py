"""Sizes of a shrunken model: constraints on them, and the arithmetic that preserves divisibility."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from legoai.specs.models.manifests.manifest import Manifest

VOCABULARY: Final = 256
"""Tokens are bytes."""

LARGEST_AS_IT_IS: Final = 20_000_000
"""Most parameters of a model that cannot be shrunk and that a few processes can train."""

PATCHES: Final = 2
"""Patches along the side of an image."""

HEAD_DIM: Final = 8
LATENT: Final = 12

_HEADS_OF_GROUP: Final = 16
_EXPERTS: Final = 4


class CannotShrinkError(ValueError):
    """A plan cannot be shrunk; the message gives the reason, and a remedy."""


def check_size(manifest: Manifest, message: str) -> None:
    """Check that a model can be trained as it is.

    Raises:
        CannotShrinkError: it cannot; with the message.
    """
    if manifest.parameter_count > LARGEST_AS_IT_IS:
        raise CannotShrinkError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Constraints on the smaller model: number of blocks, sequence lengths, and the axes' sizes in both plans."""

    kept: tuple[int, ...] | None
    """Indices of the blocks that are kept; None where the number of blocks is unchanged."""
    seq_len: int | None
    """None where the model reads no text."""
    tp: int
    """Ranks among which heads are divided, including `cp` where it attends by heads."""
    tp_now: int
    ep: int
    ep_now: int
    double: bool = False
    """Whether the smaller model computes in fp64."""

    @property
    def blocks(self) -> int | None:
        """Number of blocks; None where it is unchanged."""
        return None if self.kept is None else len(self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions that all decoders have."""

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 0
    """0 where there is no text."""


def shape_of(whole: Shape, sizes: Sizes) -> Shape:
    """Return the smaller dimensions of a model with the query heads per key/value head and the ratios of the widths."""
    group = min(max(1, whole.heads // whole.kv_heads), _HEADS_OF_GROUP)
    kv_heads = cut(whole.kv_heads, sizes, most=2)
    heads = kv_heads * group
    # Multiples of 8, which grouped kernels require, also for each rank's share.
    dim = heads * (HEAD_DIM if heads <= 8 or heads % 2 else HEAD_DIM // 2)
    hidden = multiple(dim * whole.hidden / whole.dim, 8 * sizes.tp_now)
    return Shape(dim=dim, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=vocabulary_of(whole.vocab, sizes))


def vocabulary_of(whole: int, sizes: Sizes) -> int:
    """Return a small vocabulary that `tp` divides if it divided the original one."""
    return VOCABULARY + (whole % sizes.tp != 0)


def cut(whole: int, sizes: Sizes, *, most: int) -> int:
    """Return a number with as many per rank of `tp` as before, at most ``most``; indivisible by `tp` if it was."""
    each, rest = divmod(whole, sizes.tp)
    return min(whole, most) if rest else min(each, most) * sizes.tp_now


def experts_of(whole: int, sizes: Sizes) -> int:
    """Return a number of experts such that a token does not visit all of them, and that `ep` divides."""
    return min(whole, multiple(_EXPERTS, sizes.ep_now))


def multiple(value: float, of: int) -> int:
    """Return the next multiple of a number, at least one."""
    return of * max(1, math.ceil(value / of))
