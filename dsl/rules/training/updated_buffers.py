"""Rule about buffers that a model's forward updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
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
    on all ranks. Checkpoints keep no buffer that is registered with `persistent=False`: a run that resumes begins with
    its first value again, also on one device.
    """

    code = "LP660"
    slug = "updated-buffers"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, plan = analysis.manifest, analysis.plan
        if manifest is None or not manifest.updated:
            return
        if manifest.updated_unsaved:
            yield self.at(
                analysis.span_of(plan.model, "target"),
                f"forward updates {_named(manifest.updated_unsaved)}, which no checkpoint keeps",
                label="a resumed run begins with its first value again",
                help=["register it with `persistent=True`"],
            )
        sizes = {axis: plan.mesh.size(axis) for axis in _AXES}
        several = [axis for axis, size in sizes.items() if not is_open(size) and size > 1]
        equal = synchronised_norms(analysis)
        updated = [path for path in manifest.updated if path.rpartition(".")[0] not in equal]
        if several and updated:
            is_any_saved = not set(updated) <= set(manifest.updated_unsaved)
            yield self.at(
                analysis.span_of(plan.model, "target"),
                f"forward updates {_named(updated)}: each rank of `{several[0]}` has values of its own",
                label="the checkpoint keeps those of one rank" if is_any_saved else "nothing makes them equal",
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


def _named(buffers: Sequence[str]) -> str:
    more = len(buffers) - 1
    return f"`{buffers[0]}`{f' and {more} more' if more else ''}"
