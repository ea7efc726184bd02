"""Comparison of a lowered program's results with those of one device, within rounding tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.optimizer import Muon
from legoai.specs.plan import Plan

Kind = Literal["gradient", "clipped", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Largest accepted differences, all relative.

    Attributes:
        loss: and gradient norm, relative to their values, in the first step.
        after: the same after an update, which enlarges what rounding has changed.
        gradient: the 2-norm of a difference relative to that of the gradient or, where the gradient is small, to a
            share of the usual one, which is the average for gradients of its size in this model.
        small: that share. A gradient that is zero but for rounding, as that of a bias of keys, has no digit in common
            with itself; with it, its difference may be a rounding of the usual gradient.
        update: root mean square of a parameter's difference after a step, relative to the sum of the learning rates up
            to it. Where the gradient is zero but for rounding, Adam's steps have arbitrary signs and lengths, and two
            opposite steps are allowed.
    """

    loss: float
    after: float
    gradient: float
    small: float
    update: float


TOLERANCES: Final = {
    "fp64": Tolerances(loss=1e-10, after=1e-10, gradient=1e-9, small=1e-3, update=1e-6),
    "fp32": Tolerances(loss=1e-5, after=1e-5, gradient=1e-3, small=1e-3, update=5e-2),
    "fp64, partly fp32": Tolerances(loss=5e-7, after=1e-6, gradient=1e-5, small=1e-2, update=1e-3),
    "bf16": Tolerances(loss=2e-2, after=2e-2, gradient=2e-1, small=2e-2, update=1.0),
}
"""By the dtype of computation. Models from outside LegoAI may compute norms and positions in fp32, and some compute
their logits in it, as Mamba 2 does, so that the loss is rounded to fp32 too. Adam's first steps depend only on a
gradient's sign, so that rounding of gradients near zero shows in updates."""

_BY_MUON: Final = {"after": 1e-3, "update": 2e-2}
"""Where gradients are not exact and Muon rounds them to bf16: five times that rounding in an update, and in a
loss five times what a learning rate of 2 was seen to make of it."""

_COARSE: Final = ("fp64", "fp32", "bf16", "fp16")
"""Dtypes by their rounding error in a reduction; fp16 also loses small gradients."""


def tolerances(plan: Plan) -> Tolerances:
    """Return the tolerances for the coarsest of the dtypes in which a plan stores, computes and reduces."""
    precision = plan.precision
    used = [precision.param, precision.master, precision.gradient or precision.master]
    if plan.fsdp is not None or plan.replicate is not None:
        used.append(precision.reduce)
    dtype = max(used, key=_COARSE.index)
    if dtype == "fp64" and plan.model.family in FOREIGN:
        dtype = "fp64, partly fp32"
    found = TOLERANCES["bf16" if dtype == "fp16" else dtype]
    rules = () if plan.optimizer is None else plan.optimizer.rules
    if dtype == "fp64" or not any(isinstance(rule.treatment, Muon) for rule in rules):
        return found
    return replace(found, **{name: max(getattr(found, name), least) for name, least in _BY_MUON.items()})


_EVERY_STEP: Final = 2.5
"""More than two opposite steps of Adam differ by, in learning rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that differs.

    Attributes:
        kind: `gradient` of the first step, the same `clipped`, or `update`: a parameter after a step.
        name: of the parameter.
        size: the difference, relative as in `Tolerances`; infinite where one of the tensors is missing or not finite.
        largest: the largest difference of an element; infinite likewise.
        step: after which the parameter was compared, counted from 1.
    """

    kind: Kind
    name: str
    size: float
    largest: float
    step: int


def differences(own: Mapping[str, Any], reference: Mapping[str, Any], limits: Tolerances) -> list[Difference]:
    """Compare the full tensors that one rank holds with those of one device.

    Args:
        own: `gradients`, these `clipped`, `updated` and `trained` of the parameters that the rank holds.
        reference: the same for all parameters, and the learning `rates` of each in every step.
        limits: of the comparison.
    """
    found = []
    zero = set[str]()
    fields: tuple[tuple[Kind, str], ...] = (("gradient", "gradients"), ("clipped", "clipped"))
    for kind, field in fields:
        gradients = reference[field]
        total = math.sqrt(math.fsum(float(g.double().square().sum()) for g in gradients.values() if g is not None))
        numel = sum(g.numel() for g in gradients.values() if g is not None)
        for name, gradient in own[field].items():
            wanted = gradients.get(name)
            scale = 0.0
            if wanted is not None:
                usual = total * math.sqrt(wanted.numel() / numel)
                norm = float(wanted.double().norm())
                scale = max(norm, limits.small * usual)
                if norm <= limits.gradient * limits.small * usual:
                    zero.add(name)
            size, largest = _difference(gradient, wanted, scale)
            found.append(Difference(kind=kind, name=name, size=size, largest=largest, step=1))
    rates: Mapping[str, Sequence[float]] = reference["rates"]
    steps = max((len(each) for each in rates.values()), default=0)
    for state, step in (("updated", 1), ("trained", steps)):
        for name, parameter in own[state].items():
            wanted = reference[state].get(name)
            scale = math.fsum(rates.get(name, ())[:step]) * math.sqrt(parameter.numel())
            if name in zero:
                scale *= max(1.0, _EVERY_STEP / limits.update)
            size, largest = _difference(parameter, wanted, scale)
            found.append(Difference(kind="update", name=name, size=size, largest=largest, step=step))
    return found


