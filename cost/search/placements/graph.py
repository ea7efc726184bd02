"""Module graph of a model whose styles on `tp` are open: the valid styles of each module by the layouts of its inputs.

The graph follows the model's forward with :mod:`legoai.dsl.analysis.layouts.propagation`, which computes every result.
A style is valid for an input layout if propagation finds no mismatch. Each module, operation or change of layout whose
result depends on styles is a node, and its output has one of several layouts.

Repeated blocks with the same rules share their styles. The graph holds the first of them, and the second one on behalf
of all others: its output has the layout of its input, so that the next block can take it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from legoai.cost.search.lower_bounds.local_kernels import AttentionShape
from legoai.cost.search.lower_bounds.open_holes.block_steps import is_left_to_torch
from legoai.cost.search.placements.costs import Cost, PlacementCosts
from legoai.cost.search.placements.program import Label, Node, PlacementGraph, Strategy
from legoai.dsl.analysis.computation.attention import head_widths
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.layouts.propagation import Propagation
from legoai.dsl.analysis.layouts.tensors import ANY, UNKNOWN, Tensor, matched
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step

_OPEN: Final[PathRule[Any]] = PathRule(path="**", treatment=Hole())
"""Placeholder for the rule of a module whose style is open, where the rule itself does not matter."""

_Layout = tuple[Tensor, bool, object]
"""Key of a layout: tensor, whether replicated parameters contribute to it, and whether its rule is loss parallel."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Result of a step of the forward.

    Attributes:
        node: number of the node that makes it; None where it does not depend on styles.
        tensors: its possible layouts, each with an example tensor.
        features: number of features per token.
    """

    node: int | None
    tensors: Mapping[_Layout, Tensor]
    features: int


def _constant(tensor: Tensor, features: int = 0) -> Value:
    return Value(None, {_layout(tensor): tensor}, features)


def _layout(tensor: Tensor) -> _Layout:
    rule = tensor.source.rule if tensor.source is not None else None
    return tensor, tensor.learned, bool(getattr(getattr(rule, "treatment", None), "loss_parallel", False))


_Make = Callable[[Label, Sequence[Tensor]], tuple[Tensor, Cost] | None]
"""Function from the label of a style and input tensors to a result and its cost; None where the style is invalid."""

_NOTHING: Final[tuple[Label, ...]] = (None,)
_INSIDE: Final = " "
"""Path of steps to which no rule applies."""


class GraphBuilder:
    """Builder of a model's placement graph.

    Args:
        manifest: manifest of the model, with a known forward.
        rules: the rule of each module and parameter whose style is decided.
        open: the group of each module whose style is open.
        choices: the labels of each group, each with a rule that has the style.
        costs: costs of the styles.
        followed: leave out styles with a result of unknown layout, for which propagation cannot find a mismatch.
    """

    def __init__(
        self,
        manifest: Manifest,
        rules: Mapping[str, PathRule[Any]],
        open: Mapping[str, int],
        choices: Mapping[int, Mapping[Label, PathRule[Any]]],
        costs: PlacementCosts,
        *,
        followed: bool = True,
    ) -> None:
        self.manifest = manifest
        self.rules = rules
        self.open = open
        self.choices = choices
        self.costs = costs
        self.followed = followed
        self.graph = PlacementGraph()
        self._layouts = Propagation(manifest, {**rules, **dict.fromkeys(open, _OPEN)})
        self._touched = {""} | {above for path in open for above in (path, *holders(path))}
        """Modules that are open or contain an open one."""
        self._runs = dict(self._find_runs())
        self._rest: dict[str, Value] = {}
        """Result of the other repeated blocks, by the path of the first."""

    def build(self) -> PlacementGraph:
        """Build the graph of one forward, from the model's inputs to its loss."""
        arguments = [_constant(item) for item in self._layouts.given()]
        made = self._flow(self.manifest.modules[""], arguments, 1, whole=True)

        def judge(_: Label, taken: Sequence[Tensor]) -> tuple[Tensor, Cost]:
            self._layouts.result(taken[0])
            return taken[0], self.costs.loss(self.manifest.vocab_size or 0, taken[0])

        self._node(_INSIDE, [made], judge, 0, 1)
        return self.graph

    def _find_runs(self) -> Iterator[tuple[str, tuple[str, int]]]:
        """Yield each block with open styles, with the first of its repeated blocks and their number."""
        for blocks in self.manifest.block_lists:
            paths = blocks.paths
            for _, run in itertools.groupby(paths, key=self._class_of):
                members = list(run)
                yield from ((path, (members[0], len(members))) for path in members if path in self._touched)

    def _class_of(self, path: str) -> tuple[object, ...]:
        """Key that is the same for equal blocks with the same rules."""
        inside = [name for name in self.manifest.modules if name == path or name.startswith(f"{path}.")]
        inside += [
            self.manifest.modules[name].child_path(item.name)
            for name in list(inside)
            for item in self.manifest.modules[name].parameters
        ]
        rules = (self.open.get(name, id(self.rules[name]) if name in self.rules else None) for name in inside)
        return (self.manifest.template_of(path), *rules)

    def _flow(self, info: ModuleInfo, arguments: Sequence[Value], count: int, *, whole: bool = False) -> Value:
        names = [step.name for step in info.flow if step.op == "input"]
        pending = iter(matched(arguments, names, _constant(UNKNOWN)))
        made: list[Value] = []
        for step in info.flow:
            taken = [made[index] for index in step.inputs]
            if step.op == "input":
                made.append(next(pending))
            elif step.op == "call":
                made.append(self._call(info.child_path(step.name), taken, count))
            else:
                made.append(self._operation(info, step, taken, count))
        results = [made[index] for index in info.outputs]
        alike = len({item.node for item in results}) == 1
        return results[0] if results and (whole or alike) else _constant(UNKNOWN)

    def _call(self, path: str, arguments: list[Value], count: int) -> Value:
        if path not in self._runs:
            return self._module(path, arguments, count)
        first, length = self._runs[path]
        if path == first:
            return self._block(path, arguments, 1)
        if first not in self._rest:
            made = self._block(path, arguments, length - 1)
            self._rest[first] = made if length == 2 else self._joined(arguments[0], made)
        return self._rest[first]

    def _joined(self, given: Value, made: Value) -> Value:
        """The result of a block, restricted to layouts equal to that of its input."""

        def same(_: Label, taken: Sequence[Tensor]) -> tuple[Tensor, Cost] | None:
            return (taken[1], Cost()) if _layout(taken[0]) == _layout(taken[1]) else None

        return self._node(_INSIDE, [given, made], same, made.features, 1)

    def _block(self, path: str, arguments: list[Value], count: int) -> Value:
        """Add a repeated block, whose input is kept for its backward."""

        def keep(_: Label, taken: Sequence[Tensor]) -> tuple[Tensor, Cost]:
            return taken[0], Cost(0.0, self.costs.kept(arguments[0].features, taken[0]))

        given = self._node(_INSIDE, arguments[:1], keep, arguments[0].features, count)
        return self._module(path, [given, *arguments[1:]], count)

    def _module(self, path: str, arguments: list[Value], count: int) -> Value:
        info = self.manifest.modules[path]
        inside = any(other != path and other.startswith(f"{path}.") for other in self.open)
        if inside:
            return self._holder(info, arguments, count)
        styled = info.kind in ("linear", "embedding", "norm")

        def call(label: Label, taken: Sequence[Tensor]) -> tuple[Tensor, Cost] | None:
            rule = self._rule(path, label)
            style = None if rule is None else rule.treatment
            if taken and is_left_to_torch(info, style, taken[0]):
                return None
            cost = self.costs.layer(info, style, taken[0]) if styled and taken else Cost()
            if taken and not styled:
                cost = self._around(path, style, arguments[0].features, arguments[0].features)
            return self._layouts.module(path, taken), cost

        features = arguments[0].features if arguments else 0
        if info.kind in ("linear", "embedding"):
            features = int(info.attributes.get("out_features") or info.attributes.get("embedding_dim") or 0)
        return self._node(path, arguments, call, features, count)

    def _around(self, path: str, style: Any, given: int, made: int) -> Cost:
        entering = self.costs.conversion(path, style, given, entering=True)
        return entering + self.costs.conversion(path, style, made, entering=False)

    def _holder(self, info: ModuleInfo, arguments: list[Value], count: int) -> Value:
        """Add a module that contains open ones: its inputs and its output have nodes for their changes of layout."""
        path = info.path
        inside = arguments
        if path in self.open or path in self.rules:
            inside = [self._entering(path, arguments, index, count) for index in range(len(arguments))]
        made = self._flow(info, inside, count)

        def leave(label: Label, taken: Sequence[Tensor]) -> tuple[Tensor, Cost]:
            rule = self._rule(path, label)
            style = None if rule is None else rule.treatment
            cost = self.costs.conversion(path, style, made.features, entering=False)
            return self._layouts.leaving(path, taken[1:], taken[0]), cost

        return self._node(path, [made, *inside[:1]], leave, made.features, count)

    def _entering(self, path: str, arguments: list[Value], index: int, count: int) -> Value:
        given = arguments[index]

        def enter(label: Label, taken: Sequence[Tensor]) -> tuple[Tensor, Cost]:
            others = [ANY] * len(arguments)
            others[index] = taken[0]
            rule = self._rule(path, label)
            style = None if rule is None else rule.treatment
            entered = self._layouts.entering(path, others)[index]
            cost = self.costs.conversion(path, style, given.features, entering=True) if index == 0 else Cost()
            return entered, cost

        return self._node(path, [given], enter, given.features, count)

    def _operation(self, info: ModuleInfo, step: Step, taken: list[Value], count: int) -> Value:
        features = max((item.features for item in taken), default=0) if step.op in ("add", "mul") else 0
        features = features or (taken[0].features if taken else 0)
        heads = _heads(info) if step.op == "attention" else None

        def compute(_: Label, tensors: Sequence[Tensor]) -> tuple[Tensor, Cost]:
            made = self._layouts.operation(info, step, list(tensors))
            return made, self.costs.operation(info.path, step.op, features, list(tensors), heads) if tensors else Cost()

        return self._node(_INSIDE, taken, compute, features, count)

    def _rule(self, path: str, label: Label) -> PathRule[Any] | None:
        """The rule of a module under a label of its group; None where it has no rule."""
        group = self.open.get(path)
        return self.rules.get(path) if group is None else self.choices[group][label]

    def _node(
        self,
        path: str,
        inputs: Sequence[Value],
        make: _Make,
        features: int,
        count: int,
    ) -> Value:
        """Add a node with a strategy for each style and each combination of input layouts without a mismatch."""
        group = self.open.get(path)
        held = [index for index, item in enumerate(inputs) if item.node is not None]
        strategies: list[Strategy] = []
        tensors: dict[_Layout, Tensor] = {}
        for label in _NOTHING if group is None else self.choices[group]:
            for taken in itertools.product(*(item.tensors.items() for item in inputs)):
                found = self._tried(path, label, make, [tensor for _, tensor in taken])
                if found is not None:
                    made, cost = found
                    layout = _layout(made)
                    tensors.setdefault(layout, made)
                    takes = tuple(taken[index][0] for index in held)
                    strategies.append(Strategy(label, takes, layout, cost.seconds * count, cost.bytes * count))
        same = len(tensors) == 1 and not any(item.seconds or item.bytes for item in strategies)
        if not held and same and len(strategies) == (1 if group is None else len(self.choices[group])):
            return Value(None, tensors, features)
        numbers = [number for item in inputs if (number := item.node) is not None]
        return Value(self.graph.add(Node(group, tuple(strategies)), numbers), tensors, features)

    def _tried(self, path: str, label: Label, make: _Make, taken: Sequence[Tensor]) -> tuple[Tensor, Cost] | None:
        """The result of ``make`` under the style of this label; None on a mismatch."""
        group = self.open.get(path)
        if group is not None:
            self._layouts.styles[path] = self.choices[group][label]
        self._layouts.mismatches.clear()
        try:
            found = make(label, taken)
        finally:
            if group is not None:
                self._layouts.styles[path] = _OPEN
        if self._layouts.mismatches or found is None:
            return None
        return None if self.followed and found[0].state == "unknown" else found


def _heads(info: ModuleInfo) -> AttentionShape | None:
    known = info.attributes
    if "n_heads" not in known or "head_dim" not in known:
        return None
    heads = int(known["n_heads"])
    return AttentionShape(heads, int(known.get("n_kv_heads", heads)), *head_widths(info))
