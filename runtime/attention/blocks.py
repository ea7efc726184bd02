"""Blocks of queries and keys that a context-parallel rank attends to; without torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

Balance = Literal["head_tail", "none"]


class Block(NamedTuple):
    """Local ranges of queries and keys between which attention is full or causal."""

    queries: slice
    keys: slice
    causal: bool


def gathered_blocks(*, rank: int, size: int, length: int, causal: bool, balance: Balance) -> list[Block]:
    """Return the blocks of a rank that has all keys, in the order of the sequence.

    Args:
        rank: coordinate of the rank on the axis.
        size: ranks of the axis.
        length: tokens of one rank.
        causal: whether a token sees only those up to itself.
        balance: which tokens each rank holds.
    """
    if not causal:
        return [Block(slice(0, length), slice(0, size * length), False)]
    if balance == "none":
        parts = [(slice(0, length), rank * length)]
    else:
        half = length // 2
        parts = [(slice(0, half), rank * half), (slice(half, length), (2 * size - 1 - rank) * half)]
    blocks = []
    for queries, start in parts:
        end = start + queries.stop - queries.start
        blocks.append(Block(queries, slice(start, end), True))
        if start:
            blocks.append(Block(queries, slice(0, start), False))
    return blocks


def ring_blocks(*, rank: int, source: int, length: int, causal: bool, balance: Balance) -> list[Block]:
    """Return the blocks of a rank that has the keys of another rank, or its own.

    Args:
        rank: whose queries.
        source: whose keys.
        length: tokens of one rank.
        causal: whether a token sees only those up to itself.
        balance: which tokens each rank holds.
    """
    whole, half = slice(0, length), length // 2
    if not causal:
        return [Block(whole, whole, False)]
    if source == rank:
        return [Block(whole, whole, True)]
    if balance == "none":
        return [Block(whole, whole, False)] if source < rank else []
    if source < rank:  # the head of an earlier rank precedes all local tokens, its tail follows them
        return [Block(whole, slice(0, half), False)]
    return [Block(slice(half, length), whole, False)]


def blocks_of_rank(*, rank: int, size: int, length: int, causal: bool, gathered: bool, balance: Balance) -> list[Block]:
    """Return all blocks of a rank, those of a ring in the order of the ranks whose keys they are.

    Args:
        rank: coordinate of the rank on the axis.
        size: ranks of the axis.
        length: tokens of one rank.
        causal: whether a token sees only those up to itself.
        gathered: whether the rank has all keys at once; else it gets those of one rank after another.
        balance: which tokens each rank holds.
    """
    if gathered:
        return gathered_blocks(rank=rank, size=size, length=length, causal=causal, balance=balance)
    return [
        block
        for source in range(size)
        for block in ring_blocks(rank=rank, source=source, length=length, causal=causal, balance=balance)
    ]
