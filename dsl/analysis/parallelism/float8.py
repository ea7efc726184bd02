"""Linear layers that compute in float8 or mxfp8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import following, grouped
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.shard import readers, tensor_parallel
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.directives.shard import Colwise, Inputs, Rowwise


@fact
def converted_layers(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """The linear layers that rules of `precision` convert, with their rules; other modules have nothing to convert.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    manifest = analysis.manifest
    if manifest is None:
        return {}
    matched = following(analysis, analysis.plan.precision, (Float8, MxFp8))
    return {path: rule for path, rule in matched.items() if manifest.modules[path].kind == "linear"}


@fact
def gathered_weights(analysis: Analysis) -> frozenset[str]:
    """Return the converted layers whose weights `fsdp` all-gathers in float8.

    Raises:
        Undecided: a rule's treatment or a degree is a hole.
    """
    if analysis.plan.fsdp is None or shard_ranks(analysis) == 1:
        return frozenset()
    return frozenset(path for path, rule in converted_layers(analysis).items() if _gathers(rule, "weights"))


@fact
def gathered_activations(analysis: Analysis) -> frozenset[str]:
    """Return the modules whose styles on `tp` cast before they gather: layers, and modules with only such readers.

    Raises:
        Undecided: a rule's treatment or the size of `tp` is a hole.
    """
    styles = {path: rule.treatment for path, rule in tensor_parallel(analysis).styles.items()}
    layers = {
        path: styles[path]
        for path, rule in converted_layers(analysis).items()
        if _gathers(rule, "activations") and isinstance(styles.get(path), Colwise | Rowwise)
    }
    found = {path for path, style in layers.items() if _gathers_itself(style)}
    for path, style in styles.items():
        takers = _takers(analysis, path, style) if isinstance(style, Inputs) else frozenset()
        if takers and takers <= layers.keys():
            found |= {path, *takers}
    return frozenset(found)


def _gathers(rule: PathRule[Any], what: str) -> bool:
    treatment = rule.treatment
    return isinstance(treatment, Float8) and treatment.recipe == "tensorwise" and what in treatment.gather


def _gathers_itself(style: Colwise | Rowwise) -> bool:
    """Whether a layer's own style gathers its input, or the gradient of its output."""
    return isinstance(style.input if isinstance(style, Colwise) else style.output, Sharded)


def _takers(analysis: Analysis, path: str, style: Inputs) -> frozenset[str]:
    """Return the only readers of the one input that a module's style converts; none if anything else reads it."""
    assert analysis.manifest is not None
    if style.local or style.then is not None:
        return frozenset()
    steps = readers(analysis.manifest.modules[path], style)
    alone = bool(steps) and all(step.op == "call" for step in steps)
    return frozenset(analysis.manifest.modules[path].child_path(step.name) for step in steps) if alone else frozenset()


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Float8."""
    for rule, paths in grouped(converted_layers(analysis).items()):
        if isinstance(rule.treatment, MxFp8):
            yield Unsupported(
                analysis.rule_span(rule), "`mxfp8` is not lowered yet: torchao has no stable way to train in it"
            )
            continue
        gathered = [path for path in paths if path in gathered_weights(analysis)]
        units = {path: fsdp_units(analysis)[owner(analysis, f"{path}.weight")] for path in gathered}
        for path, unit in units.items():
            if isinstance(unit.reshard, int):
                yield Unsupported(
                    analysis.rule_span(rule),
                    f"FSDP does not gather `{path}.weight` in float8 from {unit.reshard} ranks, between which it is "
                    "sharded after forward",
                    "gathered in float8",
                    ("write `reshard = after_forward`, or leave `weights` out of `gather`",),
                )
                break
