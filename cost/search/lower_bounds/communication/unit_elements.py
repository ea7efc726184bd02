"""Elements of the parameters of FSDP's units on a rank: all, those that are trained, and those that are used."""

from __future__ import annotations

import math

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.comm import unit_buckets
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters, unused_parameters
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.shard import placement
from legoai.specs.directives.hole import Undecided


@fact
def elements_of_units(analysis: Analysis) -> dict[str, int]:
    """Elements of the gathered parameters of each unit on a rank; those of units in one bucket at its first.

    Where styles on `tp` are open, elements at least: as if all parameters were cut.

    Raises:
        Undecided: it depends on another hole.
    """
    return _elements(analysis, frozenset())


@fact
def trained_of_units(analysis: Analysis) -> dict[str, int]:
    """The same of parameters that are trained.

    Raises:
        Undecided: it depends on another hole.
    """
    untrained = untrained_parameters(analysis)
    return _elements(analysis, untrained) if untrained else elements_of_units(analysis)


@fact
def used_of_units(analysis: Analysis) -> dict[str, int]:
    """The same of parameters that forward uses: a unit that is not called is not gathered."""
    unused = unused_parameters(analysis)
    return _elements(analysis, unused) if unused else elements_of_units(analysis)


def _elements(analysis: Analysis, without: frozenset[str]) -> dict[str, int]:
    manifest, tp = analysis.manifest, analysis.plan.mesh.tp
    assert manifest is not None
    joined = {path: bucket.paths[0] for bucket in unit_buckets(analysis) for path in bucket.paths}
    elements = dict.fromkeys(fsdp_units(analysis), 0)
    tied = {path for group in manifest.tied_parameters for path in group[1:]}
    for name, shape in manifest.parameters():
        if name not in tied and name not in without:
            unit = owner(analysis, name)
            cut = _may_be_cut(analysis, name)
            elements[joined.get(unit, unit)] += math.prod(shape) // (tp if cut else 1)
    return elements


def _may_be_cut(analysis: Analysis, parameter: str) -> bool:
    """Whether a parameter is cut on `tp`, or styles are open."""
    try:
        return placement(analysis, parameter).dim is not None
    except Undecided:
        return True
