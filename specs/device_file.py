"""Device files of a user's own: read, and checked by the catalogue's records as pydantic models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError, create_model
from pydantic_core import ErrorDetails

from legoai.specs.cluster import (
    CatalogueError,
    Device,
    DeviceKind,
    Features,
    Link,
    Memory,
    PeakFlops,
    Processor,
    device_of,
    read_toml,
)
from legoai.specs.record import Record

LEAST_RATE: Final = 1e6
MOST_RATE: Final = 1e21
"""Bounds of bytes, or floating-point operations, per second: far wider than what machines have."""


def _integer(most: int) -> tuple[Any, str]:
    return Annotated[StrictInt, Field(gt=0, le=most)], "a positive integer"


def _number(least: float, most: float) -> tuple[Any, str]:
    return Annotated[float, Field(ge=least, le=most, allow_inf_nan=False, strict=True)], "a positive number"


_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "str": (Annotated[StrictStr, Field(min_length=1)], "a non-empty string"),
    "ComputeCapability": (
        Annotated[StrictStr, Field(pattern=r"^[1-9][0-9]*\.[0-9]$")],
        'a compute capability MAJOR.MINOR, such as "9.0"',
    ),
    "tuple[str,": (tuple[Annotated[StrictStr, Field(min_length=1)], ...], "a list of names"),
    "DeviceKind": (DeviceKind, "a torch device type"),
    "bool": (StrictBool, "true or false"),
    "Bytes": _integer(10**15),
    "Rate": _number(LEAST_RATE, MOST_RATE),
    "Devices": _integer(65_536),
    "Multiprocessors": _integer(1_000_000),
    "Seconds": _number(1e-9, 1.0),
    "Channels": _integer(1024),
}
"""Validators by the annotation of a record's field, with a description of the accepted values.

The ranges are far wider than what machines have: outside of them is only a slip, such as GB/s where bytes per second
are meant, and far outside times and sizes overflow.
"""

_RECORDS: Final = {record.__name__: record for record in (Memory, PeakFlops, Processor, Link, Features)}


def load_device(path: str | Path) -> Device:
    """Read a device file of the catalogue's schema.

    Raises:
        CatalogueError: the file cannot be read, is not TOML, or breaks the schema; ``field`` is the key at fault.
    """
    document = read_toml(Path(path))
    check(document, Device)
    return device_of(document)


def check(document: dict[str, Any], record: type[Record]) -> None:
    """Check the content of a file by a record of the catalogue.

    Raises:
        CatalogueError: it breaks the schema; ``field`` is the first key at fault.
    """
    try:
        _model(record).model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        field, legal = _expected(record, path)
        words = {
            "missing": "missing",
            "extra_forbidden": "unknown key",
            "literal_error": f"expected a torch device type, got {first['input']!r}",
            "greater_than_equal": f"expected at least {_limit(first, 'ge')}, got {first['input']!r}",
            "less_than_equal": f"expected at most {_limit(first, 'le')}, got {first['input']!r}",
        }
        message = words.get(first["type"], f"expected {field}, got {first['input']!r}")
        raise CatalogueError(
            ".".join(path), message, legal if first["type"] in ("extra_forbidden", "literal_error") else ()
        ) from error


def _limit(error: ErrorDetails, name: str) -> str:
    """The bound of a number that is out of its range; empty for other errors."""
    bound = error.get("ctx", {}).get(name)
    return "" if bound is None else f"{bound:g}"


def _expected(record: type[Record], path: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return a description of the field at ``path``, and its legal values or, for an unknown key, its siblings."""
    name, *rest = path
    annotation = _annotation(record, name)
    if rest and annotation in _RECORDS:
        return _expected(_RECORDS[annotation], rest)
    if annotation in _RECORDS:
        return "a table", ()
    legal = get_args(DeviceKind) if annotation == "DeviceKind" else record.fields_
    return _TYPES[annotation][1] if annotation in _TYPES else "", legal


def _annotation(record: type[Record], name: str) -> str:
    return str(record.__annotations__.get(name, "")).partition(" ")[0]


@cache
def _model(record: type[Record]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name in record.fields_:
        annotation = _annotation(record, name)
        kind = _model(_RECORDS[annotation]) if annotation in _RECORDS else _TYPES[annotation][0]
        fields[name] = (kind, record.defaults_.get(name, ...))
    return create_model(record.__name__, __config__=ConfigDict(extra="forbid"), __doc__=record.__doc__, **fields)


def text_of(own: Device, *, name: str, description: str, devices_per_host: int, capacity_bytes: int | None) -> str:
    """Return the device file of a device like ``own``, under another name.

    Args:
        own: from which the figures are taken.
        name: of the new device.
        description: of the new device.
        devices_per_host: of the new device.
        capacity_bytes: of its memory; None leaves that of ``own``.
    """
    lines = [
        f"name = {toml_value(name)}",
        f"description = {toml_value(description)}",
        f"kind = {toml_value(own.kind)}",
        f"devices_per_host = {devices_per_host}",
    ]
    for section in Device.fields_:
        record = getattr(own, section)
        if not isinstance(record, Record):
            continue
        values = {field: getattr(record, field) for field in record.fields_}
        if section == "memory" and capacity_bytes is not None:
            values["capacity_bytes"] = capacity_bytes
        lines += ["", f"[{section}]"]
        lines += [f"{field} = {toml_value(value)}" for field, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A TOML value; JSON's strings and numbers are TOML's."""
    return json.dumps(value, ensure_ascii=False)
