"""Update of a profile by the measurements of a run, as far as the fit predicts held-out measurements.

Each part of the profile is updated on its own: where the fit has no smaller median error on held-out measurements than
the base, the base's figures stay. Observed products and attentions get their measured times. For other shapes, the
base's times are scaled by one factor, or interpolated between observed neighbours, whichever predicts left-out shapes
better. Memory-bound kernels and collectives are corrected by size.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from legoai.cost.calibration.correction import FEWEST, Correction, Trial, Typical, left_out, repeated
from legoai.cost.calibration.observed.kernels import KernelTimes
from legoai.cost.kernels.kinds import Attention, Movement, Product
from legoai.cost.kernels.table import Table
from legoai.cost.machine.kernel_time import products_of, seconds_of
from legoai.cost.profiles import AttentionModel, ProductModel, Profile, from_document, movement_of
from legoai.cost.timing.timeline import call_constant
from legoai.cost.trace.records import CALLS

Document = dict[str, Any]
T = TypeVar("T")
_Model = TypeVar("_Model", Product, Attention)

_REACH: Final = 0.25
"""Octaves around an observed shape for which its time is used."""
_FAR: Final = 2.0
"""The same, where neighbours predict shapes that are left out."""
_GRID: Final = tuple(2.0**power for power in range(8, 34))
_OCTAVES: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Result of the update for a part of a profile.

    Attributes:
        name: as among the errors of a profile's held-out measurements.
        seen: shapes or sizes that were measured.
        result: `measured`, `scaled` or `kept`.
        how: description of the result.
        trial: the errors of base and fit; None where nothing could be held out.
    """

    name: str
    seen: int
    result: str
    how: str
    trial: Trial | None


def update_kernels(document: Document, base: Profile, found: KernelTimes, *, on_device: bool) -> list[Part]:
    """Update products, attention, movement and the host's times in place.

    Of several times of the same kernel the median is used on a GPU. On a CPU it is the mean: its ranks and threads take
    turns on the cores, and a step takes the sum over all turns. The time of several consecutive kernels corrects none.
    """
    typical = statistics.median if on_device else statistics.fmean
    products: dict[str, dict[Product, list[float]]] = defaultdict(dict)
    attention: dict[str, dict[Attention, list[float]]] = defaultdict(dict)
    movement: dict[str, dict[Movement, list[float]]] = defaultdict(dict)
    for work, times in found.seconds.items():
        match work:
            case Product():
                products[products_of(work, base)][work] = times
            case Attention():
                direction = "backward" if work.backward else "forward"
                attention[f"{work.implementation} {direction} {work.rate}"][work] = times
            case Movement() if work.bytes > 0:
                movement[work.name][work] = times
    parts: list[Part] = []
    for key, works in sorted(products.items()):
        parts += _update_model(document["products"], key, f"products {key}", works, base, _product_point, typical)
    for key, of_kind in sorted(attention.items()):
        parts += _update_model(document["attention"], key, f"attention {key}", of_kind, base, _attention_point, typical)
    for name, moved in sorted(movement.items()):
        parts.append(_update_movement(document, name, moved, base, typical))
    parts += _host_parts(document, found, on_device=on_device)
    return parts


def _product_point(product: Product) -> list[float]:
    """The coordinates of a product in a table."""
    return [math.log2(value) for value in (product.batch, product.m, product.n, product.k)]


def _attention_point(work: Attention) -> list[float]:
    """The coordinates of an attention in a table."""
    point = [math.log2(value) for value in (work.batch * work.heads, work.queries, work.keys)]
    return [*point, math.log2(work.head_dim + work.value_dim), 4.0 * work.causal]


