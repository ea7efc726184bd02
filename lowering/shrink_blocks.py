"""Selection of the blocks that a shrunken model keeps, so that every path rule still matches some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.dsl.frontend.paths import Paths, pattern, segments_of
from legoai.lowering.emit.blocks import block_paths
from legoai.lowering.emit.blocks import group as grouped
from legoai.specs.directives.base import Divided, PathRule
from legoai.specs.directives.checkpoint import Every
from legoai.specs.directives.comm import Bucket, Units
from legoai.specs.models.manifests.block_list import BlockList
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

T = TypeVar("T")

_BLOCKS: Final = 2
"""Fewest blocks of a model without stages: the first and another one."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks that are kept, in order; they are renumbered from 0."""

    path: str
    """Of the list of blocks."""
    names: tuple[str, ...]
    """Of all blocks of the whole model."""
    kept: tuple[int, ...]
    """Indices of the kept blocks among all."""

    def keeps(self, path: str) -> bool:
        """Whether the smaller model keeps a module of the original one."""
        prefix = f"{self.path}." if self.path else ""
        name = path[len(prefix) :].partition(".")[0] if path.startswith(prefix) else ""
        return name not in self.names or self.names.index(name) in self.kept

    def original(self, path: str) -> str:
        """Return the path in the original model of a module or parameter of the smaller one."""
        prefix = f"{self.path}." if self.path else ""
        if not path.startswith(prefix):
            return path
        name, dot, rest = path[len(prefix) :].partition(".")
        if not name.isdecimal() or int(name) >= len(self.kept):
            return path
        return f"{prefix}{self.names[self.kept[int(name)]]}{dot}{rest}"


