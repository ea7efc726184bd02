"""Blocks of a step's graph: its repeated modules in forward order, and the computation before, after and between them.

Backward passes through the blocks in the opposite order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import fx, nn

from legoai.lowering.graph.step.places import LOSS, Place, place_of
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.runtime.initialize import plain_path
from legoai.runtime.offloading.host_copies import HostCopies

_BEHIND: Final = " and what follows"


class Blocks:
    """The blocks of a graph, by number; the last is the loss.

    Args:
        graph: whose nodes have places.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._lists = _lists(graph.model)
        self._number: dict[str, int] = {}
        """The first block for which a module computes."""
        self._at: dict[fx.Node, int] = {}
        self._ends: list[fx.Node] = []
        self._begins: dict[int, fx.Node] = {}
        names: list[str] = []
        for node in graph.graph.nodes:
            place = place_of(node)
            if place is None or place.makes or place.of_unit or _copies(node):
                continue
            if place.phase != "forward":
                self._begins.setdefault(self.of(place), node)
                continue
            if self._begins:  # views of the loss are at the end of the graph
                continue
            name = self._name(place.module, names)
            if name not in names:
                names.append(name)
                self._ends.append(node)
            number = self._at[node] = names.index(name)
            self._number.setdefault(place.module, number)
            self._ends[number] = node

    @property
    def count(self) -> int:
        """The number of blocks, with the loss."""
        return len(self._ends)

    def of(self, place: Place) -> int:
        """Return the number of the block at a place; for a module that only backward contains, the enclosing block."""
        module = place.module
        while module not in self._number and module:
            module = module.rpartition(".")[0]
        return self._number.get(module, 0)

    def at(self, node: fx.Node) -> int:
        """Return the number of the block in which a node of forward computes."""
        while node not in self._at:
            node = node.prev
        return self._at[node]

    def end_of_forward(self, number: int) -> fx.Node:
        """Return the last node of a block's forward."""
        return self._ends[number]

    def begin_of_backward(self, number: int) -> fx.Node | None:
        """Return the first node of the nearest later block that has a backward; None where none has."""
        return next(
            (self._begins[later] for later in range(number + 1, len(self._ends)) if later in self._begins), None
        )

    def _name(self, module: str, names: list[str]) -> str:
        """Return the name of the block that computes; nodes outside all lists of blocks belong with the one before."""
        if module == LOSS:
            return LOSS
        for path in self._lists:
            if module.startswith(f"{path}."):
                return ".".join(module.split(".")[: path.count(".") + 2])
        last = names[-1] if names else ""
        return last if last.endswith(_BEHIND) or last == LOSS else last + _BEHIND


def _copies(node: fx.Node) -> bool:
    """Whether a node copies to the host, or waits for such a copy, which may belong to a later block."""
    return isinstance(getattr(node.target, "__self__", None), HostCopies)


def _lists(model: nn.Module) -> list[str]:
    """Return the paths of the outermost containers of blocks."""
    found: list[str] = []
    for path, module in _modules(model):
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not any(path.startswith(f"{one}.") for one in found):
            found.append(path)
    return found


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        yield plain_path(path), module
