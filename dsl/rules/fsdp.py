"""`fsdp`: rules about the units of full sharding and the axes that they are sharded over."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from legoai.dsl.context import Context
from legoai.dsl.diagnostics import Diagnostic, Edit, Fix, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.blocks import by_rule, general, span_of
from legoai.dsl.rules.facts import fsdp_units, holders, listed, written
from legoai.dsl.rules.mesh import legal_divisors
from legoai.dsl.rules.shard import last_module
from legoai.specs.directives.fsdp import Fsdp, Unit
from legoai.specs.directives.mesh import AXES
from legoai.specs.directives.pipeline import SPLIT_BACKWARD

if TYPE_CHECKING:
    from legoai.specs.models.manifest import Manifest

_HELD_CONTAINERS = ("ModuleList", "ModuleDict")


def _shard_ranks(context: Context, fsdp: Fsdp) -> int:
    """Ranks over which a unit is sharded."""
    return math.prod(context.plan.mesh.size(axis) for axis in fsdp.axes if axis != "dp_replicate")


class ShardingAxes(Check):
    """Axes of `fsdp` that are not what it replicates over and then what it shards over.

    One axis shards: `fsdp on dp_shard`, or `cp`, whose ranks hold the same parameters too. With
    `dp_replicate` in front, shards are replicated over it (hybrid sharding). `dp_replicate` alone shards
    nothing.

    ## Example
    ```
    mesh (dp_replicate = 4, dp_shard = 8)
    fsdp on dp_shard, dp_replicate { layers.* = unit, root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_replicate = 4, dp_shard = 8)
    fsdp on dp_replicate, dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP321"
    slug = "sharding-axes"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp = context.plan.fsdp
        if fsdp is None:
            return
        span = context.place(fsdp, "axes")
        if fsdp.axes == ("dp_replicate",):
            yield self.at(
                span,
                "`fsdp on dp_replicate` shards nothing: whole replicas lie along `dp_replicate`",
                label="no axis to shard over",
                help=[
                    "to keep whole replicas, write `replicate on dp_replicate`",
                    "to shard, call the axis `dp_shard` in the mesh, and write `fsdp on dp_shard`",
                ],
            )
            return
        nested = tuple(sorted(fsdp.axes, key=AXES.index))
        if fsdp.axes != nested:
            text = ", ".join(nested)
            yield self.at(
                span,
                f"the axes of `fsdp` are nested {listed(nested)}, outermost first",
                label="in another order",
                help=[f"write `fsdp on {text}`"],
                fix=Fix(f"write `{text}`", (Edit(span, text),), safe=True),
            )


class ReshardSize(Check):
    """A number of ranks to reshard to that does not divide the ranks that a unit is sharded over.

    `reshard = n` keeps, between forward and backward, shards over groups of `n` ranks of those that the unit
    is sharded over.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = 12), root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = 8), root = unit }
    ```
    """

    code = "LP322"
    slug = "reshard-size"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp = context.plan.fsdp
        if fsdp is None:
            return
        for rule in fsdp.rules:
            if not isinstance(rule.treatment, Unit) or not isinstance(rule.treatment.reshard, int):
                continue
            ranks = _shard_ranks(context, fsdp)
            size = rule.treatment.reshard
            if ranks > 1 and ranks % size:
                axes = [axis for axis in fsdp.axes if axis != "dp_replicate"]
                yield self.at(
                    context.place(rule.treatment, "reshard"),
                    f"`reshard` = {size} does not divide the {ranks} ranks of {listed(axes)}",
                    label="groups of this many ranks",
                    others=[
                        Label(context.place(context.plan.mesh, axis), f"{context.plan.mesh.size(axis)} ranks")
                        for axis in axes
                    ],
                    help=[f"legal numbers are {legal_divisors(ranks).removeprefix('1, ')}"],
                )


class KeptUnderPipeline(Check):
    """A unit that is never resharded under a pipeline, which frees parameters at the end of every pass.

    A schedule reduces the gradients of a stage after its last micro batch and frees the gathered parameters then,
    whatever the unit says.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (schedule = 1F1B)
    fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (schedule = 1F1B)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }
    ```
    """

    code = "LP326"
    slug = "kept-under-pipeline"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, pipeline = context.plan.fsdp, context.plan.pipeline
        if fsdp is None or pipeline is None:
            return
        for rule in fsdp.rules:
            if isinstance(rule.treatment, Unit) and rule.treatment.reshard == "never":
                yield self.at(
                    context.place(rule.treatment, "reshard"),
                    "`reshard = never` has no effect under a pipeline",
                    label="freed all the same",
                    others=[Label(context.place(pipeline), "frees parameters at the end of every pass")],
                    help=["`after_backward` keeps them gathered for the whole pass"],
                )


class UnitOnContainer(Check):
    """A unit on a list or dictionary of modules, which is never called.

    A unit is gathered when its module is called. `fully_shard` refuses a `ModuleList` and a `ModuleDict`.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers = unit, root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP324"
    slug = "unit-on-container"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, manifest = context.plan.fsdp, context.manifest
        if fsdp is None or manifest is None:
            return
        for rule, paths in by_rule(context, fsdp):
            for path in paths if isinstance(rule.treatment, Unit) else ():
                info = manifest.modules[path]
                if info.class_name in _HELD_CONTAINERS:
                    yield self.at(
                        span_of(rule),
                        f"`{general(manifest, path)}` is a `{info.class_name}`, which is never called",
                        label="not a module that is called",
                        help=[f"make each of its modules a unit: `{path}.* = unit`"],
                    )
                    break


class EmptyUnit(Check):
    """A unit that holds no parameters: its module has none, or deeper units hold them all.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.*.attention           = unit
      layers.*.attention.{wq, wk}  = unit
      layers.*.attention.{wv, wo}  = unit
      root                         = unit
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.*.attention = unit
      root               = unit
    }
    ```
    """

    code = "LP323"
    slug = "empty-unit"
    severity = "warning"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, manifest = context.plan.fsdp, context.manifest
        if fsdp is None or manifest is None:
            return
        units = fsdp_units(context)
        for rule, paths in by_rule(context, fsdp):
            if not isinstance(rule.treatment, Unit):
                continue
            empty = [
                path
                for path in paths
                if manifest.modules[path].class_name not in _HELD_CONTAINERS and not _holds(manifest, path, units)
            ]
            if empty:
                deeper = _holds(manifest, empty[0], ())
                yield self.at(
                    span_of(rule),
                    f"the unit `{general(manifest, empty[0])}` is empty: "
                    + ("deeper units hold all its parameters" if deeper else "the module has no parameters"),
                    label="holds nothing",
                    help=["delete it" if len(empty) == len(paths) else "make the path more specific"],
                )


def _holds(manifest: Manifest, path: str, units: Container[str]) -> bool:
    """Whether the module has parameters that no unit inside of it holds."""
    info = manifest.modules[path]
    if info.parameters:
        return True
    inside = (info.child_path(name) for name in info.children)
    return any(child not in units and _holds(manifest, child, units) for child in inside)


class TiedAcrossUnits(Check):
    """A parameter that two modules share, in two units.

    A unit's parameters are gathered and freed together, so a shared parameter must lie in one unit.
    `fully_shard` refuses it otherwise.

    ## Example
    ```
    model gpt2("xl")
    mesh  (dp_shard = 32)
    fsdp on dp_shard {
      layers.*       = unit
      tok_embeddings = unit
      root           = unit
    }
    ```

    ## Use instead
    ```
    model gpt2("xl")
    mesh  (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit
      root     = unit
    }
    ```
    """

    code = "LP325"
    slug = "tied-across-units"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, manifest = context.plan.fsdp, context.manifest
        if fsdp is None or manifest is None:
            return
        units = fsdp_units(context)
        for group in manifest.tied_parameters:
            unit_of = {path: next(holder for holder in holders(path) if holder in units) for path in group}
            if len(set(unit_of.values())) == 1:
                continue
            first, other = group[0], next(path for path in group if unit_of[path] != unit_of[group[0]])
            rules = [units[unit_of[path]] for path in (first, other)]
            spans = [span_of(rule) for rule in rules if rule is not None]
            yield self.at(
                spans[0] if spans else context.place(fsdp),
                f"`{first}` and `{other}` are one parameter, and lie in the units `{unit_of[first] or 'root'}` and "
                f"`{unit_of[other] or 'root'}`",
                label="a unit of its own",
                others=[Label(span, "another unit") for span in spans[1:2]],
                help=["leave both modules in the unit above them", "or give the model a parameter for each"],
            )


class LastUnitResharded(Check):
    """The unit that ends the forward pass is freed after it, to be gathered again at once for the backward pass.

    Its backward comes next, so freeing its parameters saves memory for the time of the loss only, and costs
    an all-gather. PyTorch keeps the root unit by default for this reason.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit
      output   = unit
      root     = unit
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit
      output   = unit(reshard = after_backward)
      root     = unit
    }
    ```
    """

    code = "LP802"
    slug = "last-unit-resharded"
    severity = "advice"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, manifest = context.plan.fsdp, context.manifest
        if fsdp is None or manifest is None or context.plan.mesh.pp > 1 or _shard_ranks(context, fsdp) == 1:
            return
        units = fsdp_units(context)
        for path in ("", last_module(manifest)):
            rule = units.get(path) if path is not None else None
            if rule is None:
                continue
            reshard = rule.treatment.reshard
            by_default = reshard is None and path != ""
            if by_default or reshard == "after_forward" or isinstance(reshard, int):
                written_here = written(rule.treatment, "reshard")
                yield self.at(
                    context.place(rule.treatment, "reshard") if written_here else span_of(rule),
                    f"the unit `{path or 'root'}` ends the forward pass and begins the backward pass",
                    label="freed between the two" + ("" if written_here else ", by default"),
                    help=["write `unit(reshard = after_backward)`"],
                )


class ReshardUnderPipeline(Check):
    """Units that are freed after each forward pass under a pipeline, which gathers them twice for each micro batch.

    This is ZeRO-3. A stage computes many micro batches in one step. With `reshard = after_backward` its parameters are
    gathered once for all of them; the memory is that of one stage, which the pipeline has made small.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit, root = unit }
    pipeline on pp (schedule = 1F1B)
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }
    pipeline on pp (schedule = 1F1B)
    ```
    """

    code = "LP803"
    slug = "reshard-under-pipeline"
    severity = "advice"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, pipeline, mesh = context.plan.fsdp, context.plan.pipeline, context.plan.mesh
        if fsdp is None or pipeline is None or mesh.pp == 1 or _shard_ranks(context, fsdp) == 1:
            return
        if isinstance(pipeline.schedule, str) and pipeline.schedule in SPLIT_BACKWARD:
            return  # an error of its own
        for rule in fsdp.rules:
            if not isinstance(rule.treatment, Unit):
                continue
            reshard = rule.treatment.reshard
            if (reshard is None and rule.path != "root") or reshard == "after_forward" or isinstance(reshard, int):
                how = "" if reshard is not None else ", by default"
                yield self.at(
                    span_of(rule),
                    f"under a pipeline every micro batch gathers `{rule.path}` twice",
                    label=f"freed after each forward pass{how}",
                    others=[Label(context.place(pipeline), "several micro batches in one step")],
                    help=["write `unit(reshard = after_backward)` where the memory allows it"],
                )


class BlocksWithoutUnits(Check):
    """Blocks of the model that are in no unit of their own, so that they are all gathered at once.

    What no deeper unit holds belongs to `root`. It is gathered before the first layer computes and kept until
    the end: nothing is overlapped, and the memory is that of the whole model.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP804"
    slug = "blocks-without-units"
    severity = "advice"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        fsdp, manifest = context.plan.fsdp, context.manifest
        if fsdp is None or manifest is None or _shard_ranks(context, fsdp) == 1:
            return
        units = fsdp_units(context)
        for blocks in manifest.block_lists:
            prefix = f"{blocks.path}." if blocks.path else ""
            held = {path[len(prefix) :].partition(".")[0] for path in units if path.startswith(prefix)}
            left = [name for name in blocks.names if name not in held]
            if len(left) < 2:
                continue
            all_of_them = len(left) == len(blocks)
            yield self.at(
                context.place(fsdp),
                f"{'all' if all_of_them else len(left)} blocks of `{blocks.path or 'root'}` are gathered at once, "
                "since no unit holds them",
                label="no unit for each block",
                help=[f"add `{prefix}* = unit`"],
            )
