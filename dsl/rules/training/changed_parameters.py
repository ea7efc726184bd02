"""Rule about parameters that a model's forward changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.replicate import replicas
from legoai.dsl.analysis.parallelism.shard import DISTRIBUTING, placed_modules, tensor_parallel
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest

_HELP = "let the optimizer alone change parameters, or keep in a buffer what forward changes"


class ChangedParameters(Check):
    """Parameters that a factory's model changes in its forward, under `fsdp`, under `replicate`, or when recomputed.

    Examples are a slow copy of a layer that follows it by a moving average, and an embedding with `max_norm`. A unit
    computes with a copy of its parameters, which it gathers and frees, on one rank too: a change of the copy is lost.
    `replicate` is made of such units. A module that is recomputed changes its parameters twice. The operator that
    rescales the rows of an embedding does not support a weight that `shard on tp` distributes.
    """

    code = "LP643"
    slug = "changed-parameters"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, plan = analysis.manifest, analysis.plan
        changed = {} if manifest is None else _changed(manifest)
        if manifest is None or not changed:
            return
        paths = [path for parameters in changed.values() for path in parameters]
        named = f"`{paths[0]}`{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
        copying = plan.fsdp if plan.fsdp is not None else replicas(analysis)
        if copying is not None:
            yield self.at(
                analysis.span_of(copying),
                f"forward changes {named}, of which units compute with a copy: the change is lost",
                label="makes units",
                help=[_HELP],
            )
        distributed = {
            path: rule
            for path, rule in tensor_parallel(analysis).styles.items()
            if isinstance(rule.treatment, DISTRIBUTING)
        } | {path: next(iter(rules.values())) for path, rules in placed_modules(analysis).items()}
        scaled = (path for path in distributed if "max_norm" in manifest.modules[path].attributes)
        for path in scaled:
            yield self.at(
                analysis.rule_span(distributed[path]),
                f"`{path}` rescales rows of its weight (`max_norm`), which PyTorch cannot do with a DTensor",
                label="distributes the weight",
                help=["leave it out of `shard on tp`, or give the embedding no `max_norm`"],
            )
        recomputed = checkpointed_modules(analysis)
        for module, parameters in changed.items():
            rule = next((recomputed[path] for path in (module, *holders(module)) if path in recomputed), None)
            if rule is not None:
                yield self.at(
                    analysis.rule_span(rule),
                    f"forward changes `{parameters[0]}`, once more when it is recomputed",
                    label="changed twice for each micro batch",
                    help=["recompute other modules", _HELP],
                )
                return


def _changed(manifest: Manifest) -> dict[str, list[str]]:
    """Return the paths of the parameters that the forward of a module itself changes, by its path."""
    known = set(manifest.parameter_paths())
    return {
        path: [inside if (inside := info.child_path(name)) in known else name for name in info.changed_parameters]
        for path, info in manifest.modules.items()
        if info.changed_parameters
    }
