"""Dtypes: their sizes, the statement that applies them in forward, and the dtype of gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.precision import Float8, MxFp8, Precision
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.models.manifests.manifest import Manifest

_AUTOCAST = ("bf16",)
"""Dtypes in which `torch.autocast` computes without loss scaling."""


def has_policy(analysis: Analysis) -> bool:
    """Whether units of `fsdp` or `replicate` carry the dtypes, rather than autocast."""
    return analysis.plan.fsdp is not None or analysis.plan.replicate is not None


def autocast_dtype(analysis: Analysis) -> str | None:
    """The dtype that matrix products are autocast to; None where a policy casts, or where parameters have it."""
    precision = analysis.plan.precision
    if has_policy(analysis) or precision.param == precision.master:
        return None
    return precision.param if precision.param in _AUTOCAST and precision.master == "fp32" else None


def output_bytes(precision: Precision) -> int:
    """Return the smallest size of an element of a block's output, in bytes."""
    return min(DTYPE_BYTES[precision.param], DTYPE_BYTES[precision.output or precision.param])


def computes_in_float8(precision: Precision) -> bool:
    """Whether some layers compute, keep activations and may communicate in dtypes of one byte."""
    return any(isinstance(rule.treatment, Float8 | MxFp8) for rule in precision.rules)


def gradient_dtype(analysis: Analysis) -> str:
    """The dtype that gradients of micro batches accumulate in.

    Reduced gradients are added up in the dtype of the stored parameters. Where gradients are reduced once for several
    micro batches, by `comm` or after a pass of a pipeline, the units add them up in the dtype in which they will be
    reduced.

    Raises:
        Undecided: a size or option that this depends on is a hole.
    """
    precision = analysis.plan.precision
    return precision.reduce if _accumulates_unsharded(analysis) else precision.master


def _accumulates_unsharded(analysis: Analysis) -> bool:
    if not has_policy(analysis):
        return False
    if is_staged(analysis):
        # Of a stage, torch reduces gradients after the last micro batch of a pass, whatever `comm` says.
        return pass_micro_batches(analysis.plan) != 1
    comm = analysis.plan.comm
    return comm is not None and comm.reduce == "last_micro_batch"


def batch_norms(manifest: Manifest) -> list[str]:
    """Return the paths of modules that normalise by the statistics of a batch."""
    return [path for path, module in manifest.modules.items() if "BatchNorm" in module.class_name]


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Gradients that accumulate in torch's own dtype; without units, one dtype or bf16 over fp32."""
    yield from _batch_norms_of_a_cpu(analysis)
    precision = analysis.plan.precision
    mixed = precision.param not in (precision.master, "fp16")  # an error of its own
    if mixed and not has_policy(analysis) and autocast_dtype(analysis) is None:
        yield Unsupported(
            analysis.span_of(precision, "param"),
            f"`param = {precision.param}` over `master = {precision.master}` needs an `fsdp` statement: without "
            "one, autocast computes in bf16 over fp32",
            help=("give `master` and `param` the same dtype", "or add `fsdp on dp_shard`, also over one rank"),
        )
    # Without units or accumulation the option has no effect, which is a warning of its own.
    if precision.gradient is None or not has_policy(analysis) or micro_batches(analysis.plan) == 1:
        return
    own = gradient_dtype(analysis)
    if precision.gradient != own:
        why = "of the stored parameters"
        if _accumulates_unsharded(analysis):
            last = "each pass of the pipeline" if is_staged(analysis) else "the last micro batch"
            why = f"in which they are reduced after {last}"
        yield Unsupported(
            analysis.span_of(precision, "gradient"),
            f"`gradient = {precision.gradient}` is not lowered yet: gradients accumulate in {own}, the dtype {why}",
            help=(f"leave `gradient` out, or write `{own}`",),
        )


def _batch_norms_of_a_cpu(analysis: Analysis) -> Iterator[Unsupported]:
    """Batch normalisation whose weights are narrower than its statistics, which torch has on GPUs alone."""
    precision, device, manifest = analysis.plan.precision, analysis.device, analysis.manifest
    if device is None or device.kind != "cpu" or manifest is None or precision.param in ("fp32", "fp64"):
        return
    paths = batch_norms(manifest)
    if paths and autocast_dtype(analysis) is None:
        yield Unsupported(
            analysis.span_of(precision, "param"),
            f"`{paths[0]}` keeps the statistics of batches in fp32, beside which a CPU has no weights of "
            f"{precision.param}",
            label="not on a CPU",
            help=("write `master = fp32, param = fp32`",),
        )
