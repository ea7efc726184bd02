"""A plan's `cluster` statement becomes hosts, devices, a network and prices."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import pytest

from legoai.cost.kernels.kinds import Product
from legoai.cost.kernels.table import Table
from legoai.cost.machine import collective_time, kernel_time
from legoai.cost.machine.cluster import Machine, cluster_of, machine_of
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.network.topology import World
from legoai.cost.profiles import ProfileError
from legoai.cost.trace.records import Collective, Copy, Kernel, TensorType
from legoai.specs.cluster import CatalogueError, catalogue
from legoai.specs.directives.cluster import ClusterUse
from support import ROOT

SHIPPED = ROOT / "cost" / "profiles"
TWO_HOSTS = ClusterUse(device="h100_sxm", hosts=2, fabric="infiniband_ndr")


def machine(use: ClusterUse = TWO_HOSTS, world: int = 16, **options: object) -> Machine:
    return machine_of(use, world, directory=Path(), **options)


def multiply(m: int = 4096) -> Kernel:
    square = TensorType((m, m), "bfloat16")
    return Kernel(stream=0, op="aten.mm", inputs=(square, square), outputs=(square,), flops=2 * m**3,
                  bytes_read=4 * m * m, bytes_written=2 * m * m, attributes={}, module="", phase="forward")  # fmt: skip


def gather(ranks: tuple[int, ...]) -> Collective:
    return Collective(work=0, stream=0, kind="all_gather", ranks=ranks, axis="dp_shard", bytes=2**28, dtype="bfloat16",
                      module="", phase="forward")  # fmt: skip


def copy(direction="host_to_device") -> Copy:
    return Copy(stream=0, direction=direction, bytes=51_000_000, blocking=False, module="", phase="forward")


def test_catalogued_device_has_host_profile_and_network():
    found = machine()
    assert (found.cluster.hosts, found.cluster.devices_per_host, found.profile.name) == (2, 8, "h100_sxm")
    assert found.network.fabric is not None and found.network.fabric.name == "infiniband_ndr"


def test_cpu_host_has_one_process_per_rank():
    assert cluster_of(ClusterUse(device="cpu"), 4, directory=Path()).devices_per_host == 4
    assert cluster_of(ClusterUse(device="cpu", devices=2), 4, directory=Path()).devices_per_host == 2


def test_kernel_cost_is_model_time_plus_kernel_gap():
    found = machine()
    seconds, model = kernel_time.estimate(multiply(), found.profile)
    cost = OpCosts(machine=found)(multiply())
    assert cost.seconds == pytest.approx(seconds + found.profile.constant("kernel_gap_seconds"))
    assert (cost.resource, cost.model) == ("compute", model)


@pytest.mark.parametrize(("ranks", "resource"), [(tuple(range(8)), "intra_host"), ((0, 8), "inter_host")])
def test_collective_resource_follows_its_ranks(ranks: tuple[int, ...], resource: str):
    found = machine()
    cost = OpCosts(machine=found)(gather(ranks))
    assert (cost.seconds, cost.model) == collective_time.estimate(gather(ranks), found.network, found.profile)
    assert cost.resource == resource


def test_collective_resource_is_that_of_the_slowest_group():
    # Ranks 0 to 5 are on one host, ranks 6 to 11 beside them are not; each is the whole stage of a pipeline of four.
    use = ClusterUse(device="h100_sxm", hosts=3, fabric="infiniband_ndr")
    inside, over = gather(tuple(range(6))), gather(tuple(range(6, 12)))
    found = dataclasses.replace(machine(use, 24), world=World(24))
    slow, fast = OpCosts(machine=found), OpCosts(machine=dataclasses.replace(found, world=World(24, 4)))
    assert (slow(inside).resource, fast(inside).resource) == ("inter_host", "intra_host")
    assert slow(inside) == slow(over) == fast(over)
    assert slow(inside).seconds > 2 * fast(inside).seconds


def test_copy_uses_the_measured_or_datasheet_link_rate():
    measured = OpCosts(machine=machine())(copy())
    assert (measured.seconds, measured.resource) == (pytest.approx(1e-3, rel=0.01), "host_to_device")
    link = OpCosts(machine=machine(ClusterUse(device="h100_sxm96"), 8))(copy())
    assert link.seconds == pytest.approx(51e6 / 63e9, rel=0.01)
    assert OpCosts(machine=machine(ClusterUse(device="cpu"), 1))(copy()).seconds == 0


def test_device_override_keeps_the_number_of_devices():
    found = machine(override="a100_sxm80")
    assert (found.device.name, found.profile.name, found.cluster.hosts) == ("a100_sxm80", "a100_sxm80", 2)


@pytest.mark.parametrize("usual", [4, 16])
def test_device_override_keeps_the_devices_of_a_host(tmp_path: Path, usual: int):
    """Whatever a host of the other device usually has: the ranks are those of the plan, and so are its groups."""
    text = (catalogue() / "h200.toml").read_text(encoding="utf-8")
    (tmp_path / "other.toml").write_text(
        text.replace("devices_per_host = 8", f"devices_per_host = {usual}"), encoding="utf-8"
    )
    other = str(tmp_path / "other.toml")
    for use, world, per_host in (
        (TWO_HOSTS, 16, 8),
        (ClusterUse(device="h100_sxm"), 8, 8),
        (ClusterUse(device="h100_sxm", devices=2), 2, 2),
        (ClusterUse(device="cpu"), 6, 6),
    ):
        found = machine(use, world, override=other)
        assert (found.device.devices_per_host, found.cluster.devices_per_host) == (usual, per_host)
        assert found.network.devices_per_host == per_host
        assert OpCosts(machine=found)(gather(tuple(range(per_host)))).resource == "intra_host"


def test_profile_override_keeps_the_device():
    found = machine(override=str(SHIPPED / "h200.json.gz"))
    assert (found.device.name, found.profile.name) == ("h100_sxm", "h200")


def test_device_file_uses_the_profile_beside_it(tmp_path: Path):
    (tmp_path / "ours.toml").write_text((catalogue() / "h200.toml").read_text(encoding="utf-8"), encoding="utf-8")
    beside = tmp_path / "ours.json.gz"
    beside.write_bytes((SHIPPED / "h100_sxm.json.gz").read_bytes())
    use = ClusterUse(device="profile", profile="ours.toml")
    assert machine_of(use, 8, directory=tmp_path).profile.name == "h100_sxm"
    assert machine(override=str(tmp_path / "ours.toml")).device.name == "h200"
    beside.unlink()
    assert machine_of(use, 8, directory=tmp_path).profile.name == "h200"  # the catalogue knows that name


def test_device_without_a_profile_suggests_calibration(tmp_path: Path):
    text = (catalogue() / "h200.toml").read_text(encoding="utf-8").replace('name = "h200"', 'name = "h300"')
    (tmp_path / "ours.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match="legoai calibrate"):
        machine_of(ClusterUse(device="profile", profile="ours.toml"), 8, directory=tmp_path)


def test_broken_profile_is_an_error(tmp_path: Path):
    path = tmp_path / "broken.json.gz"
    path.write_bytes(gzip.compress(b'{"format": 1}'))
    with pytest.raises(ProfileError, match="is no complete profile: device: Field required"):
        machine(override=str(path))
    with pytest.raises(CatalogueError, match="unknown device"):
        machine(override="h300")


def test_peak_comes_from_datasheet_or_profile():
    assert machine().peak("bf16") == (989.4e12, "datasheet of h100_sxm")
    rate, source = machine(ClusterUse(device="cpu"), 1).peak("fp32")
    assert rate > 1e9 and source == "profile of cpu"


@pytest.mark.parametrize(("scale", "observed", "factor"), [(2.0, None, 0.5), (0.25, None, 4.0), (1.0, -1.5, 4.4817)])
def test_peak_of_a_profile_is_that_of_its_times(scale: float, observed: float | None, factor: float):
    cpu = machine(ClusterUse(device="cpu"), 1)
    model = cpu.profile.products["fp32"]
    large = Product(batch=1, m=4096, n=4096, k=4096, rate="fp32", bytes=12 * 4096**2)
    table = None
    if observed is not None:
        table = Table(points=((0.0, 12.0, 12.0, 12.0),), ratios=(observed,), reach=0.25)
        factor *= large.flops / model.curve.seconds(large) / model.curve.peak
    changed = dataclasses.replace(model, scale=scale, observed=table)
    profile = dataclasses.replace(cpu.profile, products={"fp32": changed}, answers={})
    rate, _ = dataclasses.replace(cpu, profile=profile).peak("fp32")
    assert rate == pytest.approx(model.curve.peak * factor, rel=1e-4)
    assert large.flops / kernel_time.seconds_of(large, profile)[0] <= rate * 1.001
    with_datasheet = dataclasses.replace(machine(), profile=profile)
    assert with_datasheet.peak("fp32") == machine().peak("fp32")
