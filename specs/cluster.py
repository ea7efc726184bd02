"""Which devices and networks a plan can name, and what is publicly known of each of them."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, dataclass_transform

if TYPE_CHECKING:
    from pathlib import Path

FABRICS_FILE: Final = "fabrics.toml"


class CatalogueError(ValueError):
    """A device, fabric or cluster that is not known, not complete, or not possible.

    Args:
        field: the key or option at fault, dotted as in the file (``memory.capacity_bytes``).
        message: what is wrong, without the field's name.
        legal: the values that would have been accepted, where they can be listed.
    """

    def __init__(self, field: str, message: str, legal: tuple[str, ...] = ()) -> None:
        super().__init__(f"{field}: {message}" + (f" (one of: {', '.join(legal)})" if legal else ""))
        self.field = field
        self.message = message
        self.legal = legal


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """What a section of a catalogue file becomes: named values that cannot be set again, equal by value.

    To a type checker a subclass is a frozen, keyword-only dataclass. It is none, because generating the eight below
    would take 5 ms of the 150 ms in which a plan is linted. Annotations are the fields and, of a file, the schema.
    """

    def __init__(self, **values: Any) -> None:
        fields = self.__dict__
        for name in self.schema():
            if name not in values and not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} needs {name}")
            fields[name] = values.pop(name, getattr(type(self), name, None))
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @classmethod
    def schema(cls) -> dict[str, str]:
        """The annotation of each field, as written, in the order of declaration."""
        return {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({values})"


class Memory(Record):
    """A device's own memory.

    ``capacity_bytes`` is what CUDA reports as the device's total (``total_memory`` of
    ``torch.cuda.get_device_properties``), which is what a program can run out of, not the name on the box;
    ``bandwidth_bytes_per_second`` is the peak.
    """

    capacity_bytes: int | None = None
    bandwidth_bytes_per_second: float | None = None
    source: str


class PeakFlops(Record):
    """Peak rates of a dense matrix product by input dtype, in floating-point operations per second.

    Tensor-core rates wherever the device has them for the dtype, without structured sparsity. ``fp32`` is IEEE
    single precision; ``tf32`` is what PyTorch uses once ``torch.backends.cuda.matmul.allow_tf32`` is set.
    """

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    mxfp8: float | None = None
    source: str


class Processor(Record):
    """The device's processor: CUDA compute capability, multiprocessors, second-level cache in bytes, power in watts."""

    compute_capability: str | None = None
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    tdp_watts: float | None = None
    source: str


class Link(Record):
    """A connection of one device: to its peers on the host (``nvlink4``) or to the host's memory (``pcie5``).

    ``bandwidth_bytes_per_second`` counts one direction; datasheets usually print the sum of both.
    """

    kind: str
    bandwidth_bytes_per_second: float
    source: str


class Features(Record):
    """What PyTorch can do on the device beyond plain kernels.

    ``symmetric_memory``: peer-mapped buffers on NVSwitch, which asynchronous tensor parallelism needs;
    ``float8``, ``mxfp8``: scaled matrix products of torchao.
    """

    symmetric_memory: bool
    float8: bool
    mxfp8: bool
    source: str


