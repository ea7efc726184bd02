"""Steps of a block's forward on `tp`: input and output layouts under each style, and their communication.

What is not known costs nothing: a layout that cannot be propagated, redistribution that is left to PyTorch, and
communication that may overlap computation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from legoai.cost.trace.records import CollectiveKind
from legoai.dsl.analysis.layouts.propagation import Propagation
from legoai.dsl.analysis.layouts.tensors import ANY, UNKNOWN, Tensor, as_list, matched
from legoai.dsl.analysis.parallelism.overlap import overlaps
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.layouts import Layout, Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise, Unplaced
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step
from legoai.specs.record import replace

_VIEWS: Final = ("reshape", "index", "cast")
"""Operations that need not wait for what they read."""
_OPEN: Final[PathRule[Any]] = PathRule(path="**", treatment=Hole())
"""Stands for the rule of a module whose style is open."""


class Collective(NamedTuple):
    """A collective beside which nothing computes.

    Attributes:
        phase: in which it is.
        kind: of collective.
        features: of each token in the tensor that it is over.
        begins: whose backward begins with it, if any: what that reads may be computed again before it is waited for.
    """

    phase: Literal["forward", "backward"]
    kind: CollectiveKind
    features: int
    begins: Literal["", "block", "layer"] = ""


class Computed(NamedTuple):
    """A linear layer that is whole on every rank, or cut by rows or columns of its weight; or whole attention."""

    path: str
    cut: Literal["none", "rows", "columns"]


class Left(NamedTuple):
    """A cut layer that gets a DTensor in another layout than its own, which PyTorch brings together as it likes.

    Attributes:
        path: of the layer.
        cut: by rows or by columns of its weight.
        by_features: whether its output leaves in pieces of the features.
        is_waited_for: whether nothing computes beside what brings its output into its layout.
    """

    path: str
    cut: Literal["rows", "columns"]
    by_features: bool
    is_waited_for: bool


Item: TypeAlias = Collective | Computed | Left
"""What a rank does under a style that it need not do under each."""


class Held(NamedTuple):
    """A tensor in a layout, whether whole parameters are in it, and in which layout a DTensor's gradient is wanted."""

    tensor: Tensor
    learned: bool = False
    gradient: Literal["whole", "pieces", "hidden"] = "whole"

    @staticmethod
    def of(tensor: Tensor) -> Held:
        """A tensor whose gradient nothing is known of."""
        return Held(tensor, tensor.learned)


Made: TypeAlias = tuple[Held, tuple[Item, ...]]
"""What a step gives, and what a rank does for it."""


