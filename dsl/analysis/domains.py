"""Places of holes that are searched, and their default domains: by the kind of value, by the option, or computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import divisors
from legoai.dsl.analysis.parallelism.mesh import number_of_devices
from legoai.dsl.analysis.parallelism.styles import styles_for
from legoai.dsl.frontend.paths import PathError
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Calls, Declared, Directive
from legoai.specs.directives.batch import Batch, Stages
from legoai.specs.directives.checkpoint import Budget, Checkpoint, Every, Selective
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.comm import Comm, Units
from legoai.specs.directives.compile import Compile
from legoai.specs.directives.fsdp import Fsdp
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.loss import ChunkedLoss, Loss
from legoai.specs.directives.mesh import AXES, Mesh
from legoai.specs.directives.pipeline import Pipeline
from legoai.specs.directives.precision import Float8, Precision
from legoai.specs.directives.replicate import ReplicateUse
from legoai.specs.directives.shard import Shard
from legoai.specs.record import Record

RULES: Final = "rules"
"""Stands for the option where a hole is the treatment of a rule."""

Use = tuple[Declared, str]
"""A statement or treatment, and the field of its option that is a hole."""

LEARNED: Final = ("model", "optimizer", "schedule", "clip", "data", "weights", "steps", "seed", "save",
                   "evaluate")  # fmt: skip
"""Statements that affect what is learned, or what is written, but not the cost of a step."""

OPEN_RULES: Final = ("tp",)
"""The axes of `shard` whose rules may be open, all or each."""

BUDGETS: Final = (0.75, 0.5, 0.25)
"""Amounts of the budgets by which a rule of `checkpoint` without a domain is answered."""

_SELECTIVE: Final = ("attention", "attention, matmul", "attention, alternate_matmul")

_TEXTS: Final[dict[tuple[type[Declared], str], tuple[str, ...]]] = {
    (Checkpoint, RULES): (
        "none",
        *(f"selective([{keep}])" for keep in _SELECTIVE),
        "every(2)",
        "every(3)",
        *(f"budget({amount})" for amount in BUDGETS),
        "full",
    ),
    (Every, "n"): ("2", "3", "4", "6", "8"),
    (Selective, "keep"): tuple(f"[{keep}]" for keep in _SELECTIVE),
    (Budget, "amount"): ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2", "0.1"),
    (Fsdp, RULES): ("unit", "unit(reshard = after_backward)", "unit(reshard = never)", "none"),
    # The last layer is computed in pieces only where a plan says so: it saves memory at one moment of a step.
    (Loss, "form"): ("eager", "fused", "chunked(2)", "chunked(4)", "chunked(8)", "chunked(16)"),
    (ChunkedLoss, "n"): ("2", "4", "8", "16", "32"),
    (Compile, RULES): ("none", "inductor"),
    (Comm, "prefetch"): ("implicit", "units(2, 2)", "units(3, 3)"),
    (Comm, RULES): ("bucket(module)", "bucket(group)"),
    (Units, "forward"): ("0", "1", "2", "3", "4"),
    (Units, "backward"): ("0", "1", "2", "3", "4"),
    (Pipeline, "split"): ("even", "even(loss = 1)", "even(embedding = 1, loss = 1)"),
    (ReplicateUse, "bucket"): ("25MB", "50MB", "100MB", "200MB"),
}
"""Default values, as a plan writes them; the first is that of PyTorch's own recipes."""


def _of_kind(kind: kinds.Kind) -> Iterator[str]:
    """Every value of a kind that has few."""
    if isinstance(kind, kinds.Choice):
        yield from kind.names
    elif isinstance(kind, kinds.Boolean):
        yield from ("false", "true")
    elif isinstance(kind, kinds.Either):
        for item in kind.kinds:
            yield from _of_kind(item)
    elif isinstance(kind, Calls):
        yield from (item.name for item in kind.treatments if not any(option.required for option in item.options))


def _degrees(analysis: Analysis) -> list[str]:
    devices = number_of_devices(analysis)
    return [] if devices is None else [str(value) for value in divisors(devices)]


def _micro_batches(analysis: Analysis) -> list[str]:
    return [str(value) for value in divisors(analysis.plan.batch.global_batch)]


def _stages(analysis: Analysis) -> list[str]:
    if analysis.manifest is None:
        return []
    blocks = sum(map(len, analysis.manifest.block_lists))
    return [str(value) for value in range(1, blocks + 1)]


