"""The device and fabric catalogue agrees with itself, and refuses bad profiles by field."""

import subprocess
import sys
import time
import tomllib

import pytest

from legoai.specs import cluster
from legoai.specs.cluster import (
    CatalogueError,
    Cluster,
    Device,
    Fabric,
    catalogue,
    device,
    device_names,
    fabric,
    fabric_names,
)
from legoai.specs.device_file import check, load_device

GPUS = ("a100_sxm40", "a100_sxm80", "b200", "h100_sxm", "h100_sxm96", "h200")

PROFILE = """
name = "mine"
description = "a card of my own"
kind = "cuda"
devices_per_host = 4

[memory]
capacity_bytes = 1_000
bandwidth_bytes_per_second = 1e12
source = "measured"

[features]
symmetric_memory = false
float8 = true
mxfp8 = false
source = "measured"
"""


def test_catalogue_holds_the_devices_of_the_published_runs():
    assert device_names() == ("a100_sxm40", "a100_sxm80", "b200", "cpu", "h100_sxm", "h100_sxm96", "h200")


@pytest.mark.parametrize(
    ("name", "bytes_per_second"),
    [
        ("efa_p5", 3200e9 / 8 / 8),  # the nanotron sweep: 3200 Gb/s for 8 devices
        ("roce_400", 400e9 / 8),  # TorchTitan: 400 Gb/s per device
        ("roce_200", 1600e9 / 8 / 8),  # MosaicML: 1600 Gb/s for 8 devices
        ("infiniband_hdr100", 800e9 / 8 / 8),  # vTrain: 800 Gb/s for 8 devices
        ("infiniband_ndr", 400e9 / 8),  # DeepCompile: 8 adapters for 8 devices
        ("slingshot11", 200e9 / 8),  # Alps: 4 adapters of 200 Gb/s for 4 devices
    ],
)
def test_published_fabrics_have_their_bandwidth_per_device(name, bytes_per_second):
    assert fabric(name).figure("bandwidth_bytes_per_second") == bytes_per_second


@pytest.mark.parametrize("name", device_names())
def test_file_name_is_the_device_name_and_every_section_names_its_source(name):
    assert device(name).name == name
    document = tomllib.loads((catalogue() / f"{name}.toml").read_text())
    sections = {key: value for key, value in document.items() if isinstance(value, dict)}
    assert sections
    assert all(len(section["source"]) > 20 for section in sections.values())


@pytest.mark.parametrize("name", device_names())
def test_catalogued_device_follows_the_user_schema(name):
    check(tomllib.loads((catalogue() / f"{name}.toml").read_text()), Device)


@pytest.mark.parametrize(
    ("capability", "legal"),
    [
        ("9.0", True), ("12.1", True), ("nine", False), ("9", False), ("90", False), ("9.0a", False), ("", False),
        (9.0, False),
    ],
)  # fmt: skip
def test_compute_capability_is_major_and_minor(capability: object, legal: bool):
    document = tomllib.loads((catalogue() / "h100_sxm.toml").read_text())
    document["processor"]["compute_capability"] = capability
    if legal:
        check(document, Device)
    else:
        with pytest.raises(CatalogueError, match=r"compute_capability: expected a compute capability MAJOR\.MINOR"):
            check(document, Device)


def test_catalogued_fabrics_follow_their_schema():
    for name, table in tomllib.loads((catalogue() / cluster.FABRICS_FILE).read_text()).items():
        check({"name": name, **table}, Fabric)
    with pytest.raises(CatalogueError, match="bandwidth_bytes_per_second: expected at least 1e"):
        check({"name": "x", "description": "x", "source": "x", "bandwidth_bytes_per_second": -1}, Fabric)


def test_every_fabric_names_its_source():
    assert all(fabric(name).source and fabric(name).description for name in fabric_names())


