"""Profile of a device: the measured and derived figures on which every estimate is based."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from legoai.cost.kernels.forest import Forest
from legoai.cost.kernels.kinds import MovementForm, MovementKind, Product, Work
from legoai.cost.kernels.roofline import AttentionCurve, MovementCurve, ProductCurve
from legoai.cost.kernels.table import Table
from legoai.cost.kernels.work import element_bytes
from legoai.cost.measurements.file import write_document
from legoai.cost.measurements.interpolation import Measured
from legoai.cost.network.bandwidth import LinkCurve
from legoai.cost.network.fabric import read_tables
from legoai.specs.cluster import PROFILE_SUFFIX
from legoai.specs.profile_file import FORMAT, ProfileError, read_document

__all__ = [
    "FORMAT", "AttentionModel", "Constant", "ProductModel", "Profile", "ProfileError", "from_document", "load",
    "movement_of", "profile", "profile_names", "read_document", "shipped_file", "write_document",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductModel:
    """The models of matrix products of one rate, from the most to the least preferred.

    ``scale`` multiplies measurements of another device; ``derived`` describes the derivation, and is empty for
    measurements of this device. ``margin`` is the distance in octaves from the nearest measurement up to which the
    forest is used. ``observed`` holds measurements of the user's own runs, which are neither scaled nor slowed.
    """

    curve: ProductCurve
    observed: Table | None
    table: Table | None
    forest: Forest | None
    scale: float
    margin: float
    derived: str

    def peak(self, rate: str) -> float:
        """Return the most floating-point operations per second that its times allow.

        Args:
            rate: the name of its rate, such as `bf16`.
        """
        return max((self.curve.peak / self.scale, *self._observed_rates(rate)))

    def _observed_rates(self, rate: str) -> Iterator[float]:
        """Yield the operations per second of each observed shape."""
        if self.observed is None:
            return
        for point, ratio in zip(self.observed.points, self.observed.ratios, strict=True):
            batch, m, n, k = (round(2**value) for value in point)
            moved = element_bytes(rate) * batch * (m * k + k * n + m * n)
            product = Product(batch=batch, m=m, n=n, k=k, rate=rate, bytes=moved)
            yield product.flops / (self.curve.seconds(product) * math.exp(ratio))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionModel:
    """As :class:`ProductModel`, for one implementation of attention in one direction.

    ``unmasked`` describes how the limits without a causal mask were derived; it is empty where they were measured.
    """

    curve: AttentionCurve
    observed: Table | None
    table: Table | None
    forest: Forest | None
    scale: float
    margin: float
    derived: str
    unmasked: str

    @property
    def measured_unmasked(self) -> bool:
        """Whether attention without a causal mask was measured; a curve without it has the limits of a causal one."""
        return not self.unmasked and any(not causal for _, causal in self.curve.limits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Performance figures of a device.

    Attributes:
        name: of the profile, and of the catalogue's device that its datasheet figures are from.
        hash: the first 12 hexadecimal digits of the SHA-256 of its content.
        made: the date on which it was fitted or measured.
        constants: launch gap, dispatch time, buffers and the like, each with its source; unknown ones are absent.
        products: by the name of the rate (`bf16`, `fp8`, …).
        attention: by implementation, direction and rate.
        movement: by kind, by kind and form (`softmax backward`), or by form (`fused`), with a note on its derivation
            that is empty for a measurement. A form that is not there runs as the kind does, `foreach` as the update.
        arithmetic: floating-point operations per second outside of the tensor cores, by rate.
        links: collectives on one host, by kind and number of ranks.
        sources: of the measurements.
        held_out: error on measurements that were not fitted, by class.
        fabrics: collectives over hosts in runs of the user's own, by fabric, and by collective and placement.
        answers: cache of estimates.
        kernels: cache of the costs of kernels, by what they depend on: a search asks for the same ones repeatedly.
    """

    name: str
    hash: str
    made: str
    constants: Mapping[str, Constant]
    products: Mapping[str, ProductModel]
    attention: Mapping[tuple[str, str, str], AttentionModel]
    movement: Mapping[str, tuple[MovementCurve, str]]
    arithmetic: Mapping[str, float]
    links: Mapping[str, Mapping[int, LinkCurve]]
    sources: tuple[Mapping[str, Any], ...]
    held_out: Mapping[str, Mapping[str, Any]]
    fabrics: Mapping[str, Mapping[tuple[str, int, int], Measured]] = field(default_factory=dict)
    answers: dict[Work, tuple[float, str]] = field(default_factory=dict)
    kernels: dict[object, Any] = field(default_factory=dict, init=False)

    def moving(self, kind: MovementKind, form: MovementForm = "") -> tuple[MovementCurve, str]:
        """Return the curve of a memory-bound kernel, and a note on its derivation."""
        name = _curve_of(self.movement, kind, form)
        curve, derived = self.movement[name]
        if form == "foreach" and name == "optimizer" and not derived:
            return curve, f"the update's, the one kernel on lists that was measured; that of a {kind} was not"
        return curve, derived

    def constant(self, name: str) -> float:
        """The constant ``name``.

        Raises:
            ProfileError: the profile does not state it.
        """
        if name not in self.constants:
            raise ProfileError(f"the profile of {self.name} does not state {name}")
        return self.constants[name].value


