"""Translation of a captured trace to another pipeline rank with structurally equal stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.trace.records import Collective, Kernel, Mark, Record

_ACTION: Final = re.compile(r"((?:end )?action )(\d+)(.*)")
_MODULE: Final = re.compile(r"(forward |end )(?!step |action )(.*)")


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """Translation of module names, stages and ranks from one rank to another.

    Attributes:
        modules: the paths of modules, from those of the first rank to those of the other.
        stages: the indices of their stages.
        here: the ranks that share the coordinate of the first rank on the `pp` axis.
        shift: difference between the ranks at the other coordinate and these.
    """

    modules: Mapping[str, str]
    stages: Mapping[int, int]
    here: range
    shift: int
    known: dict[str, str] = field(default_factory=dict)
    kept: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def path(self, path: str) -> str:
        """Return the path of the corresponding module."""
        found = self.known.get(path)
        if found is None:
            outer = path
            while outer and outer not in self.modules:
                outer = outer.rpartition(".")[0]
            found = self.known[path] = self.modules[outer] + path[len(outer) :] if outer else path
        return found

    def ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that correspond to those of a group or of the ends of a transfer.

        Groups that span several coordinates are the same for all of them, except for the two ends of a transfer.
        """
        found = self.kept.get(ranks)
        if found is None:
            inside = all(rank in self.here for rank in ranks)
            found = self.kept[ranks] = tuple(rank + self.shift for rank in ranks) if inside else ranks
        return found

    def record(self, record: Record) -> Record:
        """Return the corresponding record of the other rank."""
        if isinstance(record, Mark):
            if match := _ACTION.fullmatch(record.name):
                stage = int(match[2])
                return Mark(f"{match[1]}{self.stages.get(stage, stage)}{match[3]}")
            if match := _MODULE.fullmatch(record.name):
                return Mark(f"{match[1]}{self.path(match[2])}")
            return record
        if isinstance(record, Collective):
            return self.collective(record)
        module = getattr(record, "module", None)
        if not module or (path := self.path(module)) == module:
            return record
        return in_module(record, path)

    def collective(self, record: Collective) -> Collective:
        """Return the corresponding collective of the other rank."""
        if record.kind in ("send", "receive"):
            first, second = record.ranks
            ranks: tuple[int, ...] = (first + self.shift, second + self.shift)
        else:
            ranks = self.ranks(record.ranks)
        members = self.ranks(record.members)
        return dataclasses.replace(record, ranks=ranks, members=members, module=self.path(record.module))


def in_module(record: Record, path: str) -> Record:
    """Return a record with another module."""
    if isinstance(record, Kernel):  # most records are kernels, and `dataclasses.replace` takes several times as long
        return Kernel(
            stream=record.stream,
            op=record.op,
            inputs=record.inputs,
            outputs=record.outputs,
            flops=record.flops,
            bytes_read=record.bytes_read,
            bytes_written=record.bytes_written,
            attributes=record.attributes,
            module=path,
            phase=record.phase,
            issuer=record.issuer,
            calls=record.calls,
        )
    return dataclasses.replace(record, module=path)  # type: ignore[arg-type]
