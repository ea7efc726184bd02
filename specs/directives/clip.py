"""`clip`: the bound on gradients."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Number


class Clip(Directive):
    """Gradient clipping by the norm over all parameters, on all axes of the mesh. Without it nothing is clipped."""

    keyword: ClassVar[str] = "clip"

    norm: float = option(Number(above=0.0), doc="The largest norm; longer gradients are scaled to it.")
