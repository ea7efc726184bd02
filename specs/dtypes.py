"""Dtypes: torch's names of those that a plan may name, and the bytes of an element."""

from __future__ import annotations

from typing import Final

TORCH_DTYPES: Final = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Torch's name of each dtype of a plan."""

ITEM_BYTES: Final = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype."""

DTYPE_BYTES: Final = {name: ITEM_BYTES[of_torch] for name, of_torch in TORCH_DTYPES.items()}
"""Bytes of one element, by a plan's name of the dtype."""
