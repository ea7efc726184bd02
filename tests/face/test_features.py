"""The tables of features: every row is a clean plan, lowers to the listed calls, and names a test that exists."""

from __future__ import annotations

import ast
import math
import re
from typing import NamedTuple

import pytest

from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support import ROOT

TEXT = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
RUNTIME = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "runtime").rglob("*.py")))
HEAD, SHARD = re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)

ROWS = """\
FSDP-Zero2; FSDP-Zero3; HSDP; TP; Async TP (Micro-pipelining); CP;
PP-Gpipe; PP-Interleaved (1F1B); PP-Looped-BFS; PP-1F1B; PP-Flexible-Interleaved-1F1B; PP-ZeroBubble;
(TP+SP)+PP; DDP+(TP+SP)+PP; FSDP+(TP+SP); FSDP+(TP+SP)+PP; FSDP+(TP+SP)+PP+CP;
MoE; Full AC; Flexible SAC; DCP; Float8 Training; torch.compile"""
"""The rows of table 7 of the TorchTitan paper (Liang et al. 2025)."""


class Row(NamedTuple):
    feature: str
    lines: tuple[str, ...]
    becomes: tuple[str, ...]
    tests: tuple[str, ...]


def rows(text: str = TEXT) -> list[Row]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in ("feature", "source"):
            found.append(Row(cells[0], *(tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[1:])))
    return found


def plan_of(row: Row) -> str:
    """The plan that the row's lines make of the one that the table begins with."""
    lines = [SHARD.rstrip() if line == "shard on tp { … }" else line for line in row.lines]
    given = {line.split()[0] for line in lines}
    head = [line for line in HEAD.splitlines() if line and line.split()[0] not in given]
    mesh = next((line for line in lines if line.startswith("mesh")), "mesh (dp_shard = 1)")
    devices = math.prod(int(size) for axis, size in re.findall(r"(\w+) = (\d+)", mesh) if axis != "ep")
    hosts, devices = (2, devices // 2) if devices > 8 else (1, devices)
    cluster = f"b200(hosts = {hosts}, devices = {devices}, fabric = infiniband_ndr)"
    return "\n".join([*head, *lines]).replace("b200", cluster) + "\n"


def test_rows_equal_those_of_the_paper():
    [table, _] = TEXT.split("## The step as one graph")
    assert [row.feature for row in rows(table)] == [name.strip() for name in ROWS.replace("\n", " ").split(";")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature)
def test_plan_lines_of_a_row_lower_to_its_calls(row: Row):
    text = plan_of(row)
    linted = lint(text, "feature.plan", directory=ROOT)
    assert [item.message for item in linted.diagnostics if item.severity == "error"] == []
    assert linted.analysis is not None
    program = lower(linted.analysis).text
    call, *below = row.becomes
    assert call in program
    for torch_call in below:
        assert torch_call in RUNTIME


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature)
def test_tests_named_in_a_row_exist(row: Row):
    assert row.tests
    for name in row.tests:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
