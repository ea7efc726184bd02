"""Comparison of a lowered program with one device, within the tolerance of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

Kind = Literal["gradient", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far two computations of one number may be apart, all relative.

    Attributes:
        loss: and gradient norm, as a share of their values.
        gradient: the 2-norm of a difference as a share of that of the gradient, or, where the gradient is small, of a
            thousandth of what a gradient of its size has on average in this model.
        update: root mean square of a parameter's difference after a step, as a share of the learning rate.
    """

    loss: float
    gradient: float
    update: float


TOLERANCES: Final = {
    "fp64": Tolerances(loss=1e-10, gradient=1e-9, update=1e-6),
    "fp32": Tolerances(loss=1e-5, gradient=1e-3, update=5e-2),
    "fp64, partly fp32": Tolerances(loss=1e-7, gradient=1e-5, update=1e-3),
    "bf16": Tolerances(loss=2e-2, gradient=2e-1, update=1.0),
}
"""By the dtype of computation; models that others have written may compute norms and positions in fp32. Adam's first
steps turn a gradient's sign into a whole step, so that rounding of gradients near zero shows in updates."""

SMALL_GRADIENT: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that differs.

    Attributes:
        kind: `gradient` of the first step, or `update`: a parameter after a step.
        name: of the parameter.
        size: the difference, measured as `Tolerances` says; infinite where one of both is missing or not finite.
        largest: the largest difference of an element; infinite likewise.
        step: after which a parameter was looked at, counted from 1.
    """

    kind: Kind
    name: str
    size: float
    largest: float
    step: int


def differences(own: Mapping[str, Any], reference: Mapping[str, Any]) -> list[Difference]:
    """Compare what one rank holds, all of it, with what one device has.

    Args:
        own: `gradients`, `updated` and `trained` of the parameters that the rank holds.
        reference: the same of all parameters, and `rates`.
    """
    gradients = reference["gradients"]
    total = math.sqrt(math.fsum(float(g.double().square().sum()) for g in gradients.values() if g is not None))
    numel = sum(g.numel() for g in gradients.values() if g is not None)
    found = []
    for name, gradient in own["gradients"].items():
        wanted = gradients.get(name)
        scale = 0.0
        if wanted is not None:
            usual = total * math.sqrt(wanted.numel() / numel)
            scale = max(float(wanted.double().norm()), SMALL_GRADIENT * usual)
        size, largest = _difference(gradient, wanted, scale)
        found.append(Difference(kind="gradient", name=name, size=size, largest=largest, step=1))
    rates = reference["rates"]
    for field, step in (("updated", 1), ("trained", len(rates))):
        for name, parameter in own[field].items():
            wanted = reference[field].get(name)
            scale = max(rates[:step]) * math.sqrt(parameter.numel())
            size, largest = _difference(parameter, wanted, scale)
            found.append(Difference(kind="update", name=name, size=size, largest=largest, step=step))
    return found


def _difference(own: torch.Tensor | None, wanted: torch.Tensor | None, scale: float) -> tuple[float, float]:
    """The 2-norm of the difference as a share of ``scale``, and its largest element."""
    if own is None or wanted is None:
        return (0.0, 0.0) if own is None and wanted is None else (math.inf, math.inf)
    if own.shape != wanted.shape:
        return math.inf, math.inf
    apart = own.double() - wanted.double()
    if not bool(torch.isfinite(apart).all()):
        return math.inf, math.inf
    norm = float(apart.norm())
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    return (norm / scale if scale > 0 else (math.inf if norm else 0.0)), largest


def relative(own: float, wanted: float) -> float:
    """The difference of two numbers as a share of the second."""
    if not (math.isfinite(own) and math.isfinite(wanted)):
        return math.inf
    return abs(own - wanted) / max(abs(wanted), 1e-300)


def worst(found: Iterable[Iterable[Difference]]) -> dict[tuple[Kind, int, str], Difference]:
    """Of each tensor the largest difference of any rank."""
    merged: dict[tuple[Kind, int, str], Difference] = {}
    for rank in found:
        for item in rank:
            key = (item.kind, item.step, item.name)
            if key not in merged or not item.size <= merged[key].size:
                merged[key] = item
    return merged
