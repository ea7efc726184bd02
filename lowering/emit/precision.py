"""`precision`: in which dtypes does the program store, compute and reduce?"""

from __future__ import annotations

from legoai.lowering.emit import float8
from legoai.lowering.emit.base import Draft, Lowering, written
from legoai.lowering.emit.code import Group, call

DTYPES = {"fp64": "torch.float64", "fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}

_AUTOCAST = ("bf16",)
"""What `torch.autocast` computes in without loss scaling."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Say how parameters are stored, and refuse what neither FSDP's policy nor autocast can do.

    Under `fsdp` and `replicate` every unit carries a `MixedPrecisionPolicy` (see :func:`policy`). Without one matrix
    products run under autocast where they are in another dtype than the parameters.
    """
    precision = lowering.plan.precision
    float8.emit(lowering, draft)
    for field in ("master", "param"):
        if getattr(precision, field) == "fp16":
            lowering.refuse(
                lowering.place(precision, field),
                f"`{field} = fp16` is not lowered yet: its gradients underflow without loss scaling",
                help=["bf16 has the range of fp32 and needs none"],
            )
    _gradient(lowering)
    draft.train_with("master_dtype", DTYPES[precision.master], lowering.note(precision, "master"))
    if lowering.plan.fsdp is None and lowering.plan.replicate is None:
        _without_units(lowering, draft)


def _gradient(lowering: Lowering) -> None:
    """Refuse a dtype of accumulated gradients other than torch's own.

    Reduced gradients are added up in the dtype of the stored parameters. Where `comm` reduces only those of the last
    micro batch, the units add up the others in the dtype in which they will be reduced.
    """
    plan, precision = lowering.plan, lowering.plan.precision
    has_units = plan.fsdp is not None or plan.replicate is not None
    unreduced = has_units and plan.comm is not None and plan.comm.reduce == "last_micro_batch"
    own = precision.reduce if unreduced else precision.master
    if precision.gradient not in (None, own):
        why = "reduced gradients" if unreduced else "the stored parameters"
        lowering.refuse(
            lowering.place(precision, "gradient"),
            f"`gradient = {precision.gradient}` is not lowered yet: gradients accumulate in the dtype of {why}, "
            f"which is {own}",
            help=[f"leave `gradient` out, or write `{own}`"],
        )


def _without_units(lowering: Lowering, draft: Draft) -> None:
    precision = lowering.plan.precision
    if precision.param != precision.master:
        if precision.param in _AUTOCAST and precision.master == "fp32":
            draft.train_with("autocast_dtype", DTYPES[precision.param], lowering.note(precision, "param"))
        elif precision.param != "fp16":
            lowering.refuse(
                lowering.place(precision, "param"),
                f"`param = {precision.param}` over `master = {precision.master}` needs an `fsdp` statement: without "
                "one, autocast computes in bf16 over fp32",
                help=["give `master` and `param` the same dtype", "or add `fsdp on dp_shard`, also over one rank"],
            )
    for field in ("reduce", "output"):
        if precision.origin(field).decider != "default":
            lowering.refuse(
                lowering.place(precision, field),
                f"`{field} = {written(getattr(precision, field))}` needs an `fsdp` or `replicate` statement, "
                "whose units carry it",
                label="no effect in this plan",
                help=[f"leave `{field}` out"],
            )


def policy(lowering: Lowering, draft: Draft) -> Group:
    """The policy that every unit of `fsdp` or `replicate` carries."""
    precision = lowering.plan.precision
    draft.imports.module("torch")
    draft.imports.name("torch.distributed.fsdp", "MixedPrecisionPolicy")
    return call(
        "MixedPrecisionPolicy",
        param_dtype=DTYPES[precision.param],
        reduce_dtype=DTYPES[precision.reduce],
        output_dtype=None if precision.output is None else DTYPES[precision.output],
    )
