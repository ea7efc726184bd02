"""Changes that make another training of some models: of those that draw, match or count within a micro batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.compilation.graph_breaks import effectively_compiled
from legoai.dsl.analysis.computation.attention import attention_modules
from legoai.dsl.analysis.computation.checkpoint import (
    keeps_random_state,
    may_draw,
    random_modules,
    recomputed_modules,
)
from legoai.dsl.analysis.computation.precision import batch_norms
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.stages.pipeline import is_staged, stages_of_ranks
from legoai.specs.directives.compile import Inductor
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.mesh import DATA_AXES

WHOLE: Final = ""

_REDRAWN: Final = "recomputed dropout may drop other elements than the forward"

Place = tuple[str, str]
"""A keyword, and the field of one of its options, or `WHOLE` for each part of the statement."""

Given = TypeVar("Given")
Found = TypeVar("Found")


def decided(fact: Callable[[Given], Found], given: Given) -> Found | None:
    """A fact about a plan; None where it depends on a hole."""
    try:
        found = fact(given)
    except Undecided:
        return None
    return None if isinstance(found, Hole) else found


def another_training(before: Analysis, after: Analysis) -> Iterator[tuple[Place, str]]:
    """Yield the values whose change makes another training of the plans' model, each with the reason."""
    both = [item for item in (before, after) if item.manifest is not None]
    if (before.plan.cluster.device == "cpu") != (after.plan.cluster.device == "cpu"):
        yield ("cluster", "device"), "a CPU and a GPU draw other random numbers: first weights are others"
    if any(map(_matches, both)):
        yield ("batch", "micro_batch"), "texts and images are matched with the others of their micro batch"
    if any(map(_has_batch_statistics, both)):
        yield ("batch", "micro_batch"), "the model computes statistics of each micro batch"
        yield ("mesh", "cp"), "the model computes statistics of a rank's tokens"
    if any(map(_updates_buffers, both)):
        why = "each rank updates buffers of its own, from other samples"
        yield from ((("mesh", axis), why) for axis in _data_axes(before, after))
        if decided(_updated_again, before) != decided(_updated_again, after):
            yield ("checkpoint", WHOLE), "a module that is recomputed updates its buffers once more"
    if any(map(random_modules, both)):
        yield from _drawn(before, after)
    dropped = [decided(_dropped_anew, item) for item in (before, after)]
    if None in dropped:  # the model is not known, or a rule is a hole
        yield ("checkpoint", "preserve_rng"), _REDRAWN
    elif dropped[0] != dropped[1]:
        yield ("checkpoint", WHOLE), _REDRAWN


def _drawn(before: Analysis, after: Analysis) -> Iterator[tuple[Place, str]]:
    """Yield the changes with which a model that drops elements drops others."""
    yield ("batch", "micro_batch"), "forward draws random numbers, as of dropout, for each micro batch"
    own = "each rank draws random numbers of its own in forward, as of dropout"
    yield from ((("mesh", axis), own) for axis in (*_data_axes(before, after), "cp", "pp"))
    dealt = [
        item.plan.context and decided(lambda context: context.dealt, item.plan.context) for item in (before, after)
    ]
    if dealt[0] != dealt[1]:
        yield from ((("context", field), own) for field in ("rotate", "balance"))
    for field in ("stages", "split"):
        yield ("pipeline", field), own
    if any(decided(_has_several_stages, item) for item in (before, after)):
        turn = "the stages of a rank draw random numbers in the order of the schedule"
        yield from ((("pipeline", field), turn) for field in ("schedule", "microbatches"))
    if any(decided(_draws_on_pieces, item) for item in (before, after)):
        pieces = "each rank of `tp` draws random numbers for its piece of a tensor"
        yield ("mesh", "tp"), pieces
        yield ("shard", WHOLE), pieces
    if decided(_drawn_by_inductor, before) != decided(_drawn_by_inductor, after):
        yield ("compile", WHOLE), "compiled kernels draw other random numbers"
    if any(item.manifest is not None and _draws_in_attention(item) for item in (before, after)):
        yield ("attention", WHOLE), "another kernel draws other random numbers"


def _data_axes(before: Analysis, after: Analysis) -> tuple[str, ...]:
    """Return the axes of data parallelism, where their ranks together may be more or fewer."""
    degrees = [decided(lambda mesh: mesh.data_parallel, item.plan.mesh) for item in (before, after)]
    return () if degrees[0] is not None and degrees[0] == degrees[1] else DATA_AXES


def _matches(analysis: Analysis) -> bool:
    assert analysis.manifest is not None
    return analysis.manifest.reads is not None and analysis.manifest.reads.kind == "images_with_texts"


def _updates_buffers(analysis: Analysis) -> bool:
    assert analysis.manifest is not None
    return bool(analysis.manifest.updated)


def _has_batch_statistics(analysis: Analysis) -> bool:
    """Whether forward normalises over a micro batch, or updates buffers from it."""
    assert analysis.manifest is not None
    return _updates_buffers(analysis) or bool(batch_norms(analysis.manifest))


def _updated_again(analysis: Analysis) -> set[str]:
    """The buffers that are updated in forward and in backward."""
    recomputed = checkpointed_modules(analysis)
    updated = () if analysis.manifest is None else analysis.manifest.updated
    return {path for path in updated if not recomputed.keys().isdisjoint(holders(path))}


def _dropped_anew(analysis: Analysis) -> set[str] | None:
    """The modules that recompute and may draw other random numbers then; None where the model is not known."""
    if analysis.manifest is None:
        return None
    return {
        path
        for path in recomputed_modules(analysis)
        if may_draw(analysis, path) and not keeps_random_state(analysis, path)
    }


def _has_several_stages(analysis: Analysis) -> bool:
    return is_staged(analysis) and any(len(stages) > 1 for stages in stages_of_ranks(analysis))


def _draws_on_pieces(analysis: Analysis) -> bool:
    layouts = analysis.layouts
    return layouts is not None and any(item.kind == "drawn" for item in layouts.mismatches)


def _drawn_by_inductor(analysis: Analysis) -> set[str]:
    """The modules that draw random numbers in kernels of torch.compile."""
    if analysis.manifest is None:
        return set()
    compiled = {path for path, rule in effectively_compiled(analysis).items() if isinstance(rule.treatment, Inductor)}
    return {path for path in random_modules(analysis) if not compiled.isdisjoint((path, *holders(path)))}


def _draws_in_attention(analysis: Analysis) -> bool:
    return not attention_modules(analysis).keys().isdisjoint(random_modules(analysis))
