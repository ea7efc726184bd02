"""Groups of pipeline ranks with equal stages; one rank of each group is captured.

Two stages are equal if they hold as many modules, of the same classes and shapes, with the same treatments. The first
stage, which reads the samples, and the last, which computes the loss, equal no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from legoai.cost.replay.blocks import are_equal
from legoai.cost.simulated.program import trainer_of
from legoai.cost.simulated.unfilled import built_unfilled
from legoai.dsl.analysis.repetition.repeated_blocks import BlockClasses
from legoai.lowering.program import Program
from legoai.runtime.torch_internals.compiler.dynamo import without_dynamo

if TYPE_CHECKING:
    from legoai.runtime.parallelism.pipeline import Pipeline


def equal_coordinates(program: Program, pp: int) -> list[list[int]]:
    """Group the coordinates on the `pp` axis by equality of their stages.

    Args:
        program: as lowered.
        pp: ranks along the axis.

    Returns:
        The groups, each ascending, except that its middle comes first where stages are laid out as a V. Where the
        program has no classes of equal blocks, each coordinate is a group of its own.
    """
    apart = [[coordinate] for coordinate in range(pp)]
    if not program.block_classes:
        return apart
    with without_dynamo():
        trainer = trainer_of(program)
        pipeline = trainer.pipeline
        if pipeline is None or len(pipeline.stages_of_rank) != pp:
            return apart
        try:
            model = built_unfilled(trainer.build_model)
        except Exception:  # a factory may raise anything; each rank's capture builds the model likewise, and reports it
            return apart
    return _groups(pipeline, model, _class_of(program.block_classes, model))


def _class_of(classes: BlockClasses, model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return the list and the class of each block, by its path."""
    return {
        f"{path}.{name}" if path else name: (path, one)
        for path, of_block in classes
        for (name, _), one in zip(model.get_submodule(path).named_children(), of_block, strict=True)
    }


def _groups(pipeline: Pipeline, model: nn.Module, class_of: Mapping[str, tuple[str, int]]) -> list[list[int]]:
    last = len(pipeline.stages) - 1
    representatives: list[Sequence[str]] = []
    kinds: list[int] = []
    for stage, modules in enumerate(pipeline.stages):
        same = (
            kind
            for kind, others in enumerate(representatives)
            if 0 < stage < last and kind != kinds[0] and _are_equal_stages(model, modules, others, class_of)
        )
        kind = next(same, len(representatives))
        kinds.append(kind)
        if kind == len(representatives):
            representatives.append(modules)
    groups: dict[tuple[int, ...], list[int]] = {}
    for coordinate, stages in enumerate(pipeline.stages_of_rank):
        groups.setdefault(tuple(kinds[stage] for stage in sorted(stages)), []).append(coordinate)
    v_shaped = all(len(stages) == 2 and sum(stages) == last for stages in pipeline.stages_of_rank)
    return [_middle_first(group) for group in groups.values()] if v_shaped else list(groups.values())


def _middle_first(group: list[int]) -> list[int]:
    """Move the middle rank of a group to the front: it is captured, and the traces of the others are derived from it.

    At the ends of a V-shaped pipeline fewer classes of actions occur: on the first ranks fewer gradients wait, and the
    last rank passes activations to itself.
    """
    middle = (len(group) - 1) // 2
    return [group[middle], *group[:middle], *group[middle + 1 :]]


def _are_equal_stages(
    model: nn.Module, modules: Sequence[str], others: Sequence[str], class_of: Mapping[str, tuple[str, int]]
) -> bool:
    """Whether two stages have equal modules in the same order, all of them blocks with equal treatments."""
    return len(modules) == len(others) and all(
        (mine == theirs or (mine in class_of and class_of[mine] == class_of.get(theirs)))
        and are_equal(model.get_submodule(mine), model.get_submodule(theirs), _index(mine), _index(theirs))
        for mine, theirs in zip(modules, others, strict=True)
    )


def _index(path: str) -> int:
    """Return the index of a module in its container; -1 where it has a name."""
    name = path.rpartition(".")[2]
    return int(name) if name.isdecimal() else -1
