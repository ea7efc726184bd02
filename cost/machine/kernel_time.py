"""Time of a kernel on a device: the first of a chain of models that has an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from legoai.cost.kernels.features import attention_features, product_features
from legoai.cost.kernels.kinds import ALIGNED, Attention, Consecutive, Movement, MovementForm, Product, Work
from legoai.cost.kernels.roofline import AttentionCurve, ProductCurve
from legoai.cost.kernels.work import work_of
from legoai.cost.profiles import AttentionModel, ProductModel, Profile
from legoai.cost.trace.records import Kernel

MEASURED: Final = "measured table"
LEARNED: Final = "learned"
ROOFLINE: Final = "roofline"

GROUPED: Final = " grouped"
"""End of the name of a model of products by groups, as of `torch._grouped_mm`: the kernels are others."""

_NARROW: Final = "_flops_per_second"

Answer: TypeAlias = tuple[float, str]
"""Seconds, and the name of the model that estimated them."""


class NoModelError(ValueError):
    """A profile has no rate for a kernel."""


def work_on(kernel: Kernel, profile: Profile) -> Work:
    """The work of ``kernel`` on the device of ``profile``, which may have tensor cores for single precision."""
    return work_of(kernel, tf32="tf32" in profile.products)


def estimate(kernel: Kernel, profile: Profile) -> Answer:
    """Return the seconds that ``kernel`` takes on the device of ``profile``, and the model that estimated them.

    The first model of a chain that applies is used: `measured table`, `learned`, `roofline`. A model that was measured
    on another device and scaled is marked as derived: `learned, derived`.

    Args:
        kernel: the kernel.
        profile: of the device.

    Raises:
        NoModelError: the device has no rate for the kernel's dtype.
    """
    return seconds_of(work_on(kernel, profile), profile)


def seconds_of(work: Work, profile: Profile) -> Answer:
    """As :func:`estimate`, given the work of a kernel; estimates are cached in the profile."""
    known = profile.answers.get(work)
    if known is None:
        match work:
            case Product():
                known = _product(work, profile)
            case Attention():
                known = _attention(work, profile)
            case Movement():
                known = _movement(work, profile)
            case Consecutive():
                known = _consecutive(work, profile)
        profile.answers[work] = known
    return known


def _consecutive(work: Consecutive, profile: Profile) -> Answer:
    """The sum of the parts' seconds, and the model of the longest."""
    answers = [seconds_of(part, profile) for part in work.parts]
    return math.fsum(seconds for seconds, _ in answers), max(answers)[1]


def _product(product: Product, profile: Profile) -> Answer:
    model = profile.products.get(products_of(product, profile))
    if model is None:
        raise NoModelError(
            f"the profile of {profile.name} has no rate for matrix products of {product.rate} "
            f"(it has {', '.join(sorted(profile.products)) or 'none'})"
        )
    return _chain(
        model,
        model.curve.seconds(product),
        [math.log2(value) for value in (product.batch, product.m, product.n, product.k)],
        lambda: product_features(product, model.curve.processors),
        lambda seconds: max(seconds * model.scale * model.curve.slowed(product), model.curve.limit(product)),
        least=max(_by_narrow_loads(product, model.curve, profile), _by_streaming(product, profile)),
    )


def products_of(product: Product, profile: Profile) -> str:
    """The name of a profile's model of products like one: its rate, or of products by groups their own."""
    name = f"{product.rate}{GROUPED}"
    return name if product.grouped and name in profile.products else product.rate


def _by_narrow_loads(product: Product, curve: ProductCurve, profile: Profile) -> Answer:
    """The time of a product some of whose rows are not aligned for the fastest kernels; 0 where that is not known."""
    name = narrow_rate(product)
    if name is None or name not in profile.constants:
        return 0.0, ROOFLINE
    return curve.floor + product.flops * curve.waste(product) / profile.constants[name].value, ROOFLINE


def _by_streaming(product: Product, profile: Profile) -> Answer:
    """The time of an elementwise kernel that moves a product's bytes, which no product is faster than.

    The curve divides bytes by the datasheet's bandwidth, which no kernel reaches. Of the products measured on an H100,
    an H200 and a B200, only some in float8 on the H100, with operands in its cache, are faster.
    """
    curve, derived = profile.moving("elementwise")
    return curve.seconds(product.bytes), ROOFLINE + (", derived" if derived else "")


def knows_narrow_rates(profile: Profile) -> bool:
    """Whether products by narrow loads were measured on a device."""
    return any(name.endswith(_NARROW) for name in profile.constants)


def narrow_rate(product: Product) -> str | None:
    """The profile's constant: operations per second of large products aligned as one is; None where all rows are.

    Loads of 8 bytes have no kernels of their own. Kernels are slower where the result alone is unaligned.
    """
    aligned = min(product.operands_aligned, product.result_aligned)
    if aligned == ALIGNED:
        return None
    what = "operands" if product.operands_aligned == aligned else "result"
    return f"{what}_aligned_to_{min(aligned, 4)}{_NARROW}"