def _update_model(  # noqa: PLR0917
    models: Document,
    key: str,
    name: str,
    works: Mapping[_Model, Sequence[float]],
    base: Profile,
    point: Callable[[_Model], list[float]],
    typical: Typical,
) -> Iterator[Part]:
    """Update one model of products or attention."""
    own = _own_model(models, key, base)
    samples = [(work, times) for work, times in works.items() if min(_sizes_of(work)) > 0]
    if own is None or not samples:
        yield Part(name=name, seen=len(samples), result="kept", how="the base has no model to correct", trial=None)
        return
    model, formula = own

    def before(work: _Model) -> float:
        return seconds_of(work, base)[0]

    same = repeated(samples, before, typical)
    known = [(work, typical(times)) for work, times in samples]
    near = _Neighbours(formula, point)
    if same.better:
        model["observed"] = near.added(known, model.get("observed"))
        yield Part(name=name, seen=len(samples), result="measured", how="what these shapes took", trial=same)
    else:
        yield Part(name=name, seen=len(samples), result="kept", how=_why_kept(same, "shape"), trial=same)
    others = _other_shapes(name, model, known, base, near, observed=same.better)
    yield others
    if same.better or others.result != "kept":
        models[key] = model


def _other_shapes(
    name: str,
    model: Document,
    known: Sequence[tuple[_Model, float]],
    base: Profile,
    near: _Neighbours,
    *,
    observed: bool,
) -> Part:
    """Scale a model for shapes that were not observed, or interpolate between neighbours if these are ``observed``."""

    def before(work: _Model) -> float:
        return seconds_of(work, base)[0]

    label = f"{name}, other shapes"
    by_factor = left_out(known, before, lambda others: _scaled(others, base))
    by_near = left_out(known, before, lambda others: near.of(others, _scaled(others, base)))
    if len(known) < FEWEST or not (by_factor.better or (observed and by_near.better)):
        few = (
            f"fewer than {FEWEST} shapes were seen"
            if len(known) < FEWEST
            else "neither a factor nor neighbours predict better"
        )
        return Part(name=label, seen=len(known), result="kept", how=few, trial=by_factor)
    factor = _factor(known, _unobserved(base))
    model["scale"] = round(float(model.get("scale", 1.0)) * factor, 6)
    how, trial, reach = f"{factor:.3g} times the base's", by_factor, _REACH
    if observed and by_near.after["median"] < by_factor.after["median"]:
        how, trial, reach = f"interpolated between observed ones within {_FAR:g} octaves, else {how}", by_near, _FAR
    if observed:
        model["observed"]["reach"] = reach
    return Part(name=label, seen=len(known), result="scaled", how=how, trial=trial)


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Interpolation between observed shapes, like a profile's table."""

    formula: Callable[[Any], float]
    point: Callable[[Any], list[float]]

    def table(self, known: Sequence[tuple[Any, float]], reach: float) -> Document:
        """The table's JSON."""
        return {
            "points": [self.point(work) for work, _ in known],
            "ratios": [math.log(time / self.formula(work)) for work, time in known],
            "reach": reach,
        }

    def added(self, known: Sequence[tuple[Any, float]], base: Document | None) -> Document:
        """The table's JSON, with the base's points that no new one is near, and as far a reach as the base's."""
        if base is None:
            return self.table(known, _REACH)
        found = self.table(known, base["reach"])
        new = Table.read(found)
        for point, ratio in zip(base["points"], base["ratios"], strict=True):
            if new.distance(point) > _REACH:
                found["points"].append(point)
                found["ratios"].append(ratio)
        return found

    def of(self, known: Sequence[tuple[_Model, float]], beyond: Callable[[_Model], float]) -> Callable[[_Model], float]:
        """Return a predictor that interpolates known shapes, and uses another model where none is near."""
        table = Table.read(self.table(known, _FAR))

        def seconds(work: _Model) -> float:
            ratio = table.lookup(self.point(work))
            return beyond(work) if ratio is None else self.formula(work) * math.exp(ratio)

        return seconds


def _sizes_of(work: Product | Attention) -> tuple[int, ...]:
    if isinstance(work, Product):
        return work.batch, work.m, work.n, work.k
    return work.batch, work.heads, work.queries, work.keys, work.head_dim


