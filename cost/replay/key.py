"""Cache key of a piece: the digest of what a capture depends on, and the depth and micro batches of one program."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from legoai.cost.code_state import SIMULATION, state_of_code
from legoai.cost.replay.file import FORMAT
from legoai.cost.replay.repeated_blocks import TAKEN, runs_of
from legoai.dsl.analysis.repetition.repeated_blocks import BlockClasses
from legoai.specs.cluster import Device
from legoai.specs.models.manifests.block_list import BlockList

_NAMES: Final = frozenset({"PLAN", "PLAN_HASH"})
"""Constants of a program that only name it."""
_VALUES: Final = frozenset({"lr", "warmup", "floor", "max_norm"})
"""Arguments that are scalars on the host: any positive value gives the same operations."""
_MICRO_BATCHES: Final = "MICRO_BATCHES"
_DEPTH: Final = "n_layers"
"""The field of a built-in model's config that is its number of blocks."""
_BLOCK: Final = "[str(index)]"
"""Expression by which a program names a block of a list that it iterates over by index."""
_LEFT_OUT: Final = ("allocator_settings", "clip_norm", "flops_per_token", "peak_flops", "traced")
"""Arguments that affect only the reserved memory, the MFU, what a checkpoint records, or which profile is read, whose
digest is in the key."""
_COMPILED: Final = "compile"
"""Word of programs whose kernels depend on all of the device; of others attention and grouped products do, by its
compute capability."""
_FEW: Final = 3
_FEW_ASKED: Final = 5
"""Micro batches of a step from which on programs are equivalent: more where a program asks which is the last."""
_STATEMENT: Final = re.compile(r"\n(?=[^\s)\]}#])")
"""Start of a line of a program at which a statement may begin."""
_QUOTES: Final = '"""'
_STATEMENTS: Final = 4096
"""Size of the cache of parsed statements; the program of a candidate has some twenty."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One of the programs whose traces can be composed from the same piece.

    Attributes:
        key: of the piece.
        lengths: for each list of blocks, by its path: the number of blocks of each run of equal ones that may be
            longer.
        micro_batches: of a step.
    """

    key: str
    lengths: dict[str, tuple[int, ...]]
    micro_batches: int

    @property
    def key_at_depth(self) -> str:
        """Key of a piece all of whose blocks were captured, which serves only programs of the same depth."""
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
    model: str = "",
) -> Variation | None:
    """Return the cache key and the variable quantities of a program; None where its text does not determine them.

    The digest covers the program without comments, name, global batch, number of micro batches, learning rate, values
    of its schedule and of clipping, the allocator's settings, and depth, or the lengths of runs of blocks with equal
    treatments. It also covers the ranks, the kind of device and its compute capability (for compiled programs the
    device itself), and the versions and sources of the code that captures.

    Args:
        text: of a program.
        classes: of the blocks of the model's lists, by their treatment.
        lists: the model's lists of blocks.
        world: number of ranks for which it was lowered.
        rank: the simulated rank.
        kind: of device, which decides the kernels.
        gpu: the plan's device.
        measured: digest of the profile that the program reads; empty where it reads none.
        ahead: how many blocks away, at most, a block may refer to another.
        model: state of the code of another author's model, which decides its depth too; empty for a built-in one.
    """
    depths = {path: len(of_block) for path, of_block in classes if len(set(of_block)) == 1}
    [depth] = depths.values() if len(lists) == len(depths) == 1 and not model else (None,)
    runs = _Runs.of(classes, lists, ahead) if depth is None else None
    found = _without(text, depth, runs.bounds if runs else ())
    if found.micro_batches is None:
        return None
    of_device = repr(gpu) if _COMPILED in text else "" if gpu is None else gpu.compute_capability
    parts = [
        FORMAT,
        found.text,
        [[path, [] if found.deep and path in depths else of_block] for path, of_block in classes]
        if runs is None
        else runs.likeness,
        [world, rank, kind, of_device],
        measured,
        model,
        state_of_code(*SIMULATION),
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    known = depths if found.deep or model else {}
    lengths: dict[str, tuple[int, ...]] = {path: (depth,) for path, depth in known.items()}
    return Variation(key, lengths if runs is None else runs.lengths, found.micro_batches)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of blocks with equal treatments in a list.

    Attributes:
        lengths: the number of blocks of each run, by the path of the list.
        bounds: indices of the list at which a run begins or ends.
        likeness: what is common to programs whose runs differ only in length.
    """

    lengths: dict[str, tuple[int, ...]]
    bounds: tuple[int, ...]
    likeness: list[object]

    @classmethod
    def of(cls, classes: BlockClasses, lists: Sequence[BlockList], ahead: int) -> _Runs | None:
        """Return the runs of a model's only list of blocks; None for no or several lists, or blocks with names.

        Blocks of a run too short to be shortened are listed one by one with their indices, since as many blocks must
        precede them in every program of the same piece.
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
    """A program without the values in which programs of the same piece may differ.

    Attributes:
        text: what is left.
        micro_batches: of a step; None where the program has no such constant.
        deep: whether the depth was taken out.
    """

    text: str
    micro_batches: int | None
    deep: bool


def _without(text: str, depth: int | None, bounds: tuple[int, ...]) -> _Without:
    """Remove from a program the values in which programs of the same piece may differ.

    Programs of candidates share most of their statements. So statements are parsed one by one, and cached, where each
    can be parsed on its own.

    Args:
        text: of the program.
        depth: the number of blocks with equal treatments; None where there is none.
        bounds: indices of a list of blocks at which runs of equal treatments begin or end.
    """
    asks = ".is_last" in text
    try:
        found = [_of_statement(statement, depth, bounds, asks) for statement in _statements(text)]
    except SyntaxError:  # a string contains a line that looks like the start of a statement
        return _taken_out(text, depth, bounds, asks=asks)
    counts = [one.micro_batches for one in found if one.micro_batches is not None]
    return _Without(
        "\n".join(one.text for one in found if one.text), counts[-1] if counts else None, any(one.deep for one in found)
    )


def _statements(text: str) -> list[str]:
    """Split a program before each of its statements, leaving out its docstring."""
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
    """Removes from a program the values in which programs of the same piece may differ.

    Attributes:
        depth: the number of blocks with equal treatments; None where there is none.
        bounds: indices of a list of blocks at which runs of equal treatments begin or end.
        asks: whether the program asks which micro batch is the last.
        micro_batches: of a step; None where the program has no such constant.
        deep: whether the depth was taken out.
    """

    def __init__(self, depth: int | None, bounds: tuple[int, ...], *, asks: bool) -> None:
        self.depth, self.bounds, self.asks = depth, bounds, asks
        self.micro_batches: int | None = None
        self.deep = False

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Remove the docstring, which names the plan's file."""
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            del node.body[0]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Remove constants that name the program, and the number of micro batches."""
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
        """Remove the bounds of a loop over blocks of a list, where these are the bounds of runs."""
        match node:
            case ast.For(target=ast.Name(id="index"), iter=ast.Call(func=ast.Name(id="range"), args=args)) if (
                _BLOCK in ast.unparse(node)
            ):
                places = [arg.value for arg in args[:2] if isinstance(arg, ast.Constant) and arg.value in self.bounds]
                if len(places) == len(args[:2]):
                    args[:2] = [ast.Name(f"bound_{self.bounds.index(place)}") for place in places]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Remove the allocator's settings, arguments that serve only to compute MFU, and the key of a profile."""
        node.keywords = [one for one in node.keywords if one.arg not in _LEFT_OUT]
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Remove the global batch, which follows from the micro batches, values of the schedule, and the depth."""
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
