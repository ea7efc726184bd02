"""`precision`: the dtypes in which the program stores, computes and reduces."""

from __future__ import annotations

from legoai.dsl.analysis.computation.precision import autocast_dtype, has_policy
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Group, call
from legoai.lowering.emit.computation import float8
from legoai.lowering.emit.step import context
from legoai.specs.dtypes import TORCH_DTYPES

DTYPES = {name: f"torch.{of_torch}" for name, of_torch in TORCH_DTYPES.items()}


def emit(lowering: Lowering, draft: Draft) -> None:
    """Emit the dtype of the stored parameters, that of autocast, and what checkpoints record.

    Under `fsdp` and `replicate` every unit has a `MixedPrecisionPolicy` (see :func:`policy`). Without one, matrix
    products run under autocast where they are in another dtype than the parameters.
    """
    precision = lowering.plan.precision
    float8.emit(lowering, draft)
    for name in ("master", "param", *(("reduce",) if has_policy(lowering.analysis) else ())):
        draft.train_with(f"{name}_dtype", DTYPES[getattr(precision, name)], lowering.note(precision, name))
    autocast = autocast_dtype(lowering.analysis)
    if autocast is not None:
        note = lowering.note(precision, "param")
        draft.train_with("autocast_dtype", DTYPES[autocast], note)
        casts = call("torch.autocast", "training.device.type", dtype=DTYPES[autocast])
        draft.step.around_forward.append(context(casts, note))


def policy(lowering: Lowering, draft: Draft) -> Group:
    """Return the policy of every unit of `fsdp` or `replicate`."""
    precision = lowering.plan.precision
    draft.imports.module("torch")
    draft.imports.name("torch.distributed.fsdp", "MixedPrecisionPolicy")
    return call(
        "MixedPrecisionPolicy",
        param_dtype=DTYPES[precision.param],
        reduce_dtype=DTYPES[precision.reduce],
        output_dtype=None if precision.output is None else DTYPES[precision.output],
    )
