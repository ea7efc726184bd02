"""`optimizer`: rules about the constants of an update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import decided, listed, replacement, written
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters
from legoai.dsl.analysis.training.optimizer import distributing_statement, parameter_rules, update_of
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import walk
from legoai.specs.directives.optimizer import Adam, AdamW, Muon, Sgd

_SMALLEST: Final = {"fp64": 2.0**-1074, "fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}
"""The smallest positive number of each dtype (IEEE 754; bf16 has the exponents of fp32 and 7 bits)."""


class NothingLearned(Check):
    """A learning rate of zero.

    The optimizer runs and changes nothing, whatever the schedule does with the rate. Parameters to which a rule gives a
    rate of their own do learn.

    ## Example
    ```
    optimizer adamw(lr = 0.0)
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4)
    ```
    """

    code = "LP681"
    slug = "learning-rate-zero"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer = analysis.plan.optimizer
        algorithm = optimizer.algorithm
        decided(optimizer)
        if algorithm.lr == 0.0:
            yield from self._of_all(analysis, algorithm)
        for rule in optimizer.rules:
            for field in ("lr", "lr_scale"):
                if getattr(rule.treatment, field, None) == 0.0:
                    yield self.at(
                        analysis.span_of(rule.treatment, field),
                        "these parameters learn nothing at a learning rate of 0, and cost as much as others",
                        label="they do not change",
                        help=["give a small rate, or freeze them in the model (`requires_grad_(False)`)"],
                    )

    def _of_all(self, analysis: Analysis, algorithm: AdamW | Adam | Sgd) -> Iterator[Diagnostic]:
        """The parameters that take the optimizer's rate of 0: all, or those that no rule gives another."""
        rules, manifest = parameter_rules(analysis), analysis.manifest
        if analysis.plan.optimizer.rules and manifest is None:
            return
        paths = [] if manifest is None else [path for path, _ in manifest.parameters()]
        idle = [path for path in paths if update_of(rules.get(path), algorithm)["lr"] == 0.0]
        if paths and not idle:
            return
        some = len(idle) < len(paths)
        yield self.at(
            analysis.span_of(algorithm, "lr"),
            f"{listed(idle)} learn nothing at a learning rate of 0, and cost as much as others"
            if some
            else "nothing is learned at a learning rate of 0",
            label=f"{len(idle)} of {len(paths)} parameters do not change" if some else "no parameter changes",
            help=["give them a small rate, or freeze them in the model (`requires_grad_(False)`)"]
            if some
            else ["`3e-4` is usual for models of some billion parameters"],
        )


class NesterovNeedsMomentum(Check):
    """Nesterov momentum without momentum.

    `torch.optim.SGD` refuses it, and to Muon it makes no difference.

    ## Example
    ```
    optimizer sgd(lr = 0.1, nesterov = true)
    ```

    ## Use instead
    ```
    optimizer sgd(lr = 0.1, momentum = 0.9, nesterov = true)
    ```
    """

    code = "LP682"
    slug = "nesterov-without-momentum"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for declared in walk(analysis.plan.optimizer):
            if isinstance(declared, Sgd):
                yield from self._of_sgd(analysis, declared)
            elif isinstance(declared, Muon) and declared.momentum == 0.0 and written(declared, "nesterov"):
                yield self.at(
                    analysis.span_of(declared, "nesterov"),
                    "without momentum `nesterov` has no effect",
                    label="without momentum",
                    others=[Label(analysis.span_of(declared, "momentum"), "is 0")],
                    help=["leave both out: `momentum` is 0.95 by default"],
                )

    def _of_sgd(self, analysis: Analysis, algorithm: Sgd) -> Iterator[Diagnostic]:
        if algorithm.nesterov and algorithm.momentum == 0.0:
            others = [Label(analysis.span_of(algorithm, "momentum"), "is 0")] if written(algorithm, "momentum") else []
            yield self.at(
                analysis.span_of(algorithm, "nesterov"),
                "Nesterov momentum needs a momentum greater than 0",
                label="without momentum",
                others=others,
                help=["add `momentum = 0.9`, or leave `nesterov` out"],
                fix=replacement(algorithm, "nesterov", "false"),
            )


