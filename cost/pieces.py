"""Traces of lowered plans, composed from pieces in the disk cache.

A program that differs from an earlier one only in its depth, number of micro batches or learning rate is not captured
again, and torch is not imported for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legoai.cost.replay.key import Variation, variation_of
from legoai.cost.replay.piece import Piece
from legoai.cost.replay.store import cached_piece, keep_piece
from legoai.cost.trace.trace import Trace
from legoai.lowering.profile import ProfileKey, digest_of
from legoai.lowering.program import Program
from legoai.specs.cluster import Device
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

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
    plan: Plan,
    manifest: Manifest,
    *,
    rank: int,
    kind: Kind,
    gpu: Device,
    capturing: Callable[[], contextlib.AbstractContextManager[object]],
) -> PieceOf | Trace:
    """Return the piece from which the trace of one rank of a plan is composed, or the trace where there is no piece.

    Args:
        program: what the plan was lowered to.
        plan: the plan, without a pipeline.
        manifest: of its model.
        rank: global rank that is simulated.
        kind: of device, which decides the kernels.
        gpu: the plan's device.
        capturing: context manager that is entered while the program is captured.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
    """
    world = plan.mesh.world_size
    variation = _variation(program, plan, manifest, rank=rank, kind=kind, gpu=gpu)
    if variation is not None:
        piece = cached_piece(variation.key)
        depths = None if piece is None else piece.depths_of(variation.lengths)
        if piece is not None and depths is not None and piece.follows(depths, variation.micro_batches):
            return PieceOf(piece, depths, variation.micro_batches)
        piece = cached_piece(variation.key_at_depth)
        if piece is not None and piece.follows({}, variation.micro_batches):
            return PieceOf(piece, {}, variation.micro_batches)
    with capturing():
        from legoai.cost.capture import capture, capture_piece

        captured = capture_piece(program, world=world, rank=rank, kind=kind, gpu=gpu)
        if captured is None:
            return capture(program, world=world, rank=rank, kind=kind, gpu=gpu, replay=False)
    if isinstance(captured, Trace):
        return captured
    if variation is not None:
        any_depth = captured.depths_of(variation.lengths) is not None
        keep_piece(variation.key if any_depth else variation.key_at_depth, captured)
    return PieceOf(captured, captured.depths, captured.wanted)


def _variation(
    program: Program, plan: Plan, manifest: Manifest, *, rank: int, kind: Kind, gpu: Device
) -> Variation | None:
    """Return the cache keys of the piece; None for models whose code is not LegoAI's."""
    if plan.model.source().kind != "builtin":
        return None
    return variation_of(
        program.text,
        program.block_classes,
        manifest.block_lists,
        world=plan.mesh.world_size,
        rank=rank,
        kind=kind,
        gpu=gpu,
        measured=of_measured(plan, kind),
        ahead=program.look_ahead,
    )


def of_measured(plan: Plan, kind: Kind) -> str:
    """Return the digest of the profile that a run of the plan measured; empty where its passes read none."""
    if plan.comm is None or plan.comm.profile != "measured":
        return ""
    return digest_of(ProfileKey.of_plan(plan, device=kind))
