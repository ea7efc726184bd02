"""Traces of lowered plans, composed from pieces in the disk cache.

A program that differs from an earlier one only in its depth, number of micro batches or learning rate is not captured
again, and torch is not imported for it. That of another author's model is captured anew where a file, a package or an
environment variable has changed that the inspection of the model has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legoai.cost.replay.piece import Piece
from legoai.cost.replay.plan_key import may_keep, variation_of_plan
from legoai.cost.replay.store import cached_piece, keep_piece
from legoai.cost.trace.trace import Trace
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import Program
from legoai.specs.cluster import Device

if TYPE_CHECKING:
    from legoai.cost.simulated.device import Kind


@dataclass(frozen=True, slots=True)
class PieceOf:
    """A piece with the depths and micro batches of a program; see :meth:`legoai.cost.replay.piece.Piece.trace`."""

    piece: Piece
    depths: Mapping[str, int]
    micro_batches: int

    def trace(self) -> Trace:
        """Compose the program's trace."""
        return self.piece.trace(self.depths, self.micro_batches)


def piece_of(
    program: Program,
    analysis: Analysis,
    *,
    rank: int,
    kind: Kind,
    gpu: Device,
    capturing: Callable[[], contextlib.AbstractContextManager[object]],
) -> PieceOf | Trace:
    """Return the piece from which the trace of one rank of a plan is composed, or the trace where there is no piece.

    Args:
        program: what the plan was lowered to.
        analysis: of the plan, which has no pipeline.
        rank: global rank that is simulated.
        kind: of device, which decides the kernels.
        gpu: the plan's device.
        capturing: context manager that is entered while the program is captured.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
    """
    world = analysis.plan.mesh.world_size
    variation = variation_of_plan(program, analysis, rank=rank, kind=kind, gpu=gpu)
    if variation is not None:
        piece = cached_piece(variation.key)
        depths = None if piece is None else piece.depths_of(variation.lengths)
        if piece is not None and depths is not None and piece.follows(depths, variation.micro_batches):
            return PieceOf(piece, depths, variation.micro_batches)
        piece = cached_piece(variation.key_at_depth)
        if piece is not None and piece.follows({}, variation.micro_batches):
            return PieceOf(piece, {}, variation.micro_batches)
    kept = may_keep(analysis)
    with capturing():
        from legoai.cost.capture import capture, capture_piece

        captured = capture_piece(program, world=world, rank=rank, kind=kind, gpu=gpu)
        if captured is None:
            return capture(program, world=world, rank=rank, kind=kind, gpu=gpu, replay=False)
    if isinstance(captured, Trace):
        return captured
    if variation is not None and kept:
        any_depth = captured.depths_of(variation.lengths) is not None
        if any_depth or not captured.containers:
            keep_piece(variation.key if any_depth else variation.key_at_depth, captured)
    return PieceOf(captured, captured.depths, captured.wanted)
