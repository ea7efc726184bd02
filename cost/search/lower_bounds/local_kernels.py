"""Lower bound of the time of linear layers and attention at their local shapes on a rank.

A tensor-parallel style splits a layer's rows, its columns or the tokens, or nothing: the fastest of the four counts, so
that the bound does not depend on which style the plan takes. Times are those of the device's own kernel models.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from legoai.cost.kernels.kinds import Attention, KindAndForm, Product
from legoai.cost.kernels.roofline import MovementCurve
from legoai.cost.kernels.work import element_bytes
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import Profile

_BYTES: Final = {rate: element_bytes(rate) for rate in ("bf16", "fp16", "fp32", "tf32", "fp64")}
"""Bytes of an element by the rate of its products; those of other rates are cast, and not bounded here."""

_PADDED: Final = 8
"""Elements of half precision to a multiple of which inductor pads a dim of a product."""
_IMPLEMENTATIONS: Final = {"flash": ("flash2",), "efficient": ("efficient",), "cudnn": ("cudnn",)}
"""Implementations of attention that a plan's kernel may run."""
_EVERY: Final = ("flash2", "efficient", "cudnn")


class LinearShape(NamedTuple):
    """Weight of a linear layer: features out and in."""

    rows: int
    columns: int


class AttentionShape(NamedTuple):
    """Heads of an attention, those of keys and values, and their widths: of queries and keys, and of values."""

    heads: int
    key_heads: int
    width: int
    value_width: int


class ExpertsShape(NamedTuple):
    """Experts of a layer: elements of the weights through which a token goes."""

    elements: int


class AttentionPiece(NamedTuple):
    """Numbers of queries and keys of a sequence between which one kernel attends, and whether with a causal mask."""

    queries: int
    keys: int
    causal: bool


class Pass(NamedTuple):
    """Seconds of a layer's forward and of its backward.

    Of its backward those are named by themselves that the gradients of inputs take at least, and those of weights.
    """

    forward: float
    backward: float
    of_inputs: float = 0.0
    of_weights: float = 0.0


