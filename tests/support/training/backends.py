"""The eager and the graph backend of `fsdp`, compared to the bit."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from support.training.meshed import text_of
from support.training.staged import together, train

MIXED = "precision (param = bf16, reduce = fp32)\n"


def agree(gloo, folder: Path, head: str, body: str, comm: str, *, eager: str = "") -> None:
    """Train under both backends: losses, norms, validations and parameters have to be equal.

    Args:
        gloo: pools of ranks.
        folder: for the data.
        head: of the plan.
        body: its other statements, for the eager backend.
        comm: for the graph.
        eager: the body of the eager plan, if that differs.
    """
    ranks = math.prod(int(size) for size in re.findall(r"(?!ep)\b\w+ = (\d+)", body.partition(")")[0]))
    data = folder / "data.txt"
    data.write_text("the same text for both of them, over and over; " * 400)
    one = together(gloo(ranks)(train, text_of(eager or body, head), str(data), steps=3, evaluate_every=2))
    other = together(gloo(ranks)(train, traced(body, head, comm), str(data), steps=3, evaluate_every=2))
    assert (other["loss"], other["norm"], other["validations"]) == (one["loss"], one["norm"], one["validations"])
    assert len(set(one["loss"])) == 3
    assert other["frozen"] == one["frozen"] == [True] * len(one["frozen"])
    assert other["parameters"].keys() == one["parameters"].keys()
    for parameter, value in other["parameters"].items():
        assert torch.equal(value, one["parameters"][parameter]), parameter


def traced(body: str, head: str, comm: str) -> str:
    """The program of the graph backend."""
    graph = re.sub(r"(fsdp on [\w, ]+) \{", r"\1 (backend = graph) {", body)
    return text_of(graph + (f"comm {comm}\n" if comm else ""), head)
