"""`checkpoint`: rules about what is recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.computation.attention import attention_modules, head_widths
from legoai.dsl.analysis.computation.checkpoint import (
    chosen_of,
    matched_modules,
    recomputed_modules,
)
from legoai.dsl.analysis.facts import each_rule, following, grouped, has_operator, holders, is_within, name_of
from legoai.dsl.analysis.parallelism.experts import multiplied_together
from legoai.dsl.analysis.parallelism.parameter_reads import CALL_IT, bypassed, only_read
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.checkpoint import Budget, Every, Full, Selective
from legoai.specs.directives.compile import AotEager, Inductor
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.units import format_bytes

_RECOMPUTE: Final = (Full, Every, Selective, Budget)
OPERATOR_WORDS: Final = {
    "attention": (frozenset({"attention"}), frozenset({"attention"})),
    "matmul": (frozenset({"matmul"}), frozenset({"linear", "experts"})),
    "alternate_matmul": (frozenset({"matmul"}), frozenset({"linear", "experts"})),
}
"""Operations of a flow, and kinds of modules, for each name that `selective` accepts besides operators."""


class NeverCalled(Check):
    """A treatment for a list of modules, which is never called itself, or for a layer of which only weights are read.

    A `ModuleList` or `ModuleDict` has no forward of its own: wrapping it neither recomputes nor compiles what
    is in it. The same holds for a layer that its parent does not call, but whose weights it passes to a function, as
    `nn.MultiheadAttention` does with those of its `out_proj`, and for a module of which only the forward or another
    method is called by its name, as `block.forward(x)` is.

    ## Example
    ```
    checkpoint { layers = full }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = full }
    ```
    """

    code = "LP651"
    slug = "treatment-of-a-list"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        for directive, kinds in ((plan.checkpoint, _RECOMPUTE), (plan.compile, (Inductor, AotEager))):
            for rule, paths in grouped(following(analysis, directive, kinds).items()):
                assert manifest is not None and directive is not None
                read, inside = only_read(analysis), bypassed(analysis)
                lists = [path for path in paths if manifest.modules[path].class_name in ("ModuleList", "ModuleDict")]
                if any(path not in read and path not in inside for path in paths if path not in lists):
                    continue
                if not lists and paths[0] not in read:
                    yield self.at(
                        rule.path_origin.written,
                        f"`{paths[0]}` is never called, although `{inside[paths[0]]}` inside of it is, so "
                        f"`{directive.keyword}` has no effect",
                        label="not called",
                        help=[CALL_IT],
                    )
                    continue
                if not lists:
                    reader = name_of(read[paths[0]])
                    yield self.at(
                        rule.path_origin.written,
                        f"`{paths[0]}` is never called: `{reader}` reads its weights, so `{directive.keyword}` has no "
                        "effect",
                        label="not called",
                        help=[f"write `{reader}`"],
                    )
                    continue
                yield self.at(
                    rule.path_origin.written,
                    f"`{rule.path}` is a list of modules and never called, so `{directive.keyword}` has no effect",
                    label=f"a {manifest.modules[lists[0]].class_name} without a forward",
                    help=[f"write `{lists[0]}.*` for the modules in it"],
                )


class EveryOfFew(Check):
    """A stride that recomputes no module.

    `every(n)` counts the modules that its rule matches, and recomputes each n-th. Of fewer than n modules there is no
    stride to speak of, and the n-th ones are not recomputed where other rules give them another treatment.

    ## Example
    ```
    checkpoint { layers.{0..2} = every(4) }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = every(4) }
    ```
    """

    code = "LP652"
    slug = "every-of-few"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        recomputed = recomputed_modules(analysis)
        for rule, paths in grouped(following(analysis, analysis.plan.checkpoint, Every).items()):
            if not recomputed.keys().isdisjoint(paths):
                continue
            n, matched = rule.treatment.n, matched_modules(analysis, rule)
            chosen = chosen_of(matched, rule.treatment)
            if chosen:
                more = f" (and {len(chosen) - 1} more)" if len(chosen) > 1 else ""
                what = f"recomputes nothing: another rule decides `{chosen[0]}`{more}"
                label, instead = "counts all modules that the rule matches", "other"
            else:
                modules = "one module" if len(matched) == 1 else f"only {len(matched)} modules"
                what, label, instead = f"has {modules} to choose from", f"the rule speaks of {modules}", "more"
            yield self.at(
                analysis.span_of(rule.treatment, "n"),
                f"`every({n})` {what}",
                label=label,
                help=[f"write `full` or `none`, or let the rule match {instead} modules"],
            )


class KeepsNothing(Check):
    """A selective rule that keeps nothing, because the modules contain none of the listed operators.

    It has the same effect as `full`, at the price of checking every operator. `alternate_matmul` counts no grouped
    products, and keeps nothing of experts that have no others. There is no operator of attention either
    where the device computes it from products, as a CPU does for heads whose values have another width than their keys.

    ## Example
    ```
    checkpoint { layers.*.feed_forward = selective([attention]) }
    ```

    ## Use instead
    ```
    checkpoint { layers.*.feed_forward = selective([matmul]) }
    ```
    """

    code = "LP654"
    slug = "keeps-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, mesh = analysis.manifest, analysis.plan.mesh
        for rule, paths in grouped(following(analysis, analysis.plan.checkpoint, Selective).items()):
            assert manifest is not None
            place = analysis.span_of(rule.treatment, "keep")
            if not rule.treatment.keep:
                yield self.at(
                    place, "`selective([])` keeps nothing, as `full` does", label="an empty list", help=["write `full`"]
                )
            for word in rule.treatment.keep:
                if word == "collective" and mesh.tp == mesh.cp == mesh.ep == 1:
                    yield self.at(
                        place,
                        "`collective` keeps nothing: without `tp`, `cp` or `ep` a forward communicates nothing",
                        label="no collectives here",
                        others=[Label(analysis.span_of(mesh), "the mesh")],
                    )
                if word == "attention" and analysis.plan.attention.kernel == "math":
                    yield self.at(
                        place,
                        "`attention` keeps nothing: `attention math` computes it from products and a softmax",
                        label="no such operator",
                        others=[Label(analysis.span_of(analysis.plan.attention, "kernel"), "this kernel")],
                        help=["keep `matmul`, or use another kernel"],
                    )
                elif word == "attention" and (widths := _widths_without_kernel(analysis, paths)) is not None:
                    yield self.at(
                        place,
                        f"`attention` keeps nothing: a CPU has no kernel for keys of {widths[0]} features with values "
                        f"of {widths[1]}, and computes it from products and a softmax",
                        label="no such operator",
                        others=[Label(analysis.span_of(analysis.plan.cluster, "device"), "the device")],
                        help=["keep `matmul`, or write `full`"],
                    )
                elif word in OPERATOR_WORDS and manifest.flow_error is None:
                    ops, kinds = OPERATOR_WORDS[word]
                    aside = multiplied_together(analysis) if word == "alternate_matmul" else frozenset[str]()
                    if not any(has_operator(manifest, path, ops, kinds, aside) for path in paths):
                        grouped_only = any(is_within(expert, path) for expert in aside for path in paths)
                        yield self.at(
                            place,
                            f"`{word}` keeps nothing: `{name_of(paths[0])}` computes none",
                            label="only grouped products, which it does not count"
                            if grouped_only
                            else f"no {word.removeprefix('alternate_')} in these modules",
                            help=[
                                "write `matmul`, which keeps grouped products too, or `full`"
                                if grouped_only
                                else "write `full`, or list what these modules compute"
                            ],
                        )


def _widths_without_kernel(analysis: Analysis, paths: Iterable[str]) -> tuple[int, int] | None:
    """Return the widths of keys and values for which the device, a CPU, has no kernel, so that it computes products.

    Its one kernel, `flash`, takes heads of one width. The widths are those of the first attention within ``paths``, and
    None where the device has a kernel for any of them, or widths are not known.
    """
    if analysis.device_kind != "cpu":
        return None
    assert analysis.manifest is not None
    modules, above = analysis.manifest.modules, set(paths)
    within = [modules[path] for path in attention_modules(analysis) if not above.isdisjoint((path, *holders(path)))]
    if not all("head_dim" in module.attributes for module in within):
        return None
    widths = list(map(head_widths, within))
    return None if any(keys == values for keys, values in widths) else next(iter(widths), None)


class BudgetBeyondReason(Check):
    """A budget that keeps all or nothing, or more than the device holds.

    `budget(0)` is the same as `full`, and `budget(100%)` as `none`.

    ## Example
    ```
    checkpoint { layers.* = budget(100%) }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = budget(50%) }
    ```
    """

    code = "LP655"
    slug = "budget-without-effect"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        capacity = analysis.device.capacity if analysis.device is not None else None
        for rule in each_rule(analysis.plan.checkpoint):
            if not isinstance(rule.treatment, Budget):
                continue
            amount = rule.treatment.amount
            if isinstance(amount, float) and amount in (0.0, 1.0):
                same = "full" if amount == 0.0 else "none"
                message = (
                    f"a budget of {amount:.0%} keeps {'nothing' if amount == 0.0 else 'everything'}, as `{same}` does"
                )
                help = [f"write `{same}`"]
            elif isinstance(amount, int) and capacity is not None and amount >= capacity:
                assert analysis.device is not None
                limit = f"`{analysis.device.name}` has {format_bytes(capacity)}"
                message = f"a budget of {format_bytes(amount)} is no limit: {limit}"
                help = ["a budget in bytes is for each module that the rule matches"]
            else:
                continue
            yield self.at(
                analysis.span_of(rule.treatment, "amount"), message,
                label="limits nothing" if amount else "keeps nothing",
                help=help,
            )  # fmt: skip


class NestedCheckpoint(Check):
    """A recomputed module inside of a recomputed module.

    It is legal and exact. The inner rule can only save memory: the outer module keeps nothing of it after forward, and
    while the outer one is recomputed, the inner one may be computed a third time.

    ## Example
    ```
    checkpoint {
      layers.*              = full
      layers.*.feed_forward = full
    }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = full }
    ```
    """

    code = "LP824"
    slug = "nested-checkpoint"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        recomputed = recomputed_modules(analysis)
        inner = [
            (path, rule) for path, rule in recomputed.items() if path and any(up in recomputed for up in holders(path))
        ]
        for rule, paths in grouped(inner):
            outer = next(above for above in holders(paths[0]) if above in recomputed)
            over = recomputed[outer].path_origin.span
            assert over is not None
            yield self.at(
                rule.path_origin.written,
                f"`{paths[0]}` is recomputed as a part of `{name_of(outer)}`, and again by itself",
                label="recomputed inside of what is recomputed",
                others=[Label(over, "recomputes what holds it")],
                help=["keep one of the two rules"],
            )


class NothingToRecompute(Check):
    """A recomputed layer that keeps nothing but its input anyway.

    A linear layer keeps its input for the backward pass, and an embedding its indices. Recomputing one keeps
    the same input, and computes once more.

    ## Example
    ```
    checkpoint { layers.*.feed_forward.w2 = full }
    ```

    ## Use instead
    ```
    checkpoint { layers.*.feed_forward = full }
    ```
    """

    code = "LP827"
    slug = "nothing-to-recompute"
    severity = "advice"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        float8 = following(analysis, plan.precision, (Float8, MxFp8))
        recomputed = recomputed_modules(analysis).items()
        whole = [(path, rule) for path, rule in recomputed if isinstance(rule.treatment, Full | Every)]
        for rule, paths in grouped(whole):
            assert manifest is not None
            if any(manifest.modules[path].kind not in ("linear", "embedding") or path in float8 for path in paths):
                continue
            kind = manifest.modules[paths[0]].kind
            keeps = "its input" if kind == "linear" else "its indices"
            yield self.at(
                rule.origin.written,
                f"recomputing `{paths[0]}` saves no memory: it keeps {keeps} with or without",
                label=f"of kind {kind}",
                help=["recompute a module that computes more, such as the whole block"],
            )


class WholeModelRecomputed(Check):
    """The whole model, or all its blocks, as one recomputed module.

    When the backward pass begins, everything is computed again and kept at once: the peak of memory stays
    where it was, and the step is a third longer. Checkpointing saves memory where one block after the other
    is recomputed.

    ## Example
    ```
    checkpoint { root = full }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = full }
    ```
    """

    code = "LP657"
    slug = "whole-model-recomputed"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        recomputed = checkpointed_modules(analysis)
        if not recomputed:
            return
        assert analysis.manifest is not None
        blocks = [item.path for item in analysis.manifest.block_lists]
        around = {above for path in blocks for above in holders(path)}
        rule = next((rule for path, rule in recomputed.items() if not path or path in around), None)
        if rule is None:
            return
        inner = f"{blocks[0]}.*" if blocks and blocks[0] else "PATH"
        yield self.at(
            rule.origin.written,
            "recomputing the whole model at once saves no memory at the peak",
            label="all activations are there again when the backward pass begins",
            help=[f"recompute block by block: `{inner} = {rule.treatment.signature()}`"],
        )
