"""Rule about buffers that a model's forward updates."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.model import synchronised_norms
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check

_AXES = ("dp_replicate", "dp_shard", "cp")


class UpdatedBuffers(Check):
    """Buffers that a factory's model updates in forward, such as running means and counters.

    They are state that no optimizer knows. Under data parallelism every rank updates its own from its own samples, and
    nothing makes them equal: they differ from those of one device, and the checkpoint keeps those of one rank. A module
    that is recomputed updates its buffers twice for each micro batch. The statistics of an `nn.SyncBatchNorm` are equal
    on all ranks.
    """

    code = "LP660"
    slug = "updated-buffers"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, plan = analysis.manifest, analysis.plan
        if manifest is None or not manifest.updated:
            return
        equal = synchronised_norms(analysis)
        updated = [path for path in manifest.updated if path.rpartition(".")[0] not in equal]
        sizes = {axis: plan.mesh.size(axis) for axis in _AXES}
        several = [axis for axis, size in sizes.items() if not is_open(size) and size > 1]
        if several and updated:
            named = f"`{updated[0]}`{f' and {len(updated) - 1} more' if len(updated) > 1 else ''}"
            yield self.at(
                analysis.span_of(plan.model, "target"),
                f"forward updates {named}: each rank of `{several[0]}` has values of its own",
                label="the checkpoint keeps those of one rank",
                others=[
                    Label(
                        analysis.span_of(plan.mesh, several[0]), f"{sizes[several[0]]} ranks, with other samples each"
                    )
                ],
                help=["let forward leave buffers as they are, or reduce over the ranks what it updates them with"],
            )
        if plan.checkpoint is None:
            return
        recomputed = checkpointed_modules(analysis)
        for path in manifest.updated:
            owner = path.rpartition(".")[0]
            rule = next((recomputed[holder] for holder in (owner, *holders(owner)) if holder in recomputed), None)
            if rule is not None:
                yield self.at(
                    analysis.rule_span(rule),
                    f"forward updates `{path}`, once more when it is recomputed",
                    label="updated twice for each micro batch",
                    help=["recompute other modules, or let their forward leave buffers as they are"],
                )
                return