@dataclass(frozen=True, slots=True)
class Styles:
    """Rules of modules whose style is decided, the hole of each whose style is open, and the rules that each may be."""

    decided: Mapping[str, PathRule[Any]]
    open: Mapping[str, int]
    choices: Mapping[int, Sequence[PathRule[Any]]]

    def of(self, path: str) -> Sequence[PathRule[Any] | None]:
        """The rules that a module may have."""
        hole = self.open.get(path)
        return (self.decided.get(path),) if hole is None else self.choices[hole]

    def are_inside(self, path: str) -> bool:
        """Whether a module below this one has a style, or may have one."""
        above = f"{path}." if path else ""
        return any(other != path and other.startswith(above) for each in (self.decided, self.open) for other in each)


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A step: a module, what its style makes of its inputs or its output, or an operation between modules.

    Attributes:
        path: of the module, or of that which computes the operation.
        reads: the values that it takes.
        make: gives what it makes of these under a rule.
        features: of a token, of what it makes; 0 if that is not known.
        does: what it is to the steps around it; a block has steps of its own.
        styled: whether the rule of the module decides it.
    """

    path: str
    reads: tuple[int, ...]
    make: Callable[[PathRule[Any] | None, Sequence[Held]], Made | None]
    features: int
    does: Literal["multiplies", "enters", "views", "block", "other"]
    styled: bool = True


class BlockSteps:
    """The steps of a block, or of a model around its blocks, in their order.

    Each makes the value behind those of the steps before it, which stand behind those that the block is given.

    Args:
        manifest: of the model.
        styles: of its modules.
        path: of the block.
        features: of each of its arguments, 0 where that is not known.
        blocks: paths of modules inside that are not followed.

    Attributes:
        steps: in order.
        result: the value that the block gives.
        layouts: follows them.
        is_known: whether the forward of each module is known inside of which styles are open.
    """

    def __init__(
        self, manifest: Manifest, styles: Styles, path: str, features: Sequence[int], *, blocks: Collection[str] = ()
    ) -> None:
        self.steps: list[BlockStep] = []
        self.is_known = True
        self.styles = styles
        self._manifest, self._blocks, self._given = manifest, blocks, tuple(features)
        self.layouts = Propagation(manifest, {**styles.decided, **dict.fromkeys(styles.open, _OPEN)})
        self.result = self._call(path, tuple(range(len(features))))
        self._in_turn = self._run_in_turn(path)

    def made(self, place: int, rule: PathRule[Any] | None, taken: Sequence[Held]) -> Made | None:
        """What a step gives where its module has this rule; None where something disagrees."""
        step, styles = self.steps[place], self.layouts.styles
        held = styles.get(step.path)
        if step.styled and rule is not None:
            styles[step.path] = rule
        self.layouts.mismatches.clear()
        found = step.make(rule, taken)
        if held is not None:
            styles[step.path] = held
        return None if self.layouts.mismatches else found

    def rules(self, place: int) -> Sequence[PathRule[Any] | None]:
        """The rules that the module of a step may have; none but None where they make no difference to it."""
        step = self.steps[place]
        return self.styles.of(step.path) if step.styled else (None,)

    def hole(self, place: int) -> int | None:
        """The hole that decides a step."""
        step = self.steps[place]
        return self.styles.open.get(step.path) if step.styled else None

    def value(self, place: int) -> int:
        """What a step makes."""
        return len(self._given) + place

    def _add(self, step: BlockStep) -> int:
        self.steps.append(step)
        return self.value(len(self.steps) - 1)

    def _features(self, value: int) -> int:
        before = len(self._given)
        return self._given[value] if value < before else self.steps[value - before].features

    def _call(self, path: str, arguments: tuple[int, ...]) -> int:
        info = self._manifest.modules[path]
        if path in self._blocks:
            features = self._features(arguments[0]) if arguments else 0
            return self._add(
                BlockStep(path, arguments, lambda _, taken: (taken[0], ()), features, "block", styled=False)
            )
        if not self.styles.are_inside(path):
            return self._module(info, arguments)
        self.is_known &= bool(info.flow)
        inside = arguments
        if path in self.styles.open or path in self.styles.decided:
            inside = tuple(self._entering(path, arguments, index) for index in range(len(arguments)))
        made = self._flow(info, inside)
        place = len(self.steps)

        def leave(rule: PathRule[Any] | None, taken: Sequence[Held]) -> Made:
            given = taken[1].tensor if taken[1:] else UNKNOWN
            result = self.layouts.leaving(path, [given], _ranked(info, taken[0].tensor, given))
            style = None if rule is None else rule.treatment
            style = style.then if isinstance(style, Inputs) else style
            gathers = isinstance(style, Outputs) and _is_gather(style) and _is_known(taken[0])
            return Held.of(result), self._collective(place, "all_gather", self._features(made), when=gathers)

        return self._add(BlockStep(path, (made, *inside[:1]), leave, self._features(made), "views"))

    def _entering(self, path: str, arguments: Sequence[int], index: int) -> int:
        place, features = len(self.steps), self._features(arguments[index])

        def enter(rule: PathRule[Any] | None, taken: Sequence[Held]) -> Made:
            others = [ANY] * len(arguments)
            others[index] = taken[0].tensor
            entered = self.layouts.entering(path, others)[index]
            style = None if rule is None else rule.treatment
            if index or not isinstance(style, Inputs):
                return Held(entered, entered.learned, taken[0].gradient), ()
            gathers = _is_gather(style) and _is_known(taken[0])
            gradient: Literal["hidden", "pieces", "whole"] = (
                "hidden" if overlaps(style) else "pieces" if _is_gather(style) else "whole"
            )
            items = self._collective(place, "all_gather", features, when=gathers)
            return Held(entered, entered.learned, gradient), items

        return self._add(BlockStep(path, (arguments[index],), enter, features, "enters"))

    def _flow(self, info: ModuleInfo, arguments: Sequence[int]) -> int:
        names = [step.name for step in info.flow if step.op == "input"]
        pending = iter(matched(arguments, names, -1))
        made: list[int] = []
        for step in info.flow:
            taken = tuple(made[index] for index in step.inputs)
            if step.op == "input":
                value = next(pending)
                made.append(self._unknown() if value < 0 else value)
            elif step.op == "call":
                made.append(self._call(info.child_path(step.name), taken))
            else:
                made.append(self._operation(info, step, taken))
        results = {made[index] for index in info.outputs}
        return results.pop() if len(results) == 1 else self._unknown()

    def _unknown(self) -> int:
        return self._add(BlockStep("", (), lambda *_: (Held(UNKNOWN), ()), 0, "other", styled=False))

    def _operation(self, info: ModuleInfo, step: Step, reads: tuple[int, ...]) -> int:
        features = [self._features(value) for value in reads]
        widest = max(features, default=0) if step.op in ("add", "mul") else next(iter(features), 0)
        attends = step.op == "attention"

        def compute(_: PathRule[Any] | None, taken: Sequence[Held]) -> Made | None:
            tensors = [item.tensor for item in taken]
            result = self.layouts.operation(info, step, tensors)
            whole = attends and bool(tensors) and tensors[0].state == "replicate"
            return Held.of(result), (Computed(info.path, "none"),) if whole else ()

        does: Literal["multiplies", "views", "other"] = (
            "multiplies" if attends or step.op == "matmul" else "views" if step.op in _VIEWS else "other"
        )
        return self._add(BlockStep(info.path, reads, compute, widest, does, styled=False))

    def _module(self, info: ModuleInfo, arguments: tuple[int, ...]) -> int:
        place, is_linear = len(self.steps), info.kind == "linear"
        features = self._features(arguments[0]) if arguments else 0
        if info.kind in ("linear", "embedding"):
            features = int(info.attributes.get("out_features") or info.attributes.get("embedding_dim") or 0)

        def call(rule: PathRule[Any] | None, taken: Sequence[Held]) -> Made:
            result = self.layouts.module(info.path, [item.tensor for item in taken])
            known = is_linear and bool(taken) and (taken[0].tensor.wrapped or _is_known(taken[0]))
            return Held.of(result), tuple(self._layer(place, info, rule, taken[0])) if known else ()

        multiplies = is_linear or info.kind in ("attention", "feed_forward", "moe", "experts", "other")
        return self._add(BlockStep(info.path, arguments, call, features, "multiplies" if multiplies else "other"))

    def _layer(self, place: int, info: ModuleInfo, rule: PathRule[Any] | None, got: Held) -> Iterator[Item]:
        """What a linear layer takes, of whose input the layout is known."""
        style = None if rule is None or isinstance(rule.treatment, Unplaced) else rule.treatment
        if style is None and got.tensor.state == "replicate":
            yield Computed(info.path, "none")
        if not isinstance(style, Colwise | Rowwise):
            return
        if is_left_to_torch(info, style, got.tensor):
            if self._in_turn and (got.tensor.state == "replicate" or got.tensor.cut == 1):
                leaves = style.output if style.output is not None or isinstance(style, Rowwise) else Sharded(dim=-1)
                by_features = isinstance(leaves, Sharded) and leaves.dim == -1
                cut: Literal["rows", "columns"] = "columns" if isinstance(style, Rowwise) else "rows"
                yield Left(info.path, cut, by_features, self._is_waited_for(place))
            return
        if got.tensor.state == "unknown":
            return
        rowwise = isinstance(style, Rowwise)
        if got.gradient != "hidden" and not overlaps(style):
            yield Computed(info.path, "columns" if rowwise else "rows")
        if not self._in_turn:
            return
        yield from self._around(place, info, style, got)
        wide = int(info.attributes.get("out_features", 0))
        leaves = style.output
        if rowwise and not isinstance(leaves, Partial | Hole):
            in_pieces = isinstance(leaves, Sharded)
            yield from self._collective(place, "reduce_scatter" if in_pieces else "all_reduce", wide)
            if isinstance(leaves, Sharded) and leaves.dim == 1:
                yield Collective("backward", "all_gather", wide, "block" if self._is_last(place) else "layer")
        elif isinstance(leaves, Replicated):
            yield from self._collective(place, "all_gather", wide)

    def _around(self, place: int, info: ModuleInfo, style: Colwise | Rowwise, got: Held) -> Iterator[Item]:
        """What it takes to bring a cut layer's input into its layout, and the gradient back.

        Of layers that read one value the first to run is the last to give a gradient, beside which nothing computes.
        """
        given, wide = style.input, int(info.attributes.get("in_features", 0))
        wanted = layout_wanted(info, style)
        if isinstance(wanted, Replicated) and isinstance(given, Sharded):
            yield Collective("forward", "all_gather", wide)
        if not self._is_read_first(place) or overlaps(style):
            return
        if not isinstance(wanted, Replicated):
            if isinstance(given, Replicated):
                yield Collective("backward", "all_gather", wide)
        elif isinstance(given, Sharded):
            yield Collective("backward", "reduce_scatter", wide)
        elif given is None or isinstance(given, Replicated):
            if not got.tensor.wrapped or got.gradient == "whole":
                yield Collective("backward", "all_reduce", wide)
            elif got.gradient == "pieces":
                yield Collective("backward", "reduce_scatter", wide)

    def _collective(self, place: int, kind: CollectiveKind, features: int, *, when: bool = True) -> tuple[Item, ...]:
        """A collective for what a step gives in forward, if nothing computes beside it."""
        counts = when and features and self._in_turn and self._is_waited_for(place)
        return (Collective("forward", kind, features),) if counts else ()

    def _is_waited_for(self, place: int) -> bool:
        """Whether what a step gives is read, by more than a view of it, before a product is computed that does not."""
        reader = self._first_reader(len(self._given) + place)
        product = next((at for at in range(place + 1, len(self.steps)) if self.steps[at].does == "multiplies"), None)
        return reader is not None and (product is None or reader <= product)

    def _is_last(self, place: int) -> bool:
        """Whether no step behind this one multiplies."""
        return all(step.does != "multiplies" for step in self.steps[place + 1 :])

    def _is_read_first(self, place: int) -> bool:
        """Whether a step reads its input before all others that compute with it."""
        value, before = self.steps[place].reads[0], len(self._given)
        while value >= before and self.steps[value - before].does == "enters":
            value = self.steps[value - before].reads[0]
        return self._first_reader(value) == place

    def _first_reader(self, value: int) -> int | None:
        """The first step that reads a value, or a view of it, and is none itself."""
        views = {value}
        for place, step in enumerate(self.steps):
            if not views.isdisjoint(step.reads):
                if step.does not in ("views", "enters"):
                    return place
                views.add(len(self._given) + place)
        return None

    def _run_in_turn(self, path: str) -> bool:
        """Whether each of a block's modules that multiply takes what the one before it gives."""
        flow, info = self._manifest.modules[path].flow, self._manifest.modules[path]
        follows: list[frozenset[int]] = []
        last: int | None = None
        multiply = {step.path for step in self.steps if step.does == "multiplies"}
        for place, step in enumerate(flow):
            follows.append(frozenset(step.inputs).union(*(follows[index] for index in step.inputs)))
            called = info.child_path(step.name) if step.op == "call" else ""
            if step.op in ("attention", "matmul") or any(
                one == called or one.startswith(f"{called}.") for one in multiply if called
            ):
                if last is not None and last not in follows[place]:
                    return False
                last = place
        return bool(flow)


