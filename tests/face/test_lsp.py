"""`legoai lsp`: the arguments that the command passes to the language server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from legoai.commands.lsp import cost_command
from legoai.dsl.server.costs import CostError, costs_of, hints
from legoai.dsl.server.documents import Document, uri_of
from support.commands.command_line import GOOD, here

__all__ = ["here"]


def document(path: Path) -> Document:
    return Document(uri_of(path), 1, path.read_text(encoding="utf-8"), "utf-16", path.parent)


@pytest.mark.slow
def test_costs_are_shown_at_their_lines(here: Path):
    """By the real command, whose folder is not that of the server."""
    (here / "plans").mkdir()
    path = here / "plans" / "small.plan"
    model = 'model   llama3("tiny", n_layers = 1)'
    text = GOOD.replace('model   llama3("tiny")', model)
    path.write_text(text + "require step_time <= 1ms\n", encoding="utf-8")
    opened = document(path)
    costs = asyncio.run(costs_of(opened, cost_command(path, factories=False)))
    shown = {item.position.line: str(item.label) for item in hints(opened, costs, 0, 99)}
    lines = text.split("\n")
    assert "a step" in shown[0] and "MFU" in shown[0]
    assert "of kernels" in shown[lines.index(model)]
    assert "of communication" in shown[lines.index("fsdp on dp_shard { layers.* = unit }")]
    assert shown[len(lines) - 1].endswith(", violated")


def test_cost_failure_states_the_reason(here: Path):
    path = (here / "bad.plan").resolve()
    with pytest.raises(CostError, match="is not costed: 1 error"):
        asyncio.run(costs_of(document(path), cost_command(path, factories=False)))
    command = [*cost_command(path, factories=False), "--unknown"]
    with pytest.raises(CostError, match="unrecognized arguments: --unknown"):
        asyncio.run(costs_of(document(path), command))