def choose_blocks(
    plan: Plan,
    manifest: Manifest,
    *,
    stages: tuple[int, int] | None,
    split: Sequence[str],
    kinds: Sequence[object] | None,
) -> Blocks | None:
    """Choose blocks so that each rule and each stage has its own.

    Args:
        plan: the original plan.
        manifest: of its model.
        stages: of the original plan's pipeline and of the smaller one; None without a pipeline.
        split: for a plan with explicit split points, the first module of each stage of the smaller plan but the first
            stage.
        kinds: for each block, what distinguishes it from others with the same modules; None where nothing does.

    Returns:
        None where the model has no single list of numbered blocks.
    """
    if len(manifest.block_lists) != 1:
        return None
    blocks = manifest.block_lists[0]
    if blocks.names != tuple(str(index) for index in range(len(blocks))):
        return None
    chosen: set[int] = set()
    for alike, wanted in _classes(plan, manifest, blocks, split, kinds):
        chosen.update(alike[:wanted])
    count = max(len(chosen), min(_BLOCKS, len(blocks)), min(_prefetched(plan) + 1, len(blocks)))
    if stages is not None:
        count = _for_stages(count, stages, len(blocks), even=not split)
    spread = [place * (len(blocks) - 1) // max(1, count - 1) for place in range(count - 1, -1, -1)]
    for index in (*spread, *range(len(blocks))):
        if len(chosen) < count:
            chosen.add(index)
    return Blocks(blocks.path, blocks.names, tuple(sorted(chosen)))


def _classes(
    plan: Plan, manifest: Manifest, blocks: BlockList, split: Sequence[str], kinds: Sequence[object] | None
) -> Iterator[tuple[list[int], int]]:
    """Yield groups of blocks that no rule distinguishes, and how many of each are needed."""
    marks: list[list[object]] = [[] for _ in blocks.names]
    wanted = 1
    for directive in plan.directives():
        for rule in directive.rules:
            segment = _segment(blocks, rule.path)
            if isinstance(rule.treatment, Every) or _joins(rule.treatment):
                wanted = 2
            if isinstance(rule.treatment, Divided):
                first = {_place(blocks, path) for path in matched_first(manifest, rule)}
                for index, mark in enumerate(marks):
                    mark.append(index in first)
            if segment is not None and segment != "*":
                found = pattern(segment)
                for name, mark in zip(blocks.names, marks, strict=True):
                    mark.append(found.matches(name))
    for number, group in enumerate(blocks.groups):
        for index in group:
            marks[index].append(number)
    if kinds is not None and len(kinds) == len(marks):
        for mark, kind in zip(marks, kinds, strict=True):
            mark.append(kind)
    if split:
        held = SplitPoints(manifest).stages(split, len(split) + 1)
        prefix = f"{blocks.path}." if blocks.path else ""
        for stage, paths in enumerate(held):
            for index, name in enumerate(blocks.names):
                marks[index] += [stage] if prefix + name in paths else []
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, mark in enumerate(marks):
        alike.setdefault(tuple(mark), []).append(index)
    for members in alike.values():
        yield members, wanted


def _joins(treatment: object) -> bool:
    """Whether a rule joins several of its modules into a bucket by their index."""
    return isinstance(treatment, Bucket) and isinstance(treatment.by, tuple) and max(treatment.by) > 1


def matched_first(manifest: Manifest, rule: PathRule[Any]) -> list[str]:
    """Return the modules to which a divided rule gives its first treatment."""
    return Paths(list(manifest.modules)).matching(pattern(rule.path))[: rule.treatment.n]


def _place(blocks: BlockList, path: str) -> int | None:
    """Return the index of the block that a module is or lies in."""
    prefix = f"{blocks.path}." if blocks.path else ""
    name = path[len(prefix) :].partition(".")[0] if path.startswith(prefix) else ""
    return blocks.names.index(name) if name in blocks.names else None


def held_of(blocks: Blocks, manifest: Manifest, paths: Sequence[str]) -> int:
    """Return how many of some modules the smaller model has."""
    known = next(item for item in manifest.block_lists if item.path == blocks.path)
    return sum(place is None or place in blocks.kept for place in (_place(known, path) for path in paths))


def _prefetched(plan: Plan) -> int:
    if plan.comm is None or not isinstance(plan.comm.prefetch, Units):
        return 0
    return min(3, max(plan.comm.prefetch.forward, plan.comm.prefetch.backward))


def _for_stages(count: int, stages: tuple[int, int], whole: int, *, even: bool) -> int:
    """Return enough blocks for one per stage, and equally many per stage if the original model has that."""
    before, now = stages
    count = max(count, now)
    if even:
        count = count + (count % now == 0) if whole % before else -(-count // now) * now
    return min(count, whole)


def _segment(blocks: BlockList, path: str) -> str | None:
    """Return the part of a pattern that names the blocks; None if it does not reach them or leaves the depth open."""
    containers = blocks.path.split(".") if blocks.path else []
    if path == "root":
        return None
    segments = [segment for _, segment in segments_of(path)]
    if len(segments) <= len(containers):
        return None
    for segment, name in zip(segments, containers, strict=False):
        if segment == "**" or not pattern(segment).matches(name):
            return None
    found = segments[len(containers)]
    return None if found == "**" else found


def rewritten(blocks: Blocks, path: str) -> str | None:
    """Return a pattern with the blocks' numbers in the smaller model; None where none of its blocks is kept."""
    whole = BlockList(path=blocks.path, names=blocks.names, groups=())
    segment = _segment(whole, path)
    if segment is None or "*" in segment:
        return path
    found = pattern(segment)
    places = [new for new, old in enumerate(blocks.kept) if found.matches(blocks.names[old])]
    if not places:
        return None if any(found.matches(name) for name in blocks.names) else path
    if ".." in segment and places == list(range(places[0], places[-1] + 1)):
        numbers = f"{{{places[0]}..{places[-1]}}}"
    else:
        numbers = str(places[0]) if len(places) == 1 else f"{{{', '.join(map(str, places))}}}"
    parts = [text for _, text in segments_of(path)]
    parts[len(blocks.path.split(".")) if blocks.path else 0] = numbers
    return ".".join(parts)


def patterns_of(treatments: Mapping[str, T], manifest: Manifest) -> Iterator[tuple[str, T]]:
    """Yield patterns and treatments that are equivalent to one per module, merging equal blocks."""
    for found in grouped(treatments, manifest.block_lists):
        for relative, treatment in found.members:
            paths = block_paths(found)
            if found.blocks is None or len(paths) == 1:
                yield ".".join(filter(None, (paths[0], relative))) or "root", treatment
                continue
            names = ", ".join(found.blocks.names[index] for index in found.indices)
            yield ".".join(filter(None, (found.blocks.path, f"{{{names}}}", relative))), treatment


def points_of(blocks: Blocks, split: Sequence[str]) -> tuple[str, ...]:
    """Return the first module of each stage but the first, in the smaller model."""
    prefix = f"{blocks.path}." if blocks.path else ""
    found = []
    for point in split:
        name = point[len(prefix) :] if point.startswith(prefix) else ""
        if name in blocks.names:
            first = blocks.names.index(name)
            place = next((new for new, old in enumerate(blocks.kept) if old >= first), None)
            found.append(point if place is None else f"{prefix}{place}")
        else:
            found.append(point)
    return tuple(found)
