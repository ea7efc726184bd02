"""Random numbers that a forward draws for its piece of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from legoai.dsl.analysis.layouts.tensors import Tensor
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.shard import SequenceStyle

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step

_RANDOM: Final = frozenset(("bernoulli", "rand_like", "randn_like", "rrelu"))
_NAMES_OF_ITS_OWN: Final = ("input", "call", "parameter", "buffer")
"""Steps whose names are the model's."""


def drawn_on_pieces(
    manifest: Manifest, styles: Mapping[str, PathRule[Any]], info: ModuleInfo, made: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the modules that draw random numbers for a piece of a tensor, and the piece.

    A tensor whose layout is unknown, and which is computed from a piece, is one too.

    Args:
        manifest: of the model.
        styles: the rules by module and parameter path.
        info: a module with a flow; modules that it calls and whose own flow is not followed are looked at with it.
        made: layouts of the results of its steps.
    """
    # Of attention it is not known whether it draws; where something else does, that it does not is more likely.
    named = {place for place, step in enumerate(info.flow) if step.op not in _NAMES_OF_ITS_OWN and _draws(step.name)}
    pieces: list[Tensor | None] = []
    for place, (step, result) in enumerate(zip(info.flow, made, strict=True)):
        given = next((pieces[index] for index in step.inputs if pieces[index] is not None), None)
        of_step = place in named or (not named and step.op == "attention")
        drawing = _drawing(manifest, styles, info, step, of_step=of_step)
        found = result if result.state == "shard" else given
        if drawing is not None and found is not None:
            yield drawing, found
        pieces.append(found if result.state in ("shard", "unknown") else None)


def _draws(function: str) -> bool:
    return "dropout" in function or function in _RANDOM


def _drawing(
    manifest: Manifest, styles: Mapping[str, PathRule[Any]], info: ModuleInfo, step: Step, *, of_step: bool
) -> str | None:
    """The path of the module that draws random numbers in a step."""
    if step.op != "call":
        return info.path if info.random and of_step else None
    called = manifest.modules[info.child_path(step.name)]
    rule = styles.get(called.path)
    followed = called.flow and (rule is None or not isinstance(rule.treatment, SequenceStyle))
    return called.path if called.random and not followed else None
