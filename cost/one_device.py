"""Forward of a plan's model on one device, where no rank repeats the work of another."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from legoai.cost.kernels.model_flops import forward_products
from legoai.cost.pieces import PieceOf, piece_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import lower
from legoai.lowering.shrink_rules import changed
from legoai.specs.cluster import Device
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.precision import Precision
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan


def one_device(plan: Plan) -> Plan:
    """Return a plan that trains the same model with one micro batch on one device, in the dtype of computation."""
    dtype = plan.precision.param
    return Plan(
        name=plan.name,
        model=plan.model,
        cluster=plan.cluster,
        batch=changed(plan.batch, global_batch=plan.batch.micro_batch, ramp=None),
        mesh=Mesh(),
        precision=Precision(master=dtype, param=dtype, reduce=dtype),
        attention=plan.attention,
        loss=plan.loss,
        optimizer=plan.optimizer,
        schedule=plan.schedule,
        steps=plan.steps,
        files=plan.files,
    )


def products_on_one_device(
    plan: Plan,
    manifest: Manifest,
    directory: Path,
    gpu: Device,
    capturing: Callable[[], contextlib.AbstractContextManager[object]],
) -> int:
    """Return the FLOPs of the forward of :func:`one_device`.

    Args:
        plan: the plan.
        manifest: of its model.
        directory: of the plan's file.
        gpu: the plan's device.
        capturing: context manager that is entered while the program is captured.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
    """
    alone = one_device(plan)
    known = _known()
    key = alone.digest, gpu
    if key not in known:
        analysis = Analysis(alone, manifest, directory)
        found = piece_of(lower(analysis), analysis, rank=0, kind=gpu.kind, gpu=gpu, capturing=capturing)
        trace = found.trace() if isinstance(found, PieceOf) else found
        known[key] = forward_products(trace.between(trace.steps[-1]))
    return known[key]


@functools.cache
def _known() -> dict[tuple[str, Device], int]:
    return {}
