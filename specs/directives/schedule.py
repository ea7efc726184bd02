"""`schedule`: the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Choice, Either, Fraction, Integer, Number

_STEPS = Integer(minimum=1)
_WARMUP = Integer(minimum=0)
_SHARE = Either((Integer(minimum=0), Fraction()))
"""A number of steps, or a share of all steps."""
_FLOOR = Number(minimum=0.0, maximum=1.0)
_RATE = Number(minimum=0.0)
_WARMUP_DOC = "Steps from zero to the full rate, or their share of all steps, such as `1%`."
_FLOOR_DOC = "The last rate, as a share of the full one."
_FLOOR_LR_DOC = (
    "The last rate itself, in place of `floor`; parameters with another rate end at the same share of theirs."
)


class Constant(Treatment):
    """Linear warm-up, then the optimizer's rate."""

    name: ClassVar[str] = "constant"

    warmup: int = option(_WARMUP, doc="Steps from zero to the full rate.", default=0)


class Linear(Treatment):
    """Linear warm-up, then a line down to the floor."""

    name: ClassVar[str] = "linear"

    steps: int = option(_STEPS, doc="Steps of the schedule, after which the rate is the floor.")
    warmup: int | float = option(_SHARE, doc=_WARMUP_DOC, default=0)
    floor: float = option(_FLOOR, doc=_FLOOR_DOC, default=0.0)
    floor_lr: float | None = option(_RATE, doc=_FLOOR_LR_DOC, default=None)


class Cosine(Treatment):
    """Linear warm-up, then half a cosine down to the floor."""

    name: ClassVar[str] = "cosine"

    steps: int = option(_STEPS, doc="Steps of the schedule, after which the rate is the floor.")
    warmup: int | float = option(_SHARE, doc=_WARMUP_DOC, default=0)
    floor: float = option(_FLOOR, doc=_FLOOR_DOC, default=0.0)
    floor_lr: float | None = option(_RATE, doc=_FLOOR_LR_DOC, default=None)


class Wsd(Treatment):
    """Linear warm-up, then the full rate, then a decay down to the floor (warm-up, stable, decay)."""

    name: ClassVar[str] = "wsd"

    steps: int = option(_STEPS, doc="Steps of the schedule, after which the rate is the floor.")
    decay: int | float = option(
        Either((Integer(minimum=1), Fraction())), doc="Steps of the decay, or their share of all steps, such as `10%`."
    )
    shape: str = option(
        Choice(("linear", "cosine", "sqrt")),
        doc="Form of the decay: a line, half a cosine, or one minus the root of the progress.",
        default="linear",
    )
    warmup: int | float = option(_SHARE, doc=_WARMUP_DOC, default=0)
    floor: float = option(_FLOOR, doc=_FLOOR_DOC, default=0.0)
    floor_lr: float | None = option(_RATE, doc=_FLOOR_LR_DOC, default=None)


class Schedule(Directive):
    """The learning-rate schedule."""

    keyword: ClassVar[str] = "schedule"
    subject: ClassVar[str | None] = "form"
    absent: ClassVar[Mapping[str, Any] | None] = {}

    form: Constant | Linear | Cosine | Wsd = option(
        Calls((Constant, Linear, Cosine, Wsd)), doc="Its form.", default=Constant()
    )
