"""Attention kernels of one rank for one sequence, of which it may hold a part.

A context-parallel rank attends from its own queries to its own keys and to those of the other ranks, in the blocks of
:mod:`legoai.runtime.attention.blocks`, each of which is one kernel; or to whole sequences, with a share of the heads.
Ranks may hold different parts, of equal work; where they do not, the one with the most work is simulated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

from legoai.cost.search.lower_bounds.local_kernels import AttentionPiece
from legoai.dsl.analysis.analysis import Analysis
from legoai.runtime.attention.blocks import Balance, Block, blocks_of_rank


def pieces_of_ranks(analysis: Analysis) -> tuple[tuple[AttentionPiece, ...], ...]:
    """What a simulated rank of `cp` may have to compute of one sequence; none where that is not known.

    Raises:
        Undecided: the number of ranks, or how they share sequences, is a hole.
    """
    plan = analysis.plan
    size, length, context = plan.mesh.cp, plan.batch.length, plan.context
    if size == 1:
        return ((AttentionPiece(length, length, True),),)
    if context is None or length % (2 * size):
        return ()
    if context.rotate == "heads":
        return ((AttentionPiece(length, length, True),),)
    cut, balance = length // size, cast("Balance", context.dealt)

    gathered = context.rotate == "allgather"
    blocks = functools.partial(blocks_of_rank, size=size, length=cut, causal=True, gathered=gathered, balance=balance)

    ranks = (size - 1,) if balance == "none" else range(size)  # `busiest_rank`, whatever `tp` is
    return tuple(sorted({_pieces(blocks(rank=rank)) for rank in ranks}))


def _pieces(blocks: Iterable[Block]) -> tuple[AttentionPiece, ...]:
    """The kernels of some blocks."""
    return tuple(
        AttentionPiece(queries.stop - queries.start, keys.stop - keys.start, causal) for queries, keys, causal in blocks
    )
