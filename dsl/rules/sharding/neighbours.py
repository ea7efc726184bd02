"""Common parts of the rules about layouts: the spans of diagnostics, and names of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general, span_of
from legoai.dsl.analysis.facts import listed
from legoai.dsl.analysis.layouts.operations import MismatchKind
from legoai.dsl.analysis.layouts.propagation import Mismatch
from legoai.dsl.analysis.layouts.tensors import Tensor
from legoai.dsl.diagnostics.diagnostic import Label
from legoai.specs.directives.layouts import Layout, Sharded
from legoai.specs.span import Span


def text_of(layout: Layout | Tensor) -> str:
    """A layout as a plan writes it."""
    if isinstance(layout, Tensor):
        return layout.describe()
    return f"shard({layout.dim})" if isinstance(layout, Sharded) else layout.name


class LayoutRule:
    """Base of the rules about layouts: each reports some kinds of conflicts, once for each line at fault."""

    kinds: ClassVar[tuple[MismatchKind, ...]]

    @classmethod
    def mismatches(cls, analysis: Analysis) -> Iterator[tuple[Span, list[Mismatch]]]:
        """The diagnostics by the place to name: the line of the consumer, or else that of the producer."""
        if analysis.layouts is None:
            return
        places: dict[Span, list[Mismatch]] = {}
        for item in analysis.layouts.mismatches:
            if item.kind in cls.kinds:
                places.setdefault(anchor_of(analysis, item), []).append(item)
        yield from places.items()


def anchor_of(analysis: Analysis, item: Mismatch) -> Span:
    """The line to name: the consumer's, or else a producer's, or else the statement."""
    sources = [
        tensor.source.rule for tensor in (item.got, item.other) if tensor is not None and tensor.source is not None
    ]
    for rule in (item.rule, *sources):
        if rule is not None:
            return span_of(rule)
    shard = analysis.plan.shard_on("tp")
    assert shard is not None
    return analysis.span_of(shard)


def came_from(analysis: Analysis, tensor: Tensor) -> str:
    """The module that a tensor comes from, in words."""
    assert analysis.manifest is not None
    return f"`{general(analysis.manifest, tensor.source.path)}`" if tensor.source is not None else "the model's input"


def producer_lines(*tensors: Tensor | None, beside: Span) -> list[Label]:
    """A label at each line that gave a tensor its layout, but for the line that the diagnostic itself names."""
    found = {}
    for tensor in tensors:
        if tensor is not None and tensor.source is not None and tensor.source.rule is not None:
            span = span_of(tensor.source.rule)
            if span != beside:
                found[span] = Label(span, f"leaves its output as `{tensor.describe()}`")
    return list(found.values())


def named(analysis: Analysis, items: list[Mismatch]) -> str:
    """The modules at which the diagnostics are made, as a plan names them."""
    return listed(_names(analysis, items))


def verb(analysis: Analysis, items: list[Mismatch], one: str, many: str) -> str:
    """Return the verb in the number of :func:`named`: a path with `*` is one name for all its matches."""
    return one if len(_names(analysis, items)) == 1 else many


def _names(analysis: Analysis, items: list[Mismatch]) -> list[str]:
    assert analysis.manifest is not None
    return list(dict.fromkeys(general(analysis.manifest, item.path) for item in items))


def leaves_at(tensor: Tensor, span: Span) -> bool:
    """Whether the rule at ``span`` gave the tensor its layout."""
    return tensor.source is not None and tensor.source.rule is not None and span_of(tensor.source.rule) == span