def _attention(attention: Attention, profile: Profile) -> Answer:
    direction = "backward" if attention.backward else "forward"
    names = [attention.implementation, "flash2"]
    models = [profile.attention.get((name, direction, attention.rate)) for name in names]
    found = next((model for model in models if model is not None), None)
    if found is None:
        return _unfused(attention, profile)
    point = [math.log2(v) for v in (attention.batch * attention.heads, attention.queries, attention.keys)]
    point += [math.log2(attention.head_dim + attention.value_dim), 4.0 * attention.causal]
    return _chain(
        found,
        found.curve.seconds(attention),
        point,
        lambda: attention_features(attention, found.curve.processors),
        lambda seconds: seconds * found.scale * _slowed(attention, found.curve, profile),
        carried=found is not models[0] or not (attention.causal or found.measured_unmasked),
    )


_IDLE, _BUSY = 0.5, 0.85
"""Utilisation of an attention up to which, and from which on, the power limit has none, and its whole, effect.

Attention is measured alone, at the highest clock. In training steps at the power limit the clock is lower, and power
follows utilisation. In steps of six plans on an H100 kernels of a utilisation of 0.5 took 1.0 and 1.1 times as long as
alone, those of 0.9 took 1.0 to 1.3 times (`benchmarks/results/gpu_steps.json`): the clock depends on the whole step,
which the time of one kernel does not know.
"""


def _slowed(attention: Attention, curve: AttentionCurve, profile: Profile) -> float:
    """The time of an attention in a training step over its time alone: what the power limit costs it."""
    most = profile.constants.get("attention_slowdown")
    if most is None:
        return 1.0
    share = (curve.utilisation(attention) - _IDLE) / (_BUSY - _IDLE)
    return 1.0 + (most.value - 1.0) * min(1.0, max(0.0, share))


def _chain(
    model: ProductModel | AttentionModel,
    formula: float,
    point: Sequence[float],
    features: Callable[[], tuple[float, ...]],
    finish: Callable[[float], float],
    *,
    carried: bool = False,
    least: Answer = (0.0, ROOFLINE),
) -> Answer:
    """Apply the observations of runs, then the table, then the forest (each a ratio to ``formula``), then the formula.

    The forest is used within its range and near a measurement: between distant ones its result would be arbitrary. What
    is not observed takes at least as long as ``least``.
    """
    suffix = ", derived" if model.derived or carried else ""
    if model.observed is not None:
        ratio = model.observed.lookup(point)
        if ratio is not None:
            return formula * math.exp(ratio), MEASURED + (", derived" if carried else "")
    if model.table is not None:
        ratio = model.table.lookup(point)
        if ratio is not None:
            return max((finish(formula * math.exp(ratio)), MEASURED + suffix), least)
    if model.forest is not None:
        seen = features()
        near = model.table is None or model.table.distance(point) <= model.margin
        if near and model.forest.covers(seen, margin=model.margin):
            return max((finish(formula * math.exp(model.forest.predict(seen))), LEARNED + suffix), least)
    return max((finish(formula), ROOFLINE + suffix), least)


def _unfused(attention: Attention, profile: Profile) -> Answer:
    """Attention that materialises its scores: two products forward or four backward, and passes over the scores."""
    passes = 2 if attention.backward else 1
    batch = attention.batch * attention.heads
    scores = 4 * batch * attention.queries * attention.keys
    seconds = 0.0
    for width in (attention.head_dim, attention.value_dim):
        product = Product(
            batch=batch, m=attention.queries, n=attention.keys, k=width, rate=attention.rate,
            bytes=attention.bytes + scores,
        )  # fmt: skip
        seconds += passes * seconds_of(product, profile)[0]
    form: MovementForm = "backward" if attention.backward else ""
    softmax = seconds_of(Movement(kind="softmax", bytes=2 * scores, form=form), profile)[0]
    return seconds + passes * softmax, ROOFLINE


def _movement(movement: Movement, profile: Profile) -> Answer:
    curve, derived = profile.moving(movement.kind, movement.form)
    seconds = curve.seconds(movement.bytes)
    arithmetic = profile.arithmetic.get(movement.rate)
    if arithmetic is None and "fp32" in profile.products:  # its products run on the vector units, too
        curve_of_products = profile.products["fp32"].curve
        arithmetic = curve_of_products.peak * curve_of_products.efficiency
    if arithmetic is not None:
        seconds = max(seconds, movement.flops / arithmetic)
    measured = curve.measured is not None and curve.measured.at(movement.bytes) is not None
    model = MEASURED if measured else LEARNED if curve.second else ROOFLINE
    return seconds, model + (", derived" if derived else "")
