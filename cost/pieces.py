"""Traces of lowered plans, composed of pieces that are kept between runs.

A program that differs from one that was costed before in its depth or its number of micro batches alone is not run
again, and torch is not imported for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from legoai.cost.replay.key import Variation, variation_of
from legoai.cost.replay.piece import Piece
from legoai.cost.replay.store import keep_piece, kept_piece
from legoai.cost.trace.trace import Trace
from legoai.lowering.program import Program
from legoai.specs.cluster import Device
from legoai.specs.models.manifest import Manifest
from legoai.specs.plan import Plan

if TYPE_CHECKING:
    from legoai.cost.simulated.device import Kind


def trace_of(
    program: Program,
    plan: Plan,
    manifest: Manifest,
    *,
    rank: int,
    kind: Kind,
    gpu: Device,
    capturing: Callable[[], contextlib.AbstractContextManager[object]],
) -> Trace:
    """Return the trace of one rank of a plan without a pipeline, composed of a kept piece or captured.

    Args:
        program: what the plan was lowered to.
        plan: the plan.
        manifest: of its model.
        rank: global rank that is simulated.
        kind: whose kernels the device has.
        gpu: the plan's device.
        capturing: is entered while the program runs.

    Raises:
        SimulationError: the program fails, or does what cannot be recorded.
    """
    world = plan.mesh.world_size
    variation = _variation(program, plan, manifest, rank=rank, kind=kind, gpu=gpu)
    if variation is not None:
        piece = kept_piece(variation.key)
        found = None if piece is None else _composed(piece, variation)
        if found is not None:
            return found
    with capturing():
        from legoai.cost.capture import capture, capture_piece

        captured = capture_piece(program, world=world, rank=rank, kind=kind, gpu=gpu)
        if captured is None:
            return capture(program, world=world, rank=rank, kind=kind, gpu=gpu, replay=False)
    if isinstance(captured, Trace):
        return captured
    if variation is not None:
        keep_piece(variation.key, captured)
    return captured.trace()


def _variation(
    program: Program, plan: Plan, manifest: Manifest, *, rank: int, kind: Kind, gpu: Device
) -> Variation | None:
    """Return which piece the trace follows from; None of models whose code is not LegoAI's."""
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
    )


def _composed(piece: Piece, variation: Variation) -> Trace | None:
    """Return the trace of a program, composed of a piece; None where it does not follow from that."""
    try:
        return piece.trace({path: depth for path, depth in variation.depths.items() if path in piece.depths},
                           variation.micro_batches)  # fmt: skip
    except ValueError:
        return None
