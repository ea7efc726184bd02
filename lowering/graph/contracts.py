"""Passes over the graph of a step, in order, with their contracts.

A program names the passes that it uses. Before any of them runs, their contracts are checked, as DeepCompile does
(Tanaka et al. 2025).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from legoai.lowering.graph.measurement.profile import MeasuredProfile, measures
from legoai.lowering.graph.measurement.rounds import SecondRound, read_notice
from legoai.lowering.graph.passes.activations import keep_activations
from legoai.lowering.graph.passes.bucket import bucket_units
from legoai.lowering.graph.passes.compile_regions import compile_regions
from legoai.lowering.graph.passes.deduplicate import deduplicate_unshards
from legoai.lowering.graph.passes.keep import keep_unsharded
from legoai.lowering.graph.passes.offload import offload_activations
from legoai.lowering.graph.passes.offload_state import offload_optimizer_state
from legoai.lowering.graph.passes.overlap import overlap_communication
from legoai.lowering.graph.passes.overlap_by_time import overlap_by_time
from legoai.lowering.graph.passes.prefetch import prefetch_proactively
from legoai.lowering.graph.passes.reshard import reshard_after_forward
from legoai.lowering.graph.passes.schedule_overlap import schedule_overlap
from legoai.lowering.graph.passes.unshard import unshard_selectively
from legoai.lowering.graph.step.step_graph import StepGraph

Pass: TypeAlias = Callable[[StepGraph], None]
Watch: TypeAlias = Callable[[str, StepGraph], None]
Property = Literal[
    "gathered once",
    "activations kept",
    "gathered again for backward",
    "bucketed",
    "overlapped",
    "timed",
    "activations offloaded",
    "state offloaded",
    "prefetched",
    "unsharded",
    "kept",
    "compiled",
]


class ContractError(ValueError):
    """The order of passes violates a contract."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Contract of a pass with the graph.

    Attributes:
        rewrite: the pass; its options are bound by `functools.partial` where a program names it.
        requires: properties that earlier passes must have established.
        provides: properties that the pass establishes.
        conflicts: properties that no earlier pass may have established.
    """

    rewrite: Callable[..., None]
    requires: frozenset[Property] = frozenset()
    provides: frozenset[Property] = frozenset()
    conflicts: frozenset[Property] = frozenset()


PASSES: Final = (
    Contract(
        deduplicate_unshards,
        provides=frozenset({"gathered once"}),
        conflicts=frozenset({"gathered again for backward", "bucketed", "compiled"}),
    ),
    Contract(
        keep_activations,
        requires=frozenset({"gathered once"}),
        provides=frozenset({"activations kept"}),
        conflicts=frozenset({"gathered again for backward", "bucketed", "compiled"}),
    ),
    Contract(
        reshard_after_forward,
        requires=frozenset({"gathered once"}),
        provides=frozenset({"gathered again for backward"}),
        conflicts=frozenset({"bucketed", "compiled"}),
    ),
    Contract(
        bucket_units,
        requires=frozenset({"gathered once"}),
        provides=frozenset({"bucketed"}),
        conflicts=frozenset({"compiled"}),
    ),
    Contract(
        schedule_overlap,
        requires=frozenset({"gathered once"}),
        provides=frozenset({"bucketed", "overlapped"}),
        conflicts=frozenset({"bucketed", "compiled"}),
    ),
    Contract(
        overlap_communication,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"overlapped"}),
        conflicts=frozenset({"overlapped", "unsharded", "kept", "compiled"}),
    ),
    Contract(
        overlap_by_time,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"overlapped", "timed"}),
        conflicts=frozenset({"overlapped", "unsharded", "kept", "compiled"}),
    ),
    Contract(
        offload_activations,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"activations offloaded"}),
        conflicts=frozenset({"activations offloaded", "prefetched", "unsharded", "kept", "compiled"}),
    ),
    Contract(
        offload_optimizer_state,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"state offloaded"}),
        conflicts=frozenset({"state offloaded", "prefetched", "unsharded", "kept", "compiled"}),
    ),
    Contract(
        prefetch_proactively,
        requires=frozenset({"overlapped"}),
        provides=frozenset({"prefetched"}),
        conflicts=frozenset({"timed", "prefetched", "unsharded", "kept", "compiled"}),
    ),
    Contract(
        unshard_selectively,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"unsharded"}),
        conflicts=frozenset({"unsharded", "kept", "compiled"}),
    ),
    Contract(
        keep_unsharded,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"kept"}),
        conflicts=frozenset({"kept", "compiled"}),
    ),
    Contract(
        compile_regions,
        requires=frozenset({"bucketed"}),
        provides=frozenset({"compiled"}),
        conflicts=frozenset({"compiled"}),
    ),
)
"""All passes, in the order in which programs name them; amounts of state that are known leave before activations."""

TRACE: Final = "trace"
"""Name of a graph that no pass has rewritten."""

_WATCHES: Final[list[Watch]] = []

_CONTRACTS: Final = {contract.rewrite: contract for contract in PASSES}


def check(passes: Sequence[Pass]) -> None:
    """Check the contracts of passes.

    Raises:
        ContractError: a contract is violated.
    """
    provided: set[Property] = set()
    for rewrite in passes:
        contract = _CONTRACTS[_function(rewrite)]
        missing, clashing = contract.requires - provided, contract.conflicts & provided
        if missing or clashing:
            what = f"needs a graph that is {_words(missing)}" if missing else f"comes before it is {_words(clashing)}"
            raise ContractError(f"the pass {_function(rewrite).__name__} {what}")
        provided |= contract.provides


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """While entered, call a function with every graph that is rewritten: as it was traced, and after each pass."""
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.remove(watch)


def rewritten(graph: StepGraph, passes: Sequence[Pass], *, profile: MeasuredProfile | None = None) -> StepGraph:
    """Rewrite a graph in place, and return it.

    Args:
        graph: as it was traced.
        passes: in order.
        profile: measured by the first steps, unless an earlier run has measured it; then the passes are applied again.

    Raises:
        ContractError: a contract is violated; then no pass has run.
    """
    check(passes)
    if profile is None:
        _rewrite(graph, passes)
        return graph
    problem = profile.read(graph)
    graph.notices.append(read_notice(problem, profile, graph))
    if profile.profile is not None:
        graph.beyond = profile.profile.memory
        _rewrite(graph, passes)
        return graph
    traced = graph.copied()
    _rewrite(graph, passes)
    if measures():
        graph.rounds = SecondRound(graph, traced, lambda again: _rewrite(again, passes), profile)
    return graph


def _rewrite(graph: StepGraph, passes: Sequence[Pass]) -> None:
    for watch in _WATCHES:
        watch(TRACE, graph)
    for rewrite in passes:
        rewrite(graph)
        graph.graph.lint()
        graph.module.recompile()
        for watch in _WATCHES:
            watch(_function(rewrite).__name__, graph)


def _function(rewrite: Pass) -> Callable[..., None]:
    return rewrite.func if isinstance(rewrite, functools.partial) else rewrite


def _words(properties: frozenset[Property] | set[Property]) -> str:
    return " and ".join(sorted(properties))
