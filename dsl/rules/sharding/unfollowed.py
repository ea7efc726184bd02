"""Rules about a model whose forward cannot be followed, under `shard` and among ranks with other samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.facts import listed
from legoai.dsl.analysis.model import help_to_follow, reads_values
from legoai.dsl.analysis.parallelism.mesh import replicating_axes, sharded_axes
from legoai.dsl.analysis.parallelism.replicate import replica_axes
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class LayoutsNotChecked(Check):
    """Tensor parallelism for a model whose forward cannot be followed.

    The layouts from module to module are checked by the model's forward, which is run on the meta device, where tensors
    have no values: `if x.isnan().any()` and `counts.tolist()` fail there. Then a style that gets another layout than it
    expects is not found before the run. `docs/factories.md` says what the forward of a factory's model may do.
    """

    code = "LP441"
    slug = "layouts-not-checked"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, plan = analysis.manifest, analysis.plan
        shard, size = plan.shard_on("tp"), plan.mesh.size("tp")
        if manifest is None or manifest.flow_error is None or shard is None or not shard.rules:
            return
        if not is_open(size) and size == 1:
            return
        yield self.at(
            analysis.span_of(shard),
            f"the model could not be followed, so layouts on `tp` are not checked: {manifest.flow_error}",
            label="a wrong layout is not found before the run",
            others=[Label(analysis.span_of(plan.model, "target"), "this model")],
            help=help_to_follow(analysis),
        )


class DecisionsOfRanks(Check):
    """A forward that decides by what differs between ranks which modules it calls, or may do so.

    It may read values of tensors: `if self.training and torch.rand([]) < 0.5: return x` skips a block at random. Ranks
    have other samples and other random numbers. Where one rank skips a unit of `fsdp` or `replicate`, or leaves a
    parameter without a gradient, and another does not, their collectives do not match, and the run hangs or fails.

    The same is true of numbers that Python's `random`, NumPy, or torch on the host draw in forward. Lint calls forward
    with small and with large ones, and reports the first parameter that is used with some of them alone. Numbers of a
    generator that the model makes itself, as `random.Random(0)`, are equal on all ranks. Those of Python and NumPy are
    others on each rank of `tp` too, though these compute one result together: there all draws in forward are reported.
    """

    code = "LP336"
    slug = "decisions-of-ranks"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh, found = analysis.plan.mesh, _decision(analysis)
        several = None if found is None else next((axis for axis in found.axes if mesh.size(axis) > 1), None)
        if found is not None and several is not None:
            yield self.at(
                analysis.span_of(analysis.plan.model, "target"),
                found.message,
                label=found.label,
                others=[Label(analysis.span_of(mesh, several), f"{mesh.size(several)} ranks")],
                help=[found.help],
            )


class _Decision(NamedTuple):
    axes: tuple[str, ...]
    """Whose ranks may decide differently."""
    message: str
    label: str
    help: str


def _decision(analysis: Analysis) -> _Decision | None:
    """What a forward may decide by, if anything, that differs between ranks."""
    manifest = analysis.manifest
    axes = (*sharded_axes(analysis), *replicating_axes(analysis), *replica_axes(analysis))
    if manifest is not None and reads_values(analysis):
        return _Decision(
            axes,
            "forward reads values of tensors, and every rank must call the same modules, whatever they are: "
            f"{manifest.flow_error}",
            label="may decide by values what it calls",
            help="decide by what is equal on all ranks, such as shapes or the number of the step",
        )
    drawn = None if manifest is None else manifest.host_draws
    if drawn is None:
        return None
    unequal = [name for name in drawn.generators if name != "torch"]  # which is seeded alike on the ranks of `tp`
    of_tp = ("tp",) if unequal else ()
    help = "draw from a generator of the model's own, such as a `random.Random(0)` that its constructor makes"
    numbers = f"forward draws random numbers of {listed(unequal or drawn.generators)} on the host"
    if not drawn.decides:
        return _Decision(
            of_tp,
            f"{numbers}: ranks of `tp` compute one result together, with other numbers each",
            label="others on each rank",
            help=help,
        )
    return _Decision(
        (*axes, *of_tp),
        f"{numbers}, by which it uses `{drawn.decides}` or does not, and every rank must call the same modules",
        label="skips modules at random",
        help=help,
    )