@pytest.mark.parametrize("name", GPUS)
def test_peak_rates_double_when_the_dtype_width_halves(name):
    accelerator = device(name)
    assert accelerator.peak("bf16") == accelerator.peak("fp16")
    assert accelerator.peak("bf16") == pytest.approx(2 * accelerator.peak("tf32"), rel=1e-3)
    if accelerator.features.float8:
        assert accelerator.peak("fp8") == pytest.approx(2 * accelerator.peak("bf16"), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "clock_hz"),
    [
        ("a100_sxm80", 1.410e9),  # deviceQuery: github.com/thamada/nvidia-smi, gls/A100SXMx4_deviceQuery.py
        ("h100_sxm", 1.830e9),  # at low precision: glennklockwood.com/garden/processors/h100
        ("h200", 1.830e9),  # the same processor
    ],
)
def test_bf16_peak_is_multiprocessors_times_flops_per_cycle_times_clock(name, clock_hz):
    per_cycle = {"8.0": 2048, "9.0": 4096}[device(name).processor.compute_capability]
    multiprocessors = device(name).figure("processor.multiprocessors")
    assert device(name).peak("bf16") == pytest.approx(multiprocessors * per_cycle * clock_hz, rel=0.02)


@pytest.mark.parametrize(
    ("name", "fp64_per_cycle", "fp32_per_cycle", "clock_hz"),
    [
        ("a100_sxm80", 128, 128, 1.410e9),  # deviceQuery: github.com/thamada/nvidia-smi, gls/A100SXMx4_deviceQuery.py
        ("h100_sxm", 256, 256, 1.980e9),  # deviceQuery: github.com/thamada/nvidia-smi, nvsim/H100SXMx8_deviceQuery.py
        ("h200", 256, 256, 1.980e9),  # github.com/scitix/sichek, components/nvidia/config/default_h200_141g_spec.yaml
        ("b200", 128, 256, 1.965e9),  # github.com/scitix/sichek, components/nvidia/config/default_b200_spec.yaml
    ],
)
def test_fp64_and_fp32_peaks_are_at_the_maximum_clock(name, fp64_per_cycle, fp32_per_cycle, clock_hz):
    cycles_per_second = device(name).figure("processor.multiprocessors") * clock_hz
    assert device(name).peak("fp64") == pytest.approx(fp64_per_cycle * cycles_per_second, rel=0.02)
    assert device(name).peak("fp32") == pytest.approx(fp32_per_cycle * cycles_per_second, rel=0.02)


def test_blackwell_peaks_are_twice_hopper_per_cycle():
    # github.com/NVIDIA/cutlass, media/docs/cpp/blackwell_functionality.md: "2x Hopper" for tf32, f16 and f8f6f4.
    blackwell, hopper = device("b200"), device("h100_sxm")
    for dtype in ("tf32", "bf16", "fp8"):
        per_cycle = 2 * hopper.peak(dtype) / (hopper.figure("processor.multiprocessors") * 1.830e9)
        clock_hz = blackwell.peak(dtype) / (blackwell.figure("processor.multiprocessors") * per_cycle)
        assert 0.9 * 1.965e9 < clock_hz < 1.965e9
    assert blackwell.peak("mxfp8") == blackwell.peak("fp8")


@pytest.mark.parametrize(
    ("name", "bus_bits", "memory_clock_hz"),
    [("a100_sxm80", 5120, 1.593e9), ("h100_sxm", 5120, 2.619e9), ("b200", 7680, 3.996e9)],
)
def test_memory_bandwidth_is_bus_width_times_double_data_rate(name, bus_bits, memory_clock_hz):
    bytes_per_second = bus_bits / 8 * 2 * memory_clock_hz
    assert device(name).figure("memory.bandwidth_bytes_per_second") == pytest.approx(bytes_per_second, rel=1e-3)


@pytest.mark.parametrize("name", GPUS)
def test_link_bandwidth_follows_its_generation(name):
    accelerator = device(name)
    assert accelerator.link is not None
    assert accelerator.host_link is not None
    links, bytes_per_second = {"nvlink3": (12, 25e9), "nvlink4": (18, 25e9), "nvlink5": (18, 50e9)}[
        accelerator.link.kind
    ]
    assert accelerator.link.bandwidth_bytes_per_second == links * bytes_per_second
    transfers_per_second = {"pcie4": 16e9, "pcie5": 32e9}[accelerator.host_link.kind]
    encoded = 16 * transfers_per_second / 8 * 128 / 130
    assert accelerator.host_link.bandwidth_bytes_per_second == pytest.approx(encoded, rel=1e-3)


