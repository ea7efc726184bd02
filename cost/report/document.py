"""JSON form of an estimate; `docs/cost-output.md` documents its fields."""

from __future__ import annotations

from typing import Any, Final

from legoai.cost.estimate import Estimate, RankEstimate
from legoai.cost.memory.host import HostMemory
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.report.checkpointing import recomputed_calls, saved_outputs
from legoai.cost.report.holders import holders
from legoai.cost.requirements import RequirementResult

FORMAT_VERSION: Final = 2
"""Adding a field keeps the version; removing or changing one increments it."""

MOST_EXPENSIVE: Final = 20
"""Number of modules and collectives that are listed."""


def document(estimate: Estimate, causes: Causes) -> dict[str, Any]:
    """Return the estimate as plain data: seconds, bytes and shares."""
    one = estimate.slowest.breakdown
    exposed = estimate.exposed_communication
    cluster = estimate.machine.cluster
    return {
        "format_version": FORMAT_VERSION,
        "plan": {"name": estimate.plan, "hash": estimate.digest, "variant": estimate.variant},
        "cluster": {
            "device": cluster.device.name,
            "devices": estimate.world_size,
            "hosts": cluster.hosts,
            "devices_per_host": cluster.devices_per_host,
            "fabric": cluster.fabric.name if cluster.fabric is not None else None,
        },
        "profile": {
            "name": estimate.machine.profile.name,
            "hash": estimate.machine.profile.hash,
            "made": estimate.machine.profile.made,
        },
        "step_time_s": estimate.step_time,
        "tokens_per_step": estimate.tokens_per_step,
        "tokens_per_s_per_device": estimate.tokens_per_second_per_device,
        "device_hours_per_trillion_tokens": estimate.device_hours_per_trillion_tokens,
        "model_flops": estimate.model_flops,
        "model_flops_convention": estimate.flops_convention,
        "peak_flops_per_s_per_device": estimate.peak_flops,
        "mfu": estimate.mfu,
        "compute_s": one.compute,
        "compute_by_kind_s": dict(one.by_kind),
        "compute_by_phase_s": dict(one.by_phase),
        "communication_slowdown_s": one.slowed,
        "communication_s": one.communication,
        "exposed_communication_s": exposed,
        "exposed_communication_by_axis": {
            axis: {"seconds": seconds, "share": seconds / exposed if exposed else 0.0}
            for axis, seconds in estimate.exposed_by_axis.items()
        },
        "exposed_copies_s": one.copies,
        "host_compute_s": one.host,
        "idle_s": one.idle,
        "recompute_s": estimate.recompute,
        "bubble_fraction": estimate.bubble_fraction,
        "memory": _memory(estimate, causes),
        "modules": [
            {
                "module": item.pattern,
                "modules": item.modules,
                "seconds": item.seconds,
                "recompute_s": item.recompute,
                "operator": item.op,
                "causes": [_cause(cause) for cause in dict.fromkeys(causes.of_module(item))],
            }
            for item in causes.modules(estimate.slowest)[:MOST_EXPENSIVE]
        ],
        "recomputed": [
            {
                "module": item.pattern,
                "modules": item.modules,
                "operator": item.op,
                "calls": item.calls,
                "forward_calls": item.of,
                "seconds": item.seconds,
                "cause": _cause(item.cause),
            }
            for item in recomputed_calls(estimate.slowest, causes)[:MOST_EXPENSIVE]
        ],
        "collectives": [
            {
                "kind": item.kind,
                "axis": item.axis,
                "ranks": item.ranks,
                "module": item.pattern,
                "phase": item.phase,
                "count": item.count,
                "bytes": item.bytes,
                "seconds": item.seconds,
                "exposed_s": item.exposed,
                "cause": _cause(causes.of_collective(item)),
            }
            for item in causes.collectives(estimate.slowest)[:MOST_EXPENSIVE]
        ],
        "requirements": [_requirement(item) for item in estimate.requirements],
        "time_models": dict(estimate.share_by_model),
        "assumptions": list(estimate.assumptions),
    }


def _memory(estimate: Estimate, causes: Causes) -> dict[str, Any]:
    fullest = estimate.fullest
    return {
        "peak_active_bytes": estimate.peak_active,
        "peak_reserved_bytes": estimate.peak_reserved,
        "non_pytorch_bytes": dict(fullest.use.outside),
        "capacity_bytes": fullest.use.capacity,
        "fits": estimate.fits,
        "host_bytes": _host(estimate.host_memory),
        "by_category": dict(fullest.memory.by_category),
        "by_module": [
            {
                "module": item.pattern,
                "modules": item.modules,
                "bytes": item.bytes,
                "by_category": dict(item.by_category),
                "causes": [_cause(cause) for cause in item.causes],
            }
            for item in holders(fullest.memory, causes)[:MOST_EXPENSIVE]
        ],
        "saved": [
            {
                "module": item.pattern,
                "modules": item.modules,
                "operator": item.op,
                "bytes": item.bytes,
                "cause": _cause(item.cause),
            }
            for item in saved_outputs(fullest, causes)[:MOST_EXPENSIVE]
        ],
        "by_rank": [_rank(item) for item in estimate.ranks],
    }


def _host(memory: HostMemory | None) -> dict[str, int] | None:
    if memory is None:
        return None
    return {
        "parameter": memory.of_rank.parameters,
        "gradient": memory.of_rank.gradients,
        "optimizer_state": memory.of_rank.optimizer,
        "rank": memory.of_rank.total,
        "host": memory.total,
    }


def _rank(item: RankEstimate) -> dict[str, Any]:
    return {
        "rank": item.rank,
        "stage": item.stage,
        "peak_active_bytes": item.memory.peak,
        "peak_reserved_bytes": item.use.reserved,
        "peak_phase": item.memory.peak_phase,
        "start_bytes": item.memory.start,
        "by_category": dict(item.memory.by_category),
        "bubble_fraction": item.bubble,
        "fits": item.use.fits,
    }


def _requirement(item: RequirementResult) -> dict[str, Any]:
    required = item.requirement
    span = required.origin.span
    return {
        "metric": required.metric,
        "comparison": required.comparison,
        "bound": required.bound,
        "dimension": required.dimension,
        "value": item.value,
        "ok": item.ok,
        "file": span.file if span is not None else None,
        "line": span.line if span is not None else None,
    }


def _cause(cause: Cause | None) -> dict[str, Any] | None:
    if cause is None:
        return None
    span = cause.origin.span
    return {
        "statement": cause.words,
        "file": span.file if span is not None else None,
        "line": span.line if span is not None else None,
    }
