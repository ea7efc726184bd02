"""`optimizer`: rules about parameters that are treated unlike the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import decided, grouped, holders, listed, written
from legoai.dsl.analysis.magnitudes.trained import frozen_parameters
from legoai.dsl.analysis.training.optimizer import (
    closest_rules,
    muon_parameters,
    parameter_rules,
    two_closest_rules,
    update_of,
)
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.optimizer import Group, Muon, Sgd


class GroupChangesNothing(Check):
    """A rule of `optimizer` without which every parameter is updated in the same way.

    Its parameters have the same constants without it, or are frozen in the model, or it matches no parameters, or other
    rules match all of them more closely.

    ## Example
    ```
    optimizer adamw(lr = 3e-4, weight_decay = 0.1) { norm = group(weight_decay = 0.1) }
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4, weight_decay = 0.1) { norm = group(weight_decay = 0) }
    ```
    """

    code = "LP686"
    slug = "group-changes-nothing"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer, manifest = analysis.plan.optimizer, analysis.manifest
        if manifest is None or not optimizer.rules:
            return
        decided(optimizer)
        closest = two_closest_rules(optimizer.rules, analysis.paths_for(optimizer), dict(manifest.parameters()))
        rules = ((path, rule) for path, (rule, _) in closest.items())
        followed = {id(rule): paths for rule, paths in grouped(rules)}
        assigned, algorithm = analysis.assigned(optimizer), optimizer.algorithm
        frozen = frozen_parameters(analysis)
        elsewhere = {id(rule) for rule in assigned.unmatched} | {id(rule) for rule, _ in assigned.shadowed}
        for rule in optimizer.rules:
            if id(rule) in elsewhere:
                continue  # has a diagnostic of its own
            paths = followed.get(id(rule), [])
            trained = [path for path in paths if path not in frozen]
            if any(update_of(rule, algorithm) != update_of(closest[path][1], algorithm) for path in trained):
                continue
            why = "its parameters are updated so without it" if trained else _unfollowed(rule, paths)
            yield self.at(
                analysis.rule_span(rule),
                f"the rule for `{rule.path}` has no effect: {why}",
                label="changes nothing",
                help=["delete the line, or give a constant that differs" if trained else "delete the line"],
            )


def _unfollowed(rule: PathRule[Any], frozen: list[str]) -> str:
    if frozen:
        return f"the model freezes {listed(frozen)} (`requires_grad` is false)"
    return f"no {'matrix' if isinstance(rule.treatment, Muon) else 'parameter'} follows it"


class GroupConstantUnknown(Check):
    """A constant of a group that the algorithm does not have.

    Stochastic gradient descent has no `betas` and no `eps`.

    ## Example
    ```
    optimizer sgd(lr = 0.1, momentum = 0.9) { norm = group(eps = 1e-5) }
    ```

    ## Use instead
    ```
    optimizer sgd(lr = 0.1, momentum = 0.9) { norm = group(weight_decay = 0.01) }
    ```
    """

    code = "LP687"
    slug = "group-constant-unknown"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer = analysis.plan.optimizer
        decided(optimizer)
        if not isinstance(optimizer.algorithm, Sgd):
            return
        for rule in optimizer.rules:
            for field in ("betas", "eps"):
                if isinstance(rule.treatment, Group) and getattr(rule.treatment, field) is not None:
                    yield self.at(
                        analysis.span_of(rule.treatment, field),
                        f"`sgd` has no `{field}`",
                        label="of Adam",
                        others=[Label(analysis.span_of(optimizer, "algorithm"), "the algorithm")],
                        help=[f"leave `{field}` out, or train with `adamw`"],
                    )


class GroupRateTwice(Check):
    """A learning rate of a group that is given twice: itself, and as a multiple of the statement's.

    ## Example
    ```
    optimizer adamw(lr = 3e-4) { norm = group(lr = 1e-4, lr_scale = 0.5) }
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4) { norm = group(lr_scale = 0.5) }
    ```
    """

    code = "LP688"
    slug = "group-rate-twice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer = analysis.plan.optimizer
        decided(optimizer)
        for rule in optimizer.rules:
            group = rule.treatment
            if isinstance(group, Group) and written(group, "lr") and written(group, "lr_scale"):
                yield self.at(
                    analysis.span_of(group, "lr_scale"),
                    "the learning rate of this group is given twice",
                    label="as a multiple of the statement's",
                    others=[Label(analysis.span_of(group, "lr"), "and itself")],
                    help=["leave one of them out"],
                )


class TiedParameterDivided(Check):
    """A parameter that several modules share, of whose places the rules say different things.

    A tied parameter is one tensor, and is updated once.

    ## Example
    ```
    model llama3("8b", tie_embeddings = true)
    optimizer adamw(lr = 3e-4) { tok_embeddings = group(weight_decay = 0) }
    ```

    ## Use instead
    ```
    model llama3("8b", tie_embeddings = true)
    optimizer adamw(lr = 3e-4) { {tok_embeddings, output} = group(weight_decay = 0) }
    ```
    """

    code = "LP689"
    slug = "tied-parameter-divided"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer, manifest = analysis.plan.optimizer, analysis.manifest
        if manifest is None or not optimizer.rules:
            return
        followed, algorithm = parameter_rules(analysis), optimizer.algorithm
        for places in manifest.tied_parameters:
            rules = [followed.get(place) for place in places]
            updates = [update_of(rule, algorithm) for rule in rules]
            if all(update == updates[0] for update in updates):
                continue
            named = [(rule, place) for rule, place in zip(rules, places, strict=True) if rule is not None]
            span = analysis.rule_span(named[0][0])
            yield self.at(
                span,
                f"{listed(places)} are one parameter, of which the rules say different things",
                label=f"names `{named[0][1]}`",
                others=[
                    Label(analysis.rule_span(rule), f"names `{place}`")
                    for rule, place in named[1:]
                    if rule is not named[0][0]
                ],
                help=["name all of its places in one rule, or none"],
            )


class MuonOutsideHiddenLayers(Check):
    """Muon for a table of embeddings or for the layer of the logits.

    Muon is for matrices that map activations to activations. Of an embedding only the rows of the tokens that were read
    have gradients, and orthogonalizing them changes all rows; its authors leave embeddings and the output layer to
    AdamW (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").

    ## Example
    ```
    optimizer adamw(lr = 3e-4) { **.weight = muon(lr = 0.02) }
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4) { layers.**.weight = muon(lr = 0.02) }
    ```
    """

    code = "LP696"
    slug = "muon-outside-hidden-layers"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None:
            return
        blocks = {path for blocks in manifest.block_lists for path in blocks.paths}
        for rule, paths in grouped(muon_parameters(analysis).items()):
            found = []
            for path in paths:
                module = manifest.modules[path.rpartition(".")[0]]
                is_hidden = any(held in blocks for held in holders(path))  # and may be as wide as the vocabulary
                is_wide = module.attributes.get("out_features") == manifest.vocab_size
                logits = module.kind == "linear" and is_wide and not is_hidden
                if module.kind == "embedding" or logits:
                    found.append(path)
            if found:
                yield self.at(
                    analysis.rule_span(rule),
                    f"Muon is for matrices of hidden layers, and {listed(found)} {'is' if len(found) == 1 else 'are'} "
                    "of embeddings or logits",
                    label=f"names {'it' if len(found) == 1 else 'them'}",
                    help=["name the blocks, as in `layers.**.weight`, so that the rest stays with the statement"],
                )


class MuonLeavesExperts(Check):
    """Weights of experts that a rule gives to Muon, and that stay with the statement's algorithm.

    The weights of all experts of a layer are one tensor of three dims, and `torch.optim.Muon` takes matrices.

    ## Example
    ```
    model mixtral("8x7b")
    optimizer adamw(lr = 3e-4) { layers.** = muon(lr = 0.02) }
    ```

    ## Use instead
    ```
    model mixtral("8x7b")
    optimizer adamw(lr = 3e-4) { layers.*.attention = muon(lr = 0.02) }
    ```
    """

    code = "LP697"
    slug = "muon-leaves-experts"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        optimizer, manifest = analysis.plan.optimizer, analysis.manifest
        if manifest is None or not optimizer.rules:
            return
        decided(optimizer)
        # Who would be updated by Muon if it had two dims.
        stacks = {path: shape[-2:] for path, shape in manifest.parameters() if len(shape) > 2}
        for rule, paths in grouped(closest_rules(optimizer.rules, analysis.paths_for(optimizer), stacks).items()):
            if not isinstance(rule.treatment, Muon):
                continue
            yield self.at(
                analysis.rule_span(rule),
                f"{listed(paths)} {'stays' if len(paths) == 1 else 'stay'} with `{optimizer.algorithm.name}`: Muon "
                "takes matrices, and these have more dims",
                label="names them too",
                help=["name the matrices alone, as in `layers.*.attention`"],
            )
