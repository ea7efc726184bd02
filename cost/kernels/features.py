"""Features of kernels that the learned models read."""

from __future__ import annotations

import math
from typing import Final

from legoai.cost.kernels.kinds import Attention, Product


def product_features(product: Product, processors: int) -> tuple[float, ...]:
    """Return the features of products; their names are `PRODUCT_FEATURES`."""
    b, m, n, k = product.batch, product.m, product.n, product.k
    waves = []
    for rows, columns in ((64, 64), (128, 128), (128, 256)):
        tiles = b * math.ceil(m / rows) * math.ceil(n / columns)
        waves += [math.ceil(tiles / processors) * processors / tiles, math.log2(tiles / processors)]
    sizes = [math.log2(value) for value in (b, m, n, k, b * m * n * k, b * m * n, b * (m * k + k * n + m * n))]
    return (*sizes, *waves, float(product.grouped), product.bytes / (b * (m * k + k * n + m * n)))


PRODUCT_FEATURES: Final = (
    "batch", "m", "n", "k", "volume", "output", "elements",
    "waves 64x64", "tiles 64x64", "waves 128x128", "tiles 128x128", "waves 128x256", "tiles 128x256", "grouped",
    "bytes per element",
)  # fmt: skip


def attention_features(attention: Attention, processors: int) -> tuple[float, ...]:
    """Return the features of attention; their names are `ATTENTION_FEATURES`."""
    blocks = attention.blocks / processors
    return (
        math.log2(attention.queries),
        math.log2(attention.keys),
        math.log2(attention.batch * attention.heads),
        float(attention.head_dim),
        float(attention.value_dim),
        float(attention.causal),
        math.log2(attention.heads / attention.key_heads),
        math.log2(blocks),
        math.ceil(blocks) / blocks,
    )


ATTENTION_FEATURES: Final = (
    "queries", "keys", "heads", "head dim", "value dim", "causal", "queries per key head", "blocks", "waves",
)  # fmt: skip
