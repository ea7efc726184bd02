"""Devices and networks that a plan can name, with their publicly known figures."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from legoai.specs.record import Record

if TYPE_CHECKING:
    from pathlib import Path

FABRICS_FILE: Final = "fabrics.toml"
PROFILE_SUFFIX: Final = ".json.gz"
GZIP: Final = b"\x1f\x8b"
"""The first bytes of a compressed file."""


class CatalogueError(ValueError):
    """A device, fabric or cluster is unknown, incomplete, or impossible.

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


Bytes: TypeAlias = int
Rate: TypeAlias = float
"""Bytes, or floating-point operations, per second."""
Devices: TypeAlias = int
"""Devices of one host."""
Multiprocessors: TypeAlias = int
Seconds: TypeAlias = float
Channels: TypeAlias = int


class Memory(Record, kw_only=True):
    """A device's own memory.

    ``capacity_bytes`` is what CUDA reports as the device's total (``total_memory`` of
    ``torch.cuda.get_device_properties``), which is what a program can run out of, not the name on the box;
    ``bandwidth_bytes_per_second`` is the peak.
    """

    capacity_bytes: Bytes | None = None
    bandwidth_bytes_per_second: Rate | None = None
    source: str


class PeakFlops(Record, kw_only=True):
    """Peak rates of a dense matrix product by input dtype, in floating-point operations per second.

    Tensor-core rates wherever the device has them for the dtype, without structured sparsity. ``fp32`` is IEEE
    single precision; ``tf32`` is what PyTorch uses for convolutions, unless ``torch.backends.cudnn.allow_tf32`` is
    unset, and for other products once ``torch.backends.cuda.matmul.allow_tf32`` is set.
    """

    fp64: Rate | None = None
    fp32: Rate | None = None
    tf32: Rate | None = None
    bf16: Rate | None = None
    fp16: Rate | None = None
    fp8: Rate | None = None
    mxfp8: Rate | None = None
    source: str


ComputeCapability: TypeAlias = str
"""A CUDA compute capability, MAJOR.MINOR."""


class Processor(Record, kw_only=True):
    """The device's processor: CUDA compute capability and multiprocessors."""

    compute_capability: ComputeCapability | None = None
    multiprocessors: Multiprocessors | None = None
    source: str


class Link(Record, kw_only=True):
    """A connection of one device: to its peers on the host (``nvlink4``) or to the host's memory (``pcie5``).

    ``bandwidth_bytes_per_second`` counts one direction; datasheets usually print the sum of both.
    """

    kind: str
    bandwidth_bytes_per_second: Rate
    source: str


class Features(Record, kw_only=True):
    """Features of the device in PyTorch beyond plain kernels.

    ``symmetric_memory``: peer-mapped buffers on NVSwitch, which asynchronous tensor parallelism needs;
    ``float8``, ``mxfp8``: scaled matrix products of torchao.
    """

    symmetric_memory: bool
    float8: bool
    mxfp8: bool
    source: str


DeviceKind: TypeAlias = Literal["cpu", "cuda"]
"""The torch type of a device."""


class Device(Record, kw_only=True):
    """One kind of accelerator, as its makers and public measurements describe it.

    ``devices_per_host`` is the usual number in a host. A section or figure without a public source is None;
    :meth:`figure` and :meth:`peak` turn its use into an error.
    """

    name: str
    description: str
    kind: DeviceKind
    devices_per_host: Devices
    features: Features
    memory: Memory | None = None
    peak_flops_per_second: PeakFlops | None = None
    processor: Processor | None = None
    link: Link | None = None
    host_link: Link | None = None

    def figure(self, path: str) -> float:
        """Return the number at ``path``, such as ``memory.bandwidth_bytes_per_second``.

        Raises:
            CatalogueError: the device file does not state that figure.
        """
        return _figure(self, f"device {self.name}", path)

    @property
    def capacity(self) -> int | None:
        """Bytes of its memory; None where that is not stated."""
        return self.memory.capacity_bytes if self.memory is not None else None

    @property
    def compute_capability(self) -> str | None:
        """CUDA compute capability; None where it is not stated."""
        return self.processor.compute_capability if self.processor is not None else None

    def peak(self, dtype: str) -> float:
        """Peak rate of a dense matrix product of ``dtype`` inputs, in floating-point operations per second.

        Raises:
            CatalogueError: no such dtype, or the device has no rate for it; ``legal`` lists those it has.
        """
        rates = self.peak_flops_per_second
        dtypes = (key for key in PeakFlops.fields_ if key != "source")
        known = {key: getattr(rates, key) for key in dtypes if getattr(rates, key, None) is not None}
        if dtype not in known:
            message = f"device {self.name} has no published rate for {dtype}"
            raise CatalogueError("peak_flops_per_second", message, tuple(known))
        return float(known[dtype])