def is_left_to_torch(info: ModuleInfo, style: Any, got: Tensor) -> bool:
    """Whether a layer gets a DTensor in another layout than its own, and says nothing of it.

    `ColwiseParallel` and `RowwiseParallel` then change nothing, and the operator redistributes as PyTorch chooses.
    """
    if not isinstance(style, Colwise | Rowwise) or style.input is not None or not got.wrapped:
        return False
    return _layout(got) != layout_wanted(info, style)


def layout_wanted(info: ModuleInfo, style: Colwise | Rowwise) -> Layout:
    """The layout in which a cut layer computes with its input."""
    return Sharded(dim=-1) if isinstance(style, Rowwise) and info.kind != "embedding" else Replicated()


def _layout(tensor: Tensor) -> Layout | None:
    if tensor.state == "unknown":
        return None
    if tensor.state == "shard" and tensor.dim is not None:
        return Sharded(dim=tensor.dim)
    return Partial() if tensor.state == "partial" else Replicated()


def _ranked(info: ModuleInfo, made: Tensor, given: Tensor) -> Tensor:
    """What a module makes, with the number of dims of what it is given, which such modules keep.

    A style that takes features in pieces for pieces of another dim leaves too few features for whatever reads them.
    """
    keeps = info.kind in ("attention", "feed_forward", "moe") and made.cuts_features and not made.moved
    return replace(made, rank=given.rank) if keeps and made.rank is None and not given.moved else made


def _is_known(held: Held) -> bool:
    return held.tensor.state not in ("unknown", "any")


def _is_gather(style: Inputs | Outputs) -> bool:
    """Whether a change of layout gathers the first tensor."""
    source, target = as_list(style.source)[0], as_list(style.target)[0]
    return isinstance(source, Sharded) and isinstance(target, Replicated)
