"""`optimizer`: the update of parameters and its constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Boolean, Choice, Integer, ListOf, Number

_RATE = Number(minimum=0.0)
_BETAS = ListOf(Number(minimum=0.0, below=1.0), length=2)


class AdamW(Treatment):
    """`torch.optim.AdamW`: Adam with decoupled weight decay."""

    name: ClassVar[str] = "adamw"

    lr: float = option(_RATE, doc="Learning rate.", default=1e-3)
    betas: tuple[float, float] = option(
        _BETAS,
        doc="Decay of the two moments.",
        default=(0.9, 0.999),
    )
    eps: float = option(_RATE, doc="Added to the denominator.", default=1e-8)
    weight_decay: float = option(_RATE, doc="Decoupled weight decay.", default=0.01)
    fused: bool = option(Boolean(), doc="One kernel for the whole update; `foreach` otherwise.", default=True)
    state: str | None = option(
        Choice(("int8", "fp8", "int4")),
        doc="Moments in less than the dtype of the parameters (torchao), of which no program is made yet.",
        default=None,
    )


class Adam(Treatment):
    """`torch.optim.Adam`."""

    name: ClassVar[str] = "adam"

    lr: float = option(_RATE, doc="Learning rate.", default=1e-3)
    betas: tuple[float, float] = option(
        _BETAS,
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


class Group(Treatment):
    """Other constants for these parameters. What is not given is as in the statement.

    The learning-rate schedule multiplies the rates of all groups alike.
    """

    name: ClassVar[str] = "group"

    lr: float | None = option(_RATE, doc="Learning rate.", default=None)
    lr_scale: float | None = option(_RATE, doc="Learning rate, as a multiple of the statement's.", default=None)
    weight_decay: float | None = option(_RATE, doc="Weight decay.", default=None)
    betas: tuple[float, float] | None = option(_BETAS, doc="Decay of the two moments.", default=None)
    eps: float | None = option(_RATE, doc="Added to the denominator.", default=None)


class Muon(Treatment):
    """Muon for the matrices among these parameters (`torch.optim.Muon`).

    Those of other shapes follow the next rule that names them, or the statement.

    It orthogonalizes the momentum of whole matrices, for which ranks that share some exchange their parts in bf16.
    """

    name: ClassVar[str] = "muon"

    lr: float = option(_RATE, doc="Learning rate.")
    momentum: float = option(Number(minimum=0.0, below=1.0), doc="Momentum.", default=0.95)
    weight_decay: float = option(_RATE, doc="Decoupled weight decay.", default=0.1)
    nesterov: bool = option(Boolean(), doc="Nesterov momentum.", default=True)
    ns_steps: int = option(Integer(minimum=1, maximum=99), doc="Steps of the Newton-Schulz iteration.", default=5)
    adjust_lr: str = option(
        Choice(("original", "match_rms_adamw")),
        doc=(
            "How the rate follows the shape: by the root of rows to columns, or so that updates are as large as those "
            "of AdamW, whose rate then fits."
        ),
        default="original",
    )


class Optimizer(Directive):
    """The optimizer, an algorithm of `torch.optim`, and parameters that it treats unlike the others.

    A rule names parameters (`**.bias`), or modules, and then means all parameters inside of them. A parameter follows
    the rule that names it most closely: itself before a module around it, and an inner module before an outer one. A
    pattern that matches at several depths, such as `layers.**`, is as close as the outermost of what it matches.
    `group` without arguments takes parameters out of a wider rule. A tied parameter is one, and rules that name it must
    name all of its places.
    """

    keyword: ClassVar[str] = "optimizer"
    subject: ClassVar[str | None] = "algorithm"
    treatments: ClassVar[Calls | None] = Calls((Group, Muon))
    names_parameters: ClassVar[bool] = True
    absent: ClassVar[Mapping[str, Any] | None] = {}

    algorithm: AdamW | Adam | Sgd = option(
        Calls((AdamW, Adam, Sgd)), doc="The algorithm and its constants.", default=AdamW()
    )
