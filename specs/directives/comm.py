"""`comm`: buckets and schedule of all-gathers and reduce-scatters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Boolean, Choice, Either, Integer, ListOf, Size


class Units(Treatment):
    """Explicit prefetch under `backend = eager`: while one unit computes, the next ones are gathered."""

    name: ClassVar[str] = "units"

    forward: int = option(Integer(minimum=0), doc="Units gathered ahead in the forward pass.", default=1)
    backward: int = option(Integer(minimum=0), doc="Units gathered ahead in the backward pass.", default=1)


class Proactive(Treatment):
    """Gathers as early as a bound on their memory, and `require peak_memory`, allow.

    Under `backend = graph`, beside `reorder = true`. DeepCompile, section 4.2, Algorithm 1.
    """

    name: ClassVar[str] = "proactive"

    limit: int = option(Size(), doc="Memory that unsharded parameters may take beyond the unit that computes.")


class ByBytes(Treatment):
    """So many bytes: of each bucket of a rule but the last at least, or of what is offloaded at most."""

    name: ClassVar[str] = "bytes"

    n: int = option(Size(), doc="The amount.")


class Bucket(Treatment):
    """How the collectives of the matched modules are merged; under a pipeline those of each unit alone."""

    name: ClassVar[str] = "bucket"

    by: str | ByBytes | tuple[int, ...] = option(
        Either((Choice(("module", "group", "compiler")), Calls((ByBytes,)), ListOf(Integer(minimum=1)))),
        doc=(
            "`module`: one bucket for each matched module; `group`: one for all modules that the rule matches; "
            "`bytes(n)`: by size; `[1, 4, 8]`: so many of them in each bucket, one after another in the model's "
            "order, which is what solving writes; `compiler`: as torch's automatic scheduler decides, which also "
            "moves collectives, under `backend = graph`."
        ),
    )


class Comm(Directive):
    """The schedule of collectives.

    What is said to be neither under `backend = graph` nor under `eager` means the same under both.
    """

    keyword: ClassVar[str] = "comm"
    treatments: ClassVar[Calls | None] = Calls((Bucket,))
    absent: ClassVar[Mapping[str, Any] | None] = {}

    reorder: bool | str = option(
        Either((Boolean(), Choice(("by_time",)))),
        doc=(
            "Move gathers before and waits after the computation that can hide them: `true` past one bucket "
            "(SimpleFSDP, section 3.2.2), `by_time` as far as the simulator's times say, under `backend = graph`."
        ),
        default=False,
    )
    prefetch: str | Units | Proactive = option(
        Either((Choice(("implicit",)), Calls((Units, Proactive)))),
        doc=(
            "`implicit`: FSDP2's own order under `eager`, and as `reorder` says under `graph`; `units(…)`: so many "
            "units ahead, under `eager`; `proactive(…)`: as memory allows, under `graph`."
        ),
        default="implicit",
    )
    unshard: str = option(
        Choice(("by_unit", "selective")),
        doc=(
            "`by_unit`: as each unit's `reshard` says; `selective`: under `backend = graph`, what memory "
            "`require peak_memory` leaves keeps units gathered from forward to backward and from one micro batch to "
            "the next, first those whose gather costs most per byte (DeepCompile, section 4.3)."
        ),
        default="by_unit",
    )
    reduce: str = option(
        Choice(("every_micro_batch", "last_micro_batch")),
        doc=(
            "When gradients are reduced under accumulation: less memory, or less communication. `last_micro_batch` "
            "is under `eager`: graphs reduce the gradients of each micro batch, or those of a pipeline's pass."
        ),
        default="every_micro_batch",
    )
    profile: str = option(
        Choice(("simulated", "measured")),
        doc=(
            "Times and memory by which the passes of `backend = graph` decide. `simulated`: as predicted for the "
            "plan's cluster; `measured`: the first steps of a run measure every node, all ranks agree on one profile, "
            "and the passes are applied again; later runs begin with what was measured, also those of plans with the "
            "same traced graph, whatever their passes and learning rate (DeepCompile, section 3)."
        ),
        default="simulated",
    )

    @property
    def observes_memory_limit(self) -> bool:
        """Whether passes over a graph move or omit gathers as far as `require peak_memory` leaves memory for it."""
        decided = [value for value in (self.reorder, self.unshard) if isinstance(value, str)]
        return "by_time" in decided or "selective" in decided or isinstance(self.prefetch, Proactive)
