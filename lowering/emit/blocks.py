"""Grouping of equally treated modules into loops over repeated blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from itertools import pairwise
from keyword import iskeyword
from typing import Generic, TypeVar

from legoai.lowering.emit.code import Line, Loop, Node, Statement, call, quoted
from legoai.specs.models.manifests.block_list import BlockList
from legoai.specs.models.manifests.manifest import Manifest

T = TypeVar("T")

MODEL = "model"
"""Name of the model in the program."""

_TAKEN = frozenset({MODEL, "mesh", "policy", "index", "name", "module"})
"""Names with another meaning where a block is named."""


@dataclass(frozen=True, slots=True)
class BlockGroup(Generic[T]):
    """Blocks of one list whose members have equal treatments, or, without a list, modules outside all lists."""

    blocks: BlockList | None
    indices: tuple[int, ...]
    """Indices of the blocks in the list; empty without a list."""
    members: tuple[tuple[str, T], ...]
    """Path and treatment. The path is relative to the block, and empty for the block itself; without a list it is the
    full path of a module."""


def group(assigned: Mapping[str, T], block_lists: Sequence[BlockList]) -> tuple[BlockGroup[T], ...]:
    """Group an assignment of treatments to module paths.

    Blocks are equal where the same relative paths have equal treatments. Groups are in the order of their first block,
    members in the order of ``assigned``, and the modules outside all lists come last.
    """
    outside = dict(assigned)
    groups: list[BlockGroup[T]] = []
    for blocks in block_lists:
        alike: dict[tuple[tuple[str, T], ...], list[int]] = {}
        for index, members in enumerate(_members(outside, blocks)):
            if members:
                alike.setdefault(members, []).append(index)
        groups += [BlockGroup(blocks, tuple(indices), members) for members, indices in alike.items()]
    if outside:
        groups.append(BlockGroup(None, (), tuple(outside.items())))
    return tuple(groups)


def _members(outside: dict[str, T], blocks: BlockList) -> list[tuple[tuple[str, T], ...]]:
    """Move the members of each block out of ``outside``."""
    found: list[list[tuple[str, T]]] = [[] for _ in blocks.names]
    places = {name: index for index, name in enumerate(blocks.names)}
    prefix = f"{blocks.path}." if blocks.path else ""
    for path in [path for path in outside if path.startswith(prefix) and path != blocks.path]:
        name, _, rest = path[len(prefix) :].partition(".")
        if name in places:
            found[places[name]].append((rest, outside.pop(path)))
    return [tuple(members) for members in found]


def expand(groups: Sequence[BlockGroup[T]]) -> dict[str, T]:
    """Return the assignment of the groups; the inverse of :func:`group` apart from the order."""
    result: dict[str, T] = {}
    for item in groups:
        for relative, treatment in item.members:
            for prefix in block_paths(item):
                path = f"{prefix}.{relative}" if prefix and relative else prefix or relative
                assert path not in result, f"{path} is in two groups"
                result[path] = treatment
    return result


def block_paths(item: BlockGroup[T]) -> tuple[str, ...]:
    """Return the paths of a group's blocks; one empty path for modules outside all lists."""
    if item.blocks is None:
        return ("",)
    prefix = f"{item.blocks.path}." if item.blocks.path else ""
    return tuple(prefix + item.blocks.names[index] for index in item.indices)


