"""Blocks with open styles on `tp`, with the choices for each.

The layout of a block's input depends on the modules before it: the model is propagated around its blocks, from its
input on, with every layout that a tensor may have.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from legoai.cost.search.lower_bounds.open_holes.block_steps import BlockSteps, Held, Styles
from legoai.cost.search.lower_bounds.open_holes.style_graph import StyleGraph, style_graph
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.shard import shard_on_tp
from legoai.dsl.analysis.parallelism.styles import style_of, styles_for
from legoai.dsl.frontend.paths import assign, pattern
from legoai.specs.directives.base import Directive, PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.shard import Shard, Unplaced
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.record import replace

_MOST_WAYS: Final = 4096
"""In which what a module around the blocks takes may lie, from which on nothing is known of the model."""

_MOST_KINDS: Final = 8
"""Of blocks that differ in themselves or in their styles; of models with more nothing is known."""

_Layouts: TypeAlias = frozenset[Held]


class OpenBlock(NamedTuple):
    """All ways to choose the styles of a block, and the path of the equal block whose modules they name."""

    graph: StyleGraph
    like: str


def has_open_styles(analysis: Analysis) -> bool:
    """Whether the style of some module is open on several ranks.

    Raises:
        Undecided: the number of ranks is a hole.
    """
    shard = shard_on_tp(analysis)
    return shard is not None and any(isinstance(rule.treatment, Hole) for rule in shard.rules)


@fact
def open_blocks(analysis: Analysis) -> Mapping[str, OpenBlock]:
    """The blocks in which styles are open, by path; none where it is not known which may be chosen.

    Raises:
        Undecided: an option of a style is a hole.
    """
    manifest, shard = analysis.manifest, shard_on_tp(analysis)
    if manifest is None or shard is None or manifest.flow_error is not None:
        return {}
    if names_parts(analysis, analysis.plan.fsdp):
        return {}  # gradients of a unit are copied while its block waits in backward
    styles = _styles(analysis, manifest, shard)
    return {} if styles is None or not styles.open else Blocks(manifest, styles).found()


def names_parts(analysis: Analysis, statement: Directive | None) -> bool:
    """Whether some rule of a statement is for modules inside of blocks, whatever it says of them."""
    if statement is None or analysis.manifest is None:
        return False
    blocks = frozenset(path for item in analysis.manifest.block_lists for path in item.paths)
    paths = analysis.paths_for(statement)
    named = (path for rule in statement.rules for path in paths.matching(pattern(rule.path)))
    return any(not blocks.isdisjoint(holders(path)) for path in named)


def _styles(analysis: Analysis, manifest: Manifest, shard: Shard) -> Styles | None:
    """The styles of modules; None where a parameter is placed by itself, or it is not known what a hole may be."""
    paths = analysis.paths_for(shard)
    decided: dict[str, PathRule[Any]] = {}
    open: dict[str, int] = {}
    choices: dict[int, Sequence[PathRule[Any]]] = {}
    for path, rule in assign(shard.rules, paths).by_path.items():
        if path not in manifest.modules:
            return None
        if isinstance(rule.treatment, Hole):
            domain = rule.treatment.domain
            if id(rule) not in choices:
                listed = map(style_of, styles_for(manifest, paths, rule.path)) if domain is None else domain
                choices[id(rule)] = [replace(rule, treatment=treatment) for treatment in listed]
            if not choices[id(rule)]:
                return None
            open[path] = id(rule)
        elif not isinstance(rule.treatment, Unplaced):
            decided[path] = rule
    return Styles(decided, open, choices)


class Blocks:
    """The blocks of a model, followed from its inputs.

    Args:
        manifest: of the model, whose forward is known.
        styles: of its modules.
    """

    def __init__(self, manifest: Manifest, styles: Styles) -> None:
        self._manifest, self._styles = manifest, styles
        self._paths = [path for item in manifest.block_lists for path in item.paths]
        self._open = dict.fromkeys(self._paths, False)
        self._kinds = dict(self._by_kind())
        self._like: dict[object, str] = {}
        self._given: dict[str, tuple[_Layouts, ...]] = {}
        self._graphs: dict[tuple[str, tuple[_Layouts, ...]], StyleGraph | None] = {}

    def found(self) -> dict[str, OpenBlock]:
        """The blocks in which styles are open; none where what comes before them cannot be followed."""
        if len(set(self._kinds.values())) > _MOST_KINDS:
            return {}
        names = [step for step in self._manifest.modules[""].flow if step.op == "input"]
        around = BlockSteps(self._manifest, self._styles, "", [0] * len(names), blocks=frozenset(self._paths))
        values = [frozenset({Held.of(tensor)}) for tensor in around.layouts.given()]
        for place, step in enumerate(around.steps if around.is_known else ()):
            taken = [values[value] for value in step.reads]
            made = self._block(step.path, taken) if step.does == "block" else _made(around, place, taken)
            if made is None:
                return {}
            values.append(made)
        likes = {path: self._like.get(self._kinds[path]) for path in self._paths if self._open[path]}
        graphs = {path: self._graphs[like, self._given[like]] for path, like in likes.items() if like is not None}
        return {path: OpenBlock(graph, likes[path] or path) for path, graph in graphs.items() if graph is not None}

    def _by_kind(self) -> Iterator[tuple[str, object]]:
        """Each block with what it has in common with those that are equal and follow the same rules."""
        rules: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        blocks = frozenset(self._paths)
        identities = {**self._styles.open, **{path: id(rule) for path, rule in self._styles.decided.items()}}
        for path, rule in identities.items():
            block = next((one for one in (path, *holders(path)) if one in blocks), None)
            if block is not None:
                rules[block].append((path[len(block) :], rule))
                self._open[block] |= path in self._styles.open
        for block in self._paths:
            yield block, (self._manifest.template_of(block), tuple(sorted(rules[block])))

    def _block(self, path: str, taken: Sequence[_Layouts]) -> _Layouts | None:
        """How what a block gives may lie, with what was given to those before it that are equal."""
        like = self._like.setdefault(self._kinds[path], path)
        before = self._given.get(like, tuple(taken))
        given = tuple(one | other for one, other in zip(before, taken, strict=True))
        if (like, given) not in self._graphs:
            features = [max((held.tensor.width or 0 for held in each), default=0) for each in given]
            flow = BlockSteps(self._manifest, self._styles, like, features)
            self._graphs[like, given] = style_graph(flow, given) if flow.is_known else None
        self._given[like] = given
        graph = self._graphs[like, given]
        return None if graph is None else graph.results


def _made(around: BlockSteps, place: int, taken: Sequence[_Layouts]) -> _Layouts | None:
    """How what a step gives may lie; None where that is too much to look at, or nothing agrees."""
    rules = around.rules(place)
    if len(rules) * math.prod(map(len, taken)) > _MOST_WAYS:
        return None
    made = (around.made(place, rule, each) for each in itertools.product(*taken) for rule in rules)
    return frozenset(one[0] for one in made if one is not None) or None