@dataclass(slots=True)
class LocalKernels:
    """Least seconds of layers on one device, each computed once.

    Args:
        profile: of the device.
        rates: names of the rates at which the plan may multiply.
        attention_kernels: that the plan may use.
    """

    profile: Profile
    rates: Collection[str]
    attention_kernels: frozenset[str]
    _known: dict[tuple[object, ...], Pass | None] = field(default_factory=dict)

    def linear(self, shape: LinearShape, tokens: int, parts: int) -> Pass | None:
        """Of a linear layer; None where the profile has no rate for it.

        Args:
            shape: of the whole weight.
            tokens: of one micro batch on one rank.
            parts: ranks among which a style may split it.
        """
        key = shape, tokens, parts
        if key not in self._known:
            self._known[key] = self._linear(shape, tokens, parts)
        return self._known[key]

    def attention(
        self, shape: AttentionShape, sequences: int, pieces: Sequence[AttentionPiece], parts: int
    ) -> Pass | None:
        """Of a fused attention, one kernel after another; None where the profile has no rate for it.

        Args:
            shape: of the whole attention.
            sequences: of one micro batch.
            pieces: what one rank computes of each sequence.
            parts: ranks among which a style may split the heads.
        """
        key = shape, sequences, tuple(pieces), parts
        if key not in self._known:
            found = [self._attention(shape, sequences, piece, parts) for piece in pieces]
            known = [one for one in found if one is not None]
            forward, backward = sum(one.forward for one in known), sum(one.backward for one in known)
            whole = Pass(forward, backward, of_inputs=backward)
            self._known[key] = whole if len(known) == len(found) else None
        return self._known[key]

    def _linear(self, shape: LinearShape, tokens: int, parts: int) -> Pass | None:
        rows, columns = shape
        cut = {(tokens, rows, columns)}
        if parts > 1:
            cut |= {
                (tokens, -(-rows // parts), columns),
                (tokens, rows, -(-columns // parts)),
                (-(-tokens // parts), rows, columns),
            }
        rates = [rate for rate in self.rates if rate in _BYTES and rate in self.profile.products]
        if not rates or len(rates) < len([rate for rate in self.rates if rate in self.profile.products]):
            return None
        found = []
        for m, n, k in cut:
            for rate in rates:
                of_inputs = self._product(m, k, n, rate)
                of_weights = min(self._product(n, k, m, rate), self._product(k, n, m, rate))
                found.append(Pass(self._product(m, n, k, rate), of_inputs + of_weights, of_inputs, of_weights))
        return least_of(found)

    def _product(self, m: int, n: int, k: int, rate: str) -> float:
        """Least seconds of a product, which inductor may pad to dims of multiples of 8."""
        least = self._exactly(m, n, k, rate)
        if m % _PADDED or n % _PADDED or k % _PADDED:
            rows, columns, inner = (-(-size // _PADDED) * _PADDED for size in (m, n, k))
            least = min(least, self._exactly(rows, columns, inner, rate))
        return least

    def _exactly(self, m: int, n: int, k: int, rate: str) -> float:
        size = _BYTES[rate] * (m * k + k * n + m * n)
        seconds, _ = seconds_of(Product(batch=1, m=m, n=n, k=k, rate=rate, bytes=size), self.profile)
        return seconds + kernel_gap(self.profile)

    def _attention(self, shape: AttentionShape, sequences: int, piece: AttentionPiece, parts: int) -> Pass | None:
        rates = {rate for _, _, rate in self.profile.attention if rate in self.rates and rate in _BYTES}
        if not rates:
            return None
        found, gap = [], kernel_gap(self.profile)
        implementations = {one for name in self.attention_kernels for one in _IMPLEMENTATIONS.get(name, _EVERY)}
        for implementation in sorted(implementations):
            for rate in rates:
                for key_heads in {shape.heads, shape.key_heads}:  # those of keys may have been repeated
                    local = AttentionShape(-(-shape.heads // parts), -(-key_heads // parts), *shape[2:])
                    forward = _fused(local, sequences, piece, rate, implementation, backward=False)
                    backward = _fused(local, sequences, piece, rate, implementation, backward=True)
                    both = (seconds_of(one, self.profile)[0] + gap for one in (forward, backward))
                    found.append(Pass(*both))
        return least_of(found)


def _fused(
    shape: AttentionShape, sequences: int, piece: AttentionPiece, rate: str, implementation: str, *, backward: bool
) -> Attention:
    heads, key_heads, width, value_width = shape
    features = (width + value_width) * (heads * piece.queries + key_heads * piece.keys)
    elements = sequences * features * (2 if backward else 1)
    return Attention(
        batch=sequences, heads=heads, key_heads=key_heads, queries=piece.queries, keys=piece.keys, head_dim=width,
        value_dim=value_width, causal=piece.causal, backward=backward, rate=rate, implementation=implementation,
        bytes=_BYTES[rate] * elements,
    )  # fmt: skip


def kernel_gap(profile: Profile) -> float:
    """Seconds between two kernels that are queued."""
    gap = profile.constants.get("kernel_gap_seconds")
    return 0.0 if gap is None else gap.value


def least_moved(kinds: Iterable[KindAndForm], bytes: float, profile: Profile) -> float:
    """Least seconds in which any number of kernels of these kinds and forms move so many bytes."""
    return bytes / max(_fastest(profile.moving(kind, form)[0]) for kind, form in kinds)


@functools.lru_cache(256)
def _fastest(curve: MovementCurve) -> float:
    return curve.fastest


def least_of(found: Sequence[Pass]) -> Pass | None:
    """The least of each part of several ways to run a layer; None where there is none."""
    return Pass(*map(min, zip(*found, strict=True))) if found else None
