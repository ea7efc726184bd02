"""Modules whose tensor-parallel products inductor can split, to overlap them with their collectives (AsyncTP)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.layouts.tensors import as_list
from legoai.dsl.analysis.parallelism.shard import tensor_parallel
from legoai.specs.directives.compile import Inductor
from legoai.specs.directives.layouts import Layout, Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise, SequenceStyle


def split_by_async_tp(analysis: Analysis) -> Iterator[str]:
    """Yield the modules that inductor compiles with a product and a collective along the sequence.

    The collectives of a module's own style are compiled with it. Whether the product is next to the collective is not
    looked at, as for a model whose forward is not known.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    assert analysis.manifest is not None
    multiplies = _with_holders(path for path, info in analysis.manifest.modules.items() if info.kind == "linear")
    styles = tensor_parallel(analysis).styles
    communicates = _with_holders(path for path, rule in styles.items() if _along_sequence(rule.treatment))
    for path, rule in compiled_modules(analysis).items():
        if isinstance(rule.treatment, Inductor) and path in multiplies and path in communicates:
            yield path


def _with_holders(paths: Iterable[str]) -> set[str]:
    return {held for path in paths for held in (path, *holders(path))}


def _along_sequence(style: object) -> bool:
    """Whether a module with this style gathers or scatters the sequence, or leaves it to the next one to gather."""
    if isinstance(style, SequenceStyle):
        return not style.local
    layouts: list[Layout | str | None] = []
    if isinstance(style, Colwise | Rowwise):
        layouts += [style.input, style.output]
    if isinstance(style, Inputs | Outputs):
        layouts += [*as_list(style.source), *as_list(style.target)]
    if isinstance(style, Inputs) and style.then is not None:
        layouts += [*as_list(style.then.source), *as_list(style.then.target)]
    return any(isinstance(layout, Sharded) and layout.dim == 1 for layout in layouts)