def test_h100_96gb_has_the_peaks_of_the_h100():
    bounded, h100 = device("h100_sxm96"), device("h100_sxm")
    assert all(bounded.peak(dtype) == h100.peak(dtype) for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8"))


def test_a100s_differ_in_their_memory_alone():
    small, large = device("a100_sxm40"), device("a100_sxm80")
    assert small.figure("memory.bandwidth_bytes_per_second") == 1.555e12
    assert small.link == large.link
    assert small.figure("processor.multiprocessors") == large.figure("processor.multiprocessors")
    assert all(small.peak(dtype) == large.peak(dtype) for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16"))


@pytest.mark.parametrize("name", GPUS)
def test_float8_peaks_exist_where_float8_is_supported(name):
    accelerator = device(name)
    assert accelerator.peak_flops_per_second is not None
    assert (accelerator.peak_flops_per_second.fp8 is not None) == accelerator.features.float8
    assert (accelerator.peak_flops_per_second.mxfp8 is not None) == accelerator.features.mxfp8


@pytest.mark.parametrize("name", GPUS)
def test_capacity_is_just_below_the_nominal_size(name):
    gib = {"a100_sxm40": 40, "a100_sxm80": 80, "h100_sxm": 80, "h100_sxm96": 96, "h200": 141, "b200": 180}[name]
    assert 0.98 * gib < device(name).figure("memory.capacity_bytes") / 2**30 < gib


@pytest.mark.parametrize("name", GPUS)
def test_device_memory_is_faster_than_links_than_host_links(name):
    accelerator = device(name)
    memory, link, host_link = (
        accelerator.figure(f"{section}.bandwidth_bytes_per_second") for section in ("memory", "link", "host_link")
    )
    assert memory > link > host_link


def test_using_an_unpublished_figure_is_an_error():
    with pytest.raises(CatalogueError, match=r"memory\.capacity_bytes: no public figure is known for device cpu"):
        device("cpu").figure("memory.capacity_bytes")
    with pytest.raises(CatalogueError, match="multiprocessors"):
        device("h100_sxm96").figure("processor.multiprocessors")
    with pytest.raises(CatalogueError, match="fabric loopback"):
        fabric("loopback").figure("bandwidth_bytes_per_second")


def test_dtype_without_a_peak_names_dtypes_with_one():
    with pytest.raises(CatalogueError, match="no published rate for fp8") as caught:
        device("a100_sxm80").peak("fp8")
    assert caught.value.legal == ("fp64", "fp32", "tf32", "bf16", "fp16")
    with pytest.raises(CatalogueError) as caught:
        device("cpu").peak("source")
    assert caught.value.legal == ()


@pytest.mark.parametrize("name", ["h100", "../../pyproject", "fabrics", ""])
def test_unknown_device_error_names_known_devices(name):
    with pytest.raises(CatalogueError, match="unknown device") as caught:
        device(name)
    assert caught.value.legal == device_names()


def test_unknown_fabric_error_names_known_fabrics():
    with pytest.raises(CatalogueError, match="unknown fabric 'infiniband'") as caught:
        fabric("infiniband")
    assert "infiniband_ndr" in caught.value.legal


def test_world_size_counts_devices_of_all_hosts():
    ndr = fabric("infiniband_ndr")
    assert Cluster(device=device("h100_sxm"), hosts=32, devices_per_host=8, fabric=ndr).world_size == 256
    assert Cluster(device=device("cpu"), hosts=1, devices_per_host=4).world_size == 4


def test_several_hosts_need_a_fabric():
    with pytest.raises(CatalogueError, match="2 hosts need a network") as caught:
        Cluster(device=device("h100_sxm"), hosts=2, devices_per_host=8)
    assert caught.value.legal == fabric_names()


@pytest.mark.parametrize("option", ["hosts", "devices_per_host"])
def test_cluster_sizes_must_be_positive(option):
    with pytest.raises(CatalogueError, match=f"{option}: expected a positive number, got 0"):
        Cluster(**{"device": device("cpu"), "hosts": 1, "devices_per_host": 1, option: 0})


def test_latency_sources_state_they_are_unmeasured():
    with_latency = [fabric(name) for name in fabric_names() if fabric(name).latency_seconds is not None]
    assert with_latency
    assert all("not a measurement" in network.source for network in with_latency)


def test_record_refuses_unknown_and_missing_fields():
    with pytest.raises(TypeError, match="Memory"):
        cluster.Memory(capacity_bytes=1)
    with pytest.raises(TypeError, match="Memory has the fields capacity_bytes"):
        cluster.Memory(source="measured", size=1)
    assert cluster.Memory(source="measured") != cluster.Processor(source="measured")
    assert repr(cluster.Link(kind="nvlink4", bandwidth_bytes_per_second=1.0, source="x")) == (
        "Link(kind='nvlink4', bandwidth_bytes_per_second=1.0, source='x')"
    )


def test_records_are_immutable_and_equal_by_value():
    with pytest.raises(AttributeError, match="Device is frozen"):
        device("h100_sxm").name = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError, match="Device is frozen"):
        del device("h100_sxm").name
    again = load_device(catalogue() / "h100_sxm.toml")
    assert again is not device("h100_sxm")
    assert again == device("h100_sxm")
    assert hash(again) == hash(device("h100_sxm"))


def test_user_profile_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE)
    mine = load_device(path)
    assert isinstance(mine, Device)
    assert mine.figure("memory.bandwidth_bytes_per_second") == 1e12
    assert mine.link is None


