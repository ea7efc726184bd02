"""Operators of torch whose results can be kept, by name: without torch, for the linter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

FILE: Final = "operators.txt"
"""In the catalogue: for each operator of `aten` a line with its name and its overloads, as torch 2.13 has them."""

ATTENTION: Final = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
"""The operators that `attention` stands for: what `scaled_dot_product_attention` calls on one device or another."""

LAYER_PRODUCTS: Final = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm")
"""The operators of which `alternate_matmul` keeps every second: products of two matrices, as linear layers compute.

TorchTitan's selective checkpointing counts these too. Products of batches and of groups, as experts have, are not
counted: an expert's hidden layer is what such a policy is there to recompute.
"""

PRODUCTS: Final = (
    *LAYER_PRODUCTS,
    "aten.bmm",
    "aten.baddbmm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
)
"""The operators that `matmul` stands for."""

KEPT: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ATTENTION,
    "matmul": PRODUCTS,
    "alternate_matmul": LAYER_PRODUCTS,
    "collective": (),
}
"""Operators that may be kept by each word of `selective`; collectives are told by their namespace."""

COMPOSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("linear", "matmul", "einsum", "inner", "tensordot", "linalg_matmul"), "matmul"),
    "scaled_dot_product_attention": "attention",
    "softmax": '"aten._softmax"',
    "log_softmax": '"aten._log_softmax"',
    "layer_norm": '"aten.native_layer_norm"',
    "group_norm": '"aten.native_group_norm"',
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), '"aten.convolution"'),
    "cross_entropy_loss": '"aten._log_softmax"',
}
"""What computes operators of `aten` that have no kernel of their own, as `selective` names it."""


@cache
def keepable_operators() -> Mapping[str, frozenset[str]]:
    """Return the overloads of each operator of `aten` that has a kernel, changes no input and draws no numbers."""
    lines = files("legoai.specs.catalogue").joinpath(FILE).read_text(encoding="utf-8").splitlines()
    return {name: frozenset(overloads) for name, *overloads in map(str.split, lines)}
