"""Chain of calls of the modules with which stages can begin, in execution order, and the valid cuts of a pipeline.

A stage runs the forward of the full model, with placeholders for the modules of other stages: those of earlier stages
return the received input, those of later ones pass on their input. That equals the model's own computation only if
exactly one tensor crosses each cut, directly from one module into another, and nothing else that a stage computes needs
tokens or weights of other stages. The manifest's flow shows this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.specs.models.manifests.shapes import SAMPLES, TOKENS, Shape, words
from legoai.specs.record import Record

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, StepOp


class Node(Record, kw_only=True):
    """One step of the forward, from the model's input to its output."""

    op: StepOp
    path: str
    """Path of the called module; else of the module whose forward contains the step."""
    inputs: tuple[int, ...]
    """The nodes of its arguments, in order."""


class CannotFollow(Exception):  # noqa: N818
    """The forward cannot be followed to its end; the message gives the position, and `help` a remedy of its own."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


class Cut(Record, kw_only=True):
    """Boundary between two stages.

    Attributes:
        before: the module that computes the crossing tensor.
        start: the first module that reads it.
        shape: of the tensor.
    """

    before: str
    start: str
    shape: Shape


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
        """Yield the tensors that cross from each stage to the next.

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
            if path in self.calls and self.manifest.modules[path].gives is None:
                raise CannotFollow(
                    f"`{path}` does not return one tensor whose lengths are multiples of the batch and the length"
                )
        for reader, module, attribute in self.manifest.attribute_reads:
            if self.points.holder(module) in stage_of:
                raise CannotFollow(
                    f"the forward of `{reader or 'root'}` runs on every stage and reads `{module}.{attribute}`, which "
                    "is on one",
                    help="let forward take dtypes, devices and numbers from its inputs, or keep them in attributes of "
                    f"`{reader or 'root'}`",
                )
        for index in range(1, len(stages)):
            yield self._cut(index, stage_of)

    @staticmethod
    def shape(cuts: Sequence[Cut]) -> Shape:
        """Return the shape of the crossing tensor, the same at every cut.

        Raises:
            CannotFollow: they differ.
        """
        shape = cuts[0].shape
        odd = next((cut for cut in cuts if cut.shape != shape), None)
        if odd is not None:
            raise CannotFollow(
                f"`{odd.before}` hands on {words(odd.shape)}, and `{cuts[0].before}` {words(shape)}: every stage sends "
                "a tensor of the shape that it gets"
            )
        return shape

    def results(self, stages: Sequence[Sequence[str]], crossing: Shape, *, sharded: bool) -> dict[str, Shape]:
        """Return the shapes of modules of earlier stages whose results are not laid out as what a stage receives is.

        A later stage, which has no such result, looks at its shape only, to count positions or to make a mask. It knows
        the whole of a shard that is laid out as [batch, length, …] without being told.

        Args:
            stages: the modules of each stage.
            crossing: the shape of the tensor between stages.
            sharded: whether a stage may receive a shard of that.
        """
        all_of_them = sharded and crossing[:2] != (SAMPLES, TOKENS)
        held = dict.fromkeys(path for stage in stages[:-1] for path in stage if path not in self.everywhere)
        gives = {path: self.manifest.modules[path].gives for path in held if path in self.calls}
        return {
            path: shape
            for path, shape in gives.items()
            if shape is not None and (all_of_them or shape[:-1] != crossing[:-1])
        }

    def logits(self) -> Shape:
        """Return the shape of the model's result: logits of every token.

        Raises:
            CannotFollow: it is another.
        """
        gives = self.manifest.modules[""].gives
        if gives is None or gives[:-1] != (SAMPLES, TOKENS):
            told = "something else than one tensor of known lengths" if gives is None else words(gives)
            raise CannotFollow(
                f"the model returns {told}, and the last stage has to return [batch, length, vocabulary]"
            )
        return gives

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
        gives, takes = self.manifest.modules[before.path].gives, self.manifest.modules[start].takes
        if gives is None or gives != takes:
            raise CannotFollow(f"the first argument of `{start}` is not what `{before.path}` returns, one tensor")
        return Cut(before=before.path, start=start, shape=gives)

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


def _reached(info: ModuleInfo) -> set[int]:
    """The steps of a flow on which its outputs depend."""
    reached, pending = set(info.outputs), list(info.outputs)
    while pending:
        for index in info.flow[pending.pop()].inputs:
            if index not in reached:
                reached.add(index)
                pending.append(index)
    return reached
