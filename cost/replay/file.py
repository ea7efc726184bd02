"""File format of pieces: JSON, so that reading executes no code.

Records, tensor types, lists of these, attributes, groups of ranks and moves are each written once, in a table, and
referenced by index. Objects that were shared when written are shared again when read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from legoai.cost.replay.lists import ListKernel, ListPart
from legoai.cost.replay.piece import Alone, Move, Node, Numbers, Part, Piece, Term
from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.records import RECORDS, HostKernel, Kernel, Record, TensorType
from legoai.cost.trace.segments import Segment

FORMAT: Final = 4
"""Version of the format; files of other versions are rejected."""

_KINDS: Final = {name: index for index, name in enumerate(RECORDS)}
_FIELDS: Final = [tuple(kind.__slots__) for kind in RECORDS.values()]
_PLAIN: Final = (str, int, float, bool, type(None))

Json: TypeAlias = Any


class _Table:
    """Table of distinct values, each written once."""

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self.known: dict[Hashable, int] = {}
        self.kept: list[object] = []
        """Keeps the objects alive that are keyed by identity."""

    def index(self, value: object, key: Hashable, row: Callable[[], Json]) -> int:
        """Return the index of a value; write the value if its key is new."""
        found = self.known.get(key)
        if found is None:
            made = row()
            found = self.known[key] = len(self.rows)
            self.rows.append(made)
            self.kept.append(value)
        return found


class _Writer:
    def __init__(self) -> None:
        names = ("types", "tensors", "attributes", "ranks", "moves", "records", "segments")
        self.tables = {name: _Table() for name in names}

    def tensors(self, types: tuple[TensorType, ...]) -> int:
        """Return the index of a list of types."""
        own = [self.tables["types"].index(one, one, functools.partial(_type_row, one)) for one in types]
        return self.tables["tensors"].index(types, types, lambda: own)

    def attributes(self, found: Mapping[str, Any]) -> int:
        """Return the index of a kernel's attributes."""
        return self.tables["attributes"].index(
            found, id(found), lambda: [[name, _tagged(value)] for name, value in found.items()]
        )

    def record(self, record: Record) -> int:
        """Return the index of a record."""
        return self.tables["records"].index(record, id(record), lambda: self._record(record))

    def _record(self, record: Record) -> Json:
        kind = _KINDS[type(record).__name__]
        row: list[Json] = [kind]
        for name in _FIELDS[kind]:
            value = getattr(record, name)
            if name in {"inputs", "outputs"}:
                value = self.tensors(value)
            elif name == "attributes":
                value = self.attributes(value)
            elif name in {"ranks", "members"}:
                value = self.tables["ranks"].index(value, value, functools.partial(list, value))
            row.append(value)
        return row

    def moves(self, moves: tuple[Move, ...]) -> int:
        """Return the index of moves."""
        return self.tables["moves"].index(moves, moves, lambda: [list(map(int, one)) for one in moves])

    def segment(self, segment: Segment) -> int:
        """Return the index of a segment."""
        return self.tables["segments"].index(
            segment, id(segment), lambda: [list(map(self.record, segment.records)), list(segment.slots)]
        )

    def node(self, node: Node) -> Json:
        """Return the JSON of a part, or of a record that forms an item of its own."""
        if isinstance(node, Part):
            numbers = node.numbers
            terms = [row.tolist() if row.any() else 0 for row in numbers.terms]
            own = [list(map(int, one)) for one in numbers.own]
            columns = numbers.terms.shape[1]
            return [
                self.segment(node.segment), own, numbers.size, columns, terms, self.moves(node.moves),
                node.container, int(node.backwards),
            ]  # fmt: skip
        return {
            "record": self.record(node.record),
            "term": None if node.term is None else list(map(int, node.term)),
            "grows": self._grows(node.grows),
            "moves": self.moves(node.moves),
            "batch": None if node.batch is None else list(map(int, node.batch)),
        }

    def _grows(self, grows: object) -> Json:
        if isinstance(grows, ListKernel):
            return {
                side: [[self.tensors(part.types), part.traffic, part.container, part.stretch] for part in parts]
                for side, parts in (("inputs", grows.inputs), ("outputs", grows.outputs))
            }
        return grows


def save(piece: Piece) -> str:
    """Write a piece.

    Raises:
        ValueError: a kernel has an attribute that cannot be written.
    """
    writer = _Writer()
    nodes = {
        name: [writer.node(node) for node in found]
        for name, found in (("before", piece.before), ("repeated", piece.repeated), ("behind", piece.behind))
    }
    head = {name: getattr(piece, name) for name in ("rank", "world", "taken", "wanted", "fixed", "period")}
    containers = [[one.prefix, one.kept, one.names, one.middle, one.period, one.key] for one in piece.containers]
    tables = {name: table.rows for name, table in writer.tables.items()}
    whole = {"format": FORMAT, **head, "containers": containers, **tables, **nodes}
    return json.dumps(whole, separators=(",", ":"))


