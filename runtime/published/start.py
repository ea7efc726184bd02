"""Start of a training with published weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from legoai.runtime.checkpoint.checkpoint import WEIGHTS, State
from legoai.runtime.process_group import on_first_rank
from legoai.runtime.published.folder import open_folder
from legoai.runtime.published.matching import check_map, config_warnings, match
from legoai.runtime.published.reader import read
from legoai.runtime.published.whole_model import WholeModel
from legoai.runtime.wrapped import local_part


def load_published(
    path: Path, state: State, whole: WholeModel, *, others: bool, warn: Callable[[str], None]
) -> list[str]:
    """Read published weights into a model; collective.

    Args:
        path: of the folder.
        state: the model's tensors on this rank, by their names in a checkpoint.
        whole: the model before it was sharded.
        others: whether to leave out tensors that only one side has, or that differ in shape.
        warn: called on rank 0 with differences between the published model and this one.

    Returns:
        The names of tensors of the full model that were left out.

    Raises:
        RunError: the weights are missing, damaged, or of another model.
    """
    check_map(whole)
    folder = on_first_rank(lambda: open_folder(path))
    matched, missing = on_first_rank(lambda: match(whole, folder, others=others))
    for warning in on_first_rank(lambda: list(config_warnings(whole, folder))):
        warn(warning)
    for name, first in whole.tied.items():
        if first in matched and not _shares(state, name, first):
            matched[name] = matched[first]
    read(folder, matched, state)
    return missing


def _shares(state: State, name: str, other: str) -> bool:
    """Whether a tied tensor of this rank is in the memory of the other, and need not be read."""
    one, two = (state.get(f"{WEIGHTS}{tied}") for tied in (name, other))
    if one is None or two is None:
        return False
    return local_part(one).untyped_storage().data_ptr() == local_part(two).untyped_storage().data_ptr()
