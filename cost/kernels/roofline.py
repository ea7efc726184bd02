"""Roofline model: time of a kernel by peak rates and the efficiency of its class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legoai.cost.kernels.kinds import Attention, Product
from legoai.cost.measurements.interpolation import Measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductCurve:
    """Efficiency of matrix products of one rate on one device.

    ``seconds = floor + quantised operations / (peak · efficiency)``, bounded below by the bytes over the memory's
    bandwidth. That is the time in a short run at the highest clock. In a long one the power limit lowers the clock, and
    with it the rate of every product that is not bound by memory, by ``sustained / efficiency``.

    A product is cut into tiles of the output; a multiprocessor works on one at a time, so that the last wave may leave
    some idle. For each size of tile the operations are multiplied by ``⌈tiles/processors⌉ · processors / tiles`` and
    by the padding of the edges, and divided by the tile's own rate; the best size counts, as in a library that
    chooses. Where there are fewer tiles than processors, the sum over `k` is split in pieces of no less than
    ``split`` elements.

    Attributes:
        peak: floating-point operations per second of the datasheet.
        bandwidth: bytes per second of the memory.
        efficiency: share of the peak that large products reach for a short time.
        sustained: share of the peak that they reach for long, under the power limit; None where it is not known.
        floor: seconds of the smallest product.
        processors: multiprocessors, or the cores of a cpu.
        tiles: rows, columns and relative rate of each size of tile.
        split: elements of `k` below which a sum is not split.
        more_of_group: elements by which each group of a product by groups is longer in effect.
    """

    peak: float
    bandwidth: float
    efficiency: float
    sustained: float | None
    floor: float
    processors: int
    tiles: tuple[tuple[int, int, float], ...]
    split: int
    more_of_group: float = 0.0

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ProductCurve:
        """The curve that a profile's JSON holds.

        Raises:
            KeyError: a field is missing.
            ValueError: a rate is not positive.
        """
        fields = {name: document[name] for name in cls.__slots__ if name != "more_of_group"}
        fields["more_of_group"] = document.get("more_of_group", 0.0)
        fields["tiles"] = tuple((int(rows), int(columns), float(rate)) for rows, columns, rate in fields["tiles"])
        curve = cls(**fields)
        if min(curve.peak, curve.bandwidth, curve.efficiency, curve.processors) <= 0 or not curve.tiles:
            raise ValueError("a product's rates are positive")
        return curve

    def seconds(self, product: Product) -> float:
        """Time of ``product`` in a short run."""
        return self._at(product, 1.0)

    def slowed(self, product: Product) -> float:
        """The time of ``product`` in a long run over that in a short one: what the power limit costs it, at least 1."""
        if self.sustained is None or self.sustained >= self.efficiency:
            return 1.0
        return self._at(product, self.sustained / self.efficiency) / self._at(product, 1.0)

    def _at(self, product: Product, clock: float) -> float:
        compute = product.flops * self.waste(product) / (self.peak * self.efficiency * clock)
        return self.floor + max(compute, product.bytes / self.bandwidth)

    def limit(self, product: Product) -> float:
        """Return the minimum time of a product between others; 0 where it is not known."""
        return 0.0 if self.sustained is None else product.flops / (self.peak * self.sustained)

    def waste(self, product: Product) -> float:
        """Operations of the best tile, padding and idle processors included, over those of the product."""
        longer = 1.0 + self.more_of_group / product.group if product.grouped else 1.0
        return longer * min(self._waste(product, *tile) for tile in self.tiles)

    def _waste(self, product: Product, rows: int, columns: int, rate: float) -> float:
        down, across = math.ceil(product.m / rows), math.ceil(product.n / columns)
        tiles = product.batch * down * across
        padding = (down * rows / product.m) * (across * columns / product.n)
        if tiles < self.processors:
            pieces = min(self.processors // tiles, max(1, product.k // self.split))
            tiles *= pieces
        waves = math.ceil(tiles / self.processors)
        return padding * waves * self.processors / (tiles * rate)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCurve:
    """Efficiency of one implementation of attention in one direction.

    ``1/efficiency = (1/utilisation) / limit``, and ``1/utilisation = sequence/length + tail``. A block computes 128
    rows of one head: of queries in the forward, of keys in the backward. ``length`` is the number of keys (in the
    backward queries) that it goes through; a short one pays for the block's start and end. ``tail`` is what idle
    multiprocessors cost at the end. With a causal mask the blocks are of unequal lengths, and it is
    ``1 + units/blocks``, ``blocks`` being for each multiprocessor. Without one they are equal and run in waves:
    ``⌈blocks⌉ / blocks``.

    ``limits`` holds, for a width of the heads and whether the mask is causal, limit, sequence and units.
    """

    peak: float
    bandwidth: float
    floor: float
    processors: int
    limits: Mapping[tuple[int, bool], tuple[float, float, float]]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> AttentionCurve:
        """The curve that a profile's JSON holds, its keys being such as `128 causal` and `64 full`.

        Raises:
            KeyError: a field is missing.
            ValueError: a key or a rate that makes no sense.
        """
        limits = {}
        for key, (limit, sequence, units) in document["limits"].items():
            width, mask = key.split()
            if mask not in ("causal", "full") or limit <= 0:
                raise ValueError(f"an attention curve for `{key}` makes no sense")
            limits[int(width), mask == "causal"] = (float(limit), float(sequence), float(units))
        if not limits:
            raise ValueError("an attention curve without widths")
        return cls(
            peak=document["peak"],
            bandwidth=document["bandwidth"],
            floor=document["floor"],
            processors=document["processors"],
            limits=limits,
        )

    def seconds(self, attention: Attention) -> float:
        """Time of ``attention``."""
        compute = attention.flops / (self.peak * self.efficiency(attention))
        return self.floor + max(compute, attention.bytes / self.bandwidth)

    def efficiency(self, attention: Attention) -> float:
        """Share of the peak, of the operations that a mask leaves."""
        limit, _, _ = self._limits_of(attention)
        return limit * self.utilisation(attention)

    def utilisation(self, attention: Attention) -> float:
        """Efficiency over that of the longest sequences and infinitely many blocks."""
        _, sequence, units = self._limits_of(attention)
        blocks = attention.blocks / self.processors
        tail = 1 + units / blocks if attention.causal else _waves(blocks, _splits(blocks, attention))
        return 1 / (sequence / max(1, attention.length) + tail)

    def _limits_of(self, attention: Attention) -> tuple[float, float, float]:
        return self._limits((attention.head_dim + attention.value_dim) / 2, attention.causal)

    def _limits(self, width: float, causal: bool) -> tuple[float, float, float]:
        """Between two measured widths in proportion to the logarithm, beyond them as at the last."""
        known = sorted(w for w, mask in self.limits if mask == causal)
        if not known:
            return self._limits(width, not causal)
        below = max((w for w in known if w <= width), default=known[0])
        above = min((w for w in known if w >= width), default=known[-1])
        first, second = self.limits[below, causal], self.limits[above, causal]
        share = 0.0 if below == above else math.log(width / below) / math.log(above / below)
        a, b, c = (one + share * (two - one) for one, two in zip(first, second, strict=True))
        return a, b, c


def _waves(blocks: float, splits: int) -> float:
    """Time of equal blocks over that without idle multiprocessors."""
    return math.ceil(blocks * splits) / (blocks * splits)


def _splits(blocks: float, attention: Attention) -> int:
    """Pieces in which the keys are processed side by side.

    Only FlashAttention-2's forward has them: the fewest with 0.85 of the best use of the multiprocessors, where less
    than 0.8 of these would have a block (`num_splits_heuristic` of its source, and of torch's copy).
    """
    if attention.implementation != "flash2" or attention.backward or blocks >= 0.8:
        return 1
    waste = [_waves(blocks, splits) for splits in range(1, min(128, math.ceil(attention.keys / 128)) + 1)]
    enough = min(waste) / 0.85
    return next(splits for splits, value in enumerate(waste, 1) if value <= enough)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MovementCurve:
    """Time over bytes of the kernels that only move them: three segments, straight on a log-log scale.

    The dissertation's section 4.4: `exp(a₁ + b₁ log x)` below ``first``, `exp(a₂ + b₂ log x)` below ``second``, and
    `exp(a₃ + log x)` above, continuous. What decides is ``start`` (seconds at ``first``) and the two slopes.

    Where only the bandwidth is known, ``first`` and ``second`` are 0 and seconds are ``floor + bytes / rate``. Where a
    device was measured itself, ``measured`` is interpolated between its sizes, and the line is for what is beyond them.
    """

    rate: float
    floor: float
    first: float = 0.0
    second: float = 0.0
    slope_first: float = 0.0
    slope_second: float = 1.0
    measured: Measured | None = None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> MovementCurve:
        """The curve that a profile's JSON holds.

        Raises:
            KeyError: a field is missing.
            ValueError: no positive rate, or segments out of order.
        """
        numbers = [name for name in cls.__slots__ if name != "measured" and name in document]
        fields: dict[str, Any] = {name: float(document[name]) for name in numbers}
        curve = cls(**fields, measured=Measured.read(document.get("points", ())))
        if curve.rate <= 0 or not 0 <= curve.first <= curve.second:
            raise ValueError("a movement's rate is positive and its segments are in order")
        return curve

    @property
    def fastest(self) -> float:
        """The highest rate at any size, in bytes per second: a cache may hold a part of what a small kernel reads."""
        points = () if self.measured is None else zip(self.measured.sizes, self.measured.seconds, strict=True)
        return max([self.rate, *(size / seconds for size, seconds in points)])

    def seconds(self, bytes: float) -> float:
        """Time to move ``bytes`` bytes."""
        exact = self.measured.at(bytes) if self.measured is not None else None
        if exact is not None:
            return exact
        if self.second == 0.0:
            return self.floor + bytes / self.rate
        if bytes >= self.second:
            return bytes / self.rate
        at_second = self.second / self.rate
        if bytes >= self.first:
            return at_second * float((bytes / self.second) ** self.slope_second)
        at_first = at_second * float((self.first / self.second) ** self.slope_second)
        return at_first * float((max(bytes, 1.0) / self.first) ** self.slope_first)