def load(text: str | bytes) -> Piece:
    """Read what :func:`save` wrote.

    Raises:
        ValueError: the text is no piece.
    """
    try:
        with uncollected():
            return _Reader(json.loads(text)).piece()
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a piece: {error!r}") from error


class _Reader:
    def __init__(self, found: Json) -> None:
        if found["format"] != FORMAT:
            raise ValueError(f"a piece of format {found['format']}")
        self.found = found
        types = [TensorType(tuple(shape), dtype) for dtype, *shape in found["types"]]
        self.tensors = [tuple(types[index] for index in row) for row in found["tensors"]]
        self.attributes = [{name: _untagged(value) for name, value in row} for row in found["attributes"]]
        self.ranks = [tuple(row) for row in found["ranks"]]
        self.moves = [
            tuple(Move(a, b, c, bool(from_end), bool(each)) for a, b, c, from_end, each in row)
            for row in found["moves"]
        ]
        self.records = list(map(self._record, found["records"]))
        self.segments = [
            Segment(tuple(self.records[index] for index in records), tuple(slots))
            for records, slots in found["segments"]
        ]

    def piece(self) -> Piece:
        """Return the piece."""
        found = self.found
        head = {name: found[name] for name in ("rank", "world", "taken", "wanted", "fixed", "period")}
        return Piece(
            **head,
            containers=tuple(
                RepeatedBlocks(prefix, tuple(kept), tuple(names), middle, period, key)
                for prefix, kept, names, middle, period, key in found["containers"]
            ),
            before=tuple(map(self._node, found["before"])),
            repeated=tuple(map(self._node, found["repeated"])),
            behind=tuple(map(self._node, found["behind"])),
        )

    def _record(self, row: Json) -> Record:
        kind = _KIND_LIST[row[0]]
        fields = dict(zip(_FIELDS[row[0]], row[1:], strict=True))
        if kind is Kernel or kind is HostKernel:
            fields["inputs"] = self.tensors[fields["inputs"]]
            fields["outputs"] = self.tensors[fields["outputs"]]
            fields["attributes"] = self.attributes[fields["attributes"]]
        elif "ranks" in fields:
            fields["ranks"] = self.ranks[fields["ranks"]]
            fields["members"] = self.ranks[fields["members"]]
        if "calls" in fields:
            fields["calls"] = tuple(map(tuple, fields["calls"]))
        made: Record = kind(**fields)
        return made

    def _node(self, row: Json) -> Node:
        if isinstance(row, list):
            segment, own, size, columns, terms, moves, container, backwards = row
            numbers = np.zeros((len(Term.__match_args__), columns), dtype=np.int64)
            for place, values in enumerate(terms):
                numbers[place] = values
            return Part(
                segment=self.segments[segment],
                numbers=Numbers(tuple((a, b, bool(follow)) for a, b, follow in own), size, numbers),
                moves=self.moves[moves],
                container=container,
                backwards=bool(backwards),
            )
        record = self.records[row["record"]]
        return Alone(
            record,
            term=_term(row["term"]),
            grows=self._grows(record, row["grows"]),
            moves=self.moves[row["moves"]],
            batch=_term(row["batch"]),
        )

    def _grows(self, record: Record, row: Json) -> ListKernel | tuple[int, tuple[int, ...]] | None:
        if isinstance(row, dict):
            assert isinstance(record, Kernel)
            inputs, outputs = (tuple(map(self._list_part, row[side])) for side in ("inputs", "outputs"))
            return ListKernel(record, inputs, outputs)
        return _stretch(row)

    def _list_part(self, row: Json) -> ListPart:
        types, (read, written), container, stretch = row
        return ListPart(self.tensors[types], (read, written), container, _stretch(stretch))


_KIND_LIST: Final[Sequence[Callable[..., Any]]] = list(RECORDS.values())


def _type_row(found: TensorType) -> Json:
    return [found.dtype, *found.shape]


def _term(row: Json) -> Term | None:
    if row is None:
        return None
    base, container, block, from_end, each_block, batch, each_batch, last_batch = row
    return Term(base, container, block, bool(from_end), bool(each_block), batch, bool(each_batch), bool(last_batch))


def _stretch(row: Json) -> tuple[int, tuple[int, ...]] | None:
    return None if row is None else (row[0], tuple(row[1]))


def _tagged(value: object) -> Json:
    """Return an attribute in a form that distinguishes tuples from lists."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_tagged, value)]
    raise ValueError(f"an attribute of type {type(value).__name__} cannot be written to a file")


def _untagged(value: Json) -> object:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    found = map(_untagged, rest)
    return tuple(found) if kind == "tuple" else list(found)
