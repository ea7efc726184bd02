"""Effect of a change on numbers: another training, other dtypes, or sums in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.computation.precision import gradient_dtype
from legoai.dsl.analysis.parallelism.experts import limited_experts
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.differences.changes import Change, parts
from legoai.dsl.differences.of_model import WHOLE, Place, another_training, decided
from legoai.specs.directives import family
from legoai.specs.record import Record

Kind = Literal["training", "dtype", "rounding", "none"]

KINDS: Final[Mapping[Kind, str]] = {
    "training": "another training",
    "dtype": "other dtypes",
    "rounding": "equal up to rounding: sums in another order, or other kernels",
    "none": "unchanged",
}
"""Effects of a change on numbers, the strongest first. With `rounding` losses agree except for the last digits."""

Effect = tuple[Kind, str]

NONE: Final[Effect] = ("none", "")
_SUMMED: Final[Effect] = ("rounding", "gradients and their norm are summed over other groups of ranks")
_BUCKETS: Final[Effect] = ("rounding", "gradients are summed in other buckets, along other rings")
_KERNELS: Final[Effect] = ("rounding", "another kernel computes it")
_LEARNED: Final[Effect] = ("training", "the update of parameters is another")
_DTYPES: Final[Effect] = ("dtype", "numbers are stored, computed or reduced in another dtype")

RULES: Final = "rules"

EFFECTS: Final[Mapping[str, Mapping[str, Effect]]] = {
    "model": {WHOLE: ("training", "another model"), "family": ("training", "another model"),
              "target": ("training", "another model")},
    "cluster": {
        WHOLE: NONE,
        "device": ("rounding", "another device has other kernels"),
        "profile": ("rounding", "another device has other kernels"),
        "hosts": NONE,
        "devices": NONE,
        "fabric": NONE,
    },
    "batch": {
        WHOLE: NONE,
        "global": ("training", "an update sees another number of samples"),
        "micro": ("rounding", "gradients are summed over micro batches of another size"),
        "seq_len": ("training", "samples have another length"),
        "ramp": ("training", "the first updates see another number of samples"),
    },
    "mesh": {
        WHOLE: NONE,
        "pp": ("rounding", "the gradient's norm is summed over other stages"),
        "dp_replicate": _SUMMED,
        "dp_shard": _SUMMED,
        "cp": ("rounding", "attention is summed over other pieces of the sequence, and gradients over other ranks"),
        "tp": ("rounding", "matrix products are summed over pieces on another number of ranks"),
        "ep": ("rounding", "gradients of experts are summed over other ranks"),
    },
    "shard": {WHOLE: ("rounding", "other matrix products are summed over pieces"),
              RULES: ("rounding", "other matrix products are summed over pieces")},
    "fsdp": {WHOLE: _SUMMED, "axes": _SUMMED, "backend": ("rounding", "collectives are placed by a compiler"),
             RULES: _BUCKETS},
    "replicate": {WHOLE: _SUMMED, "axes": _SUMMED, "bucket": _BUCKETS, "optimizer": NONE},
    "pipeline": {
        WHOLE: ("rounding", "the gradients of micro batches are summed in the order of the schedule"),
        "schedule": ("rounding", "the gradients of micro batches are summed in another order"),
        "stages": ("rounding", "the gradient's norm is summed over other stages"),
        "split": ("rounding", "the gradient's norm is summed over other stages"),
        "microbatches": ("rounding", "the gradients of micro batches are summed in another order"),
    },
    "context": {
        WHOLE: ("rounding", "attention is summed over pieces of the sequence in another order"),
        "rotate": ("rounding", "attention is summed over pieces of the sequence in another order"),
        "balance": ("rounding", "attention is summed over other pieces of the sequence"),
    },
    "checkpoint": {
        WHOLE: NONE,
        RULES: NONE,
        "preserve_rng": NONE,
    },
    "comm": {
        WHOLE: NONE,
        RULES: _BUCKETS,
        "reorder": NONE,
        "prefetch": NONE,
        "profile": NONE,
        "unshard": NONE,
        "reduce": ("rounding", "gradients of micro batches are summed before, or after, those of ranks"),
    },
    "offload": {
        WHOLE: NONE,
        "optimizer": NONE,
        "parameters": ("rounding", "the optimizer computes on the host, or no longer does"),
        "activations": NONE,
    },
    "allocator": {WHOLE: NONE, "expandable_segments": NONE},
    "precision": {WHOLE: _DTYPES, RULES: _DTYPES, "master": _DTYPES, "param": _DTYPES, "reduce": _DTYPES,
                  "output": _DTYPES, "gradient": _DTYPES},
    "attention": {WHOLE: _KERNELS, "kernel": _KERNELS},
    "loss": {WHOLE: ("rounding", "the loss is summed in another form"),
             "form": ("rounding", "the loss is summed in another form")},
    "compile": {
        WHOLE: NONE,
        RULES: ("rounding", "compiled kernels round less often than eager ones"),
        "async_tp": ("rounding", "matrix products are computed in pieces, beside their collectives"),
    },
    "optimizer": {WHOLE: _LEARNED, RULES: _LEARNED, "algorithm": _LEARNED},
    "clip": {WHOLE: _LEARNED, "norm": _LEARNED},
    "schedule": {WHOLE: _LEARNED, "form": ("training", "learning rates are others")},
    "data": {WHOLE: ("training", "other samples"), "source": ("training", "other samples"),
             "field": ("training", "other samples"), "tokenizer": ("training", "other tokens of the same texts")},
    "weights": {WHOLE: ("training", "other first weights"), "huggingface": ("training", "other first weights")},
    "steps": {WHOLE: NONE, "count": NONE},
    "seed": {WHOLE: NONE, "value": ("training", "other first weights and another order of samples")},
    "save": {WHOLE: NONE, "every": NONE, "keep": NONE, "asynchronous": NONE},
    "evaluate": {WHOLE: NONE, "every": NONE, "batches": NONE},
}  # fmt: skip
"""Effect of a change by keyword, and by option, `rules`, `axes` or the whole statement: of a statement that is added or
removed its presence has that effect, and its options and rules where they differ from the defaults have theirs."""

_ORDER: Final = list(KINDS)

_ALIKE: Final = ("unit", "unit(", "first(")
"""How the treatments begin that differ only in when parameters are gathered."""


class Reason(Record):
    """A change that changes numbers, what it does to them, and why."""

    change: Change
    kind: Kind
    why: str


def effect_of(change: Change) -> Effect:
    """What a change does to numbers, and why."""
    key = change.key
    if key.part in ("require", "objective", "name"):
        return NONE
    if key.part == "file":
        return ("training", "what is read from a file may be another model or another order")
    if key.field == "variant":
        return NONE
    effects = EFFECTS[key.field]
    if key.part == "argument":
        return effects[WHOLE]
    if key.part == "rule":
        return _of_rule(change, effects[RULES])
    if key.part == "axes":
        return effects["axes"]
    if key.part == "statement":
        return effects[WHOLE]  # beside those of its parts
    if key.names[1:] == ("fused",):
        return _KERNELS
    return effects[_option_name(key.field, key.names[0])]


def _option_name(keyword: str, field: str) -> str:
    return family(keyword).option(field).name


def _of_rule(change: Change, usual: Effect) -> Effect:
    values = [value for value in (change.before, change.after) if value is not None]
    if change.key.field == "fsdp" and len(values) == 2 and all(map(_is_unit, values)):
        return NONE  # other times at which the same parameters are gathered
    if change.key.field == "shard" and any("capacity_factor" in value for value in values):
        return ("training", "experts take another number of tokens")
    return usual


def _is_unit(value: str) -> bool:
    """Whether every module that a rule matches is a unit."""
    return value.startswith(_ALIKE) and "none" not in value


def numerics(found: Iterable[Change], before: Analysis, after: Analysis) -> tuple[Reason, ...]:
    """The changes from one plan to another that change numbers, the strongest effects first."""
    beside = dict(_beside(before, after))

    def effects_of(change: Change) -> Iterator[Effect]:
        own, keyword = effect_of(change), change.key.field
        yield own
        yield from (beside.get((keyword, part), own) for part in (WHOLE, *change.key.names[:1]))

    def of(change: Change) -> Effect:
        field = change.key.field
        if field == "pipeline" and before.plan.pipeline is None and after.plan.pipeline is None:
            return NONE  # of one rank
        among = [change]
        if change.key.part == "statement" and change.kind != "changed" and field != "variant":
            among += parts(change, before.plan, after.plan)
        found = (effect for one in among for effect in effects_of(one))
        return min(found, key=lambda effect: _ORDER.index(effect[0]))

    reasons = [Reason(change, *of(change)) for change in found]
    return tuple(sorted((item for item in reasons if item.kind != "none"), key=lambda item: _ORDER.index(item.kind)))


def _beside(before: Analysis, after: Analysis) -> Iterator[tuple[Place, Effect]]:
    """Effects of statements and fields beside what the rest of both plans states, where that is decided."""
    for place, why in another_training(before, after):
        yield place, ("training", why)
    if any(decided(limited_experts, analysis) for analysis in (before, after)):
        drop: Effect = ("training", "experts have a capacity of each rank's micro batch, and drop other tokens")
        yield ("batch", "micro_batch"), drop
        yield ("mesh", "cp"), drop
    dtypes = [decided(gradient_dtype, analysis) for analysis in (before, after)]
    accumulate = any(decided(micro_batches, analysis.plan) != 1 for analysis in (before, after))
    if None not in dtypes and dtypes[0] != dtypes[1] and accumulate:
        summed: Effect = ("dtype", f"gradients of micro batches are summed in {dtypes[1]}, and not in {dtypes[0]}")
        yield ("comm", "reduce"), summed
        yield ("fsdp", WHOLE), summed
        yield ("mesh", "pp"), summed
        yield ("pipeline", WHOLE if decided(is_staged, before) != decided(is_staged, after) else "microbatches"), summed