class EpsilonVanishes(Check):
    """An epsilon that is zero where it is added.

    Adam divides by the root of the second moment and epsilon. Both live in the dtype of `precision (master =
    …)`, and in fp16 everything below 3e-8 is zero: where a gradient is zero, the update is 0/0.

    ## Example
    ```
    precision (master = fp16, param = fp16)
    optimizer adamw(lr = 3e-4, eps = 1e-8)
    ```

    ## Use instead
    ```
    precision (master = fp32, param = bf16)
    optimizer adamw(lr = 3e-4, eps = 1e-8)
    ```
    """

    code = "LP683"
    slug = "epsilon-vanishes"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer, precision = analysis.plan.optimizer, analysis.plan.precision
        algorithm = optimizer.algorithm
        decided(optimizer)
        if isinstance(algorithm, AdamW | Adam):
            for rule in optimizer.rules:
                eps = getattr(rule.treatment, "eps", None)
                if eps is not None and eps <= _SMALLEST[precision.master] / 2:
                    yield self.at(
                        analysis.span_of(rule.treatment, "eps"),
                        f"`eps` = {eps:g} is 0 in {precision.master}, so that a parameter without gradient becomes NaN",
                        label="divides by zero",
                        others=[
                            Label(analysis.span_of(precision, "master"), f"parameters are stored in {precision.master}")
                        ],
                        help=["write `master = fp32`, or a larger `eps`"],
                    )
        # A number at or below half of the smallest one is rounded to zero.
        if not isinstance(algorithm, AdamW | Adam) or algorithm.eps > _SMALLEST[precision.master] / 2:
            return
        place = "eps" if written(algorithm, "eps") else "lr"
        why = "is 0" if algorithm.eps == 0.0 else f"= {algorithm.eps:g} is 0 in {precision.master}"
        yield self.at(
            analysis.span_of(algorithm if written(algorithm, place) else analysis.plan.optimizer, place),
            f"`eps` {why}, so that a parameter without gradient becomes NaN",
            label="divides by zero" if place == "eps" else "`eps` is 1e-8 by default",
            others=[Label(analysis.span_of(precision, "master"), f"parameters are stored in {precision.master}")],
            help=["write `master = fp32`, or a larger `eps`"],
        )


class FusedSgdOfDTensors(Check):
    """Fused SGD on parameters that are DTensors.

    PyTorch has no sharding strategy for `_fused_sgd_`, as it has for fused Adam. The parameters are DTensors under
    `fsdp`, under `replicate`, and where `shard on tp` places them. Without `fused` all parameters of a kind are updated
    by a few `foreach` kernels.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    optimizer sgd(lr = 0.1, fused = true)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    optimizer sgd(lr = 0.1)
    ```
    """

    code = "LP685"
    slug = "fused-sgd-of-dtensors"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        algorithm = analysis.plan.optimizer.algorithm
        if not isinstance(algorithm, Sgd) or not algorithm.fused:
            return
        statement = distributing_statement(analysis)
        if statement is None:
            return
        yield self.at(
            analysis.span_of(algorithm, "fused"),
            "PyTorch's fused SGD does not update DTensors",
            label="no sharding strategy",
            others=[Label(analysis.span_of(statement), "makes DTensors of parameters")],
            help=["leave `fused` out: `foreach` kernels update all parameters of a kind at once"],
            fix=replacement(algorithm, "fused", "false"),
        )


class FusedComplex(Check):
    """Parameters of complex numbers whose update is computed by fused kernels.

    PyTorch's fused kernels take real numbers only (PyTorch 2.13). `adam` and `adamw` are fused by default.

    With `fused = false` the parameters of a kind are updated by a few `foreach` kernels, which take complex numbers as
    pairs of real ones. Under `fsdp` and `replicate` all parameters are of real numbers, see `other-dtype-under-fsdp`.
    """

    code = "LP678"
    slug = "fused-complex"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, optimizer = analysis.manifest, analysis.plan.optimizer
        if manifest is None or analysis.plan.fsdp is not None or analysis.plan.replicate is not None:
            return
        algorithm, untrained = optimizer.algorithm, untrained_parameters(analysis)
        found = {
            module.child_path(item.name): item.dtype
            for module in manifest.modules.values()
            for item in module.parameters
            if item.dtype.startswith("complex") and module.child_path(item.name) not in untrained
        }
        if not found:
            return
        rules = parameter_rules(analysis)
        fused = [path for path in found if update_of(rules.get(path), algorithm).get("fused")]
        if not fused:
            return
        named = list(dict.fromkeys(general(manifest, path) for path in fused))
        yield self.at(
            analysis.span_of(algorithm if written(algorithm, "fused") else optimizer, "fused"),
            f"{listed(named)} {'are' if len(named) > 1 else 'is'} of {found[fused[0]]}, and fused kernels update real "
            "numbers only",
            label="updates by fused kernels",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), "this model")],
            help=[f"write `{algorithm.name}(…, fused = false)`: `foreach` kernels take complex numbers"],
            fix=replacement(algorithm, "fused", "false"),
        )
