"""Rules about tensors that a forward changes in place, where recomputation or parallelism need them unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.computation.precision import autocast_dtype
from legoai.dsl.analysis.facts import grouped, holders, name_of
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, has_own_parameters
from legoai.dsl.analysis.parallelism.shard import placed_modules, shard_on_tp, tensor_parallel
from legoai.dsl.analysis.stages.pipeline import first_modules, has_placeholders, split_points, stage_of
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Budget
from legoai.specs.directives.shard import Colwise, Inputs, SequenceStyle
from legoai.specs.operators import KEPT

if TYPE_CHECKING:
    from legoai.specs.models.manifests.changes import Changes
    from legoai.specs.models.manifests.manifest import Manifest

_HELP = "write `x = x + …` in place of `x += …`, and leave out `inplace = True`"


class ChangesOwnInput(Check):
    """A module that changes its own input in place, as `x += self.pos` does, and is recomputed or is a unit.

    A recomputed module is computed again from its input, which is no longer what it was. A unit of `fsdp` that holds
    parameters hands those of its inputs that have a gradient through a function of autograd, whose results PyTorch does
    not let it change (PyTorch 2.13).

    A unit that is resharded after forward gathers its parameters again when the gradient of its result is there, which
    PyTorch does not notice where the result is a view and was changed (PyTorch 2.13). A linear layer with bias returns
    such a view: `ReLU(inplace = True)` behind a unit of one layer fails. With `reshard = after_backward` it works.

    The same holds for what a module with selective checkpointing returns, where the module computes with it too, and it
    is, or with a budget may be, among the outputs that are kept: a change by a module above changes what is kept.
    """

    code = "LP642"
    slug = "changes-own-input"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None:
            return
        # The model itself takes tokens or images, which have no gradient.
        units = fsdp_units(analysis)
        wrapping = (
            (path, unit.rule)
            for path, unit in units.items()
            if path
            and unit.rule is not None
            and _changes(analysis, path).trained_input
            and has_own_parameters(manifest, path, units)
        )
        recomputed = checkpointed_modules(analysis).items()
        again = ((path, rule) for path, rule in recomputed if _changes(analysis, path).own_input)
        for changing, why, label in (
            (again, "is computed again from it", "recomputed"),
            (wrapping, "as a unit it must leave it as it is", "a unit"),
        ):
            for rule, paths in grouped(changing):
                yield self.at(
                    analysis.rule_span(rule),
                    f"{_these(manifest, paths)} changes its own input in place, and {why}",
                    label=label,
                    help=[_HELP],
                )
        for rule, paths in grouped(_changed_views(analysis)):
            yield self.at(
                analysis.rule_span(rule),
                f"what {_these(manifest, paths)} returns is a view and is changed in place, so that its unit is not "
                "gathered again for backward",
                label="resharded after forward",
                help=[_HELP, "or keep the unit gathered: `unit(reshard = after_backward)`"],
            )
        for rule, paths in grouped(_changed_kept(analysis, checkpointed_modules(analysis))):
            yield self.at(
                analysis.rule_span(rule),
                f"what {_these(manifest, paths)} returns is changed in place, and is kept for its recomputation",
                label="recomputed with it",
                help=[_HELP],
            )


class ChangesShard(Check):
    """A tensor that a style of `shard on tp` has made a plain one, and that the model changes in place.

    Layers compute on DTensors, and styles turn their results into plain tensors. Such a tensor is a view that a
    function of autograd returns, and PyTorch does not let it be changed (PyTorch 2.13): `h = self.attention(x); h += x`
    fails where the last layer of attention is `rowwise`, and so does `ReLU(inplace = True)` behind a layer that is
    `colwise`. The same holds for the input of a module with `inputs(…, local = true)`.
    """

    code = "LP442"
    slug = "changes-shard"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None or shard_on_tp(analysis) is None:
            return
        styles = tensor_parallel(analysis).styles
        placed = {path: next(iter(rules.values())) for path, rules in placed_modules(analysis).items()}
        plain = placed | {path: rule for path, rule in styles.items() if _gives_plain(rule.treatment)}
        changed = dict.fromkeys(
            path
            for info in manifest.modules.values()
            for path in (info.child_path(result.path) for result in _changes(analysis, info.path).results)
        )
        for rule, paths in grouped((path, plain[path]) for path in changed if path in plain):
            yield self._report(analysis, rule, f"the result of {_these(manifest, paths)} is changed in place")
        taking = (
            (path, rule)
            for path, rule in styles.items()
            if isinstance(rule.treatment, Inputs) and rule.treatment.local and _changes(analysis, path).trained_input
        )
        for rule, paths in grouped(taking):
            yield self._report(analysis, rule, f"{_these(manifest, paths)} changes its own input in place")

    def _report(self, analysis: Analysis, rule: PathRule[Any], what: str) -> Diagnostic:
        return self.at(
            analysis.rule_span(rule),
            f"{what}, and is a view of a DTensor, which PyTorch does not let be changed",
            label="makes it a plain tensor",
            help=[_HELP],
        )


class ChangesBetweenStages(Check):
    """A pipeline of a model that changes in place what one of its blocks returns, or where a stage begins its input.

    Each stage runs the forward of the whole model, with placeholders for the modules of other stages, which return the
    tensor that the stage received, or the one that it sends. A change in place of their results changes that tensor
    itself: what a stage sends is wrong, or PyTorch refuses.
    """

    code = "LP522"
    slug = "changes-between-stages"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, manifest = analysis.plan.pipeline, analysis.manifest
        starts = first_modules(analysis) if has_placeholders(analysis) else None
        if pipeline is None or manifest is None or not starts:
            return
        changing = next((path for path in starts if _changes(analysis, path).received_input), None)
        changed = next(_changed_between(analysis, manifest), None)
        if changing is not None:
            what = f"`{changing}`, with which a stage begins, changes its own input in place"
        elif changed is not None:
            what = f"`{name_of(changed[0])}` changes in place what `{changed[1]}` returns"
        else:
            return
        yield self.at(
            analysis.span_of(pipeline),
            f"{what}, which passes from stage to stage",
            label="passes it on",
            help=[_HELP],
        )


def _changes(analysis: Analysis, path: str) -> Changes:
    """What a module changes in place, by the dtype of the activations.

    Under autocast only the results of products are in bf16; what passes between blocks and stages is fp32.
    """
    assert analysis.manifest is not None
    changes = analysis.manifest.modules[path].changes
    in_fp32 = analysis.plan.precision.param == "fp32" or autocast_dtype(analysis) is not None
    return changes.fp32 if in_fp32 else changes.bf16


def _changed_views(analysis: Analysis) -> Iterator[tuple[str, PathRule[Any]]]:
    """Yield the units, with their rules, that are resharded after forward and return a view which is changed."""
    assert analysis.manifest is not None
    manifest, units = analysis.manifest, fsdp_units(analysis)
    found = {
        info.child_path(result.path)
        for info in manifest.modules.values()
        for result in _changes(analysis, info.path).results
        if result.is_view
    }
    return (
        (path, unit.rule)
        for path, unit in units.items()
        if path in found
        and unit.rule is not None
        and unit.is_resharded_after_forward
        and has_own_parameters(manifest, path, units)
    )


def _changed_kept(analysis: Analysis, rules: Mapping[str, PathRule[Any]]) -> Iterator[tuple[str, PathRule[Any]]]:
    """Yield the modules, with their rules, that keep an output for recomputation which a module above changes."""
    assert analysis.manifest is not None
    found = {
        path
        for info in analysis.manifest.modules.values()
        for result in _changes(analysis, info.path).results
        if result.operator
        and (path := info.child_path(result.path)) in rules
        and _keeps(rules[path].treatment, result.operator)
    }
    return ((path, rule) for path, rule in rules.items() if path in found)


def _keeps(treatment: Any, operator: str) -> bool:
    """Whether recomputation with a treatment may begin from kept outputs of an operator such as `aten.mm.default`."""
    if isinstance(treatment, Budget):
        return True
    kept = chain.from_iterable(KEPT.get(word, (word,)) for word in getattr(treatment, "keep", ()))
    return any(f"{operator}.".startswith(f"{name}.") for name in kept)


def _changed_between(analysis: Analysis, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each forward that runs on several stages and changes the result of a module of one stage, with both."""
    above = dict.fromkeys(path for start in split_points(analysis).starts for path in holders(start))
    for path in above:
        info = manifest.modules[path]
        for result in _changes(analysis, path).results:
            changed = info.child_path(result.path)
            by_stage = result.by and stage_of(analysis, info.child_path(result.by)) is not None
            if not by_stage and stage_of(analysis, changed) is not None:
                yield path, changed


def _gives_plain(style: Any) -> bool:
    """Whether a style makes the result of its module a plain tensor."""
    if isinstance(style, Colwise):
        return not style.loss_parallel
    if isinstance(style, SequenceStyle):
        return style.local
    return not isinstance(style, Inputs) or style.then is not None


def _these(manifest: Manifest, paths: Iterable[str]) -> str:
    first, *more = dict.fromkeys(general(manifest, path) for path in paths)
    return f"`{first}` (and {len(more)} more)" if more else f"`{first}`"
