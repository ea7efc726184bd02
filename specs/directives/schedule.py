"""`schedule`: the learning rate over the steps."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Integer, Number

_STEPS = Integer(minimum=1)
_WARMUP = Integer(minimum=0)
_FLOOR = Number(minimum=0.0, maximum=1.0)


class Constant(Treatment):
    """Linear warm-up, then the optimizer's rate."""

    name: ClassVar[str] = "constant"

    warmup: int = option(_WARMUP, doc="Steps from zero to the full rate.", default=0)


class Linear(Treatment):
    """Linear warm-up, then a line down to the floor."""

    name: ClassVar[str] = "linear"

    steps: int = option(_STEPS, doc="The step at which the floor is reached.")
    warmup: int = option(_WARMUP, doc="Steps from zero to the full rate.", default=0)
    floor: float = option(_FLOOR, doc="The last rate, as a share of the full one.", default=0.0)


class Cosine(Treatment):
    """Linear warm-up, then half a cosine down to the floor."""

    name: ClassVar[str] = "cosine"

    steps: int = option(_STEPS, doc="The step at which the floor is reached.")
    warmup: int = option(_WARMUP, doc="Steps from zero to the full rate.", default=0)
    floor: float = option(_FLOOR, doc="The last rate, as a share of the full one.", default=0.0)


class Schedule(Directive):
    """The learning-rate schedule."""

    keyword: ClassVar[str] = "schedule"
    subject: ClassVar[str | None] = "form"

    form: Constant | Linear | Cosine = option(Calls((Constant, Linear, Cosine)), doc="Its form.", default=Constant())
