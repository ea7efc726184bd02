"""Disk cache of simulated pipelines.

A pipeline whose program differs from an earlier one only in its name or learning rate is not simulated again, and torch
is not imported for it. Cached simulations are pickled. Only the user can write the cache folder, and unpickling is
restricted to the types of which a simulation consists: it calls no function of another module.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from legoai.cost.code_state import SIMULATION, state_of_code
from legoai.cost.machine.cluster import Machine
from legoai.cost.replay.plan_key import may_keep, variation_of_plan
from legoai.cost.replay.store import keep_bytes, kept_bytes
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.pickling import restored
from legoai.dsl.analysis.allocator import expandable_segments
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import Program

T = TypeVar("T")

_FOLDER: Final = "pipelines"
_LEVEL: Final = 1
"""Compression level: reduces the size to a quarter, in a tenth of the time that pickling takes."""

_OTHERS: Final = frozenset({("builtins", "range"), ("numpy", "dtype"), ("numpy", "ndarray")})
"""Types of other modules that simulations consist of."""
_MODULES: Final = tuple(f"legoai.cost.{name}" for name in ("estimate", "memory.", "timing.", "trace."))
"""Modules whose types simulations consist of."""


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to the simulator's records, ranges and arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the type or function of a name.

        Raises:
            pickle.UnpicklingError: the name does not belong to a simulation.
        """
        array = module in {"numpy._core.numeric", "numpy.core.numeric"} and name == "_frombuffer"
        if (module, name) in _OTHERS or array:
            return super().find_class(module, name)
        if module.startswith(_MODULES) and "." not in name:
            found = super().find_class(module, name)
            if found is restored or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a simulation")


def cached_or_simulated(program: Program, analysis: Analysis, machine: Machine, simulate: Callable[[], T]) -> T:
    """Return the simulation of a pipeline from the cache or, where it is not cached, from ``simulate``.

    Args:
        program: what the plan was lowered to.
        analysis: of the plan, which has a pipeline.
        machine: on which it runs.
        simulate: simulates the pipeline.
    """
    key = _key(program, analysis, machine)
    if key is None:
        return simulate()
    with uncollected():
        held = kept_bytes(_FOLDER, key)
        if held is not None:
            # Unpickling raises whatever its instructions raise: where a module is not there, for one.
            with contextlib.suppress(Exception):
                known: T = _Unpickler(io.BytesIO(zlib.decompress(held))).load()
                return known
        kept = may_keep(analysis)
        found = simulate()
        if not kept:
            return found
        packed = zlib.compress(pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL), _LEVEL)
        keep_bytes(_FOLDER, key, packed)
    return found


def _key(program: Program, analysis: Analysis, machine: Machine) -> str | None:
    """Return the digest of all inputs of the simulation; None where they are not known."""
    device = machine.device
    variation = variation_of_plan(program, analysis, rank=0, kind=device.kind, gpu=device)
    if variation is None:
        return None
    of_machine = [
        f"{machine.profile.name}@{machine.profile.hash}",
        repr(machine.cluster),
        expandable_segments(analysis.plan),
    ]
    # Unlike a piece, a pipeline's trace cannot be derived for other depths or numbers of micro batches.
    parts = [variation.key, variation.lengths, variation.micro_batches, *of_machine]
    return hashlib.sha256(json.dumps([*parts, state_of_code(*SIMULATION)]).encode()).hexdigest()
