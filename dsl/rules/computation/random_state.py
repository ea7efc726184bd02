"""`checkpoint`: rules about the random state of recomputed modules."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.computation.checkpoint import random_modules, recomputed_modules
from legoai.dsl.analysis.facts import holders, written
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check


class RngOfNothing(Check):
    """A choice about the random state in a plan that recomputes nothing, or that restores none.

    Under `backend = graph` a step is traced once, and recomputation is operators of its graph, which restore no random
    state. The models that it supports draw no random numbers.

    ## Example
    ```
    checkpoint (preserve_rng = false)
    ```

    ## Use instead
    ```
    checkpoint (preserve_rng = false) { layers.* = full }
    ```
    """

    code = "LP658"
    slug = "rng-of-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        checkpoint = analysis.plan.checkpoint
        if checkpoint is None or analysis.manifest is None or not written(checkpoint, "preserve_rng"):
            return
        more = "leave it out, or say what is recomputed"
        if not checkpointed_modules(analysis):
            within = bool(recomputed_modules(analysis))
            why = "compiled modules with a budget draw no random numbers" if within else "no module is recomputed"
        elif checkpoint.preserve_rng is True and is_traced(analysis):
            why, more = "`backend = graph` restores no random state, and its models draw none", "leave it out"
        else:
            return
        yield self.at(
            analysis.span_of(checkpoint, "preserve_rng"),
            f"`preserve_rng` has no effect: {why}",
            label="has no effect",
            help=[more],
        )


class RandomStateNotKept(Check):
    """Recomputed modules that draw other random numbers than they drew in the forward pass.

    With `preserve_rng = false` the random state is not restored before a module is recomputed. Where a module inside of
    it draws random numbers, as dropout does, other elements are dropped then, and the gradients are not those of the
    loss.

    ## Use instead
    ```
    checkpoint { layers.* = full }
    ```
    """

    code = "LP659"
    slug = "random-state-not-kept"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        checkpoint = analysis.plan.checkpoint
        if checkpoint is None or analysis.manifest is None or checkpoint.preserve_rng is not False:
            return
        recomputed = checkpointed_modules(analysis)
        drawing = [
            path for path in random_modules(analysis) if not recomputed.keys().isdisjoint((path, *holders(path)))
        ]
        if drawing:
            more = f" and {len(drawing) - 1} more modules" if len(drawing) > 1 else ""
            yield self.at(
                analysis.span_of(checkpoint, "preserve_rng"),
                f"`{drawing[0]}`{more} would draw other random numbers when recomputed: wrong gradients",
                label="the random state is not restored",
                help=["leave `preserve_rng` out: the state is kept where modules draw random numbers"],
            )
