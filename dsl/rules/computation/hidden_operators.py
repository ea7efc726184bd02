"""`checkpoint` beside `compile`: rules about choices between operators that a compiled module hides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.compilation.compiler_budgets import compiler_budgets
from legoai.dsl.analysis.computation.checkpoint import may_draw, recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, grouped, holders, name_of
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Budget, Selective
from legoai.specs.operators import ATTENTION


class HiddenOperators(Check):
    """A choice between the operators of a module that compilation hides.

    `selective` and `budget` choose operator by operator what to keep. A compiled module inside such a module is a
    single operator to them. Where the module is compiled itself, the compiler keeps and recomputes what `selective`
    lists, and keeps a `budget`: it chooses what it saves by `knapsack` or `greedy`, within a share of what it would
    save by default, not within bytes. Inside of a compiled module it keeps no budget of a part.

    ## Example
    ```
    checkpoint { layers.* = selective([matmul]) }
    compile { layers.*.feed_forward = inductor }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = selective([matmul]) }
    compile { layers.* = inductor }
    ```
    """

    code = "LP628"
    slug = "hidden-operators"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if is_traced(analysis):  # which chooses operators before it compiles
            return
        compiled = compiled_modules(analysis)
        for rule, paths in grouped(recomputed_modules(analysis).items()):
            if not isinstance(rule.treatment, Selective | Budget):
                continue
            met = next((found for path in paths for found in _met(compiled, path, rule)), None)
            if met is None:
                yield from self._beyond_compiler(analysis, compiled, rule, paths)
                continue
            path, other = met
            assert rule.path_origin.span is not None
            yield self.at(
                rule.path_origin.span,
                f"`{rule.treatment.name}` chooses between the operators of `{name_of(path)}`, which compilation hides",
                label="sees no operators",
                others=_compiles(compiled, other),
                help=["write `full`" if below(other, path) else "write `full` or `selective([…])`"],
            )

    def _beyond_compiler(
        self, analysis: Analysis, compiled: Mapping[str, PathRule[Any]], rule: PathRule[Any], paths: Iterable[str]
    ) -> Iterator[Diagnostic]:
        """Yield the options of a budget that the compiler of these modules does not have."""
        path, treatment = next((path for path in paths if path in compiled), None), rule.treatment
        if path is None or not isinstance(treatment, Budget):
            return
        about = f"`{name_of(path)}` is compiled, and the compiler"
        if isinstance(treatment.amount, int):
            yield self.at(
                analysis.span_of(treatment, "amount"),
                f"{about} keeps a budget only as a share of what it would save by default",
                label="bytes",
                others=_compiles(compiled, path),
                help=["write a share, such as `budget(50%)`"],
            )
        if treatment.by == "ilp":
            yield self.at(
                analysis.span_of(treatment, "by"),
                f"{about} chooses by `knapsack` or `greedy`",
                label="chooses by another program",
                others=_compiles(compiled, path),
                help=["leave `by` out: `knapsack` gives the best choice up to rounding"],
            )


def _met(compiled: Mapping[str, PathRule[Any]], path: str, rule: PathRule[Any]) -> Iterator[tuple[str, str]]:
    """The module with the compiled one that hides its operators: inside of it, or for a budget also around it."""
    inside = (held for held in compiled if below(held, path))
    around = (above for above in holders(path) if above in compiled)
    yield from ((path, found) for found in inside)
    if isinstance(rule.treatment, Budget):
        yield from ((path, found) for found in around)


class CompilerDrawsAgain(Check):
    """A compiled module that draws random numbers, as dropout does, and has a budget.

    Within a budget the compiler computes random operators again like others, and draws other numbers than in forward
    (PyTorch 2.13): other elements are dropped, and the gradients are not those of the loss.

    ## Use instead
    ```
    compile { layers.* = inductor }
    checkpoint { layers.* = selective([attention, matmul]) }
    ```
    """

    code = "LP639"
    slug = "compiler-draws-again"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        compiled = compiled_modules(analysis)
        for rule, paths in grouped(compiler_budgets(analysis).items()):
            path = next((path for path in paths if may_draw(analysis, path)), None)
            if path is None:
                continue
            assert rule.path_origin.span is not None and analysis.manifest is not None
            draws = "may draw" if analysis.manifest.flow_error is not None else "draws"
            yield self.at(
                rule.path_origin.span,
                f"`{name_of(path)}` {draws} random numbers, and its compiler would draw others when it recomputes",
                label="wrong gradients",
                others=_compiles(compiled, path),
                help=["write `full` or `selective([…])`, which restore the random state", "or leave dropout out"],
            )


class CompiledAttention(Check):
    """Attention that is recomputed by itself in a module that is compiled under tensor parallelism.

    torch can then recompute attention only with the whole module (PyTorch 2.13): `selective` has to keep it, by the
    word `attention` or by the name of its operator.

    ## Example
    ```
    mesh (tp = 8, dp_replicate = 4)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile { layers.* = inductor }
    checkpoint { layers.* = selective([matmul]) }
    ```

    ## Use instead
    ```
    mesh (tp = 8, dp_replicate = 4)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile { layers.* = inductor }
    checkpoint { layers.* = selective([attention, matmul]) }
    ```
    """

    code = "LP629"
    slug = "compiled-attention"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.mesh.tp == 1 or plan.shard_on("tp") is None or is_traced(analysis):
            return
        compiled, operators = compiled_modules(analysis), _attention_operators(analysis)
        for rule, paths in grouped(recomputed_modules(analysis).items()):
            path = next((path for path in paths if path in compiled), None)
            if path is None or not isinstance(rule.treatment, Selective):
                continue
            if any(_is_attention(kept, operators) for kept in rule.treatment.keep):
                continue
            assert rule.path_origin.span is not None
            yield self.at(
                rule.path_origin.span,
                f"`{name_of(path)}` is compiled under tensor parallelism, where torch can recompute attention only "
                "with the whole module",
                label="recomputes attention",
                others=_compiles(compiled, path),
                help=["add `attention` to what is kept", "or write `full`"],
            )


def _attention_operators(analysis: Analysis) -> list[str]:
    """The operators of attention on the plan's device; all where that is not known."""
    device = analysis.device
    return [name for name in ATTENTION if device is None or name.endswith("_for_cpu") == (device.kind == "cpu")]


def _is_attention(kept: str, operators: Iterable[str]) -> bool:
    """Whether what is kept is the word for attention, or the name of one of its operators or their overloads."""
    return kept == "attention" or any(kept == name or kept.startswith(f"{name}.") for name in operators)


def _compiles(compiled: Mapping[str, PathRule[Any]], path: str) -> list[Label]:
    span = compiled[path].path_origin.span
    assert span is not None
    return [Label(span, f"`{name_of(path)}` is compiled")]
