"""Lower bounds of the memory for parameters, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.comm import reduces_last
from legoai.dsl.analysis.magnitudes.fragments import chosen_state
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters, unused_parameters
from legoai.dsl.analysis.offload import offloads
from legoai.dsl.analysis.parallelism.experts import axes_of_ep
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.shard import shard_on_tp
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.training.optimizer import moments, muon_parameters
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.optimizer import Sgd
from legoai.specs.directives.shard import Colwise, Rowwise
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.record import Record


class StateBytes(Record, kw_only=True):
    """Lower bounds for the fullest device when the optimizer updates, in bytes."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together: at an update they are all there."""
        return self.parameters + self.gradients + self.optimizer


@fact
def state_bytes(analysis: Analysis) -> StateBytes | None:
    """Return a lower bound of the bytes on the fullest device at an update; None without a manifest.

    Let an element of parameter q be on one in s(q) of the devices of one replica. All replicas hold the
    same, so the devices of a replica hold Σ numel(q) · (devices / s(q)) elements together, and the fullest at
    least their mean,

        Σ numel(q) / s(q),  with  s(q) = pp · (the axes of `fsdp` that shard) · (tp, where a style or
        placement cuts q, or where styles are open).

    Shards are padded upwards and stages are uneven, which only adds to the fullest. At an update each element has its
    parameter, and if that is trained its gradient (in the dtype of `master`, or of `gradient` where that is narrower:
    `torch.distributed.fsdp` casts reduced gradients to the dtype of the stored parameter) and the optimizer's state (in
    the dtype of the parameter: two moments of Adam, one of Muon or SGD with momentum). From the second update on all of
    these exist at the same time.

    Experts on `ep` count as sharded over all of `dp_shard · cp`, the most that `ep` and `fsdp` together can do.
    Offloaded state counts as nothing.

    Raises:
        Undecided: a size, dtype or rule that this depends on is a hole.
    """
    if analysis.manifest is None:
        return None
    held, offload = _held(analysis), analysis.plan.offload
    on_device = offload is None or offload.parameters == "none"
    with_state = on_device and (offload is None or offload.optimizer == "none")
    return StateBytes(
        parameters=held.parameters if on_device else 0,
        gradients=held.gradients if on_device else 0,
        optimizer=held.optimizer if with_state else 0,
    )


def offloaded_bytes(analysis: Analysis) -> StateBytes:
    """Return the bytes of parameters, gradients and optimizer state that a rank keeps in host memory.

    They are the mean of the ranks of a replica, as for :func:`state_bytes`. Of an amount of `bytes(n)` the parameters
    count whose state leaves the device, and of an adaptive one nothing.
    """
    held, with_parameters = _held(analysis), offloads(analysis, "parameters")
    return StateBytes(
        parameters=held.parameters if with_parameters else 0,
        gradients=held.gradients if with_parameters else 0,
        optimizer=held.optimizer if offloads(analysis, "optimizer") else chosen_state(analysis),
    )


def _held(analysis: Analysis) -> StateBytes:
    """Return what a rank holds at an update, on the device or in host memory."""
    precision = analysis.plan.precision
    whole, trained, moments = _largest_shares(analysis)
    master = DTYPE_BYTES[precision.master]
    gradient = min(master, DTYPE_BYTES[precision.gradient]) if precision.gradient is not None else master
    return StateBytes(
        parameters=int(whole * master),
        gradients=int(trained * gradient),
        optimizer=int(moments / _optimizer_replicas(analysis) * master),
    )


def element_bytes(analysis: Analysis) -> float:
    """Bytes of an element of a trained parameter with its gradient and optimizer state, at least, before it is cut.

    Raises:
        Undecided: a dtype or an option of the optimizer that this depends on is a hole.
    """
    plan, precision = analysis.plan, analysis.plan.precision
    master = DTYPE_BYTES[precision.master]
    gradient = min(master, DTYPE_BYTES[precision.gradient]) if precision.gradient is not None else master
    if plan.offload is not None and plan.offload.parameters != "none":
        return 0.0
    kept = plan.offload is None or plan.offload.optimizer == "none"
    algorithm = plan.optimizer.algorithm
    moments = int(algorithm.momentum > 0.0) if isinstance(algorithm, Sgd) else 1 if muon_parameters(analysis) else 2
    replicas = plan.mesh.dp_replicate if plan.replicate is not None and plan.replicate.optimizer == "sharded" else 1
    return master + gradient + (moments * master / replicas if kept else 0)


def _moments(analysis: Analysis) -> Callable[[str], int]:
    """Return how many values the optimizer keeps for each element of a parameter."""
    by_muon, usual, untrained = muon_parameters(analysis), moments(analysis), untrained_parameters(analysis)
    return lambda name: 0 if name in untrained else 1 if name in by_muon else usual


def state_of_modules(analysis: Analysis) -> dict[str, int]:
    """Return a lower bound of the bytes that a rank of a module's stage holds for it throughout a step.

    These are parameters and the optimizer's state, by the same reasoning as :func:`state_bytes`.

    Raises:
        Undecided: a size, dtype or rule that this depends on is a hole.
    """
    state, manifest = state_bytes(analysis), analysis.manifest
    if state is None or manifest is None:
        return {}
    size = DTYPE_BYTES[analysis.plan.precision.master]
    replicas = _optimizer_replicas(analysis)
    found: dict[str, float] = {}
    for share in _shares(analysis):
        held = share.held * size if state.parameters else 0.0
        added = share.moments * size / replicas if state.optimizer else 0.0
        found[share.path] = found.get(share.path, 0.0) + held + added
    return {path: int(held) for path, held in found.items()}


