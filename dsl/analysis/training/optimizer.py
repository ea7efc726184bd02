"""Parameters as the optimizer sees them: their tensor type, and the rule that each of them follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import decided, grouped, holders
from legoai.dsl.analysis.offload import offloads, without_limit
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.replicate import replicas
from legoai.dsl.analysis.parallelism.shard import DISTRIBUTING, tensor_parallel
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.dsl.frontend.paths import Paths, pattern
from legoai.specs.directives.base import Directive, PathRule, name_of
from legoai.specs.directives.optimizer import Adam, AdamW, Group, Muon, Sgd


def distributing_statement(analysis: Analysis) -> Directive | None:
    """Return the statement that turns parameters into DTensors; None where all of them are plain tensors.

    Raises:
        Undecided: the size of `tp` or a treatment on it is a hole.
    """
    plan = analysis.plan
    if plan.fsdp is not None:
        return plan.fsdp
    replicate = replicas(analysis)
    if replicate is not None:
        return replicate
    laid = tensor_parallel(analysis)
    placed = laid.placements or any(isinstance(rule.treatment, DISTRIBUTING) for rule in laid.styles.values())
    return plan.shard_on("tp") if placed else None


@fact
def parameter_rules(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the rule of `optimizer` that each parameter follows, by path; parameters without a rule are left out.

    See :func:`closest_rules`. A tied parameter is listed under each of its names.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    optimizer, manifest = analysis.plan.optimizer, analysis.manifest
    if not optimizer.rules or manifest is None:
        return {}
    decided(optimizer)
    return closest_rules(optimizer.rules, analysis.paths_for(optimizer), dict(manifest.parameters()))


def closest_rules(
    rules: Sequence[PathRule[Any]], paths: Paths, parameters: Mapping[str, Sequence[int]]
) -> dict[str, PathRule[Any]]:
    """Return for each parameter the rule that matches it most closely.

    A rule for the parameter is closer than one for an ancestor, an inner module is closer than an outer one, and of two
    rules for the same path the more specific pattern wins. A pattern that matches at several depths, such as
    `layers.**`, is as close as its outermost match. Muon's rules apply only to matrices.

    Args:
        rules: decided ones.
        paths: of the model's modules and parameters.
        parameters: shape by path.
    """
    return {path: found[0] for path, found in two_closest_rules(rules, paths, parameters).items()}


def two_closest_rules(
    rules: Sequence[PathRule[Any]], paths: Paths, parameters: Mapping[str, Sequence[int]]
) -> dict[str, tuple[PathRule[Any], PathRule[Any] | None]]:
    """Return for each parameter the rule of :func:`closest_rules`, and the one that it would follow without that."""
    reaching: dict[str, list[tuple[tuple[int, ...], int, PathRule[Any]]]] = {}
    for number, rule in enumerate(rules):
        found = pattern(rule.path)
        for place in dict.fromkeys(paths.matching(found)):
            reaching.setdefault(place, []).append((found.specificity, number, rule))
    closest = {}
    for path, shape in parameters.items():
        # By the number of the rule: how close it is, the closest least.
        near: dict[int, tuple[int, tuple[int, ...], int, PathRule[Any]]] = {}
        for depth, place in enumerate((*reversed(holders(path)), path)):
            for specificity, number, rule in reaching.get(place, ()):
                if not isinstance(rule.treatment, Muon) or len(shape) == 2:
                    near.setdefault(number, (-depth, specificity, number, rule))
        if near:
            first, *others = sorted(near.values(), key=lambda item: item[:3])
            closest[path] = (first[3], others[0][3] if others else None)
    return closest


def own_constants(group: Group, algorithm: AdamW | Adam | Sgd) -> dict[str, Any]:
    """Return a group's constants that override the optimizer's, by their names in torch."""
    names = ("lr", "weight_decay", "betas", "eps")
    found = {name: getattr(group, name) for name in names if getattr(group, name) is not None}
    if group.lr_scale is not None:
        found["lr"] = group.lr_scale * algorithm.lr
    return found


def update_of(rule: PathRule[Any] | None, algorithm: AdamW | Adam | Sgd) -> dict[str, Any]:
    """Return the algorithm and constants of a parameter that follows the rule."""
    if rule is not None and isinstance(rule.treatment, Muon):
        return {"algorithm": rule.treatment.name, **muon_constants(rule.treatment)}
    usual = {item.field: getattr(algorithm, item.field) for item in algorithm.options}
    own = {} if rule is None else own_constants(rule.treatment, algorithm)
    return {"algorithm": algorithm.name, **usual, **own}


def muon_constants(muon: Muon) -> dict[str, Any]:
    """The constants of Muon, by their names in torch."""
    names = {"adjust_lr": "adjust_lr_fn"}
    return {names.get(item.field, item.field): getattr(muon, item.field) for item in muon.options}


@fact
def muon_parameters(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """The matrices that Muon updates, with their rules.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    return {path: rule for path, rule in parameter_rules(analysis).items() if isinstance(rule.treatment, Muon)}


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Optimizer state in the dtype of the parameters, and matrices whose shards are exchanged during computation."""
    algorithm = analysis.plan.optimizer.algorithm
    if isinstance(algorithm, AdamW) and algorithm.state is not None:
        yield Unsupported(
            analysis.span_of(algorithm, "state"),
            f"`state = {algorithm.state}` is not lowered yet: its kernels are torchao's, which are not simulated",
            help=("leave `state` out, or offload the state (`offload (optimizer = all)`)",),
        )
    if is_traced(analysis):
        yield from _offloaded_from_a_graph(analysis)
    if not offloads(analysis, "parameters"):
        return
    for rule, _ in grouped(muon_parameters(analysis).items()):
        yield Unsupported(
            analysis.rule_span(rule),
            "`muon` of parameters in host memory is not lowered yet: ranks exchange their parts of matrices on the "
            "device",
            help=("offload the optimizer's state alone (`offload (optimizer = all)`), or leave `muon` out",),
        )


def moments(analysis: Analysis) -> int:
    """Return how many values the optimizer keeps per element of a parameter that Muon does not update."""
    algorithm = analysis.plan.optimizer.algorithm
    return int(algorithm.momentum > 0.0) if isinstance(algorithm, Sgd) else 2


def keeps_state(analysis: Analysis) -> bool:
    """Whether the optimizer keeps anything per element of a parameter: SGD without momentum does not.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    return bool(moments(analysis) or muon_parameters(analysis))


def _offloaded_from_a_graph(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield amounts of the optimizer's state whose sizes or limit are not known."""
    offload = analysis.plan.offload
    if offload is None or offload.optimizer == "none" or offload.parameters != "none":
        return
    place, amount = analysis.span_of(offload, "optimizer"), offload.optimizer
    if not keeps_state(analysis):
        yield Unsupported(
            place,
            "`optimizer` of `offload` is not lowered: `sgd` without `momentum` keeps no state",
            "nothing to offload",
            ("leave `optimizer` out",),
        )
    elif amount != "all" and muon_parameters(analysis):
        yield Unsupported(
            place,
            f"`optimizer = {name_of(amount)}` of `offload` is not lowered beside `muon`, whose state "
            "is not as large for each parameter as that of the others",
            "sizes differ",
            ("write `all`, or leave `muon` out",),
        )
    elif amount == "adaptive" and analysis.plan.memory_limit is None:
        yield Unsupported(place, *without_limit(analysis, "optimizer"))
