"""Equal blocks of a model: what is the same in all of them is computed and reported once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import grouped, name_of
from legoai.specs.directives.base import Directive, PathRule
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.span import Span


def span_of(rule: PathRule[Any]) -> Span:
    """Return the span of the rule's path."""
    span = rule.path_origin.span or rule.origin.span
    assert span is not None, "a rule is always written by a person"
    return span


def general(manifest: Manifest, path: str) -> str:
    """Return the path with the block's number as `*`, as plans refer to all blocks."""
    for blocks in manifest.block_lists:
        prefix = f"{blocks.path}." if blocks.path else ""
        if path.startswith(prefix):
            name, dot, rest = path[len(prefix) :].partition(".")
            if name in blocks.names and len(blocks) > 1:
                return f"{prefix}*{dot}{rest}"
    return name_of(path)


def distinct(analysis: Analysis, directive: Directive) -> list[tuple[str, PathRule[Any]]]:
    """Each path that a rule of the statement matches, with the rule; of equal blocks under one rule the first."""
    # The statement is stored with its result, so that no other object can reuse its `id`.
    return analysis.once(("distinct", id(directive)), lambda: (directive, list(_distinct(analysis, directive))))[1]


def _distinct(analysis: Analysis, directive: Directive) -> Iterator[tuple[str, PathRule[Any]]]:
    manifest = analysis.manifest
    assert manifest is not None
    groups = {
        (f"{blocks.path}." if blocks.path else ""): {
            blocks.names[index]: number for number, group in enumerate(blocks.groups) for index in group
        }
        for blocks in manifest.block_lists
    }
    seen = set()
    for path, rule in analysis.assigned(directive).by_path.items():
        for prefix, group_of in groups.items():
            if path.startswith(prefix):
                name, _, rest = path[len(prefix) :].partition(".")
                group = group_of.get(name)
                if group is not None:
                    key = (prefix, group, rest, id(rule))
                    if key in seen:
                        break
                    seen.add(key)
        else:
            yield path, rule


def by_rule(analysis: Analysis, directive: Directive) -> Iterator[tuple[PathRule[Any], list[str]]]:
    """Yield each rule of the statement once, with its paths from :func:`distinct`."""
    yield from grouped(distinct(analysis, directive))
