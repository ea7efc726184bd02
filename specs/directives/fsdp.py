"""`fsdp`: fully sharded data parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

from legoai.specs.directives.base import AxisUse, Calls, Directive, Divided, Staged, Treatment, option
from legoai.specs.directives.kinds import Choice, Either, Integer, ListOf


class Unit(Treatment):
    """A unit (`fully_shard`): parameters below the path that no deeper unit holds are gathered and freed together."""

    name: ClassVar[str] = "unit"

    reshard: str | int | None = option(
        Either((Choice(("after_forward", "after_backward", "never")), Integer(minimum=2))),
        doc=(
            "When unsharded parameters are freed: `after_forward` (ZeRO-3), `after_backward` (ZeRO-2), `never` (kept "
            "from micro batch to micro batch, until the optimizer changes them), or a number: after forward to shards "
            "over that many ranks. By default `after_forward`, and `after_backward` for `root`, as `fully_shard` does."
        ),
        default=None,
    )


class NoUnit(Treatment):
    """No unit: the modules belong to the unit above them. Experts on `ep` are units all the same."""

    name: ClassVar[str] = "none"


class FirstUnits(Divided):
    """Units for the first n modules that the rule matches, and other ones, or none, for the rest.

    `first(24, unit, others = unit(reshard = after_backward))` keeps the last blocks gathered between forward and
    backward. They are the first that backward needs, and the first that it frees.
    """

    these: Any = option(Calls((Unit, NoUnit)), doc="The unit, or none, of the first n modules.")
    others: Any = option(Calls((Unit, NoUnit)), doc="What the others are.", default=Unit())


class UnitsOfStages(Staged):
    """Units, or none, for the modules of each stage of a pipeline.

    `stages([unit, first(4, unit, others = unit(reshard = after_backward)), unit(reshard = after_backward)])` keeps
    parameters gathered where few micro batches are under way.
    """

    each: tuple[Any, ...] = option(
        ListOf(Calls((Unit, NoUnit, FirstUnits))),
        doc="What they are in each stage, in the model's order; `first` counts the modules of its stage.",
    )


class BlockUnits(Treatment):
    """A unit for each repeated block of the model, and `root`. Rules beside it replace its rules for the same paths."""

    name: ClassVar[str] = "blocks"


class Fsdp(Directive):
    """Parameters, gradients and optimizer state in shards over one axis, or hybrid: shards that are replicated.

    `fsdp on dp_shard` shards; `fsdp on dp_replicate, dp_shard` shards over the second and replicates over the first.
    `fsdp on dp_shard, cp` shards over both together; without `cp` there, its ranks hold replicas, since they see other
    tokens of the same sequences. Experts on `ep` are units of their own, in shards over the ranks that hold the same
    ones. Each rule makes units. `root` is always a unit, since something must hold the rest. `fsdp blocks on dp_shard`
    makes the usual units of the model.
    """

    keyword: ClassVar[str] = "fsdp"
    axis_use: ClassVar[AxisUse | None] = AxisUse(("dp_replicate", "dp_shard", "cp"), minimum=1, maximum=3)
    treatments: ClassVar[Calls | None] = Calls((Unit, NoUnit, FirstUnits, UnitsOfStages))
    layouts: ClassVar[tuple[type[Treatment], ...]] = (BlockUnits,)

    backend: str = option(
        Choice(("eager", "graph")),
        doc=(
            "`eager`: FSDP2's hooks. `graph`: forward, loss, backward and communication as one traced graph, whose "
            "collectives passes merge, move and leave out, or each stage of a pipeline as such; for models that read "
            "token ids and whose steps are alike."
        ),
        default="eager",
    )
