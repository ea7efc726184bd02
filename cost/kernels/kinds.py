"""Kinds of a kernel's work: matrix products, attention, bytes to be moved, and several one after another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

MovementKind = Literal[
    "elementwise", "reduction", "normalisation", "softmax", "embedding", "copy", "fill", "optimizer", "loss"
]

MovementForm = Literal["", "backward", "long", "long backward", "unvectorised", "fused", "foreach"]
"""Kernels of one kind that run at another rate.

`backward` is that of a normalisation, of a softmax and of an embedding, which reduce over other dimensions than their
forward. `long` is a softmax of rows that no multiprocessor holds, as over a vocabulary. `unvectorised` is what an
elementwise kernel or a copy is that loads single elements: of operands that are broadcast, or of several dtypes.
`fused` is a group that inductor compiled. `foreach` is a kernel over a list of tensors, as of FSDP and of optimizers.
"""

KindAndForm: TypeAlias = tuple[MovementKind, MovementForm]

ALIGNED: Final = 16
"""Bytes at multiples of which the rows of a product's matrices begin where its kernels are the fastest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``batch`` products of an ``m`` by ``k`` with a ``k`` by ``n`` matrix.

    ``rate`` names the peak rate of the catalogue that applies (``bf16``, ``tf32``, ``fp8``, …). Of a product by groups,
    such as experts, ``batch`` is their number, and ``group`` the mean of the lengths in which they differ: of ``m``,
    ``n`` or ``k``; it is 0 of others. The rows of its operands and of its result begin at multiples of
    ``operands_aligned`` and ``result_aligned`` bytes, 16 standing for more too.
    """

    batch: int
    m: int
    n: int
    k: int
    rate: str
    bytes: int
    group: int = 0
    operands_aligned: int = ALIGNED
    result_aligned: int = ALIGNED

    @property
    def grouped(self) -> bool:
        """Whether it is one of several groups, whose lengths differ."""
        return self.group > 0

    @property
    def flops(self) -> float:
        """Floating-point operations, two for a multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scaled dot-product attention of ``heads`` query heads over ``key_heads`` key and value heads.

    ``flops`` counts two products forward and five backward, halved where a causal mask lets half be skipped.
    ``implementation`` is `flash2`, `flash3`, `cudnn` or `efficient`.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool
    backward: bool
    rate: str
    implementation: str
    bytes: int

    @property
    def flops(self) -> float:
        """Floating-point operations that are not skipped.

        Forward: `QKᵀ` (2·q·k·d) and `PV` (2·q·k·v) for each head. Backward: recomputed `QKᵀ`, `dP = dO Vᵀ`,
        `dV = Pᵀ dO`, `dQ = dS K`, `dK = dSᵀ Q`, that is three products of width d and two of width v: 2.5 times the
        forward where d = v, which is the convention of the FlashAttention papers.
        """
        widths = 3 * self.head_dim + 2 * self.value_dim if self.backward else self.head_dim + self.value_dim
        whole = 2.0 * self.batch * self.heads * self.queries * self.keys * widths
        return whole * _causal_share(self.queries, self.keys) if self.causal else whole

    @property
    def blocks(self) -> int:
        """Blocks that run side by side: 128 queries of one head; in the backward, which sums up over queries, keys."""
        return self.batch * self.heads * math.ceil((self.keys if self.backward else self.queries) / 128)

    @property
    def length(self) -> int:
        """Number of keys, in the backward of queries, that a block goes through."""
        return self.queries if self.backward else self.keys


def _causal_share(queries: int, keys: int) -> float:
    """The share of the scores that a causal mask, aligned to the last key, leaves; 1/2 for long square ones."""
    if queries > keys:
        return 0.5
    return 1 - queries / (2 * keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Bytes read and written once, with little arithmetic."""

    kind: MovementKind
    bytes: int
    form: MovementForm = ""
    rate: str = "fp32"
    flops: float = 0.0

    @property
    def name(self) -> str:
        """Kind and form: `softmax backward`."""
        return f"{self.kind} {self.form}".strip()


@dataclass(frozen=True, slots=True)
class Consecutive:
    """Kernels that one operator launches one after another, as the backward of a convolution for its gradients."""

    parts: tuple[Product | Movement, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)


Work: TypeAlias = Product | Attention | Movement | Consecutive