def _difference(own: torch.Tensor | None, wanted: torch.Tensor | None, scale: float) -> tuple[float, float]:
    """Return the 2-norm of the difference relative to ``scale``, and its largest element."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialDifference:
    """A parameter or buffer whose initial values differ from those of the model's constructor.

    Attributes:
        name: of the tensor.
        what: description of the difference.
    """

    name: str
    what: str


def unlike(drawn: torch.Tensor, built: Sequence[torch.Tensor]) -> str | None:
    """Return how a tensor's initial values differ from those of its constructor; None where they do not.

    Constant values must be equal; for random values, mean and standard deviation must agree within six times their
    statistical error.

    Args:
        drawn: initial values of the training.
        built: the constructor's values with two different seeds.
    """
    one, other = (tensor.detach().double() for tensor in built)
    own = drawn.detach().double()
    if own.shape != one.shape:
        return f"its shape is {list(own.shape)}, and the constructor's {list(one.shape)}"
    if own.numel() == 0:
        return None
    if torch.equal(one, other):
        if torch.allclose(own, one, rtol=1e-4, atol=1e-6, equal_nan=True):
            return None
        return f"it is {_values(own)}, where the model's constructor gives {_values(one)}"
    number = own.numel()
    if number < _FEWEST:
        return None
    deviation, wanted = float(own.std()), float(torch.cat([one.flatten(), other.flatten()]).std())
    chance = 6.0 / math.sqrt(number)
    mean, wanted_mean = float(own.mean()), float(torch.stack([one, other]).mean())
    if deviation == 0.0 or wanted == 0.0 or abs(math.log(deviation / wanted)) > chance:
        return f"its standard deviation is {deviation:.3g}, and {wanted:.3g} from the model's constructor"
    if abs(mean - wanted_mean) > 1.5 * chance * max(deviation, wanted):
        return f"its mean is {mean:.3g}, and {wanted_mean:.3g} from the model's constructor"
    return None


_FEWEST: Final = 16
"""Fewest elements of a tensor for which the statistics are compared."""


def _values(tensor: torch.Tensor) -> str:
    low, high = float(tensor.min()), float(tensor.max())
    return f"{low:.3g} throughout" if low == high else f"from {low:.3g} to {high:.3g}"


def wrong_samples(ranks: Sequence[Sequence[Sequence[str]]], wanted: Sequence[Sequence[str]]) -> list[str]:
    """Return descriptions of samples that ranks read wrongly or do not read, step by step.

    Args:
        ranks: for each rank and step, the digests of the samples that it read; empty on ranks that read nothing.
        wanted: for each step, those of the whole batch.
    """
    found = []
    for step, batch in enumerate(wanted, 1):
        read = {rank: steps[step - 1] for rank, steps in enumerate(ranks) if len(steps) >= step and steps[step - 1]}
        missing = set(batch) - {sample for samples in read.values() for sample in samples}
        if missing:
            found.append(f"step {step}: {len(missing)} of the batch's {len(batch)} samples are read by no rank")
        for rank, samples in read.items():
            if others := set(samples) - set(batch):
                found.append(f"step {step}: rank {rank} reads {len(others)} samples that are not of the batch")
            if len(set(samples)) < len(samples):
                found.append(f"step {step}: rank {rank} reads a sample twice")
        parts = list({frozenset(samples) for samples in read.values()})
        if sum(len(part) for part in parts) > len(frozenset().union(*parts)):
            found.append(f"step {step}: ranks share a part of their samples, and not all of them")
    return found


def relative(own: float, wanted: float) -> float:
    """Return the difference of two numbers relative to the second."""
    if not (math.isfinite(own) and math.isfinite(wanted)):
        return math.inf
    return abs(own - wanted) / max(abs(wanted), 1e-300)


def worst(found: Iterable[Iterable[Difference]]) -> dict[tuple[Kind, int, str], Difference]:
    """Return for each tensor the largest difference of any rank."""
    merged: dict[tuple[Kind, int, str], Difference] = {}
    for rank in found:
        for item in rank:
            key = (item.kind, item.step, item.name)
            if key not in merged or not item.size <= merged[key].size:
                merged[key] = item
    return merged