def _own_model(models: Document, key: str, base: Profile) -> tuple[Document, Callable[[Any], float]] | None:
    """Return a copy of the base's model for ``key``, and its formula."""
    source, is_attention = models.get(key), len(key.split()) == 3
    if source is None and is_attention:
        source = models.get(" ".join(["flash2", *key.split()[1:]]))  # as the base falls back
    if source is not None and "like" in source:
        source = {**models[source["like"]], "derived": source["derived"]}
        source.pop("observed", None)
    if source is None:
        return None
    if is_attention:
        implementation, direction, rate = key.split()
        found: ProductModel | AttentionModel | None = base.attention.get((implementation, direction, rate))
        found = found or base.attention.get(("flash2", direction, rate))
    else:
        found = base.products.get(key)
    assert found is not None, "a model of the document is one of the profile"
    return copy.deepcopy(source), found.curve.seconds


def _factor(known: Sequence[tuple[Any, float]], before: Callable[[Any], float]) -> float:
    """Return the median of measured over base times, each shape weighted equally."""
    return statistics.median(time / before(work) for work, time in known)


def _scaled(known: Sequence[tuple[_Model, float]], base: Profile) -> Callable[[_Model], float]:
    """Return the base's prediction with its model scaled."""
    return _unobserved(base, _factor(known, _unobserved(base)))


