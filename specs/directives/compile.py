"""`compile`: modules that torch.compile compiles, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Boolean, Choice


class Inductor(Treatment):
    """`torch.compile` with its default backend."""

    name: ClassVar[str] = "inductor"

    mode: str = option(
        Choice(("default", "reduce_overhead", "max_autotune", "max_autotune_no_cudagraphs")),
        doc="The `mode` of `torch.compile`.",
        default="default",
    )
    fullgraph: bool = option(Boolean(), doc="Refuse graph breaks.", default=True)
    dynamic: bool = option(Boolean(), doc="Compile for shapes that vary.", default=False)


class AotEager(Treatment):
    """Traces forward and backward and runs the graphs as they are, without generating kernels."""

    name: ClassVar[str] = "aot_eager"

    fullgraph: bool = option(Boolean(), doc="Refuse graph breaks.", default=True)


class NotCompiled(Treatment):
    """Runs eagerly."""

    name: ClassVar[str] = "none"


class Compile(Directive):
    """Compilation: a treatment for each module path, or for `root`."""

    keyword: ClassVar[str] = "compile"
    treatments: ClassVar[Calls | None] = Calls((Inductor, AotEager, NotCompiled))
    absent: ClassVar[Mapping[str, Any] | None] = {}
    unruled: ClassVar[type[Treatment] | None] = NotCompiled

    async_tp: bool = option(
        Boolean(),
        doc="Split tensor-parallel matmuls so that their collectives overlap (AsyncTP); needs symmetric memory.",
        default=False,
    )
