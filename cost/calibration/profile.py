"""Calibration of this machine: its kernels and collectives measured and written as a profile."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from legoai.cost.calibration.calls import call_constants
from legoai.cost.calibration.host import GAP_SOURCE, gap_seconds, issue_constants
from legoai.cost.calibration.kernels import (
    attention_model,
    attention_rows,
    matrix_products,
    products_by_groups,
    unaligned_products,
)
from legoai.cost.calibration.movement import movements
from legoai.cost.calibration.network import collectives
from legoai.cost.calibration.timing import Timer
from legoai.cost.machine.kernel_time import GROUPED
from legoai.cost.simulated.operators.grouped_products import has_kernel_of_capability
from legoai.runtime.device import processor_name

SIZE: Final = 4096
"""Size of products whose rows are not aligned, and of those by groups: large enough for their start and end not to
matter."""
SHARE_OF_CALLS: Final = 0.25
"""Share of the time of a calibration in which the host's calls are measured."""


def calibrate(
    *,
    device: str,
    name: str,
    seconds: float,
    progress: Callable[[str], None],
    group: dist.ProcessGroup | None = None,
    calls: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure ``device`` (`cpu` or `cuda`) for about ``seconds`` seconds; the result is a profile's JSON object.

    What is measured is repeated a few times in any case, and its operands are allocated besides.

    With a process ``group`` the collectives among its ranks are measured too, and all its ranks must call this; only
    rank 0's result is whole. The ranks of a cpu share its cores and its memory: all measure every kernel at the same
    time, and the profile states the speed of one of as many ranks while the others work too.

    Args:
        device: torch's device type.
        name: of the profile: the catalogue's device, or another.
        seconds: to take, about.
        progress: called with a description of what is being measured.
        group: the ranks on this machine.
        calls: constants of the host's calls, measured before the process joined the group in their share of the
            seconds; None without a group.
    """
    if calls is None:
        progress("host time of calls")
        calls = call_constants(device, seconds * SHARE_OF_CALLS)
    seconds *= 1 - SHARE_OF_CALLS
    rank = dist.get_rank(group) if group is not None else 0
    links: dict[str, dict[str, Any]] = {}
    if group is not None:
        links = collectives(group, device, seconds / 3, progress if rank == 0 else _silent)
    timer = Timer(device=device, group=group if device == "cpu" else None)
    if rank != 0:
        progress = _silent
        if timer.group is None:
            return {}
    budget = seconds * (2 / 3 if group is not None else 1)
    rates = ("fp32", "bf16", "fp64") if device == "cpu" else ("bf16", "tf32", "fp32", "fp64")
    share = budget / (len(rates) + 2)
    bandwidth, moves, held_moves = movements(timer, share, progress)
    products: dict[str, Any] = {}
    held: dict[str, Any] = dict(held_moves)
    for rate in rates:
        products[rate], held[f"products {rate}"] = matrix_products(timer, rate, share, bandwidth, progress)
    attentions: dict[str, Any] = {}
    measured = rates[:2] if device == "cpu" else rates[:1]
    for rate, backward in ((rate, backward) for rate in measured for backward in (False, True)):
        direction = "backward" if backward else "forward"
        progress(f"attention {direction}, {rate}")
        rows = attention_rows(timer, rate, backward=backward, seconds=share / (2 * len(measured)))
        attentions[f"flash2 {direction} {rate}"] = attention_model(rows, products[rate]["curve"]["peak"], bandwidth)
    progress("host time")
    constants: dict[str, Any]
    if device == "cpu":
        constants = {
            "dispatch_seconds": {"value": 0.0, "source": "on a cpu an operation is its own dispatch"},
            "kernel_gap_seconds": {"value": gap_seconds(timer, share / 4), "source": GAP_SOURCE},
        }
    else:
        constants = issue_constants(device)
        constants["kernel_gap_seconds"] = {"value": 0.0, "source": "part of every time that was measured here"}
        constants |= unaligned_products(timer, products["bf16"]["curve"], share / 8, SIZE)
        products["fp16"] = {"like": "bf16", "derived": "the rate of bf16, which the tensor cores share"}
    constants |= dict(calls)
    for key in list(attentions):
        *kind, rate = key.split()
        for other in sorted(set(products) - set(measured)):
            attentions.setdefault(
                " ".join([*kind, other]), {"like": key, "derived": f"the seconds of {rate}; not measured"}
            )
    if device == "cuda" and has_kernel_of_capability(f"{torch.cuda.get_device_capability()[0]}"):
        products[f"bf16{GROUPED}"] = products_by_groups(timer, products["bf16"]["curve"], share / 8, SIZE)
    return {
        "format": 1,
        "device": name,
        "made": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "constants": constants,
        "products": products,
        "attention": attentions,
        "movement": moves,
        "arithmetic": {},
        "links": links,
        "sources": [machine(device, ranks=dist.get_world_size(group) if group is not None else 1)],
        "held_out": held,
    }


def machine(device: str, *, ranks: int) -> dict[str, Any]:
    """Return a description of what was measured, and on what."""
    described = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    return {
        "what": f"kernels and collectives of {ranks} ranks of one host" if ranks > 1 else "kernels of one process",
        "from": f"legoai calibrate on {described}, {torch.get_num_threads()} threads, {platform.system()}",
        "dated": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def _silent(text: str) -> None:
    return None
