"""Names and layouts in files of `transformers` models, from the library's own table of conversions.

Since its fifth release `transformers` stores experts stacked and fused in memory, and separately in files, and modules
of some models have other names in memory than in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from legoai.specs.published.pieces import Piece, Pieces, stacked, whole


class _Conversions(NamedTuple):
    """Conversions of `transformers` when it reads a file: first of names, in this order, then of tensors."""

    renamings: list[Any]
    mergers: list[Any]
    backwards: list[Any]
    """The renamings that it does when it writes one, in their order."""


def published_by_transformers(model: nn.Module) -> Callable[[str, Sequence[int]], Iterator[Pieces]]:
    """Return the mapping of a `transformers` model's tensors to published ones, by its conversions or by equal names.

    Args:
        model: not changed yet.
    """
    conversions = _conversions(model)

    def published(name: str, shape: Sequence[int]) -> Iterator[Pieces]:
        converted = _converted(conversions, name, shape)
        if converted is not None:
            yield converted
        yield whole(name, shape)

    return published


def _conversions(model: nn.Module) -> _Conversions:
    """The conversions of a model; none where this release of `transformers` has no such table."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return _Conversions([], [], [])
    table: Callable[..., list[Any]] = get_model_conversion_mapping
    # A change of prefix is for files of one part of a model, and undone by nothing.
    found = [one for one in table(model, add_legacy=False) if type(one).__name__ != "PrefixChange"]
    renamings = [one for one in found if not hasattr(one, "operations")]
    mergers = [one for one in found if hasattr(one, "operations")]
    return _Conversions(renamings, mergers, [one.reverse_transform() for one in reversed(renamings)])


def _converted(conversions: _Conversions, name: str, shape: Sequence[int]) -> Pieces | None:
    """Return the published tensors that conversions combine into one; None where there is no supported conversion."""
    found = whole(name, shape)
    for merger in conversions.mergers:
        targets = merger.target_patterns
        if len(targets) == 1 and name.endswith(targets[0]):
            merged = _merged(merger.operations, merger.source_patterns, name.removesuffix(targets[0]), shape)
            if merged is None:
                return None
            found = merged
    renamed = tuple(piece._replace(name=_renamed(conversions, piece.name)) for piece in found)
    return None if [piece.name for piece in renamed] == [name] else renamed


def _merged(operations: list[Any], sources: list[str], prefix: str, shape: Sequence[int]) -> Pieces | None:
    """Tensors that were stacked along the first dim, and then concatenated along the second."""
    names = [type(operation).__name__ for operation in operations]
    dims = [getattr(operation, "dim", None) for operation in operations]
    if (names, dims) not in ((["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])):
        return None
    if len(shape) < 2 or shape[1] % len(sources) or any(source.count("*") != 1 for source in sources):
        return None
    rows = shape[1] // len(sources)
    pieces: list[Piece] = []
    for place, source in enumerate(sources):
        each = [f"{prefix}{source.replace('*', str(index))}" for index in range(shape[0])]
        pieces += stacked(each, shape, row=place * rows, rows=rows)
    return tuple(pieces)


def _renamed(conversions: _Conversions, name: str) -> str:
    """Return the name in a file, where reading it gives the name back."""
    found = _through(conversions.backwards, name)
    return found if _through(conversions.renamings, found) == name else name


def _through(renamings: list[Any], name: str) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