def movement_of(curves: Mapping[str, T], kind: MovementKind, form: MovementForm) -> T:
    """Return what is there for a kind in a form, or else for the form, or else for the kind."""
    return curves[_curve_of(curves, kind, form)]


def _curve_of(curves: Mapping[str, object], kind: MovementKind, form: MovementForm) -> str:
    """The name of what is there for a kind in a form.

    A kernel on a list of tensors that was not measured takes as long as the update, which is one, and not as its kind
    does: torch's kernels on lists give each thread block 65,536 elements of one tensor, so that a short list takes as
    long as one block needs.
    """
    names = (name for name in (f"{kind} {form}", form) if form and name in curves)
    return next(names, "optimizer" if form == "foreach" else kind)


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles, sorted, without those of fabrics."""
    names = (path.name.removesuffix(PROFILE_SUFFIX) for path in Path(__file__).parent.glob(f"*{PROFILE_SUFFIX}"))
    return tuple(sorted(name for name in names if name != "fabrics"))


@cache
def profile(name: str) -> Profile:
    """The shipped profile of the catalogue's device ``name``.

    Raises:
        ProfileError: there is none.
    """
    # A test checks the shipped profiles against the schema, which avoids the import of pydantic here.
    return from_document(*read_document(shipped_file(name)))


def shipped_file(name: str) -> Path:
    """The file of the shipped profile of the catalogue's device ``name``.

    Raises:
        ProfileError: there is none.
    """
    if name not in profile_names():
        raise ProfileError(f"there is no profile for {name}; there are {', '.join(profile_names())}")
    return Path(__file__).parent / f"{name}{PROFILE_SUFFIX}"


def load(path: Path) -> Profile:
    """Read a profile, such as one that `legoai calibrate` wrote.

    Raises:
        ProfileError: the file cannot be read, or is no profile; the message names the problem.
    """
    from legoai.cost.profiles.schema import check  # imports pydantic

    document, digest = read_document(path)
    try:
        check(document)
        return from_document(document, digest)
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{path} is no complete profile: {error}") from error


def from_document(document: Mapping[str, Any], digest: str = "") -> Profile:
    """The profile that a JSON object holds.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of the wrong kind.
        ValueError: a field makes no sense.
    """
    products = {
        rate: ProductModel(curve=ProductCurve.read(model["curve"]), **_parts(model))
        for rate, model in document["products"].items()
        if "like" not in model
    }
    attention = {
        _key(name): AttentionModel(
            curve=AttentionCurve.read(model["curve"]), unmasked=str(model.get("unmasked", "")), **_parts(model)
        )
        for name, model in document["attention"].items()
        if "like" not in model
    }
    for rate, model in document["products"].items():
        if "like" in model:
            products[rate] = replace(products[model["like"]], derived=model["derived"], observed=None)
    for name, model in document["attention"].items():
        if "like" in model:
            attention[_key(name)] = replace(attention[_key(model["like"])], derived=model["derived"], observed=None)
    return Profile(
        name=document["device"],
        hash=digest,
        made=document["made"],
        constants={name: Constant(**item) for name, item in document["constants"].items()},
        products=products,
        attention=attention,
        movement={
            name: (MovementCurve.read(curve), curve.get("derived", "")) for name, curve in document["movement"].items()
        },
        arithmetic=document["arithmetic"],
        links={
            kind: {int(ranks): LinkCurve.read(curve) for ranks, curve in curves.items()}
            for kind, curves in document["links"].items()
        },
        sources=tuple(document["sources"]),
        held_out=document["held_out"],
        fabrics={name: read_tables(tables) for name, tables in document.get("fabrics", {}).items()},
    )


def _key(name: str) -> tuple[str, str, str]:
    implementation, direction, rate = name.split()
    return implementation, direction, rate


def _parts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that models of products and of attention have in common."""
    return {
        "observed": Table.read(model["observed"]) if model.get("observed") else None,
        "table": Table.read(model["table"]) if model.get("table") else None,
        "forest": Forest.read(model["forest"]) if model.get("forest") else None,
        "scale": float(model.get("scale", 1.0)),
        "margin": float(model.get("margin", 1.0)),
        "derived": str(model.get("derived", "")),
    }
