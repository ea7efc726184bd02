"""Key of a piece: the digest of what it depends on, and how the trace of one program follows from it."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from legoai.cost.code_state import state_of_code
from legoai.cost.replay.file import FORMAT
from legoai.cost.replay.repeated_blocks import TAKEN, runs_of
from legoai.dsl.analysis.repeated_blocks import BlockClasses
from legoai.specs.cluster import Device
from legoai.specs.models.manifest import BlockList

_NAMES: Final = frozenset({"PLAN", "PLAN_HASH"})
"""Constants of a program that only name it."""
_VALUES: Final = frozenset({"lr", "warmup", "floor", "max_norm"})
"""Arguments that are numbers of the host's, of which no operation is otherwise for another positive value."""
_MICRO_BATCHES: Final = "MICRO_BATCHES"
_DEPTH: Final = "n_layers"
"""The field of a built-in model's config that is its number of blocks."""
_BLOCK: Final = "[str(index)]"
"""How a program names a block of a list that it goes through by places."""
_LEFT_OUT: Final = ("allocator_settings", "flops_per_token", "peak_flops")
"""Arguments of `Trainer` that decide what is reserved for what is captured, and what its time is compared with."""
_EXPERTS: Final = "Mixtral"
"""In the name of the model of ours that multiplies by grouped products, of which not all devices have a kernel."""
_FEW: Final = 3
_FEW_ASKED: Final = 5
"""Micro batches of a step from which on all are like a few: more where the program asks which is the last."""
_STATEMENT: Final = re.compile(r"\n(?=[^\s)\]}#])")
"""Before a line of a program with which a statement may begin."""
_QUOTES: Final = '"""'
_STATEMENTS: Final = 4096
"""Statements of programs that are kept without what is taken out of them; of a candidate they are some twenty."""
_SOURCES: Final = ("cost", "lowering", "runtime", "specs")
"""Folders of the package that decide what is captured of a program."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One of the programs whose traces follow from the same piece.

    Attributes:
        key: of the piece.
        lengths: the number of blocks of each run of equal ones that may be longer, by the path of their list.
        micro_batches: of a step.
    """

    key: str
    lengths: dict[str, tuple[int, ...]]
    micro_batches: int

    @property
    def key_at_depth(self) -> str:
        """The key of a piece whose blocks were all captured, from which programs of the same depth follow alone."""
        return hashlib.sha256(json.dumps([self.key, self.lengths]).encode()).hexdigest()