def _unobserved(base: Profile, factor: float = 1.0) -> Callable[[Any], float]:
    """Return the base's prediction of shapes that no run observed, with its models scaled."""

    def scaled(models: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {name: replace(model, scale=model.scale * factor, observed=None) for name, model in models.items()}

    trial = replace(base, products=scaled(base.products), attention=scaled(base.attention), answers={})
    return lambda work: seconds_of(work, trial)[0]


def _update_movement(
    document: Document, name: str, works: Mapping[Movement, Sequence[float]], base: Profile, typical: Typical
) -> Part:
    """Correct the curve of one kind of movement, in one form, by size."""

    def before(work: Movement) -> float:
        return seconds_of(work, base)[0]

    part, correction = corrected(
        f"movement {name}", list(works.items()), before, lambda work: work.bytes, octaves=_OCTAVES, typical=typical
    )
    if correction is None:
        return part
    one = next(iter(works))
    curve = document["movement"][name] = dict(movement_of(document["movement"], one.kind, one.form))
    known = [float(size) for size, _ in curve.get("points", ())]
    sizes = sorted({*(known or _GRID), *(2.0**place for place in correction.sizes)})
    own, _ = base.moving(one.kind, one.form)
    curve["points"] = [[size, own.seconds(size) * correction.at(size)] for size in sizes]
    curve["rate"] = curve["rate"] / correction.at(sizes[-1] * 2**10)
    curve["derived"] = ""
    return part


def corrected(
    name: str,
    samples: Sequence[tuple[T, Sequence[float]]],
    before: Callable[[T], float],
    size_of: Callable[[T], float],
    *,
    octaves: float,
    typical: Typical,
) -> tuple[Part, Correction | None]:
    """Correct a model by size; no correction where the base predicts held-out measurements as well.

    Args:
        name: of the part.
        samples: what was measured, with its times.
        before: the base's prediction in seconds.
        size_of: bytes of a sample.
        octaves: width of the bins of sizes.
        typical: statistic of several times.
    """

    def fit(known: Sequence[tuple[T, float]], *, holds: bool) -> Correction:
        return Correction.of(
            [(size_of(what), time / before(what)) for what, time in known], holds=holds, octaves=octaves
        )

    def answers(known: Sequence[tuple[T, float]]) -> Callable[[T], float]:
        correction = fit(known, holds=True)
        return lambda what: before(what) * correction.at(size_of(what))

    known = [(what, typical(times)) for what, times in samples]
    trial = left_out(known, before, answers)
    if trial.better:
        how = "corrected by size; beyond the measured sizes as at the last one"
        return Part(name=name, seen=len(known), result="measured", how=how, trial=trial), fit(known, holds=True)
    twice = [(what, typical(times[::2]), typical(times[1::2])) for what, times in samples if times[1:]]
    if twice:
        half = fit([(what, first) for what, first, _ in twice], holds=False)
        held = [time for _, _, time in twice]
        again = Trial.of(
            held, [before(what) for what, *_ in twice], [before(what) * half.at(size_of(what)) for what, *_ in twice]
        )
        if again.better:
            how = "corrected near the measured sizes"
            return Part(name=name, seen=len(known), result="measured", how=how, trial=again), fit(known, holds=False)
        trial = trial if trial.after["rows"] else again
    return Part(name=name, seen=len(known), result="kept", how=_why_kept(trial, "size"), trial=trial), None


def _why_kept(trial: Trial, what: str) -> str:
    if not trial.after["rows"]:
        return f"each {what} was measured once, so that nothing could be held out"
    return "the fit has no smaller median error on held-out measurements"


def _host_parts(document: Document, found: KernelTimes, *, on_device: bool) -> Iterator[Part]:
    """Update the host's seconds for each operator."""
    if not on_device:
        yield from _host_part(
            document, "kernel_gap_seconds", found.host.get("gap", []), statistics.fmean,
            "between two operators of the profiled step, the profiler's own time included; not where it waited",
        )  # fmt: skip
        return
    base = dict(document["constants"])
    for kind in ("dispatch", "python"):
        yield from _host_part(
            document, f"{kind}_seconds", found.host.get(kind, []), statistics.median,
            "from one operator to the next on the host of the profiled step, the profiler's own time included",
            only_less=True,
        )  # fmt: skip
    _scale_with_python(document["constants"], base)


def _scale_with_python(constants: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Change the times of Python autograd functions, of recomputation and of calls as that of modules.

    A trace does not tell Python autograd functions from nodes, or the hooks of checkpoints from other work.
    """
    python = "python_seconds"
    if python not in base or constants[python] is base[python]:
        return
    ratio = constants[python]["value"] / base[python]["value"]
    others = ("function_seconds", "recompute_seconds", "policy_seconds", "policy_recompute_seconds")
    for name in (*others, *map(call_constant, CALLS)):
        if name in base:
            source = f"{base[name]['source']}; scaled like {python}"
            constants[name] = {"value": ratio * base[name]["value"], "source": source}


def _host_part(
    document: Document, name: str, times: Sequence[float], typical: Typical, source: str,
    *, only_less: bool = False,
) -> Iterator[Part]:  # fmt: skip
    known = document["constants"].get(name)
    if known is None or len(times) < 2 * FEWEST:
        return
    first, second, value = typical(times[::2]), typical(times[1::2]), typical(times)
    trial = Trial.of([second], [known["value"]], [first])
    label = f"host {name.removesuffix('_seconds').replace('_', ' ')}"
    if only_less and value >= known["value"]:
        how = f"under the profiler {value * 1e6:.1f} µs, which is no less than the base's {known['value'] * 1e6:.1f} µs"
        yield Part(name=label, seen=len(times), result="kept", how=how, trial=None)
    elif trial.better:
        document["constants"][name] = {"value": value, "source": f"measured in a run: {source}"}
        how = f"{value * 1e6:.1f} µs, of {known['value'] * 1e6:.1f} µs"
        yield Part(name=label, seen=len(times), result="measured", how=how, trial=trial)
    else:
        yield Part(name=label, seen=len(times), result="kept", how=_why_kept(trial, "time"), trial=trial)


def checked(document: Document) -> Profile:
    """Return the profile of an updated document.

    Raises:
        ProfileError: it violates the schema.
    """
    from legoai.cost.profiles.schema import check  # imports pydantic

    check({"format": 1, **document})
    return from_document(document)
