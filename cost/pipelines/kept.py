"""Simulated steps of pipelines that are kept between runs.

A pipeline whose program differs from one that was costed before in its name or learning rate alone is not simulated
again, and torch is not imported for it. What is kept is pickled: only the user can write the folder that it stands in.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Callable
from typing import Final, TypeVar

from legoai.cost.code_state import state_of_code
from legoai.cost.machine.cluster import Machine
from legoai.cost.replay.key import variation_of
from legoai.cost.replay.store import keep_bytes, kept_bytes
from legoai.cost.trace.garbage import uncollected
from legoai.lowering.program import Program
from legoai.specs.models.manifest import Manifest
from legoai.specs.plan import Plan

T = TypeVar("T")

_FOLDER: Final = "pipelines"
_SOURCES: Final = ("cost", "dsl", "lowering", "runtime", "specs")
"""Folders of the package that decide what is simulated of a program."""
_DIGEST_BYTES: Final = 32
"""Of the digest that stands before what is kept."""
_LEVEL: Final = 1
"""Of compression: a quarter is left, in a tenth of the time that pickling takes."""


def kept_or_simulated(
    program: Program, plan: Plan, manifest: Manifest, machine: Machine, simulate: Callable[[], T]
) -> T:
    """Return what simulating a pipeline gives, as it is kept or, where it is not, from ``simulate``.

    Args:
        program: what the plan was lowered to.
        plan: the plan, with a pipeline.
        manifest: of its model.
        machine: on which it runs.
        simulate: simulates it; what it returns is kept, unless the code of the model is not LegoAI's.
    """
    key = _key(program, plan, manifest, machine)
    if key is None:
        return simulate()
    with uncollected():
        held = kept_bytes(_FOLDER, key)
        if held is not None and hashlib.sha256(held[_DIGEST_BYTES:]).digest() == held[:_DIGEST_BYTES]:
            known: T = pickle.loads(zlib.decompress(held[_DIGEST_BYTES:]))
            return known
    found = simulate()
    with uncollected():
        packed = zlib.compress(pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL), _LEVEL)
        keep_bytes(_FOLDER, key, hashlib.sha256(packed).digest() + packed)
    return found


def _key(program: Program, plan: Plan, manifest: Manifest, machine: Machine) -> str | None:
    """The digest of what decides how a pipeline is simulated; None of models whose code is not LegoAI's."""
    if plan.model.source().kind != "builtin":
        return None
    variation = variation_of(
        program.text,
        program.block_classes,
        manifest.block_lists,
        world=plan.mesh.world_size,
        rank=0,
        kind=machine.device.kind,
        gpu=machine.device,
    )
    if variation is None:
        return None
    profile = f"{machine.profile.name}@{machine.profile.hash}"
    # The trace of a pipeline follows neither its depth nor its number of micro batches.
    parts = [variation.key, variation.depths, variation.micro_batches, profile, repr(machine.cluster)]
    return hashlib.sha256(json.dumps([*parts, state_of_code(*_SOURCES)]).encode()).hexdigest()