def variation_of(
    text: str,
    classes: BlockClasses,
    lists: Sequence[BlockList],
    *,
    world: int,
    rank: int,
    kind: str,
    gpu: Device | None,
    measured: str = "",
    ahead: int = 1,
) -> Variation | None:
    """Return which piece a program's trace follows from, and how; None where the text does not say so.

    The digest is over the program without comments, name, global batch, number of micro batches, learning rate,
    values of its schedule and of clipping, the allocator's settings, and depth, or the lengths of runs of blocks that
    are treated equally; over the ranks, the kind of device, for compiled programs and experts the device; and over the
    versions and sources of what captures.

    Args:
        text: of a program whose model is a built-in one.
        classes: of the blocks of the model's lists, by what the program does to them.
        lists: the model's lists of blocks.
        world: number of ranks for which it was lowered.
        rank: the one that is simulated.
        kind: whose kernels the device has.
        gpu: the plan's device.
        measured: digest of the profile that the program reads; empty where it reads none.
        ahead: blocks that a block looks ahead or back at most.
    """
    depths = {path: len(of_block) for path, of_block in classes if len(set(of_block)) == 1}
    [depth] = depths.values() if len(lists) == len(depths) == 1 else (None,)
    runs = _Runs.of(classes, lists, ahead) if depth is None else None
    found = _without(text, depth, runs.bounds if runs else ())
    if found.micro_batches is None:
        return None
    of_device = "compile" in text or _EXPERTS in text
    parts = [
        FORMAT,
        found.text,
        [[path, [] if found.deep and path in depths else of_block] for path, of_block in classes]
        if runs is None
        else runs.likeness,
        [world, rank, kind, repr(gpu) if of_device else ""],
        measured,
        state_of_code(*_SOURCES),
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    lengths: dict[str, tuple[int, ...]] = {path: (depth,) for path, depth in depths.items()} if found.deep else {}
    return Variation(key, lengths if runs is None else runs.lengths, found.micro_batches)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of equal blocks in a list of which the program treats some otherwise than others.

    Attributes:
        lengths: the number of blocks of each, by the path of the list.
        bounds: places of the list at which a run begins or ends.
        likeness: what programs have in common whose runs differ in length alone.
    """

    lengths: dict[str, tuple[int, ...]]
    bounds: tuple[int, ...]
    likeness: list[object]

    @classmethod
    def of(cls, classes: BlockClasses, lists: Sequence[BlockList], ahead: int) -> _Runs | None:
        """Return the runs of a model's only list of blocks; None where it has none, or blocks have names of their own.

        Blocks of which none is left out count by themselves, with their places: all before them are as many.
        """
        if len(classes) != 1 or len(lists) != 1 or lists[0].names != tuple(map(str, range(len(classes[0][1])))):
            return None
        [(path, of_block)] = classes
        runs = list(runs_of(of_block, ahead))
        if not runs:
            return None
        inside = {place for run in runs for place in range(run.start, run.stop)}
        alone = [[place, kind] for place, kind in enumerate(of_block) if place not in inside]
        return cls(
            lengths={path: tuple(run.stop - run.start for run in runs)},
            bounds=tuple(sorted({bound for run in runs for bound in (run.start, run.stop)})),
            likeness=[path, alone, [[of_block[run.start : run.start + run.period], run.reach] for run in runs]],
        )


class _Without(NamedTuple):
    """A program without what other programs of the same piece have otherwise.

    Attributes:
        text: of what is left.
        micro_batches: of a step; None where the program has no such constant.
        deep: whether the depth was taken out.
    """

    text: str
    micro_batches: int | None
    deep: bool


def _without(text: str, depth: int | None, bounds: tuple[int, ...]) -> _Without:
    """Take out of a program what others of the same piece have otherwise.

    Programs of candidates have most of their statements in common. So a statement is read once, where all can be read
    by themselves.

    Args:
        text: of the program.
        depth: the number of blocks that the program treats equally; None where there is none.
        bounds: places of a list of blocks at which those that it treats equally begin or end.
    """
    asks = ".is_last" in text
    try:
        found = [_of_statement(statement, depth, bounds, asks) for statement in _statements(text)]
    except SyntaxError:  # a string has a line that begins like a statement
        return _taken_out(text, depth, bounds, asks=asks)
    counts = [one.micro_batches for one in found if one.micro_batches is not None]
    return _Without(
        "\n".join(one.text for one in found if one.text), counts[-1] if counts else None, any(one.deep for one in found)
    )


def _statements(text: str) -> list[str]:
    """Split a program before each of its statements, without its docstring."""
    found: list[str] = []
    begin = text.find(_QUOTES, len(_QUOTES)) + len(_QUOTES) if text.startswith(_QUOTES) else 0
    for part in _STATEMENT.split(text[begin:]):
        if found and found[-1].rpartition("\n")[2].startswith("@"):
            found[-1] += f"\n{part}"
        else:
            found.append(part)
    return found


@functools.lru_cache(_STATEMENTS)
def _of_statement(statement: str, depth: int | None, bounds: tuple[int, ...], asks: bool) -> _Without:
    return _taken_out(statement, depth, bounds, asks=asks)


def _taken_out(text: str, depth: int | None, bounds: tuple[int, ...], *, asks: bool) -> _Without:
    tree = ast.parse(text)
    taken_out = _Variable(depth, bounds, asks=asks)
    taken_out.visit(tree)
    return _Without(ast.unparse(tree), taken_out.micro_batches, taken_out.deep)


class _Variable(ast.NodeTransformer):
    """Takes out of a program what other programs of the same piece have otherwise.

    Attributes:
        depth: the number of blocks that the program treats equally; None where there is none.
        bounds: places of a list of blocks at which those that it treats equally begin or end.
        asks: whether the program asks which micro batch is the last.
        micro_batches: of a step; None where the program has no such constant.
        deep: whether the depth was taken out.
    """

    def __init__(self, depth: int | None, bounds: tuple[int, ...], *, asks: bool) -> None:
        self.depth, self.bounds, self.asks = depth, bounds, asks
        self.micro_batches: int | None = None
        self.deep = False

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Leave out the docstring, which names the plan's file."""
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            del node.body[0]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Take out constants that name the program, and the number of micro batches."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in _NAMES:
                node.value = ast.Constant(None)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int(count))) if (
                name == _MICRO_BATCHES
            ):
                self.micro_batches = count
                node.value = ast.Constant(min(count, _FEW_ASKED if self.asks else _FEW))
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        """Take out between which blocks of a list the program goes, where these are the bounds of runs."""
        match node:
            case ast.For(target=ast.Name(id="index"), iter=ast.Call(func=ast.Name(id="range"), args=args)) if (
                _BLOCK in ast.unparse(node)
            ):
                places = [arg.value for arg in args[:2] if isinstance(arg, ast.Constant) and arg.value in self.bounds]
                if len(places) == len(args[:2]):
                    args[:2] = [ast.Name(f"bound_{self.bounds.index(place)}") for place in places]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave out how the allocator serves what is captured, and what its time is compared with."""
        node.keywords = [one for one in node.keywords if one.arg not in _LEFT_OUT]
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Take out the global batch, which follows from the micro batches, values of the schedule, and the depth."""
        match node:
            case ast.keyword(arg="global_batch"):
                node.value = ast.Constant(None)
            case ast.keyword(arg=name, value=ast.Constant(value=int(value) | float(value))) if (
                name in _VALUES and value > 0
            ):
                node.value = ast.Constant(type(value)(1))
            case ast.keyword(arg=name, value=ast.Constant(value=int(depth))) if (
                name == _DEPTH and depth > TAKEN and depth == self.depth
            ):
                self.deep = True
                node.value = ast.Constant(TAKEN + 1)
        return self.generic_visit(node)
