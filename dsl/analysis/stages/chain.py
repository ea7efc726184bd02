"""Chain of calls of the modules with which stages can begin, in execution order, and the valid cuts of a pipeline.

A stage runs the forward of the full model, with placeholders for the modules of other stages: those of earlier stages
return the received input, those of later ones pass on their input. That equals the model's own computation only if
exactly one tensor crosses each cut, directly from one module into another, and nothing else that a stage computes needs
tokens or weights of other stages. The manifest's flow shows this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.specs.record import Record

if TYPE_CHECKING:
    from legoai.specs.models.manifest import Manifest, ModuleInfo, StepOp


class Node(Record, kw_only=True):
    """One step of the forward, from the model's input to its output."""

    op: StepOp
    path: str
    """Path of the called module; else of the module whose forward contains the step."""
    inputs: tuple[int, ...]
    """The nodes of its arguments, in order."""


class CannotFollow(Exception):  # noqa: N818
    """The forward cannot be followed to its end; the message gives the position."""


class Cut(Record, kw_only=True):
    """Boundary between two stages.

    Attributes:
        before: the module that computes the crossing tensor.
        start: the first module that reads it.
        width: its features, the last dim; None where that is not known.
    """

    before: str
    start: str
    width: int | None


class Chain:
    """The calls of the modules with which stages can begin, in the order of execution."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.points = SplitPoints(manifest)
        self.nodes: list[Node] = []
        self._clean: dict[int, bool] = {}
        if manifest.flow_error is not None:
            raise CannotFollow(f"its forward cannot be followed: {manifest.flow_error}")
        self._walk("", ())

    def _walk(self, path: str, arguments: tuple[int, ...]) -> tuple[int, ...]:
        """Add the steps of a module that contains others; return the nodes of its results."""
        info = self.manifest.modules[path]
        count = sum(step.op == "input" for step in info.flow)
        if path and len(arguments) not in (count, 1):
            raise CannotFollow(f"the arguments of `{path}` cannot be told apart")
        given = iter(arguments if len(arguments) == count else arguments * count)
        made: list[tuple[int, ...]] = []
        for step in info.flow:
            taken = tuple(dict.fromkeys(node for index in step.inputs for node in made[index]))
            below = info.child_path(step.name)
            if step.op == "input":
                made.append((next(given),) if path else self._add("input", "", ()))
            elif step.op == "call" and below in self.points.position:
                made.append(self._add("call", below, taken))
            elif step.op == "call" and self.points.holder(below) is not None:
                raise CannotFollow(f"`{below}` is called by itself, without `{self.points.holder(below)}`")
            elif step.op == "call":
                made.append(self._walk(below, taken))
            else:
                made.append(self._add(step.op, path, taken))
        return tuple(dict.fromkeys(node for index in info.outputs for node in made[index]))

    def _add(self, op: StepOp, path: str, inputs: tuple[int, ...]) -> tuple[int]:
        self.nodes.append(Node(op=op, path=path, inputs=inputs))
        return (len(self.nodes) - 1,)

    @cached_property
    def calls(self) -> dict[str, list[int]]:
        """The nodes at which each module is called."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if node.op == "call":
                found.setdefault(node.path, []).append(index)
        return found

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """Modules that every stage computes itself, such as rotary embeddings: no weights, and no token goes in."""
        return tuple(
            path
            for path in self.points.starts
            if self.calls.get(path) and not self._weighs(path) and all(map(self._is_clean, self.calls[path]))
        )

    def stages(self, split: str | Sequence[str], stages: int) -> tuple[tuple[str, ...], ...]:
        """Return the modules of each stage, as `SplitPoints.stages`; modules that each stage computes are in each."""
        found = self.points.stages(split, stages)
        shared = set(self.everywhere)
        return tuple((*(path for path in stage if path not in shared), *self.everywhere) for stage in found)

    def cuts(self, stages: Sequence[Sequence[str]]) -> Iterator[Cut]:
        """Return the tensors that cross from each stage to the next.

        Raises:
            CannotFollow: a stage needs something else of earlier stages.
        """
        for path in ("", *self._holders()):
            for parameter in self.manifest.modules[path].parameters:
                name = f"{path}.{parameter.name}" if path else parameter.name
                raise CannotFollow(f"`{name}` is a parameter of a module that would be on every stage")
        stage_of = {path: index for index, stage in enumerate(stages) for path in stage if path not in self.everywhere}
        for path in stage_of:
            if len(self.calls.get(path, ())) > 1:
                raise CannotFollow(f"`{path}` is called {len(self.calls[path])} times in one forward")
        for index in range(1, len(stages)):
            yield self._cut(index, stage_of)

    @staticmethod
    def width(cuts: Sequence[Cut]) -> int:
        """Return the features of the crossing tensor, the same at every cut.

        Raises:
            CannotFollow: they are not known, or differ.
        """
        width = cuts[0].width
        odd = next((cut for cut in cuts if cut.width is None or cut.width != width), None)
        if odd is not None or width is None:
            before = (odd or cuts[0]).before
            raise CannotFollow(f"how many features `{before}` hands on cannot be told, or differs from the rest")
        return width

    def _cut(self, index: int, stage_of: dict[str, int]) -> Cut:
        """Return the tensor that crosses to one stage from the one before."""
        place = {path: self.calls[path][0] for path in stage_of if self.calls.get(path)}
        later = {path: at for path, at in place.items() if stage_of[path] >= index}
        start = min(later, key=later.__getitem__, default=None)
        if start is None or stage_of[start] != index:
            raise CannotFollow(f"no module of stage {index} computes what stage {index + 1} takes")
        for path, at in place.items():
            if stage_of[path] < index and at > later[start]:
                raise CannotFollow(f"`{path}` lies on an earlier stage than `{start}`, and is called after it")
        first = self.nodes[later[start]].inputs[:1]
        before = self.nodes[first[0]] if first else None
        if before is None or before.op != "call" or stage_of.get(before.path) != index - 1:
            raise CannotFollow(f"what `{start}` takes does not come straight from a module of the stage before")
        for at in range(later[start], len(self.nodes)):
            for source in self.nodes[at].inputs:
                if source < later[start] and source != first[0] and not self._is_clean(source):
                    raise CannotFollow(
                        f"{self._named(at)} takes what {self._named(source)} computes, besides what `{start}` takes"
                    )
        return Cut(before=before.path, start=start, width=self._widths[first[0]])

    def _holders(self) -> Iterator[str]:
        """The modules around those with which stages can begin."""
        yield from dict.fromkeys(
            ".".join(path.split(".")[:count]) for path in self.points.starts for count in range(1, path.count(".") + 1)
        )

    def _named(self, index: int) -> str:
        node = self.nodes[index]
        if node.op == "input":
            return "the model's input"
        return f"`{node.path}`" if node.op == "call" else f"the forward of `{node.path or 'root'}`"

    def _weighs(self, path: str) -> bool:
        info = self.manifest.modules[path]
        return bool(info.parameters) or any(self._weighs(info.child_path(name)) for name in info.children)

    def _is_clean(self, index: int) -> bool:
        """Whether a value is the same on every stage: computed only from buffers and shapes."""
        if index not in self._clean:
            node = self.nodes[index]
            if node.op in ("input", "parameter") or (node.op == "call" and self._weighs(node.path)):
                self._clean[index] = False
            else:
                used = self._used(node) if node.op == "call" else node.inputs
                self._clean[index] = all(map(self._is_clean, used))
        return self._clean[index]

    def _used(self, node: Node) -> tuple[int, ...]:
        """Return the arguments of a call whose values, rather than only shapes and dtypes, affect the result."""
        info = self.manifest.modules[node.path]
        inputs = [index for index, step in enumerate(info.flow) if step.op == "input"]
        if len(inputs) != len(node.inputs) or not info.outputs:
            return node.inputs
        reached = _reached(info)
        return tuple(source for source, step in zip(node.inputs, inputs, strict=True) if step in reached)

    @cached_property
    def _widths(self) -> Sequence[int | None]:
        """Return the features of each node's result; None where they are not known."""
        found: list[int | None] = []
        for node in self.nodes:  # in topological order
            if node.op == "call":
                given = partial(self._first_known, node.inputs[:1], found.__getitem__)
                found.append(self._width_of(node.path, given))
            else:
                found.append(self._first_known(node.inputs, found.__getitem__) if node.op in _SAME_WIDTH else None)
        return found

    def _width_of(self, path: str, given: Callable[[], int | None]) -> int | None:
        """Return the features of a module's result: given by its layer, or derived from its flow."""
        info = self.manifest.modules[path]
        if info.kind in ("linear", "embedding"):
            width = info.attributes.get("out_features" if info.kind == "linear" else "embedding_dim")
            return None if width is None else int(width)
        if info.kind == "norm" or not info.flow:
            return given()

        def of_step(index: int) -> int | None:
            step = info.flow[index]
            if step.op == "input":
                return given() if index == first else None
            if step.op == "call":
                return self._width_of(info.child_path(step.name), lambda: self._first_known(step.inputs[:1], of_step))
            return self._first_known(step.inputs, of_step) if step.op in _SAME_WIDTH else None

        first = next((index for index, step in enumerate(info.flow) if step.op == "input"), None)
        return self._first_known(info.outputs[:1], of_step)

    @staticmethod
    def _first_known(nodes: Sequence[int], width: Callable[[int], int | None]) -> int | None:
        return next((found for node in nodes if (found := width(node)) is not None), None)


_SAME_WIDTH: Final = ("add", "mul", "cast", "activation", "normalize")
"""Operations whose result has as many features as their argument."""


def _reached(info: ModuleInfo) -> set[int]:
    """The steps of a flow on which its outputs depend."""
    reached, pending = set(info.outputs), list(info.outputs)
    while pending:
        for index in info.flow[pending.pop()].inputs:
            if index not in reached:
                reached.add(index)
                pending.append(index)
    return reached
