"""The resolved plan: every decision about one model's training on one cluster, typed, without its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from legoai.specs.directives.base import Directive, PathRule, describe, walk
from legoai.specs.directives.hole import Hole
from legoai.specs.record import Record, replace
from legoai.specs.span import DEFAULT, Origin

if TYPE_CHECKING:
    from legoai.specs.directives.allocator import Allocator
    from legoai.specs.directives.attention import Attention
    from legoai.specs.directives.batch import Batch
    from legoai.specs.directives.checkpoint import Checkpoint
    from legoai.specs.directives.clip import Clip
    from legoai.specs.directives.cluster import ClusterUse
    from legoai.specs.directives.comm import Comm
    from legoai.specs.directives.compile import Compile
    from legoai.specs.directives.context import Context
    from legoai.specs.directives.fsdp import Fsdp
    from legoai.specs.directives.loss import Loss
    from legoai.specs.directives.mesh import Mesh
    from legoai.specs.directives.model import Model
    from legoai.specs.directives.offload import Offload
    from legoai.specs.directives.optimizer import Optimizer
    from legoai.specs.directives.pipeline import Pipeline
    from legoai.specs.directives.precision import Precision
    from legoai.specs.directives.replicate import ReplicateUse
    from legoai.specs.directives.require import Objective, Requirement
    from legoai.specs.directives.run import Data, Evaluate, Save, Seed, Steps, Weights
    from legoai.specs.directives.schedule import Schedule
    from legoai.specs.directives.shard import Shard


DEFAULTS: Final = 2
"""Version of the options' defaults. It changes when an option's default changes, and not when an option is added."""


Stop: TypeAlias = Literal["time_limit", "interrupted"]
"""What stopped a search."""


class Solved(Record, kw_only=True):
    """The solver's record of its last answer: the plan that it solved, and the quality of the answer.

    `gap` is None where a search was stopped before it had a bound. `stopped` is what stopped a search that did not end
    by itself: its answer is the best that was found until then.
    """

    digest: str
    version: str
    profile: str
    gap: float | None
    stopped: Stop | None = None
    origin: Origin = DEFAULT


class HoleFound(Record):
    """An undecided value: its description, its span, and the hole."""

    what: str
    origin: Origin
    hole: Hole


def holes_of(directive: Directive) -> Iterator[HoleFound]:
    """Every undecided value of a statement."""
    for item in walk(directive):
        if isinstance(item, PathRule):
            if isinstance(item.treatment, Hole):
                yield HoleFound(f"the treatment of `{item.path}`", item.origin, item.treatment)
            continue
        for option in item.options:
            value = getattr(item, option.field)
            origin = item.origins.get(option.field, item.origin("keyword"))
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Hole):
                    yield HoleFound(f"`{option.name}`", origin, part)


class Plan(Record, kw_only=True):
    """A resolved plan. A field is None where the plan has no such statement.

    Where a plan still has holes, the field of an undecided value holds a :class:`Hole`, which raises when it is used as
    a value.
    """

    name: str
    model: Model
    cluster: ClusterUse
    batch: Batch
    mesh: Mesh
    shard: tuple[Shard, ...] = ()
    fsdp: Fsdp | None = None
    replicate: ReplicateUse | None = None
    pipeline: Pipeline | None = None
    context: Context | None = None
    checkpoint: Checkpoint | None = None
    comm: Comm | None = None
    offload: Offload | None = None
    allocator: Allocator | None = None
    precision: Precision
    attention: Attention
    loss: Loss
    compile: Compile | None = None
    optimizer: Optimizer
    clip: Clip | None = None
    schedule: Schedule
    data: Data | None = None
    weights: Weights | None = None
    steps: Steps | None = None
    seed: Seed | None = None
    save: Save | None = None
    evaluate: Evaluate | None = None
    require: tuple[Requirement, ...] = ()
    objective: Objective | None = None
    variant: str | None = None
    solved: Solved | None = None
    files: tuple[tuple[str, str], ...] = ()
    """The files whose content is part of the program: each name as the plan writes it, with the content's digest."""
    idle: tuple[Directive, ...] = ()
    """Statements without effect, which :attr:`effective` separates from the others."""

    def directives(self) -> Iterator[Directive]:
        """Every statement that the plan has or that has defaults, in the language's order, but those that are idle."""
        for field in self.fields_:
            if field == "idle":
                continue
            value = getattr(self, field)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Directive):
                    yield item

    @property
    def effective(self) -> Plan:
        """Return the plan with idle statements separated: a pipeline of one rank is the model without a pipeline."""
        if self.pipeline is None or isinstance(self.mesh.pp, Hole) or self.mesh.pp > 1:
            return self
        return replace(self, pipeline=None, idle=(self.pipeline,))

    def shard_on(self, axis: str) -> Shard | None:
        """Return the `shard` statement for ``axis``, if there is one."""
        return next((item for item in self.shard if axis in item.axes), None)

    @property
    def memory_limits(self) -> list[Requirement]:
        """The requirements that bound from above the active bytes of a device, which passes over a graph count."""
        return [item for item in self.require if item.metric == "peak_memory" and item.bounds_above]

    @property
    def memory_limit(self) -> int | None:
        """The most active bytes that a device may hold by the requirements; None where they set no limit."""
        return min((int(item.bound) for item in self.memory_limits), default=None)

    @property
    def _observes_memory_limit(self) -> bool:
        """Whether passes over the step's graph decide by the memory limit, which is then part of the program."""
        return any(item is not None and item.observes_memory_limit for item in (self.comm, self.offload))

    def holes(self) -> Iterator[HoleFound]:
        """Every undecided value."""
        for directive in self.directives():
            yield from holes_of(directive)

    def canonical(self) -> dict[str, Any]:
        """Return the plan as plain data: the same for equivalent plans, whatever their text, order or file.

        Rules are sorted, since their order has no meaning. Default values are left out, with statements that have
        nothing else, and the version of the defaults is written instead, so that a plan's identity does not change with
        options that it does not use. `require`, the objective, the variant's name and the solver's line are left out,
        since they change nothing that is run, but for the memory limit where it decides what passes over a graph do.
        """
        body: dict[str, Any] = {"format": 2, "defaults": DEFAULTS, "name": self.name}
        for directive in (*self.directives(), *self.idle):
            if directive.is_neutral:
                continue
            described = describe(directive, defaults=False)
            if "rules" in described:
                described["rules"] = sorted(described["rules"], key=lambda rule: json.dumps(rule, sort_keys=True))
            if directive.repeats_by_axis:
                body.setdefault(directive.keyword, []).append(described)
            else:
                body[directive.keyword] = described
        body.get("shard", []).sort(key=lambda item: item["on"])
        if self.files:
            body["files"] = dict(self.files)
        if self.memory_limit is not None and self._observes_memory_limit:
            body["memory_limit"] = self.memory_limit
        return body

    def goals(self) -> list[Any]:
        """The requirements, whose order has no meaning, and the objective as plain data."""
        wanted = sorted([item.metric, item.comparison, item.bound, item.dimension] for item in self.require)
        objective = None if self.objective is None else [self.objective.direction, self.objective.metric]
        return [wanted, objective]

    def canonical_json(self) -> str:
        """:meth:`canonical` as JSON with sorted keys and no spaces."""
        return json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @property
    def digest(self) -> str:
        """The plan's identity: ``sha256:`` and the SHA-256 of :meth:`canonical_json` in hexadecimal."""
        import hashlib

        return "sha256:" + hashlib.sha256(self.canonical_json().encode()).hexdigest()
