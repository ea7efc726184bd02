"""Comparison of a plan's model with the one that a checkpoint was saved of, where names and shapes of tensors agree.

It is that of published weights with their config, so that the same differences are errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legoai.runtime.checkpoint.checkpoint import CheckpointMeta
from legoai.runtime.errors import RunError, RunErrorCode, listed
from legoai.runtime.published.matching import shown
from legoai.runtime.published.whole_model import WholeModel
from legoai.specs.published.configs import Difference, differences
from legoai.specs.visible_text import visible_line


def recorded_config(whole: WholeModel) -> dict[str, Any]:
    """Return the fields of a model's config as a checkpoint records them: plain data, equal after it is read."""
    fields: dict[str, Any] = json.loads(json.dumps(dict(whole.fields), default=str))
    return fields


def check_model(
    path: Path, meta: CheckpointMeta, whole: WholeModel, *, others: bool, strict: bool = False, help: str
) -> list[str]:
    """Check that the weights of a checkpoint mean the same in a model; return the other differences, as sentences.

    Args:
        path: of the checkpoint.
        meta: of the checkpoint. One of an earlier version does not record its model, and is not compared.
        whole: the model before it was sharded.
        others: whether the weights may mean something else.
        strict: whether they may not even be computed with other numbers, such as an epsilon.
        help: what helps where they do.

    Raises:
        RunError: they mean something else.
    """
    notices = []
    for difference in _differences(meta, whole):
        saved, own = shown(difference.published), shown(difference.own)
        what = visible_line(f"{difference.field} = {saved}, and the plan's model {own}")
        if strict or (difference.changes_function and not others):
            raise RunError(
                RunErrorCode.CHECKPOINT_OTHER_MODEL,
                f"checkpoint {path} is of another model (plan {visible_line(meta.plan)}), with {what}"
                + (": the weights mean something else there" if difference.changes_function else ""),
                help=help,
            )
        notices.append(f"the checkpoint's model has {what}: with its weights this one may compute something else")
    return notices


def _differences(meta: CheckpointMeta, whole: WholeModel) -> Iterator[Difference]:
    if not meta.model_class:
        return
    own = recorded_config(whole)
    if own and meta.model_config:
        yield from differences(own, meta.model_config, builtin=whole.config is not None)
    elif meta.model_class != whole.kind:
        yield Difference("class", meta.model_class, whole.kind, False)
    if meta.factory and whole.factory and meta.factory != whole.factory:
        yield Difference("factory", meta.factory, whole.factory, False)
    if meta.tied != whole.tied:
        # Of tensors that are tied here only one can be loaded; those that were tied have equal values.
        lost = not whole.tied.items() <= meta.tied.items()
        yield Difference("tied tensors", listed(meta.tied) or None, listed(whole.tied) or None, lost)