@fact
def summed_gradients_of_modules(analysis: Analysis) -> dict[str, int]:
    """A lower bound of the bytes of unsharded gradients that a rank adds up over micro batches, by module.

    Units of `fsdp` add them up in the dtype in which they reduce them, from the first backward to the last of a
    pipeline's pass, or, under `comm (reduce = last_micro_batch)`, of a step. Experts on `ep` count as nothing, and so
    does everything where gradients are reduced for each micro batch.

    Raises:
        Undecided: a size, dtype or rule that this depends on is a hole.
    """
    plan, manifest = analysis.plan, analysis.manifest
    if manifest is None or plan.fsdp is None or not (is_staged(analysis) or reduces_last(analysis)):
        return {}
    if plan.offload is not None and plan.offload.parameters != "none":
        return {}
    untrained = untrained_parameters(analysis)
    return _unsharded(analysis, DTYPE_BYTES[plan.precision.reduce], lambda parameter: parameter not in untrained)


@fact
def summed_gradients(analysis: Analysis) -> int:
    """Those of all modules together."""
    return sum(summed_gradients_of_modules(analysis).values())


@fact
def unsharded_parameters_of_modules(analysis: Analysis) -> dict[str, int]:
    """Return a lower bound of the bytes of unsharded parameters that units keep from forward to backward, by module.

    Experts on `ep` count as nothing, and so does everything where units are gathered in float8.

    Raises:
        Undecided: a size, dtype or rule that this depends on is a hole.
    """
    plan = analysis.plan
    if analysis.manifest is None or shard_ranks(analysis) == 1 or plan.precision.rules:
        return {}
    units, unused = fsdp_units(analysis), unused_parameters(analysis)
    return _unsharded(
        analysis,
        DTYPE_BYTES[plan.precision.param],
        lambda parameter: (
            parameter not in unused and units[owner(analysis, parameter)].reshard in ("after_backward", "never")
        ),
    )


@fact
def unsharded_parameters(analysis: Analysis) -> int:
    """Those of all modules together."""
    return sum(unsharded_parameters_of_modules(analysis).values())


def _unsharded(analysis: Analysis, size: int, counts: Callable[[str], bool]) -> dict[str, int]:
    """Bytes of unsharded parameters of some size, by module."""
    manifest = analysis.manifest
    assert manifest is not None
    found: dict[str, float] = {}
    for share in _shares(analysis):
        local = analysis.plan.mesh.ep == 1 or manifest.modules[share.path].kind != "experts"
        if local and counts(share.parameter):
            found[share.path] = found.get(share.path, 0.0) + share.unsharded * size
    return {path: int(held) for path, held in found.items()}


def _optimizer_replicas(analysis: Analysis) -> int:
    """Return the number of ranks that shard the optimizer's state of parameters that all of them hold."""
    replicate = analysis.plan.replicate
    return analysis.plan.mesh.dp_replicate if replicate is not None and replicate.optimizer == "sharded" else 1


def _largest_shares(analysis: Analysis) -> tuple[float, float, float]:
    """Mean elements of parameters, trained ones and the optimizer's state, on the devices of one replica."""
    elements = trained = moments = 0.0
    untrained, stages = untrained_parameters(analysis), analysis.plan.mesh.pp
    for share in _shares(analysis):
        elements += share.held
        trained += 0.0 if share.parameter in untrained else share.held
        moments += share.moments
    return elements / stages, trained / stages, moments / stages


class _Share(NamedTuple):
    """Mean elements of a parameter on a device of its module's stage: as stored, of its state, and unsharded."""

    path: str
    parameter: str
    held: float
    moments: float
    unsharded: float


def _shares(analysis: Analysis) -> Iterator[_Share]:
    """The share of each parameter."""
    mesh, degree = analysis.plan.mesh, shard_ranks(analysis)
    experts = max(degree, math.prod(map(mesh.size, axes_of_ep(analysis)))) if mesh.ep > 1 else degree
    for one in _whole_shares(analysis):
        held = one.unsharded / (experts if one.of_experts else degree)
        yield _Share(one.path, one.parameter, held, one.moments * held, one.unsharded)


class _Whole(NamedTuple):
    """Return the mean elements of a parameter on a device before `fsdp` shards it, and the values kept per element."""

    path: str
    parameter: str
    of_experts: bool
    unsharded: float
    moments: int


@fact
def _whole_shares(analysis: Analysis) -> list[_Whole]:
    manifest, tensor_parallel, found = analysis.manifest, shard_on_tp(analysis), []
    assert manifest is not None
    winners = analysis.assigned(tensor_parallel).by_path if tensor_parallel is not None else {}
    cut = {path for path, rule in winners.items() if isinstance(rule.treatment, Colwise | Rowwise | Sharded)}
    # An open rule could cut any module.
    all_cut = any(is_open(rule.treatment) for rule in tensor_parallel.rules) if tensor_parallel is not None else False
    # Of the names of a tied parameter only the first counts.
    repeated = {path for group in manifest.tied_parameters for path in group[1:]}
    tp, moments_of = analysis.plan.mesh.tp, _moments(analysis)
    for path, module in manifest.modules.items():
        for parameter in module.parameters:
            name = module.child_path(parameter.name)
            if name not in repeated:
                unsharded = parameter.numel / (tp if all_cut or path in cut or name in cut else 1)
                found.append(_Whole(path, name, module.kind == "experts", unsharded, moments_of(name)))
    return found