def index_range(item: BlockGroup[T]) -> str | None:
    """Return the expression of a group's block indices; None where the blocks have other names than their indices."""
    if item.blocks is None or len(item.indices) < 2 or not _numbered(item.blocks):
        return None
    return _indices(item.indices)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Loop of the program over the blocks of a group."""

    header: str | None
    """The head of the `for` statement without its colon; None where there is one block, or the model itself."""
    block: str
    """The expression for the block."""
    base: str
    """The path of one of the blocks, from which the paths of its members follow."""
    place: str
    """The expression to which another module in place of the block is assigned."""
    binding: Line | None = None
    """The first line of the loop, where it gives the block a name."""
    presence: str | None = None
    """The condition under which a stage of the model holds the block; None where it always does."""

    def path(self, relative: str) -> str:
        """The path of a member, from its path inside of the block, which is empty for the block itself."""
        return f"{self.base}.{relative}" if self.base and relative else self.base or relative

    def loop(self, body: Sequence[Statement]) -> list[Statement]:
        """The body, once for each block."""
        body = [*(() if self.binding is None else (self.binding,)), *body]
        if self.presence is not None:
            body = [Loop(f"if {self.presence}", tuple(body))]
        return body if self.header is None else [Loop(self.header, tuple(body))]


def blocks_of(item: BlockGroup[T], manifest: Manifest, *, replace: bool = False, staged: bool = False) -> Blocks:
    """Return the loop of the program over a group's blocks.

    Args:
        item: the group.
        manifest: of the model.
        replace: whether blocks must be assignable, to be replaced by other modules.
        staged: whether blocks may be missing, as in a stage of the model.
    """
    if item.blocks is None:
        return Blocks(None, MODEL, "", MODEL)
    paths = block_paths(item)
    if len(paths) == 1:
        one = expression(manifest, paths[0])
        return Blocks(None, one, paths[0], one, presence=presence(manifest, paths[0]) if staged else None)
    found = _over(item.blocks, item.indices, manifest, replace=replace)
    if staged and found.header is not None and found.header.startswith(("for index in ", "for name in ")):
        found = dataclass_replace(found, presence=_presence_of_each(item.blocks, manifest, found.header.split()[1]))
    if found.block == found.place and len(item.members) > 1 and not replace and not found.block.isidentifier():
        name = _block_name(item.blocks.path)
        return dataclass_replace(found, block=name, binding=Line(found.block, f"{name} = "))
    return found


def presence(manifest: Manifest, path: str) -> str:
    """Return the condition under which a stage holds the module at ``path``, which is a block or outside all blocks.

    >>> presence(manifest, "layers.3"), presence(manifest, "norm")
    ('"3" in model.layers', 'model.norm is not None')
    """
    above, _, name = path.rpartition(".")
    if manifest.modules[above].class_name == "ModuleDict":
        return f"{quoted(name)} in {expression(manifest, above)}"
    return f"{expression(manifest, path)} is not None"


def _presence_of_each(blocks: BlockList, manifest: Manifest, variable: str) -> str:
    key = f"str({variable})" if variable == "index" else variable
    return f"{key} in {expression(manifest, blocks.path)}"


def _over(blocks: BlockList, indices: tuple[int, ...], manifest: Manifest, *, replace: bool) -> Blocks:
    container = expression(manifest, blocks.path)
    kind = manifest.modules[blocks.path].class_name
    prefix = f"{blocks.path}." if blocks.path else ""
    block, base = _block_name(blocks.path), prefix + blocks.names[indices[0]]
    repeats = manifest.repeats(blocks.path)
    if len(indices) == len(blocks) and kind in _ITERATED and not repeats:
        every, numbered = _ITERATED[kind]
        if not replace:
            return Blocks(f"for {block} in {every.format(container)}", block, base, block)
        variable, pairs = numbered
        return Blocks(f"for {variable}, {block} in {pairs.format(container)}", block, base, f"{container}[{variable}]")
    by_index = _numbered(blocks) or (kind in ("ModuleList", "Sequential") and _is_indexed(manifest, blocks.path))
    names = ", ".join(quoted(blocks.names[index]) for index in indices)
    if repeats and by_index:
        indices = tuple(int(blocks.names[index]) for index in indices)
    header = f"for index in {_indices(indices)}" if by_index else f"for name in ({names})"
    variable = "index" if by_index else "name"
    if kind == "ModuleDict":
        one = f"{container}[{'str(index)' if by_index else 'name'}]"
    elif kind in _ITERATED and by_index:
        one = f"{container}[index]"
    else:
        one = f'{MODEL}.get_submodule(f"{prefix}{{{variable}}}")'
    return Blocks(header, one, base, one)


_ITERATED = {
    "ModuleDict": ("{}.values()", ("name", "{}.items()")),
    "ModuleList": ("{}", ("index", "enumerate({})")),
    "Sequential": ("{}", ("index", "enumerate({})")),
}
"""Containers of torch, with the expressions to iterate over modules, and over keys and modules."""


def _numbered(blocks: BlockList) -> bool:
    return blocks.names == tuple(str(index) for index in range(len(blocks)))


def _indices(indices: tuple[int, ...]) -> str:
    """Return the shortest expression of increasing numbers: a range where they are evenly spaced, else a tuple."""
    first, last = indices[0], indices[-1]
    steps = {after - before for before, after in pairwise(indices)}
    if len(steps) != 1 or (len(indices) == 2 and steps != {1}):
        return f"({', '.join(map(str, indices))})"
    (step,) = steps
    if step > 1:
        return f"range({first}, {last + 1}, {step})"
    return f"range({first}, {last + 1})" if first else f"range({last + 1})"


def _block_name(path: str) -> str:
    """Return the name of one element of the list: `layer` for `model.layers`."""
    name = path.rpartition(".")[2]
    singular = name[:-1] if name.endswith("s") and len(name) > 2 else ""
    if not singular.isidentifier() or not singular.isascii() or iskeyword(singular) or singular in _TAKEN:
        return "block"
    return singular


def expression(manifest: Manifest, path: str, *, base: str = "", block: str = MODEL) -> str:
    """Return the expression for the module at ``path``; ``block`` is the expression for the prefix ``base``.

    >>> expression(manifest, "layers.0.attention")
    'model.layers["0"].attention'
    >>> expression(manifest, "layers.0.attention", base="layers.0", block="layer")
    'layer.attention'
    """
    if path == base:
        return block
    relative = path[len(base) + 1 :] if base else path
    text, above = block, base
    for name in relative.split("."):
        kind = manifest.modules[above].class_name
        if kind == "ModuleDict":
            text += f"[{quoted(name)}]"
        elif kind in ("ModuleList", "Sequential") and _is_indexed(manifest, above):
            text += f"[{_position(manifest, above, name)}]"
        elif name.isidentifier() and name.isascii() and not iskeyword(name):
            text += f".{name}"
        else:
            return f"{block}.get_submodule({quoted(relative)})"
        above = f"{above}.{name}" if above else name
    return text


def _is_indexed(manifest: Manifest, path: str) -> bool:
    """Whether the indices of the children of a list or a sequence are known.

    The manifest has no child again that is there twice.
    """
    return not manifest.repeats(path) or all(name.isdecimal() for name in manifest.modules[path].children)


def _position(manifest: Manifest, path: str, name: str) -> int:
    """The index of a child of a list or a sequence."""
    return int(name) if manifest.repeats(path) else manifest.modules[path].children.index(name)


def replacement(place: str, value: Node) -> Line:
    """Return the line that replaces a module."""
    looked_up = _LOOKED_UP.fullmatch(place)
    if looked_up is not None:
        return Line(call(f"{looked_up[1]}.set_submodule", looked_up[2], value))
    return Line(value, f"{place} = ")


_LOOKED_UP = re.compile(r'(.+)\.get_submodule\((f?"[^"]*")\)')
"""An expression that ends in a lookup by path, to which Python cannot assign."""