@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        ('kind = "cuda"', 'kind = "tpu"', "kind", "expected a torch device type"),
        ("capacity_bytes = 1_000", "capacity_bytes = -1", "memory.capacity_bytes", "expected a positive integer"),
        ("capacity_bytes = 1_000", "capacity_bytes = 1.5", "memory.capacity_bytes", "expected a positive integer"),
        ("capacity_bytes = 1_000", "capacity_bytes = true", "memory.capacity_bytes", "expected a positive integer"),
        ("= 1e12", "= inf", "memory.bandwidth_bytes_per_second", "expected a positive number"),
        ("= 1e12", "= nan", "memory.bandwidth_bytes_per_second", "expected a positive number"),
        ("= 1e12", '= "1 TB/s"', "memory.bandwidth_bytes_per_second", "expected a positive number"),
        ("capacity_bytes = 1_000", "capacity_bytes = 0", "memory.capacity_bytes", "expected a positive integer"),
        ("= 1_000", f"= {10**18}", "memory.capacity_bytes", r"expected at most 1e\+15"),
        ("= 1_000", f"= {'9' * 400}", "memory.capacity_bytes", r"expected at most 1e\+15"),
        ("= 1e12", "= 1e-300", "memory.bandwidth_bytes_per_second", r"expected at least 1e\+06"),
        ("= 1e12", "= 1e300", "memory.bandwidth_bytes_per_second", r"expected at most 1e\+21"),
        ("devices_per_host = 4", f"devices_per_host = {10**12}", "devices_per_host", "expected at most 65536"),
        ("capacity_bytes", "capacity", "memory.capacity", "unknown key"),
        ("[memory]", "[memroy]", "memroy", "unknown key"),
        ("float8 = true", "float8 = 1", "features.float8", "expected true or false"),
        ("mxfp8 = false", "", "features.mxfp8", "missing"),
        ('name = "mine"', "", "name", "missing"),
        ('name = "mine"', 'name = ""', "name", "expected a non-empty string"),
        ('name = "mine"', 'name = "mine"\nlink = 3', "link", "expected a table"),
        ("devices_per_host = 4", "devices_per_host = 0", "devices_per_host", "expected a positive integer"),
        ("[features]", "[", "file", "is not TOML"),
    ],
)
def test_broken_profile_error_names_the_field(tmp_path, old, new, field, message):
    assert PROFILE.count(old) >= 1
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.replace(old, new, 1))
    with pytest.raises(CatalogueError, match=message) as caught:
        load_device(path)
    assert caught.value.field == field


def test_section_without_a_source_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.replace('source = "measured"', "", 1))
    with pytest.raises(CatalogueError, match=r"memory\.source: missing"):
        load_device(path)


def test_missing_profile_is_refused(tmp_path):
    with pytest.raises(CatalogueError, match="cannot read"):
        load_device(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CatalogueError, match="is not TOML"):
        load_device(tmp_path / "binary.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(CatalogueError, match="is not TOML"):
        load_device(tmp_path / "deep.toml")


def test_reading_a_device_takes_a_few_milliseconds():
    def seconds() -> float:
        cluster.device.cache_clear()
        start = time.process_time()
        cluster.device("h100_sxm")
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 10e-3  # under 3 ms where nothing else runs


def test_catalogue_is_loaded_lazily_without_heavy_modules():
    code = "import sys, legoai.specs.cluster; print({'tomllib', 'pathlib', 'dataclasses', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
