"""`checkpoint`: activations that are kept for the backward pass, and those that are recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from legoai.specs.directives.base import Calls, Directive, Divided, Staged, Treatment, option
from legoai.specs.directives.kinds import Boolean, Choice, Either, Fraction, Integer, ListOf, Size, Text


class KeepAll(Treatment):
    """Keeps every activation."""

    name: ClassVar[str] = "none"


class Full(Treatment):
    """Keeps the module's input and recomputes the rest (`checkpoint_wrapper`)."""

    name: ClassVar[str] = "full"


class Every(Treatment):
    """Full checkpointing of every n-th module that the rule matches, and none of the others."""

    name: ClassVar[str] = "every"

    n: int = option(Integer(minimum=1), doc="The stride; 1 is the same as `full`.")


class Selective(Treatment):
    """Keeps the outputs of the listed operators and recomputes the others."""

    name: ClassVar[str] = "selective"

    keep: tuple[str, ...] = option(
        ListOf(
            Either(
                (
                    Choice(("attention", "matmul", "alternate_matmul", "collective")),
                    Text("an operator in quotes"),
                )
            )
        ),
        doc=(
            "What is kept: `attention`, `matmul`, `alternate_matmul` (of the products of two matrices, as linear "
            "layers compute, every second from the first on, and none of the grouped products of experts), "
            '`collective`, or operators by name (`"aten.mm.default"`).'
        ),
    )


class Budget(Treatment):
    """Saves activations up to a share of their memory, choosing operators so that recomputation is least.

    Of a module that is compiled itself the compiler chooses, by `torch._functorch.config.activation_memory_budget`.
    `legoai cost` lists which outputs are saved, and which operators run again.
    """

    name: ClassVar[str] = "budget"

    amount: float | int = option(
        Either((Size(), Fraction())),
        doc=(
            "The memory kept: a fraction of all, or bytes for each module. Of a compiled module a fraction of what "
            "the compiler would save by itself, beyond what enters the module."
        ),
    )
    by: str = option(
        Choice(("greedy", "knapsack", "ilp")),
        doc=(
            "How a module's operators are chosen: `greedy` by recomputation cost per byte, `knapsack` the best set "
            "with sizes rounded up to 1/4096 of the budget, `ilp` the best set by an integer program, which needs "
            "`pip install 'legoai[solvers]'` where the plan trains and which compiled modules do not take."
        ),
        default="knapsack",
    )


_ALIKE: Final = Calls((KeepAll, Full, Selective, Budget))
"""Treatments that are the same for every module."""


class First(Divided):
    """One treatment for the first n modules that the rule matches, and another for the rest.

    Recomputing the first blocks of a model needs least memory: when their backward runs, that of the others is over,
    and has freed their activations. Modules are counted over the whole model, as `every` counts them, so that the rule
    does not depend on a pipeline's split; `stages` gives each stage its own number.
    """

    these: Any = option(_ALIKE, doc="The treatment of the first n.")
    others: Any = option(_ALIKE, doc="The treatment of the others.", default=KeepAll())


class Stages(Staged):
    """A treatment for the modules of each stage of a pipeline.

    The first stages have most micro batches in flight, so they must recompute most:
    `stages([full, first(6, full), first(2, full), none])`.
    """

    each: tuple[Any, ...] = option(
        ListOf(Calls((KeepAll, Full, Selective, Budget, First))),
        doc="One for each stage, in the model's order; `first` counts the modules of its stage.",
    )


class Checkpoint(Directive):
    """Activation checkpointing: a treatment for each module path; modules without a rule keep all their activations."""

    keyword: ClassVar[str] = "checkpoint"
    treatments: ClassVar[Calls | None] = Calls((KeepAll, Full, Every, Selective, Budget, First, Stages))
    absent: ClassVar[Mapping[str, Any] | None] = {}
    unruled: ClassVar[type[Treatment] | None] = KeepAll

    preserve_rng: bool | None = option(
        Boolean(),
        doc=(
            "Save and restore the random state, so that recomputed dropout drops the same elements. By default where "
            "a module inside draws random numbers, as dropout does; built-in models draw none, and `backend = graph`, "
            "which is for them, restores none."
        ),
        default=None,
    )
