"""Shrunken plan that is ready for a verification."""

from __future__ import annotations

from dataclasses import dataclass

from legoai.lowering.program import Program
from legoai.lowering.shrink import Shrunken
from legoai.specs.models.reads import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A shrunken plan that is ready to run, and its program."""

    shrunken: Shrunken
    program: Program
    reads: Reads | None
    """The model's inputs."""
    drawing: tuple[str, ...]
    """Paths of the model's modules whose own forward draws random numbers."""
