"""Number of walks of the passes over the nodes of a graph."""

from __future__ import annotations

import sys

import pytest

from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY, after_each_pass
from support.texts.plans import HEAD, lowered


def walks(text: str) -> dict[str, int]:
    """How often each pass has walked the graph's nodes, without torch's own functions."""
    from torch.fx.graph import _node_list as nodes

    number, walk = 0, nodes.__iter__

    def counted(self: object) -> object:
        nonlocal number
        number += sys._getframe(1).f_globals["__name__"].startswith("legoai.lowering")
        return walk(self)

    def taken(_: object) -> int:
        nonlocal number
        found, number = number, 0
        return found

    nodes.__iter__ = counted
    try:
        return after_each_pass(text, taken)
    finally:
        nodes.__iter__ = walk


@pytest.mark.slow
def test_number_of_walks_does_not_grow_with_the_graph():
    few, more = (
        in_the_simulator(walks, lowered(HEAD.replace('"tiny"', f'"tiny", n_layers = {number}') + BODY).text)
        for number in (1, 2)
    )
    assert few == more
