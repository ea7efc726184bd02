"""Units of `fsdp`: which modules are units, when each is resharded, and which unit owns a parameter."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import following, holders
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.fsdp import Unit
from legoai.specs.record import Record

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest


class FsdpUnit(Record):
    """One unit of `fsdp`."""

    rule: PathRule[Any] | None
    """The rule that makes it; None for the model itself where no rule matches it."""
    reshard: Any
    """When it is resharded, the default included: `after_forward`, `after_backward`, `never`, or a number of ranks over
    which it is sharded after forward; perhaps a hole."""

    @property
    def is_resharded_after_forward(self) -> bool:
        """Whether it is gathered again for the backward pass."""
        return bool(self.reshard == "after_forward" or isinstance(self.reshard, int))


@fact
def fsdp_units(analysis: Analysis) -> dict[str, FsdpUnit]:
    """Return every unit by path, first the model itself, which is a unit even without a rule, then in model order.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    fsdp = analysis.plan.fsdp
    if fsdp is None:
        return {}
    units = {"": FsdpUnit(None, resharding(Unit(), ""))}
    for path, rule in following(analysis, fsdp, Unit).items():
        units[path] = FsdpUnit(rule, resharding(rule.treatment, path))
    return units


def has_own_parameters(manifest: Manifest, path: str, units: Container[str]) -> bool:
    """Whether a module has parameters that no unit inside of it holds; as a unit, it is empty otherwise."""
    info = manifest.modules[path]
    if info.parameters:
        return True
    inside = (info.child_path(name) for name in info.children)
    return any(child not in units and has_own_parameters(manifest, child, units) for child in inside)


def resharding(unit: Unit, path: str) -> Any:
    """Return when the unit at ``path`` is resharded, as :attr:`FsdpUnit.reshard`; by default like ``fully_shard``."""
    if unit.reshard is None:
        return "after_forward" if path else "after_backward"
    return unit.reshard


def owner(analysis: Analysis, parameter: str) -> str:
    """Return the path of the unit that owns a parameter: the innermost that contains it."""
    units = fsdp_units(analysis)
    return next(path for path in holders(parameter) if path in units)
