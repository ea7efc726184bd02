"""`mesh`: rules about the axes over which devices are laid out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import divisors, listed, replacement, written
from legoai.dsl.analysis.parallelism.experts import axes_of_ep, limited_experts
from legoai.dsl.analysis.parallelism.mesh import devices_per_host, number_of_devices
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.frontend.syntax import Statement
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import Directive
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.mesh import AXES
from legoai.specs.plan import Plan
from legoai.specs.units import counted

_ELASTIC = ("dp_shard", "dp_replicate", "cp", "pp", "tp")
"""Axes by how likely their size is the one to change where the number of devices does."""


class MeshSize(Check):
    """A mesh that does not have as many places as the cluster has devices.

    The product of `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp` is the number of processes, one for each
    device: with fewer, devices are paid for and idle; with more, the program cannot start. `ep` has no
    devices of its own and is not counted.

    ## Example
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh (dp_shard = 8, tp = 8)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh (dp_shard = 4, tp = 8)
    ```
    """

    code = "LP301"
    slug = "mesh-size"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        cluster, mesh = analysis.plan.cluster, analysis.plan.mesh
        per_host, total = devices_per_host(analysis), number_of_devices(analysis)
        if total is not None and any(isinstance(mesh.size(axis), Hole) for axis in AXES if axis != "ep"):
            yield from self._decided(analysis, total)
            return
        if per_host is None or total is None or mesh.world_size == total:
            return
        named = [axis for axis in AXES if axis != "ep" and (mesh.size(axis) > 1 or written(mesh, axis))]
        product = " · ".join(f"`{axis}` = {mesh.size(axis)}" for axis in named)
        places, devices = counted(mesh.world_size, "place"), counted(total, "device")
        help = []
        fix = None
        for axis in sorted(named, key=_ELASTIC.index):
            rest = mesh.world_size // mesh.size(axis)
            if total % rest == 0:
                help.append(f"with `{axis}` = {total // rest} the mesh has {counted(total, 'place')}")
                fix = fix or replacement(mesh, axis, str(total // rest))
        if mesh.world_size % per_host == 0 and cluster.hosts != mesh.world_size // per_host:
            hosts = mesh.world_size // per_host
            had = counted(mesh.world_size, "device")
            help.append(f"{counted(hosts, 'host')} of {per_host} would have {had}")
        elif cluster.hosts == 1:
            help.append(f"with `devices = {mesh.world_size}` the cluster has that many")
        of_hosts = f" of {cluster.hosts:,} hosts with {per_host} each" if cluster.hosts > 1 else ""
        yield self.at(
            analysis.span_of(mesh) if written(mesh, "keyword") else analysis.span_of(cluster),
            f"the mesh has {places}{f' ({product})' if named else ''} for the {devices}{of_hosts}",
            label=places,
            others=[Label(analysis.span_of(cluster, "hosts"), devices)] if written(mesh, "keyword") else [],
            help=help,
            fix=fix,
        )

    def _decided(self, analysis: Analysis, total: int) -> Iterator[Diagnostic]:
        """The axes that are decided, where others are open: their product must divide the number of devices."""
        mesh = analysis.plan.mesh
        sizes = {axis: mesh.size(axis) for axis in AXES if axis != "ep" and not isinstance(mesh.size(axis), Hole)}
        product = math.prod(sizes.values())
        if total % product == 0:
            return
        named, devices = [axis for axis, size in sizes.items() if size > 1], counted(total, "device")
        yield self.at(
            analysis.span_of(mesh, named[-1]),
            f"{' · '.join(f'`{axis}` = {sizes[axis]}' for axis in named)} does not divide the {devices}",
            label="no other axis can make up for it",
            others=[Label(analysis.span_of(analysis.plan.cluster, "hosts"), devices)],
            help=[f"sizes that divide them are {legal_divisors(total)}"],
        )


def _users(plan: Plan, axis: str) -> list[Directive]:
    """The statements that put devices along ``axis`` to work."""
    candidates: dict[str, tuple[Directive | None, ...]] = {
        "pp": (plan.pipeline,),
        "dp_replicate": (plan.replicate, plan.fsdp),
        "dp_shard": (plan.fsdp,),
        "cp": (plan.context,),
        "tp": plan.shard,
        "ep": plan.shard,
    }
    return [item for item in candidates[axis] if item is not None and axis in item.axes and _has_effect(item)]


def _has_effect(directive: Directive) -> bool:
    """Whether the statement does anything: a `shard` without rules shards nothing."""
    return directive.keyword != "shard" or bool(directive.rules)


_CURES = {
    "pp": "`pipeline on pp (schedule = 1F1B)` puts stages of the model on its ranks",
    "dp_replicate": "`replicate on dp_replicate` keeps replicas, `fsdp on dp_replicate, dp_shard` replicas of shards",
    "dp_shard": "`fsdp on dp_shard { layers.* = unit }` shards the parameters over it",
    "cp": "`context on cp` puts pieces of each sequence on its ranks",
    "tp": "`shard on tp { … }` gives modules a style",
    "ep": "`shard on ep { … = experts }` puts experts on its ranks",
}


class UnusedAxis(Check):
    """A mesh axis of several ranks that no statement uses.

    All ranks along such an axis would compute the same thing, or would drift apart since nothing reduces
    their gradients.

    ## Example
    ```
    mesh (dp_shard = 4, tp = 8)
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    fsdp on dp_shard { layers.* = unit, root = unit }
    shard on tp {
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise
    }
    ```
    """

    code = "LP306"
    slug = "unused-axis"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh = analysis.plan.mesh
        for axis in AXES:
            size = mesh.size(axis)
            if not isinstance(size, Hole) and size > 1 and not _users(analysis.plan, axis):
                yield self.at(
                    analysis.span_of(mesh, axis),
                    f"no statement uses the {size} ranks of `{axis}`",
                    label="an axis without a use",
                    help=[_CURES[axis]],
                )


class IdleStatement(Check):
    """A statement on an axis that the mesh does not have, or that has one rank.

    It does nothing. A variant that shrinks an axis takes the statement away: `unset context`.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = unit }
    context on cp
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, cp = 2)
    fsdp on dp_shard { layers.* = unit, root = unit }
    context on cp
    ```
    """

    code = "LP307"
    slug = "idle-statement"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh = analysis.plan.mesh
        for directive in (*analysis.plan.directives(), *analysis.plan.idle):
            if not _has_effect(directive):
                continue
            for axis in directive.axes:
                size = mesh.size(axis)
                # One rank by the command line is an experiment and no slip.
                tried = mesh.origin(axis).decider == "command line"
                # The capacity of experts limits them on one rank too.
                if isinstance(size, Hole) or size > 1 or tried or (axis == "ep" and limited_experts(analysis)):
                    continue
                others = []
                if written(mesh, axis):
                    others.append(Label(analysis.span_of(mesh, axis), "one rank"))
                elif written(mesh, "keyword"):
                    others.append(Label(analysis.span_of(mesh), f"the mesh has no `{axis}`"))
                one_of_several = len(directive.axes) > 1
                yield self.at(
                    analysis.span_of(directive, "axes"),
                    f"`{directive.keyword} on {axis}` does nothing: `{axis}` has one rank",
                    label="an axis without ranks",
                    others=others,
                    help=[
                        f"leave `{axis}` out here, or give it ranks: `mesh ({axis} = …)`"
                        if one_of_several
                        else f"give the axis ranks, `mesh ({axis} = …)`, or delete the statement"
                    ],
                )


class AxisOrder(Check):
    """Mesh axes that are not written in the order in which they are nested.

    Axes are always nested `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`, outermost first, whatever the order
    of the text. Another order suggests to the reader that, say, `tp` crosses hosts. `ep` comes last, since it
    has no devices of its own.

    ## Example
    ```
    mesh (tp = 8, dp_shard = 4)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    ```
    """

    code = "LP308"
    slug = "axis-order"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.resolution is None:
            return
        statement = next(
            (
                item
                for item in analysis.resolution.statements
                if isinstance(item, Statement) and item.keyword.text == "mesh" and item.options is not None
            ),
            None,
        )
        if statement is None or statement.options is None:
            return
        given = [item for item in statement.options.items if item.name is not None and item.name.text in AXES]
        if len(given) < len(statement.options.items):
            return
        names = [item.name.text for item in given if item.name is not None]
        nested = sorted(names, key=AXES.index)
        if names == nested or len(set(names)) < len(names):
            return
        text = analysis.resolution.files[statement.span.file].text
        pieces = {name: text[item.span.start : item.span.end] for name, item in zip(names, given, strict=True)}
        wrong = next(index for index, name in enumerate(names) if name != nested[index])
        yield self.at(
            given[wrong].span,
            f"the axes are nested {listed(nested, limit=len(nested))}, outermost first, not as written",
            label=f"`{nested[wrong]}` is outside of `{names[wrong]}`",
            help=[f"write `mesh ({', '.join(pieces[name] for name in nested)})`"],
            fix=Fix(
                "write the axes in the order of nesting",
                tuple(
                    Edit(item.span, pieces[name])
                    for item, name in zip(given, nested, strict=True)
                    if item.name is not None and item.name.text != name
                ),
                safe=True,
            ),
        )


class ExpertGroups(Check):
    """An expert-parallel degree that does not divide the ranks from which it takes its groups.

    `ep` has no devices of its own: it groups the ranks of `dp_shard` and `cp`, each group holding all experts
    once. Experts with `across_tp = true` are on the ranks of `tp` too, and a group has all of these or none.

    ## Example
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 32, ep = 3)
    shard on ep { layers.*.feed_forward.experts = experts }
    ```

    ## Use instead
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 32, ep = 4)
    shard on ep { layers.*.feed_forward.experts = experts }
    ```
    """

    code = "LP309"
    slug = "expert-groups"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh, axes = analysis.plan.mesh, axes_of_ep(analysis)
        ranks, least = math.prod(map(mesh.size, axes)), mesh.tp if "tp" in axes else 1
        if ranks % mesh.ep == 0 and mesh.ep % least == 0:
            return
        product = " · ".join(f"`{axis}`" for axis in axes if axis != "cp" or mesh.cp > 1) + f" = {ranks}"
        used = [axis for axis in axes if written(mesh, axis)]
        yield self.at(
            analysis.span_of(mesh, "ep"),
            f"`ep` = {mesh.ep} does not divide {product}"
            if ranks % mesh.ep
            else f"`ep` = {mesh.ep} is no multiple of `tp` = {mesh.tp}, whose ranks `across_tp` takes together",
            label="groups of this many ranks",
            others=[Label(analysis.span_of(mesh, axis), "of these") for axis in used],
            help=[f"legal sizes of `ep` are {legal_divisors(ranks // least, times=least)}"],
        )


class TensorParallelAcrossHosts(Check):
    """Tensor parallel groups that reach over more than one host.

    Tensor parallelism exchanges activations several times in every layer, in the middle of the computation.
    Inside a host the links between devices are many times as fast as the fabric.

    ## Example
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh (dp_shard = 2, tp = 16)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh (dp_shard = 4, tp = 8)
    ```
    """

    code = "LP801"
    slug = "tensor-parallel-across-hosts"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        mesh, cluster = analysis.plan.mesh, analysis.plan.cluster
        per_host = devices_per_host(analysis)
        on_cpu = analysis.device_kind == "cpu"
        if per_host is None or on_cpu or mesh.tp == 1 or cluster.hosts == 1 or per_host % mesh.tp == 0:
            return
        yield self.at(
            analysis.span_of(mesh, "tp"),
            f"groups of `tp` = {mesh.tp} reach over hosts of {per_host} devices",
            label="crosses hosts",
            others=[Label(analysis.span_of(cluster, "device"), f"{per_host} devices in a host")],
            help=[f"sizes of `tp` that stay inside a host are {legal_divisors(per_host)}"],
        )


def legal_divisors(*numbers: int, least: int = 1, times: int = 1) -> str:
    """The common divisors from ``least`` on, as the end of a sentence, ``1, 2 and 4``; at most the largest twelve.

    Each is multiplied by ``times``.
    """
    found = [str(item * times) for item in divisors(math.gcd(*numbers)) if item >= least][-12:]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"
