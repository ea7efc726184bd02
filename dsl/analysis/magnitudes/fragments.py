"""Fragments of the optimizer's state as a traced step offloads them, and those that `offload` chooses."""

from __future__ import annotations

import math

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.parallelism.experts import distributed_experts, ranks_of_one_expert
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.shard import placement
from legoai.dsl.analysis.training.optimizer import moments
from legoai.specs.allocator import round_block
from legoai.specs.directives.comm import ByBytes
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.fragments import Fragment, within


@fact
def state_fragments(analysis: Analysis) -> tuple[Fragment, ...]:
    """Return the state of each parameter's shard, a tied one by the first of its names.

    Muon's parameters, whose state is smaller, are counted like others: `bytes(n)` is not lowered beside `muon`.

    Raises:
        Undecided: a size, dtype or rule that this depends on is a hole.
    """
    kept = moments(analysis)
    return tuple(Fragment(name, kept * round_block(size)) for name, size in _shards(analysis).items())


def chosen_state(analysis: Analysis) -> int:
    """Return the bytes of optimizer state that `optimizer = bytes(n)` of `offload` chooses; 0 for another amount."""
    offload = analysis.plan.offload
    if offload is None or not isinstance(offload.optimizer, ByBytes):
        return 0
    shards, kept = _shards(analysis), moments(analysis)
    return sum(kept * shards[one.parameter] for one in within(state_fragments(analysis), offload.optimizer.n))


@fact
def _shards(analysis: Analysis) -> dict[str, int]:
    """Return the bytes of each parameter's shard on a rank, padded to that of the first rank."""
    manifest, mesh = analysis.manifest, analysis.plan.mesh
    assert manifest is not None
    repeated = {path for group in manifest.tied_parameters for path in group[1:]}
    size, experts = DTYPE_BYTES[analysis.plan.precision.master], distributed_experts(analysis)
    found = {}
    for name, whole in manifest.parameters():
        if name in repeated:
            continue
        shape, ranks, dim = [*whole], shard_ranks(analysis), placement(analysis, name).dim
        if name.rpartition(".")[0] in experts:
            shape[0], ranks = shape[0] // mesh.ep, ranks_of_one_expert(analysis)
        elif dim is not None:
            shape[dim] = -(-shape[dim] // mesh.tp)
        found[name] = -(-shape[0] // ranks) * math.prod(shape[1:]) * size
    return found
