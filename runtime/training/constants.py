"""Constants of a training that its checkpoints record, and their differences from those of another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

import torch

from legoai.runtime.initialize import plain_path
from legoai.runtime.process_group import gather_objects
from legoai.runtime.training.group_constants import constants_in, listed_changes, merged, record_of
from legoai.runtime.training.recipe import Recipe
from legoai.runtime.training.state import Training

_OF_KERNELS: Final = frozenset({"params", "lr", "initial_lr", "fused", "foreach", "capturable", "differentiable"})
"""Options of a group that are no constants, or that the learning-rate schedule changes."""

_LATER: Final = frozenset({"micro_batch", "clip_norm", "param_dtype", "reduce_dtype"})
"""Constants that checkpoints of earlier versions do not record."""

GROUPS: Final = "groups"
"""Name of the record of the optimizer's constants by parameter, which was added later still."""


def constants_of(recipe: Recipe, training: Training) -> dict[str, Any]:
    """Return constants of a training by name, as plain data; collective.

    Of the optimizer these are the different values of its groups, of all ranks; and which parameters have which.
    """
    found: dict[str, Any] = {"optimizer": optimizer_name(training.optimizer)}
    found |= {name: getattr(recipe, name) for name in ("global_batch", "ramp", "seq_len", "micro_batch", "clip_norm")}
    for name in ("master_dtype", "param_dtype", "reduce_dtype"):
        dtype = getattr(recipe, name)
        found[name] = None if dtype is None else str(dtype).removeprefix("torch.")
    names = {id(parameter): plain_path(name) for name, parameter in training.model.named_parameters()}
    groups = [group for group in training.optimizer.param_groups if group["params"]]
    constants = [
        {"lr": group.get("initial_lr", group["lr"])} | {name: group[name] for name in group.keys() - _OF_KERNELS}
        for group in groups
    ]
    parameters = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    own = record_of(zip(parameters, _plain(constants), strict=True))
    found[GROUPS] = merged(gather_objects(own))
    every = [entry["constants"] for entry in found[GROUPS]]
    for name in sorted({name for group in every for name in group}):
        values = {json.dumps(group[name]): group[name] for group in every if name in group}
        found[name] = [values[text] for text in sorted(values)]
    if training.scheduler is not None:
        factor: Any = training.scheduler.lr_lambdas[0]
        if is_dataclass(factor) and not isinstance(factor, type):
            found |= {f"schedule {name}": value for name, value in asdict(factor).items()}
    plain: dict[str, Any] = _plain(found)
    return plain


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer; for a sharded one, of the inner optimizer; for several, of each."""
    parts = getattr(optimizer, "parts", (optimizer,))
    return " and ".join(type(getattr(part, "sliced", part)).__name__ for part in parts)


def mesh_of(training: Training) -> dict[str, int]:
    """Return the sizes of the axes of a training's mesh."""
    return dict(zip(training.mesh.mesh_dim_names or (), training.mesh.shape, strict=True))


def listed_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the entries that differ, as in `lr 0.1 → 0.2`; empty where none does.

    Those of the optimizer that differ for some parameters only are followed by their names, where both record them.
    """
    by_parameter: list[str] = []
    of_optimizer: set[str] = set()
    if GROUPS in before and GROUPS in now:
        by_parameter = listed_changes(before[GROUPS], now[GROUPS])
        of_optimizer = constants_in(before[GROUPS]) | constants_in(now[GROUPS])
    others = [
        f"{name} {_shown(before.get(name))} → {_shown(now.get(name))}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
        and (name in before or name not in _LATER)
        and name != GROUPS
        and name not in of_optimizer
    ]
    return ", ".join((*others, *by_parameter))


def sameness(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return, in words, in what two trainings agree whose constants have no listed differences."""
    scope = "optimizer, learning rate and batch"
    if before.keys() >= _LATER:
        scope = "optimizer, learning rate, clipping, batch and precision"
    if GROUPS in before or all(len(before.get(name, ())) < 2 for name in constants_in(now.get(GROUPS, ()))):
        return f"with the same constants of {scope}"
    return f"with the same values of constants of {scope}, but it does not record which parameters have which"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _shown(value: object) -> str:
    if value in (None, []):
        return "none"
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)