class Device(Record):
    """One kind of accelerator, as its makers and public measurements describe it.

    ``kind`` is the torch device type (``cuda`` or ``cpu``), ``devices_per_host`` the usual number in a host. A
    section or figure without a public source is None; :meth:`figure` and :meth:`peak` turn its use into an error.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    name: str
    description: str
    kind: str
    devices_per_host: int
    features: Features
    memory: Memory | None = None
    peak_flops_per_second: PeakFlops | None = None
    processor: Processor | None = None
    link: Link | None = None
    host_link: Link | None = None

    def figure(self, path: str) -> float:
        """The number at ``path``, such as ``memory.bandwidth_bytes_per_second``.

        Raises:
            CatalogueError: the profile does not hold that figure.
        """
        return _figure(self, f"device {self.name}", path)

    def peak(self, dtype: str) -> float:
        """Peak rate of a dense matrix product of ``dtype`` inputs, in floating-point operations per second.

        Raises:
            CatalogueError: no such dtype, or the device has no rate for it; ``legal`` lists those it has.
        """
        rates = self.peak_flops_per_second
        dtypes = (key for key in PeakFlops.schema() if key != "source")
        known = {key: getattr(rates, key) for key in dtypes if getattr(rates, key, None) is not None}
        if dtype not in known:
            message = f"device {self.name} has no published rate for {dtype}"
            raise CatalogueError("peak_flops_per_second", message, tuple(known))
        return float(known[dtype])


class Fabric(Record):
    """A network between hosts.

    ``bandwidth_bytes_per_second`` is what one device can send through its network adapter, or through its share of
    one, in one direction; ``latency_seconds`` is what one network hop adds. In the catalogue that is a constant of a
    model of collectives, not a measurement of the network; a measured one belongs in a calibrated profile.
    """

    name: str
    description: str
    bandwidth_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    source: str

    def figure(self, path: str) -> float:
        """The number at ``path``: ``bandwidth_bytes_per_second`` or ``latency_seconds``.

        Raises:
            CatalogueError: no public figure is known.
        """
        return _figure(self, f"fabric {self.name}", path)


class Cluster(Record):
    """Equal hosts of equal devices. Ranks count through one host's devices before the next host's, as torchrun does.

    Raises:
        CatalogueError: a count below one, or several hosts without a fabric between them.
    """

    device: Device
    hosts: int
    devices_per_host: int
    fabric: Fabric | None = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for option in ("hosts", "devices_per_host"):
            if getattr(self, option) < 1:
                raise CatalogueError(option, f"expected a positive number, got {getattr(self, option)}")
        if self.hosts > 1 and self.fabric is None:
            raise CatalogueError("fabric", f"{self.hosts} hosts need a network between them", fabric_names())

    @property
    def world_size(self) -> int:
        """Number of devices, which is the number of ranks."""
        return self.hosts * self.devices_per_host


def catalogue() -> Path:
    """The folder of device files, and of the file of fabrics."""
    from pathlib import Path

    return Path(__file__).parent / "catalogue"


@cache
def device_names() -> tuple[str, ...]:
    """Names of the catalogued devices, sorted."""
    return tuple(sorted(path.stem for path in catalogue().glob("*.toml") if path.name != FABRICS_FILE))


@cache
def fabric_names() -> tuple[str, ...]:
    """Names of the catalogued fabrics, sorted."""
    return tuple(sorted(_read(catalogue() / FABRICS_FILE)))


@cache
def device(name: str) -> Device:
    """The catalogued device called ``name``.

    Raises:
        CatalogueError: there is none; ``legal`` lists those there are.
    """
    if name not in device_names():
        raise CatalogueError("device", f"unknown device '{name}'", device_names())
    return load_profile(catalogue() / f"{name}.toml")


@cache
def fabric(name: str) -> Fabric:
    """The catalogued fabric called ``name``.

    Raises:
        CatalogueError: there is none; ``legal`` lists those there are.
    """
    if name not in fabric_names():
        raise CatalogueError("fabric", f"unknown fabric '{name}'", fabric_names())
    table = _read(catalogue() / FABRICS_FILE)[name]
    return Fabric(**_checked({"name": name, **table}, Fabric, at=f"{name}."))


def load_profile(path: str | Path) -> Device:
    """Read a device file of the catalogue's schema, such as a user's own.

    Raises:
        CatalogueError: the file cannot be read, is not TOML, or breaks the schema; ``field`` is the key at fault.
    """
    from pathlib import Path

    document = _read(Path(path))
    for key, record in _SECTIONS.items():
        if key in document:
            if not isinstance(document[key], dict):
                raise CatalogueError(key, f"expected a table, got {document[key]!r}")
            document[key] = record(**_checked(document[key], record, at=f"{key}."))
    values = _checked(document, Device, at="")
    if values["kind"] not in Device.KINDS:
        raise CatalogueError("kind", f"expected a torch device type, got {values['kind']!r}", Device.KINDS)
    return Device(**values)


_SECTIONS: Final[dict[str, type[Record]]] = {
    "memory": Memory,
    "peak_flops_per_second": PeakFlops,
    "processor": Processor,
    "link": Link,
    "host_link": Link,
    "features": Features,
}


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogueError("file", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError("file", f"{path} is not TOML: {error}") from error


def _checked(table: dict[str, Any], record: type[Record], *, at: str) -> dict[str, Any]:
    """Check ``table`` against the fields of ``record``, whose annotations are the schema."""
    schema = record.schema()
    for key in table:
        if key not in schema:
            raise CatalogueError(f"{at}{key}", "unknown key", tuple(schema))
    for key, annotation in schema.items():
        if key in table:
            _check_value(table[key], annotation.partition(" ")[0], field=f"{at}{key}")
        elif not hasattr(record, key):
            raise CatalogueError(f"{at}{key}", "missing")
    return table


def _check_value(value: object, kind: str, *, field: str) -> None:
    match kind:
        case "str":
            accepted, expected = isinstance(value, str) and value != "", "a non-empty string"
        case "bool":
            accepted, expected = isinstance(value, bool), "true or false"
        case "int":
            accepted = isinstance(value, int) and not isinstance(value, bool) and value > 0
            expected = "a positive integer"
        case "float":
            accepted = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            expected = "a positive number"
        case _:  # a record of _SECTIONS; load_profile has built it where the document had a table
            accepted, expected = True, ""
    if not accepted:
        raise CatalogueError(field, f"expected {expected}, got {value!r}")


def _figure(record: Device | Fabric, owner: str, path: str) -> float:
    value: Any = record
    for key in path.split("."):
        value = None if value is None else getattr(value, key)
    if value is None:
        raise CatalogueError(path, f"no public figure is known for {owner}; give one in a device profile of your own")
    assert isinstance(value, (int, float)), f"{path} is not a figure"
    return value