class Fabric(Record, kw_only=True):
    """A network between hosts.

    ``bandwidth_bytes_per_second`` is what one device can send through its network adapter, or through its share of
    one, in one direction; ``latency_seconds`` is what one network hop adds. In the catalogue that is a constant of a
    model of collectives, not a measurement of the network; a measured one belongs in a calibrated profile.
    """

    name: str
    description: str
    bandwidth_bytes_per_second: Rate | None = None
    latency_seconds: Seconds | None = None
    collective_channels: Channels | None = None
    """NCCL's channels of a collective between hosts, each of which occupies a multiprocessor; None where not known."""
    devices: tuple[str, ...] = ()
    """The catalogued devices whose hosts have it, where it is sold with those only; empty for every device's."""
    source: str

    @property
    def has_figures(self) -> bool:
        """Whether its speed is known, without which no step over it is simulated."""
        return self.bandwidth_bytes_per_second is not None

    def figure(self, path: str) -> float:
        """Return the number at ``path``: ``bandwidth_bytes_per_second`` or ``latency_seconds``.

        Raises:
            CatalogueError: no public figure is known.
        """
        return _figure(self, f"fabric {self.name}", path)


class Cluster(Record, kw_only=True):
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


def profile_path(device_file: Path) -> Path:
    """Return the path of a device file's profile: beside it, `our_gpu.json.gz` for `our_gpu.toml`."""
    return device_file.with_suffix(PROFILE_SUFFIX)


@cache
def device_names() -> tuple[str, ...]:
    """Names of the catalogued devices, sorted."""
    return tuple(sorted(path.stem for path in catalogue().glob("*.toml") if path.name != FABRICS_FILE))


@cache
def fabric_names() -> tuple[str, ...]:
    """Names of the catalogued fabrics, sorted."""
    return tuple(sorted(_fabrics()))


@cache
def _fabrics() -> dict[str, Any]:
    return read_toml(catalogue() / FABRICS_FILE)


@cache
def device(name: str) -> Device:
    """The catalogued device called ``name``.

    Raises:
        CatalogueError: there is none; ``legal`` lists those there are.
    """
    if name not in device_names():
        raise CatalogueError("device", f"unknown device '{name}'", device_names())
    # The catalogue's own files are checked by a test: checking them here would cost every lint the import of pydantic.
    return device_of(read_toml(catalogue() / f"{name}.toml"))


@cache
def fabric(name: str) -> Fabric:
    """The catalogued fabric called ``name``.

    Raises:
        CatalogueError: there is none; ``legal`` lists those there are.
    """
    if name not in fabric_names():
        raise CatalogueError("fabric", f"unknown fabric '{name}'", fabric_names())
    table = dict(_fabrics()[name])
    table["devices"] = tuple(table.get("devices", ()))
    return Fabric(name=name, **table)


_SECTIONS: Final[dict[str, type[Record]]] = {
    "memory": Memory,
    "peak_flops_per_second": PeakFlops,
    "processor": Processor,
    "link": Link,
    "host_link": Link,
    "features": Features,
}


def device_of(document: dict[str, Any]) -> Device:
    """The device that a checked document of the catalogue's schema describes."""
    values: dict[str, Any] = dict(document)
    for key, record in _SECTIONS.items():
        if key in values:
            values[key] = record(**values[key])
    return Device(**values)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        CatalogueError: the file cannot be read, is too large, or is not TOML.
    """
    import tomllib

    from legoai.specs.files import MOST_TEXT, read_file

    try:
        return tomllib.loads(read_file(path, MOST_TEXT).decode("utf-8"))
    except OSError as error:
        raise CatalogueError("file", f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # includes a name that is none, and nesting beyond Python's stack
        raise CatalogueError("file", f"{path} is not TOML: {error}") from error


def _figure(record: Device | Fabric, owner: str, path: str) -> float:
    value: Any = record
    for key in path.split("."):
        value = None if value is None else getattr(value, key)
    if value is None:
        raise CatalogueError(path, f"no public figure is known for {owner}; give one in a device profile of your own")
    assert isinstance(value, (int, float)), f"{path} is not a figure"
    return value
