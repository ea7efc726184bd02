"""Work of a kernel: a matrix product, an attention, or bytes to be moved."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Final

from legoai.cost.kernels.convolutions import convolution
from legoai.cost.kernels.kinds import ALIGNED, Attention, Movement, MovementForm, MovementKind, Product, Work
from legoai.cost.trace.records import Kernel, TensorType
from legoai.specs.dtypes import ITEM_BYTES, TORCH_DTYPES

_RATES: Final = {
    **{of_torch: name for name, of_torch in TORCH_DTYPES.items()},
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "complex64": "fp32",
    "complex128": "fp64",
}

STORED_AS: Final = {"tf32": "fp32", "mxfp8": "fp8"}
"""Rates of products whose elements are stored in the dtype of another rate."""

_PRODUCTS: Final = {
    "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_scaled_mm": (0, 1), "_int_mm": (0, 1),
    "_grouped_mm": (0, 1), "_scaled_grouped_mm": (0, 1), "linear": (0, 1), "matmul": (0, 1), "mv": (0, 1),
    "addmv": (1, 2), "dot": (0, 1), "addmm_": (1, 2), "baddbmm_": (1, 2),
}  # fmt: skip
"""Where the two factors stand among the tensor inputs."""

_KINDS: Final[tuple[tuple[MovementKind, str], ...]] = (
    ("optimizer", r"_fused_(adam|adamw|sgd|adagrad)"),
    ("loss", r"nll_loss|cross_entropy|mse_loss"),
    ("softmax", r"softmax"),
    ("normalisation", r"layer_norm|rms_norm|batch_norm|group_norm"),
    ("copy", r"_pre_bucket_"),
    ("embedding", r"embedding|index_select|gather|scatter|index_put|index_add|\bindex\b"),
    ("fill", r"zeros|ones|full|fill_|zero_|empty|arange|\beye\b|rand|normal_|uniform_|bernoulli"),
    ("copy", r"copy|clone|_to_copy|\bcat\b|split_with_sizes|chunk_cat|slice_scatter|slice_backward|stack|constant_pad"),
    ("reduction", r"sum|mean|amax|amin|\bmax\b|\bmin\b|norm|argm|var|\ball\b|\bany\b|topk|sort|hist|bincount|prod"),
)  # fmt: skip
_PATTERNS: Final = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)
_OPS: Final = 4096
"""Size of the cache of operator classes: there are some hundreds of operators, and fused groups."""


def element_bytes(rate: str) -> int:
    """Return the bytes of an element of a product's operands, by the product's rate.

    >>> element_bytes("bf16"), element_bytes("tf32"), element_bytes("mxfp8")
    (2, 4, 1)
    """
    stored = STORED_AS.get(rate, rate)
    return next(ITEM_BYTES[dtype] for dtype, name in _RATES.items() if name == stored)


def work_of(kernel: Kernel, *, tf32: bool = False) -> Work:
    """Return the work of ``kernel``; with ``tf32`` single-precision convolutions use the tensor cores.

    PyTorch allows that to convolutions by default (`torch.backends.cudnn.allow_tf32`), and not to other products
    (`torch.backends.cuda.matmul.allow_tf32`). No program sets either.

    An unknown operator moves its bytes, and has the floating-point operations that its record states.
    """
    name = _short(kernel.op)
    if name in _PRODUCTS:
        product = _product(kernel, name)
        if product is not None:
            return product
    if "convolution" in name and kernel.outputs:
        return convolution(kernel, _rate(kernel.inputs, tf32=tf32), cores=tf32)
    if "attention" in name and not name.startswith("fused("):
        attention = _attention(kernel, name)
        if attention is not None:
            return attention
    kind = kind_of(kernel.op)
    return Movement(
        kind=kind,
        bytes=kernel.bytes_read + kernel.bytes_written,
        form=_form(kernel, name, kind),
        rate=_rate(kernel.inputs or kernel.outputs),
        flops=float(kernel.flops),
    )


@functools.lru_cache(_OPS)
def _short(op: str) -> str:
    """`aten.mm.default`, `aten::mm` and `aten.mm` are `mm`; a fused group stays as it is."""
    if op.startswith("fused("):
        return op
    parts = re.split(r"::|\.", op)
    return parts[1] if len(parts) > 1 else parts[0]


_FOREACH: Final = "_foreach_"
"""Prefix of operators on lists of tensors, before the name of the operator that each tensor undergoes."""
LONG_ROW: Final = 16384
"""Entries of the longest row of a softmax that was measured to run at the rate of short ones."""
_WITH_BACKWARD: Final = ("normalisation", "softmax", "embedding")


def _form(kernel: Kernel, name: str, kind: MovementKind) -> MovementForm:
    if kernel.op.startswith("fused("):
        return "fused"
    if name.startswith(_FOREACH):
        return "foreach"
    backward = "backward" in name and kind in _WITH_BACKWARD
    if kind == "softmax" and kernel.inputs and (kernel.inputs[0].shape or (0,))[-1] > LONG_ROW:
        return "long backward" if backward else "long"
    if backward:
        return "backward"
    if kind not in ("elementwise", "copy"):
        return ""
    inputs = [one for one in kernel.inputs if math.prod(one.shape) > 1]
    read, result = (inputs[1:], inputs[:1]) if name == "copy_" else (inputs, kernel.outputs)
    dtypes = {one.dtype for one in (*read, *result)} - {"bool"}  # kernels read masks as they are, without a cast
    if len(dtypes) > 1 and not (len(read) == len(result) == 1 and _narrows(read[0], result[0])):
        return "unvectorised"
    if kind == "elementwise" and len({math.prod(one.shape) for one in inputs}) > 1:
        return "unvectorised"
    return ""


def _narrows(read: TensorType, result: TensorType) -> bool:
    """Whether elements become smaller, as torch converts them by a vectorised kernel."""
    return ITEM_BYTES.get(result.dtype, 0) < ITEM_BYTES.get(read.dtype, 0)


def is_product(op: str) -> bool:
    """Whether an operator is a matrix product or a convolution."""
    return _short(op) in _PRODUCTS or ("convolution" in op and not op.startswith("fused("))


@functools.lru_cache(_OPS)
def kind_of(op: str) -> MovementKind:
    """Return the class of a memory-bound operator.

    A fused group has the class of its costliest member, and an operator on a list of tensors that of the one on each.
    """
    op = op.replace(_FOREACH, "")
    for kind, pattern in _PATTERNS:
        if pattern.search(op) and not (kind in ("fill", "copy") and op.startswith("fused(")):
            return kind
    return "elementwise"


def _rate(tensors: tuple[TensorType, ...], *, tf32: bool = False) -> str:
    rate = next((_RATES[tensor.dtype] for tensor in tensors if tensor.dtype in _RATES), "fp32")
    return "tf32" if rate == "fp32" and tf32 else rate


def _product(kernel: Kernel, name: str) -> Product | None:
    first, second = _PRODUCTS[name]
    if len(kernel.inputs) <= second:
        return None
    left, right = kernel.inputs[first], kernel.inputs[second]
    scales = kernel.inputs[2:] if name.startswith("_scaled") else ()
    rate = _rate((left, right))
    if any(scale.dtype == "float8_e8m0fnu" for scale in scales):
        rate = "mxfp8"
    total = kernel.bytes_read + kernel.bytes_written
    out = kernel.outputs[0].shape if kernel.outputs else ()
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped(left.shape, right.shape, out, rate, total)
    if name == "linear":
        n, k = right.shape[0], left.shape[-1]
        return Product(batch=1, m=math.prod(left.shape[:-1]), n=n, k=k, rate=rate, bytes=total)
    if len(left.shape) < 1 or len(right.shape) < 1:
        return None
    k = left.shape[-1]
    m = left.shape[-2] if len(left.shape) > 1 else 1
    n = right.shape[-1] if len(right.shape) > 1 else 1
    batch = math.prod(out[:-2]) if len(out) > 2 else 1
    return Product(
        batch=max(1, batch), m=m, n=n, k=k, rate=rate, bytes=total,
        operands_aligned=kernel.attributes.get("operands_aligned", ALIGNED),
        result_aligned=kernel.attributes.get("result_aligned", ALIGNED),
    )  # fmt: skip


def _grouped(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...], rate: str, total: int) -> Product:
    """Of `torch._grouped_mm`: two or three dims on each side; the groups are the third, or a ragged one's pieces."""
    if len(left) == 3 and len(right) == 3:
        return Product(batch=left[0], m=left[1], n=right[2], k=left[2], rate=rate, bytes=total, group=max(1, left[1]))
    if len(left) == 2 and len(right) == 3:
        groups, rows = right[0], max(1, left[0] // right[0])
        return Product(batch=groups, m=rows, n=right[2], k=left[1], rate=rate, bytes=total, group=rows)
    if len(left) == 3:
        groups, rows = left[0], max(1, right[1] // left[0])
        return Product(batch=groups, m=left[1], n=rows, k=left[2], rate=rate, bytes=total, group=rows)
    # Both ragged along k: the gradients of the experts' weights, of which each sums over its own rows.
    groups = out[0] if len(out) == 3 else 1
    rows = max(1, left[1] // groups)
    return Product(batch=groups, m=left[0], n=right[1], k=rows, rate=rate, bytes=total, group=rows)


def _implementation(name: str) -> str:
    return next((known for known in ("cudnn", "efficient") if known in name), "flash2")


def _attention(kernel: Kernel, name: str) -> Attention | None:
    """The attention of a kernel whose inputs begin with query, key and value, or in a backward with the gradient."""
    backward = "backward" in name
    fours = [tensor for tensor in kernel.inputs if len(tensor.shape) == 4]
    if len(fours) < (4 if backward else 3):
        return None
    query, key, value = fours[1:4] if backward else fours[:3]
    # torch's own `_efficient_attention_forward` and flash-attn hold (batch, sequence, heads, width).
    sequence_first = "scaled_dot_product" not in name and ("_efficient_" in name or "_flash_" in name)
    heads, length = (2, 1) if sequence_first else (1, 2)
    attributes: dict[str, Any] = dict(kernel.attributes)
    return Attention(
        batch=query.shape[0],
        heads=query.shape[heads],
        key_heads=key.shape[heads],
        queries=query.shape[length],
        keys=key.shape[length],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        causal=bool(attributes.get("causal", attributes.get("is_causal", False))),
        backward=backward,
        rate=_rate((query,)),
        implementation=str(attributes.get("implementation", _implementation(name))),
        bytes=kernel.bytes_read + kernel.bytes_written,
    )
