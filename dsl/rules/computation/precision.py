"""`precision`: rules about dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.computation.precision import has_policy
from legoai.dsl.analysis.facts import replacement, written
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.dtypes import DTYPE_BYTES

_FIRST_WITH_BF16: Final = (8, 0)
"""The first compute capability whose tensor cores multiply bf16: Ampere (CUDA C++ programming guide)."""


class EmulatedBf16(Check):
    """bf16 on a device that has no units for it, so that every operation converts.

    Devices of compute capability below 8.0 (before Ampere) have none.
    """

    code = "LP617"
    slug = "emulated-bf16"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision, device = analysis.plan.precision, analysis.device
        if device is None:
            return
        capability = device.compute_capability
        if precision.param != "bf16" or capability is None or _version(capability) >= _FIRST_WITH_BF16:
            return
        yield self.at(
            analysis.span_of(precision, "param"),
            f"`{device.name}` has compute capability {capability} and no bf16 units, which come with 8.0",
            label="emulated" if written(precision, "param") else "`param` is bf16 by default",
            others=[Label(analysis.span_of(analysis.plan.cluster, "device"), f"`{device.name}`")],
            help=["write `param = fp32`"],
            fix=replacement(precision, "param", "fp32"),
        )


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())


class DtypeOfConfig(Check):
    """A dtype among the arguments of a Hugging Face model.

    It is the dtype of the published weights, as `dtype` or `torch_dtype` of the config. A training stores and computes
    in the dtypes of `precision`, whatever the config has.
    """

    code = "LP621"
    slug = "dtype-of-config"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        model = analysis.plan.model
        for name in ("dtype", "torch_dtype"):
            if model.family == "huggingface" and name in model.arguments:
                yield self.at(
                    analysis.span_of(model, name),
                    f"`{name}` has no effect: `precision` decides the dtypes of a training",
                    label="has no effect",
                    help=["leave it out, and write `precision (param = bf16)` or another dtype"],
                )


class Fp16WithoutScaling(Check):
    """fp16 without loss scaling.

    Gradients below 6e-8 become zero in fp16. The usual cure, a scaled loss, is not part of the language,
    since bf16 needs none.

    ## Example
    ```
    precision (param = fp16)
    ```

    ## Use instead
    ```
    precision (param = bf16)
    ```
    """

    code = "LP614"
    slug = "fp16-without-scaling"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision = analysis.plan.precision
        for field, instead, why in (("master", "fp32", ""), ("param", "bf16", ", which has the range of fp32")):
            if getattr(precision, field) == "fp16":
                yield self.at(
                    analysis.span_of(precision, field),
                    "small gradients become zero in fp16, and the loss is not scaled",
                    label="gradients below 6e-8 vanish",
                    help=[f"write `{field} = {instead}`{why}"],
                    fix=replacement(precision, field, instead),
                )


class NoUnitsForPolicy(Check):
    """A dtype that only a unit of `fsdp` or `replicate` could apply, in a plan without units.

    `output` is what a unit's forward returns, `gradient` what a unit accumulates in, and `reduce` what
    gradients are reduced in between data-parallel ranks.

    ## Example
    ```
    mesh (tp = 8)
    precision (param = bf16, output = fp32)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { root = unit }
    precision (param = bf16, output = fp32)
    ```
    """

    code = "LP615"
    slug = "precision-without-units"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision = analysis.plan.precision
        if has_policy(analysis):
            return
        for field in ("output", "gradient", "reduce"):
            if written(precision, field):
                yield self.at(
                    analysis.span_of(precision, field),
                    f"`{field}` has no effect without `fsdp` or `replicate`",
                    label="has no effect",
                    help=["leave the option out, or add `fsdp` or `replicate`"],
                )


class GradientWithoutAccumulation(Check):
    """A dtype for accumulated gradients where nothing is accumulated.

    With one micro batch per rank there is one gradient, which is reduced at once.

    ## Example
    ```
    batch (global = 32, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (gradient = fp32)
    ```

    ## Use instead
    ```
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (gradient = fp32)
    ```
    """

    code = "LP616"
    slug = "gradient-without-accumulation"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if not has_policy(analysis) or not written(plan.precision, "gradient") or micro_batches(plan) != 1:
            return
        yield self.at(
            analysis.span_of(plan.precision, "gradient"),
            "`gradient` has no effect: each rank computes one micro batch in a step, and accumulates nothing",
            label="has no effect",
            others=[Label(analysis.span_of(plan.batch, "global_batch"), "one micro batch for each rank")],
            help=["leave the option out"],
        )


class NarrowReduction(Check):
    """Gradients that are reduced in a narrower dtype than they are computed in.

    Summing over many ranks loses the digits that the backward pass computed. Only units of `fsdp` and `replicate`
    reduce.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (param = fp32, reduce = bf16)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (param = bf16, reduce = fp32)
    ```
    """

    code = "LP822"
    slug = "narrow-reduction"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision = analysis.plan.precision
        if has_policy(analysis) and DTYPE_BYTES[precision.reduce] < DTYPE_BYTES[precision.param]:
            yield self.at(
                analysis.span_of(precision, "reduce"),
                f"gradients are computed in {precision.param} and reduced in {precision.reduce}",
                label="narrower than what is reduced",
                others=[Label(analysis.span_of(precision, "param"), f"`param` = {precision.param}")],
                help=[f"write `reduce = {precision.param}`"],
                fix=replacement(precision, "reduce", precision.param),
            )


class NarrowMaster(Check):
    """Parameters that are stored in half precision.

    An update that is smaller than about 1/256 of its parameter is lost in bf16 (1/2048 in fp16), and most
    updates late in training are.

    ## Example
    ```
    precision (master = bf16)
    ```

    ## Use instead
    ```
    precision (master = fp32)
    ```
    """

    code = "LP823"
    slug = "narrow-master"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision = analysis.plan.precision
        if DTYPE_BYTES[precision.master] < 4:
            share = "1/256" if precision.master == "bf16" else "1/2048"
            yield self.at(
                analysis.span_of(precision, "master"),
                f"updates below about {share} of a parameter are lost when parameters are stored in {precision.master}",
                label="small updates are lost",
                help=["write `master = fp32`; computation stays in the dtype of `param`"],
                fix=replacement(precision, "master", "fp32"),
            )
