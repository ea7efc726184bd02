"""Pipelines of TorchTitan: stages, and the blocks of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from legoai.dsl.importing.config import Config
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE

_SCHEDULES: Final = {name.lower(): name for name in (*SINGLE_STAGE, *MULTI_STAGE)}
"""TorchTitan's names in any case, as PyTorch looks them up."""

_MOST_BLOCKS: Final = 10_000
"""Blocks up to which legal stages are looked for."""

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.\w+)*")

_SPLITS: Final = (
    "parallelism.pipeline_parallel_split_points",
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_layers_per_stage",
)


def schedule_of(config: Config) -> str | None:
    """The schedule's name in a plan; None, after a diagnostic, for one that plans do not have."""
    name = config["parallelism.pipeline_parallel_schedule"]
    found = _SCHEDULES.get(name.lower())
    if found is None:
        config.wrong(
            "parallelism.pipeline_parallel_schedule",
            f"plans have no schedule `{name}`",
            f"they have {', '.join(f'`{item}`' for item in _SCHEDULES.values())}",
        )
    return found


def options_of(config: Config, schedule: str, *, ranks: int, layers: int) -> list[str] | None:
    """Return `stages` and `split` of the statement; None, after a diagnostic, where the stages cannot be made."""
    each = 1 if schedule in SINGLE_STAGE else 2
    points, parts, per_stage = (config[name] for name in _SPLITS)
    if not all(map(_PATH.fullmatch, points)):
        config.wrong(_SPLITS[0], "each stage begins with a module, named as `layers.4`")
        return None
    if points:
        return _stages(len(points) + 1, ranks, each, f"[{', '.join(points)}]")
    if parts is not None:
        starts = _starts(config, parts, layers)
        return None if starts is None else _stages(len(parts), ranks, each, f"[{', '.join(starts[1:])}]")
    if config.is_old:
        counts: Sequence[int] | None = _even(layers, ranks * each)
    else:
        first = config["parallelism.pipeline_parallel_first_stage_less_layers"]
        last = config["parallelism.pipeline_parallel_last_stage_less_layers"]
        if per_stage is not None:
            counts = _of_at_most(per_stage, layers, ranks, first, last)
            if counts is None:
                _refuse_stages(config, per_stage, layers, ranks, each)
                return None
        else:
            counts = _weighted(layers, ranks * each, first, last)
    if counts is None:
        message = f"{layers} blocks do not make such stages on {ranks} ranks"
        config.wrong("parallelism.pipeline_parallel_degree", message)
        return None
    return _stages(len(counts), ranks, each, "" if len(set(counts)) == 1 else f"[{', '.join(_counted(counts))}]")


def _starts(config: Config, parts: Sequence[Sequence[str]], layers: int) -> list[str] | None:
    """The first module of each part; None, after a diagnostic, where parts do not divide the model in its order.

    TorchTitan takes a part for a set of names, leaves out of the model what no part names, and ignores other names.
    """
    last = "lm_head" if config.is_current else "output"
    modules = ["tok_embeddings", *(f"layers.{number}" for number in range(layers)), "norm", last]
    # Between February and August 2026 the last layer had either name.
    other = {"lm_head": "output"} if config.format.is_python and not config.is_current else {}
    named = [{other.get(path, path) for path in part} for part in parts]
    held = [[module for module in modules if module in part] for part in named]
    unknown = sorted(path for part in named for path in part if path not in modules)
    missing = [module for module in modules if not any(module in part for part in named)]
    problem = (
        f"`{unknown[0]}` is no module of this model"
        if unknown
        else f"no part has `{missing[0]}`"
        if missing
        else "a part has no modules"
        if not all(held)
        else "parts are not the modules in their order, each in one part"
        if [module for part in held for module in part] != modules
        else ""
    )
    if problem:
        config.wrong(
            _SPLITS[1], problem, f"its modules are `tok_embeddings`, `layers.0` and so on, `norm` and `{last}`"
        )
        return None
    return ["output" if part[0] == last else part[0] for part in held]


def _of_at_most(per_stage: int, layers: int, ranks: int, first: int, last: int) -> list[int] | None:
    """Blocks of each stage where a stage holds so many, embedding and output counted as blocks; None for no stages."""
    stages = -(-(layers + first + last) // per_stage)
    fits = max(first, last) <= layers and not stages % ranks
    return _weighted(layers, stages, first, last) if fits else None


def _refuse_stages(config: Config, per_stage: int, layers: int, ranks: int, each: int) -> None:
    """Report a number of blocks of a stage that makes no stages, with the nearest that makes some."""
    first, last = (config[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
    whole = layers + first + last
    stages = -(-whole // per_stage)
    if stages % ranks:
        problem = f"no multiple of {ranks} ranks"
    else:
        problem = "of which one would have no blocks, or the first or last fewer than are left out of it"
    legal = [
        other
        for other in range(1, whole + 1 if whole <= _MOST_BLOCKS else 1)
        if (counts := _of_at_most(other, layers, ranks, first, last)) is not None
        and (len(counts) == ranks if each == 1 else len(counts) > ranks)
    ]
    near = min(legal, key=lambda other: abs(other - per_stage), default=None)
    config.wrong(
        _SPLITS[2],
        f"{layers} blocks, with {first} and {last} for embedding and output, count as {whole}: {per_stage} on a stage "
        f"make {stages} stage{'s' * (stages > 1)}, {problem}",
        *([] if near is None else [f"the nearest number with as many stages on every rank is {near}"]),
    )


def _counted(counts: Sequence[int]) -> list[str]:
    """A split into stages of so many blocks; by its first modules where an end has none beside its own layers."""
    if min(counts) > 0:
        return list(map(str, counts))
    starts = [f"layers.{done}" for done in accumulate(counts[:-1])]
    return starts if counts[-1] else [*starts[:-1], "norm"]


def _stages(count: int, ranks: int, each: int, split: str) -> list[str]:
    usual = count == ranks * each
    return [*([] if usual else [f"stages = {count}"]), *([f"split = {split}"] if split else [])]


def _even(layers: int, stages: int) -> list[int] | None:
    """Blocks of each stage until 2025: the remainder is distributed over the stages after the first."""
    if stages > layers:
        return None
    least, over = divmod(layers, stages)
    counts = [least + (1 <= index <= over) for index in range(stages - 1)]
    return [*counts, layers - sum(counts)]


def _weighted(layers: int, stages: int, first: int, last: int) -> list[int] | None:
    """Blocks of each stage since 2025: embedding and output count as blocks, and the first stages get the remainder."""
    least, over = divmod(layers + first + last, stages)
    counts = [least + (index < over) for index in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    ends_hold_all = min(counts[0], counts[-1]) >= 0 and min(counts[1:-1], default=1) > 0
    return counts if first <= least and last <= least and ends_hold_all else None
