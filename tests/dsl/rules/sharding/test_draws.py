"""Dropout on pieces of a tensor drops the same elements on all ranks of `tp`, which a warning says."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint

PLAN = """plan a
model python("support.models.factories:build_dropping", drops = "{drops}")
cluster {cluster}
batch (global = 4, micro = 1, seq_len = 16)
mesh (tp = 2)
shard on tp {{
  blocks.*.{{q, k, v}} = colwise
  blocks.*.o = rowwise{output}
  {more}
}}
"""
CPU, GPU = "cpu(devices = 2)", "h100_sxm(devices = 2)"


def drawn(drops: str, cluster: str = GPU, output: str = "", more: str = "") -> list[tuple[str, int, tuple[str, ...]]]:
    """What is said of equal drops: the message, its line and its cures."""
    text = PLAN.format(drops=drops, cluster=cluster, output=output, more=more)
    found = [item for item in lint(text, "a.plan", directory=Path()).diagnostics if item.code == "LP440"]
    assert all(item.severity == "warning" for item in found)
    return [(item.message, item.label.span.line, tuple(item.help)) for item in found]


@pytest.mark.parametrize("drops", ["heads", "kernel"])
def test_dropout_of_the_heads_of_a_rank_is_reported(drops: str):
    [(message, line, cures)] = drawn(drops)
    assert message == "`blocks.*` drops the same elements of every rank's piece, from `blocks.*.q`"
    assert line == 7
    assert cures == ("train without this dropout: a probability of 0",)


@pytest.mark.parametrize("drops", ["rest", "none"])
def test_dropout_of_what_every_rank_has_is_not_reported(drops: str):
    assert drawn(drops) == []


def test_dropout_of_a_piece_of_the_sequence_is_reported_unless_it_is_distributed_on_gpus():
    """On a CPU, whose generator has no offsets, DTensors drop the same elements too."""
    [(message, line, cures)] = drawn("rest", output="(output = shard(1))")
    assert message == "`blocks.*.drop` drops the same elements of every rank's piece, from `blocks.*.o`"
    assert line == 8
    assert cures[0] == "write `sequence` for `blocks.*.drop`: each rank drops other elements"
    style = "blocks.*.drop = sequence"
    assert drawn("rest", output="(output = shard(1))", more=style) == []
    [(message, line, cures)] = drawn("rest", CPU, "(output = shard(1))", style)
    assert (message, line, len(cures)) == ("`blocks.*.drop` drops the same elements of every rank's piece", 9, 1)
