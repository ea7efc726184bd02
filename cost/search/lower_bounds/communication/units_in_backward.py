"""Buffers of FSDP2's units around the backward of a decoder's last blocks.

Hooks allocate them in the order in which the host issues operations, independent of time. The root unit stays unsharded
from forward to backward, and its gradients are reduced last. When the backward of a block begins, its parameters are
unsharded, and those of the block before it are being gathered into a buffer. When it ends, its gradients are copied
into a buffer for the reduce-scatter, which the end of the next backward frees. From the second micro batch on there are
the gradients of the first.
"""

from __future__ import annotations

from typing import NamedTuple

from legoai.cost.search.lower_bounds.communication.collectives import gathered_for_backward, may_reshard
from legoai.cost.search.lower_bounds.communication.unit_elements import elements_of_units, trained_of_units
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.comm import reduces_last, unit_buckets
from legoai.dsl.analysis.computation.precision import computes_in_float8
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.magnitudes.state import state_bytes, summed_gradients
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters
from legoai.dsl.analysis.parallelism.experts import distributed_experts
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.shard import placement
from legoai.specs.dtypes import DTYPE_BYTES


class UnitsInBackward(NamedTuple):
    """Bytes of a rank beside parameters, optimizer state, activations and what stays gathered of units, at least.

    Attributes:
        before: when the backward of the last micro batch begins.
        last: when that of the last block goes on.
        second: when that of the block before it does; no more than `last` where it is not known.
    """

    before: int = 0
    last: int = 0
    second: int = 0


@fact
def units_in_backward(analysis: Analysis) -> UnitsInBackward:
    """What units hold in the last micro batch; nothing in a pipeline.

    Raises:
        Undecided: it depends on a hole.
    """
    plan, manifest, batches = analysis.plan, analysis.manifest, micro_batches(analysis.plan)
    if manifest is None or plan.mesh.pp > 1 or batches is None:
        return UnitsInBackward()
    state = state_bytes(analysis)
    gradients = 0 if state is None or batches == 1 or is_traced(analysis) else state.gradients
    if not follows_hooks(analysis):
        own = gathered_for_backward(analysis)
        return UnitsInBackward(gradients, gradients + own, own)
    units, elements = fsdp_units(analysis), elements_of_units(analysis)
    precision = plan.precision
    gathered, reduced = DTYPE_BYTES[precision.param], DTYPE_BYTES[precision.reduce]
    root = 0 if may_reshard(units[""]) else elements[""] * gathered
    if reduces_last(analysis):
        summed = summed_gradients(analysis) if batches > 1 else 0
        own = gathered_for_backward(analysis)
        return UnitsInBackward(root + summed, root + summed + own, root + own)
    before = root + gradients
    last = before + _gradients_of_head(analysis) * gathered + _gathered_in(analysis, -1) * gathered
    blocks = [path for item in manifest.block_lists for path in item.paths]
    second = before + _gradients_of_head(analysis) * gathered + _gathered_in(analysis, -2) * gathered
    return UnitsInBackward(before, last, second + trained_of_units(analysis).get(blocks[-1], 0) * reduced)


def follows_hooks(analysis: Analysis) -> bool:
    """Whether units are those of FSDP2, each of which gathers and reduces by itself, and gathers ahead by default."""
    plan = analysis.plan
    if plan.fsdp is None or is_traced(analysis) or shard_ranks(analysis) == 1 or plan.offload is not None:
        return False
    if distributed_experts(analysis) or computes_in_float8(plan.precision) or plan.compile is not None:
        return False
    return plan.comm is None or (plan.comm.prefetch == "implicit" and not unit_buckets(analysis))


def _gathered_in(analysis: Analysis, place: int) -> int:
    """Elements of a block, counted from behind, and of the one before it, as far as they are units gathered anew.

    Of units that may stay gathered, or not, as much is there in either case.
    """
    assert analysis.manifest is not None
    units, elements, trained = fsdp_units(analysis), elements_of_units(analysis), trained_of_units(analysis)
    lists = analysis.manifest.block_lists
    paths = lists[0].paths if len(lists) == 1 else ()
    pair = [path for path in paths[len(paths) + place - 1 : len(paths) + place + 1] if -place < len(paths)]
    # Those of which nothing is trained may have no backward.
    anew = [path for path in pair if path in units and may_reshard(units[path]) and trained[path]]
    return sum(elements[path] for path in anew)


def _gradients_of_head(analysis: Analysis) -> int:
    """Elements of trained linear layers behind the blocks in the unit that is the model itself."""
    manifest = analysis.manifest
    assert manifest is not None
    inside, tp = {path for item in manifest.block_lists for path in item.paths}, analysis.plan.mesh.tp
    left_out = {path for group in manifest.tied_parameters for path in group} | untrained_parameters(analysis)
    found = 0
    for path, module in manifest.modules.items():
        if module.kind == "linear" and inside.isdisjoint(holders(path)):
            for parameter in module.parameters:
                name = module.child_path(parameter.name)
                if name not in left_out and not owner(analysis, name):
                    found += parameter.numel // (tp if placement(analysis, name).dim is not None else 1)
    return found
