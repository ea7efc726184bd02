"""Modules that recompute their activations in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import decided, each_rule, holders
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.dsl.frontend.paths import pattern
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Budget, Every, Full, Selective


def matched_modules(analysis: Analysis, rule: PathRule[Any]) -> Sequence[str]:
    """Return the modules that a rule matches, those included that another rule wins."""
    return analysis.module_paths.matching(pattern(rule.path))


def chosen_of(matched: Sequence[str], treatment: Every) -> Sequence[str]:
    """Return those of the modules matched that `every(n)` chooses: the n-th, the 2n-th and so on."""
    return matched[treatment.n - 1 :: treatment.n]


@fact
def recomputed_modules(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """The modules that recompute, in the model's order, each with its rule.

    `every(n)` counts the modules that its pattern matches, those included that another rule wins; the n-th, the 2n-th
    and so on recompute, as TorchTitan counts.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    checkpoint = analysis.plan.checkpoint
    if checkpoint is None or analysis.manifest is None:
        return {}
    decided(checkpoint)
    chosen: dict[int, Sequence[str]] = {}
    found = {}
    for path, rule in analysis.assigned(checkpoint).by_path.items():
        treatment = rule.treatment
        if isinstance(treatment, Every):
            if id(rule) not in chosen:
                chosen[id(rule)] = chosen_of(matched_modules(analysis, rule), treatment)
            if path in chosen[id(rule)]:
                found[path] = rule
        elif isinstance(treatment, Full | Selective | Budget):
            found[path] = rule
    return found


def kept_outputs(analysis: Analysis) -> PathRule[Any] | None:
    """The first rule that keeps some outputs, by a list or a budget; None where there is none."""
    rules = recomputed_modules(analysis).values()
    return next((rule for rule in rules if isinstance(rule.treatment, Selective | Budget)), None)


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Budgets of single modules, whose operators are the same on every rank."""
    checkpoint = analysis.plan.checkpoint
    if checkpoint is None:
        return
    for rule in each_rule(checkpoint):
        if not isinstance(rule.treatment, Budget):
            continue
        if analysis.plan.context is not None and analysis.plan.mesh.cp > 1:
            # Ranks that saved different operators would recompute different collectives, and deadlock.
            yield Unsupported(
                rule.origin.span or analysis.span_of(checkpoint, "keyword"),
                "a `budget` beside ranks of `cp` is not lowered: they compute different blocks of attention, "
                "so that each would choose other operators",
                help=("`selective([…])` keeps the same operators on every rank, and `full` keeps none",),
            )


def keeps_random_state(analysis: Analysis, path: str) -> bool:
    """Whether a recomputing module restores the random state of its forward, so that dropout drops the same elements.

    By default it does where the module or one within it draws random numbers, or where forward could not be followed,
    so that this is not known.
    """
    checkpoint = analysis.plan.checkpoint
    assert checkpoint is not None, "a plan that recomputes modules"
    return may_draw(analysis, path) if checkpoint.preserve_rng is None else checkpoint.preserve_rng


def may_draw(analysis: Analysis, path: str) -> bool:
    """Whether a module or one within it draws random numbers in training, or forward could not be followed."""
    assert analysis.manifest is not None, "a model that can be inspected"
    unknown = analysis.manifest.flow_error is not None
    return unknown or any(path in (name, *holders(name)) for name in random_modules(analysis))


def stops_early(analysis: Analysis, path: str) -> bool:
    """Whether recomputation of a module may stop when autograd has been given all tensors that backward needs.

    Not where an operator such as `rrelu` fills one of them with random numbers only after that.
    """
    assert analysis.manifest is not None, "a model that can be inspected"
    modules = analysis.manifest.modules.items()
    return not any(module.changes.fp32.noise and path in (name, *holders(name)) for name, module in modules)


@fact
def random_modules(analysis: Analysis) -> tuple[str, ...]:
    """Return the paths of the modules whose own forward draws random numbers in training."""
    assert analysis.manifest is not None, "a model that can be inspected"
    return tuple(path for path, module in analysis.manifest.modules.items() if module.random)