_COMPUTED: Final[dict[tuple[type[Declared], str], Callable[[Analysis], list[str]]]] = {
    **{(Mesh, axis): _degrees for axis in AXES},
    (Batch, "micro_batch"): _micro_batches,
    (Pipeline, "microbatches"): _micro_batches,
    (Pipeline, "stages"): _stages,
}
"""The values of holes without a domain that depend on the plan: divisors, and numbers of stages."""

_WITH_DOMAIN: Final = (
    *((Precision, item.field) for item in Precision.options),
    *((ClusterUse, item.field) for item in ClusterUse.options),
    (Precision, RULES),
    (Float8, "gather"),
    (Shard, RULES),
)
"""Holes that are searched only among values that the user lists: they affect numerics, or cost of hardware.
Modules on `tp` have styles of their own (:mod:`legoai.dsl.analysis.parallelism.styles`); parameters and experts have
none."""


def is_item(use: Use) -> bool:
    """Whether the hole is an item of the option's list, and not its value."""
    owner, field = use
    return field != RULES and isinstance(getattr(owner, field), tuple)


def values_of(use: Use | None, kind: kinds.Kind, analysis: Analysis | None) -> list[str]:
    """Return the default values of a hole, by its use, else by its kind; none where there are none.

    Args:
        use: of the hole; None where that is not known.
        kind: of its values; of an item's, where the hole is one in a list.
        analysis: of the plan with all its holes open; None where a statement cannot be read without an answer.
    """
    if use is None:
        return list(_of_kind(kind))
    return values_at((type(use[0]), use[1]), kind, analysis, in_list=is_item(use))


def values_at(
    place: tuple[type[Declared], str], kind: kinds.Kind, analysis: Analysis | None, *, in_list: bool
) -> list[str]:
    """Return the default values of a hole at an option; none where there are none.

    Args:
        place: the statement or treatment, and the field of the option.
        kind: as :func:`values_of` takes it.
        analysis: the same.
        in_list: whether the hole is an item of the option's list, and not its value.
    """
    if place in _WITH_DOMAIN:
        return []
    if in_list:  # the usual values below are whole lists, or stand in the place of one
        return list(_of_kind(kind))
    if place in _COMPUTED and analysis is not None:
        try:
            return _COMPUTED[place](analysis)
        except Undecided:
            return []
    return list(_TEXTS[place]) if place in _TEXTS else list(_of_kind(kind))


class Opening(Record, kw_only=True):
    """A place for a value, which may be left open: an option of a statement or treatment, or a rule's treatment.

    ``kind`` is that of the value, or of an item where it is ``in_list``; ``axes`` and ``path`` are those of a rule.
    """

    keyword: str
    owner: type[Declared]
    field: str
    kind: kinds.Kind
    in_list: bool
    axes: tuple[str, ...]
    path: str

    @property
    def is_searched(self) -> bool:
        """Whether `legoai solve` fills a hole there that has a domain."""
        return self.keyword not in LEARNED and decides_learning(self.owner, self.field) is None

    def needs_domain(self, analysis: Analysis | None) -> bool:
        """Whether `legoai solve` fills a hole there only if it has a domain, as far as the plan is known."""
        place = self.owner, self.field
        if place == (Shard, RULES):
            return not open_styles(self.axes, self.path, analysis)
        if analysis is None and place in _COMPUTED:
            return False
        return not values_at(place, self.kind, analysis, in_list=self.in_list)


def rules_may_be_open(declared: type[Directive], axes: tuple[str, ...]) -> bool:
    """Whether `auto` may stand in place of a statement's rules, on these axes; with none, on some."""
    return declared.rules_may_be_open and axes in ((), OPEN_RULES)


def open_styles(axes: tuple[str, ...], path: str, analysis: Analysis | None) -> tuple[str, ...]:
    """The styles that a rule of `shard` may have; none on other axes than `tp`, and for a path that is none."""
    if axes != OPEN_RULES or analysis is None or analysis.manifest is None:
        return ()
    try:
        return styles_for(analysis.manifest, analysis.paths_for(Shard), path)
    except PathError:
        return ()


def decides_learning(owner: type[Declared], field: str) -> str | None:
    """Return why a hole at an option is never searched, where the option decides what is learned."""
    of_batch = (owner is Batch and field != "micro_batch") or owner is Stages
    if not of_batch and (owner, field) != (Checkpoint, "preserve_rng"):
        return None
    return f"`{owner.option(field).name}` decides what is learned, not what a step costs"
