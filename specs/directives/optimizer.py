"""`optimizer`: the update of parameters and its constants."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Boolean, ListOf, Number

_RATE = Number(minimum=0.0)


class AdamW(Treatment):
    """`torch.optim.AdamW`: Adam with decoupled weight decay."""

    name: ClassVar[str] = "adamw"

    lr: float = option(_RATE, doc="Learning rate.", default=1e-3)
    betas: tuple[float, float] = option(
        ListOf(Number(minimum=0.0, below=1.0), length=2),
        doc="Decay of the two moments.",
        default=(0.9, 0.999),
    )
    eps: float = option(_RATE, doc="Added to the denominator.", default=1e-8)
    weight_decay: float = option(_RATE, doc="Decoupled weight decay.", default=0.01)
    fused: bool = option(Boolean(), doc="One kernel for the whole update; `foreach` otherwise.", default=True)


class Adam(Treatment):
    """`torch.optim.Adam`."""

    name: ClassVar[str] = "adam"

    lr: float = option(_RATE, doc="Learning rate.", default=1e-3)
    betas: tuple[float, float] = option(
        ListOf(Number(minimum=0.0, below=1.0), length=2),
        doc="Decay of the two moments.",
        default=(0.9, 0.999),
    )
    eps: float = option(_RATE, doc="Added to the denominator.", default=1e-8)
    weight_decay: float = option(_RATE, doc="L2 penalty.", default=0.0)
    fused: bool = option(Boolean(), doc="One kernel for the whole update; `foreach` otherwise.", default=True)


class Sgd(Treatment):
    """`torch.optim.SGD`."""

    name: ClassVar[str] = "sgd"

    lr: float = option(_RATE, doc="Learning rate.", default=1e-3)
    momentum: float = option(Number(minimum=0.0, below=1.0), doc="Momentum.", default=0.0)
    weight_decay: float = option(_RATE, doc="L2 penalty.", default=0.0)
    nesterov: bool = option(Boolean(), doc="Nesterov momentum.", default=False)
    fused: bool = option(
        Boolean(),
        doc="One kernel for the whole update; `foreach` otherwise, the only way for parameters that are DTensors.",
        default=False,
    )


class Optimizer(Directive):
    """The optimizer, an algorithm of `torch.optim`."""

    keyword: ClassVar[str] = "optimizer"
    subject: ClassVar[str | None] = "algorithm"

    algorithm: AdamW | Adam | Sgd = option(
        Calls((AdamW, Adam, Sgd)), doc="The algorithm and its constants.", default=AdamW()
    )
