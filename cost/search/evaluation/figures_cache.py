"""On-disk cache of figures and estimates of simulations, invalidated when the code, torch or a device changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, Final

from legoai.cost.code_state import SIMULATION, state_of_code
from legoai.cost.machine.cluster import Machine
from legoai.cost.replay.plan_key import state_of_model
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import Program
from legoai.specs.cache import private_cache, read_cached, write_cached

_MOST_FILES: Final = 16
"""Files that are kept of a kind: of figures one for each state of this package, of torch and of a device."""

Kept = dict[str, dict[str, Any]]
"""Figures by the key of a program."""


def identity_of(machine: Machine) -> str:
    """What of a machine's devices decides figures: the name and hash of their profile, and their device file.

    A profile does not contain the device file beside it, whose memory decides which candidates fit.
    """
    return f"{machine.profile.name}@{machine.profile.hash} {machine.device!r}"


def figures_file(devices: str) -> Path | None:
    """The file of the figures of some devices, by their :func:`identity_of`; None where nothing can be kept."""
    return state_file("figures", devices)


def estimate_file(devices: str, analysis: Analysis, program: Program) -> Path | None:
    """The file of a plan's estimate, whose causes name the plan's lines; None where nothing can be kept."""
    resolution = analysis.resolution
    files = {} if resolution is None else resolution.files
    texts = [part for name, file in sorted(files.items()) for part in (name, file.text)]
    state = state_of_model(analysis)
    if state is None:
        return None
    return state_file("estimates", "\0".join([devices, analysis.plan.digest, program.text, state, *texts]))


def state_file(name: str, state: str) -> Path | None:
    """The file of a kind for a state of this package, of torch, and of `more`; None where no cache is possible."""
    folder = private_cache(name)
    digest = hashlib.sha256(f"{state_of_code(*SIMULATION)} {state}".encode()).hexdigest()[:24]
    return None if folder is None else folder / f"{digest}.json"


def read_cache(path: Path | None) -> Kept:
    """The figures of a file; none where it cannot be read."""
    held = read_checked(path)
    return held if isinstance(held, dict) else {}


def write_cache(path: Path | None, kept: Kept) -> None:
    """Add figures to a file, as a whole or not at all; the oldest files go."""
    if kept:
        known = read_checked(path, before=True)
        # Not all of them were computed now.
        write_checked(path, {**(known if isinstance(known, dict) else {}), **kept}, whole=False)


def read_checked(path: Path | None, *, before: bool = False) -> Any:
    """The plain data that :func:`write_checked` wrote; None where there is none, or where it was changed.

    Args:
        path: of the file; None where nothing can be kept.
        before: as of :func:`legoai.specs.cache.read_cached`.
    """
    held = None if path is None else read_cached(path, before=before)
    return None if held is None else json.loads(held)


def write_checked(path: Path | None, data: Any, *, whole: bool = True) -> None:
    """Write plain data with its digest, if there is a place for it, as a whole or not at all; the oldest files go.

    Args:
        path: of the file; None where nothing can be kept.
        data: what :func:`read_checked` returns.
        whole: as of :func:`legoai.specs.cache.write_cached`.
    """
    if path is None:
        return
    with contextlib.suppress(OSError):
        write_cached(path, json.dumps(data).encode(), whole=whole)
        others = sorted(path.parent.glob("*.json"), key=lambda item: item.stat().st_mtime_ns, reverse=True)
        for old in others[_MOST_FILES:]:
            old.unlink(missing_ok=True)
