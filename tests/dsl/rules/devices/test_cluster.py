"""Rules about hosts, fabrics and profiles."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from legoai.cost.profiles import profile_names, shipped_file
from legoai.dsl.lint import lint
from legoai.specs.cluster import catalogue, device_names, fabric, fabric_names
from support.texts.rule_plans import codes, diagnostics, message, place


def test_profile_must_be_a_readable_file(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text((catalogue() / "h100_sxm.toml").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "broken.toml").write_text('name = "ours"\nkind = "abacus"\n', encoding="utf-8")
    assert "LP222" not in wrong_profiles('cluster profile("good.toml")', tmp_path)
    assert "no file is named" in wrong_profiles("cluster profile", tmp_path)["LP222"]
    assert "cannot read" in wrong_profiles('cluster profile("none.toml")', tmp_path)["LP222"]
    assert "missing" in wrong_profiles('cluster profile("broken.toml")', tmp_path)["LP222"]
    slip = "memory.bandwidth_bytes_per_second: expected at least 1e+06, got 3350"
    good = (tmp_path / "good.toml").read_text(encoding="utf-8")
    (tmp_path / "slip.toml").write_text(good.replace("= 3.35e12", "= 3350"), encoding="utf-8")
    assert slip in wrong_profiles('cluster profile("slip.toml")', tmp_path)["LP222"]


def wrong_profiles(text: str, directory: Path) -> dict[str, str]:
    whole = f'plan x\nmodel llama3("tiny")\n{text}\nbatch (global = 8, micro = 1, seq_len = 64)'
    found = lint(whole, "x.plan", directory=directory).diagnostics
    return {item.code: f"{item.message} {item.label.text}" for item in found}


def test_profile_of_a_catalogued_device_has_no_effect() -> None:
    assert place('cluster h100_sxm(profile = "ours.toml")', "LP305") == '"ours.toml"'
    assert "LP305" not in codes("cluster h100_sxm")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("cluster h100_sxm(hosts = 2)", "LP302"),
        ("cluster h100_sxm(hosts = 1, fabric = infiniband_ndr)", "LP303"),
        ("cluster h100_sxm(fabric = infiniband_ndr)", "LP303"),
        ("cluster h100_sxm(devices = 9)", "LP304"),
        ("cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)", None),
        ("cluster h100_sxm(devices = 4)", None),
        ("cluster cpu(devices = 64)", None),
    ],
)
def test_hosts_devices_and_fabric(text: str, code: str | None) -> None:
    assert codes(text) & {"LP302", "LP303", "LP304"} == ({code} if code else set())


def test_device_count_above_one_host_suggests_hosts() -> None:
    found = [item for item in diagnostics("cluster h100_sxm(devices = 16)") if item.code == "LP304"]
    assert found[0].help[0] == "16 devices are 2 hosts of 8"


def test_a_host_of_one_device_is_named_in_the_singular(tmp_path: Path) -> None:
    text = (catalogue() / "h100_sxm.toml").read_text(encoding="utf-8")
    (tmp_path / "ours.toml").write_text(text.replace("devices_per_host = 8", "devices_per_host = 1"), encoding="utf-8")
    found = {item.code: item.message for item in diagnostics('cluster profile("ours.toml", devices = 2)', tmp_path)}
    assert found["LP304"] == "a host has 1 device of `h100_sxm`, not 2"


def test_several_hosts_without_a_fabric_are_an_error() -> None:
    assert message("cluster h100_sxm(hosts = 3)", "LP302") == "3 hosts need a fabric between them"


def test_undecided_number_of_hosts_has_no_diagnostic() -> None:
    assert not codes("cluster h100_sxm(hosts = auto)") & {"LP301", "LP302", "LP303"}


CLOUDS = {
    "efa_p4d": {"a100_sxm80", "h200"},
    "efa_p5": {"h100_sxm", "b200"},
    "efa_p6_b200": {"b200", "h100_sxm"},
    "tcpxo_a3_mega": {"h100_sxm", "a100_sxm80"},
}


@pytest.mark.parametrize("fabric", CLOUDS)
def test_cloud_fabric_requires_its_hosts(fabric: str) -> None:
    def warned(device: str) -> bool:
        return "LP312" in codes(f"cluster {device}(hosts = 2, fabric = {fabric})\nmesh (dp_shard = 16)")

    assert sorted(warned(device) for device in CLOUDS[fabric]) == [False, True]
    assert "LP312" in codes(f"cluster cpu(hosts = 2, fabric = {fabric})")


@pytest.mark.parametrize(
    ("device", "fabric", "fits"),
    [
        ("a100_sxm40", "infiniband_hdr", True),
        ("a100_sxm40", "efa_p4d", True),
        ("a100_sxm80", "infiniband_hdr", True),
        ("a100_sxm80", "infiniband_ndr", False),
        ("a100_sxm80", "roce_400", False),
        ("h100_sxm", "infiniband_ndr", True),
        ("h100_sxm", "infiniband_xdr", False),
        ("h100_sxm", "ethernet_100", True),
        ("h100_sxm96", "roce_400", True),
        ("cpu", "infiniband_xdr", True),
        ("cpu", "loopback", True),
    ],
)
def test_fabric_bandwidth_is_limited_by_the_host_link(device: str, fabric: str, fits: bool) -> None:
    assert ("LP312" not in codes(f"cluster {device}(hosts = 2, fabric = {fabric})\nmesh (dp_shard = 16)")) is fits


@pytest.mark.parametrize(
    ("stated", "missing"),
    [
        ('compute_capability = "9.0"', None),
        ("", "compute capability"),
        ('compute_capability = "6.1"', "compute capability"),
        ('compute_capability = "8.9"', "multiprocessors"),
        ('compute_capability = "8.9"\nmultiprocessors = 142', None),
    ],
)
def test_inductor_asks_for_the_processor(stated: str, missing: str | None, tmp_path: Path) -> None:
    lines = (catalogue() / "h100_sxm.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("compute_capability", "multiprocessors"))]
    place = kept.index("[processor]") + 1
    (tmp_path / "ours.toml").write_text("\n".join([*kept[:place], stated, *kept[place:]]))
    plan = 'cluster profile("ours.toml")\n'
    found = {item.code: item.message for item in diagnostics(f"{plan}compile {{ layers.* = inductor }}", tmp_path)}
    assert ("LP313" in found) is (missing is not None)
    assert missing is None or missing in found["LP313"]
    assert "LP313" not in codes(f"{plan}compile {{ layers.* = aot_eager }}", tmp_path)
    assert "LP313" not in codes("cluster h100_sxm\ncompile { layers.* = inductor }")


@pytest.mark.parametrize(
    ("statement", "labels", "rest"),
    [
        ("", [], "the plan can be lowered and run, and not costed"),
        ("require step_time <= 1s", ["is not tested"], "the plan can be lowered and run, and not costed"),
        ("minimize step_time", ["cannot be solved for"], "the plan can be lowered and run, and not costed"),
        (
            "checkpoint { layers.* = auto in [none, full] }",
            ["cannot be filled"],
            "the plan can be neither costed nor solved",
        ),
        (
            "checkpoint { layers.* = auto in [none, full] -> full }",
            [],
            "the plan can be lowered and run, and not costed",
        ),
    ],
)
def test_device_file_without_profile_is_a_warning(statement: str, labels: list[str], rest: str, tmp_path: Path) -> None:
    text = (catalogue() / "h100_sxm.toml").read_text(encoding="utf-8")
    (tmp_path / "ours.toml").write_text(text.replace('name = "h100_sxm"', 'name = "ours"'), encoding="utf-8")
    plan = f'cluster profile("ours.toml", devices = 2)\n{statement}'
    [found] = [item for item in diagnostics(plan, tmp_path) if item.code in ("LP314", "LP315")]
    assert (found.code, found.severity) == ("LP314", "warning")
    assert found.message == f"the profile of `ours`, ours.json.gz, is missing beside ours.toml: {rest}"
    assert [label.text for label in found.others] == labels
    assert "`legoai calibrate -o ours.toml`" in found.help[0]
    (tmp_path / "ours.toml").write_text(text, encoding="utf-8")
    assert "LP314" not in codes(plan, tmp_path), "the catalogue's device of that name has a profile"


@pytest.mark.parametrize("name", fabric_names())
def test_fabric_without_figures_is_a_warning(name: str) -> None:
    plan = f"cluster h100_sxm(hosts = 2, fabric = {name})\nmesh (dp_shard = 16)\nrequire step_time <= 1s"
    found = [item for item in diagnostics(plan) if item.code in ("LP314", "LP315")]
    assert bool(found) is not fabric(name).has_figures
    assert "LP314" not in codes(plan.replace("hosts = 2", "hosts = 1").replace("16", "8")), "nothing is sent over it"
    for item in found:
        assert (item.code, item.severity, place(plan, "LP314")) == ("LP314", "warning", name)
        assert item.message.endswith(f"the fabric `{name}`: the plan can be lowered and run, and not costed")
        assert [label.text for label in item.others] == ["is not tested"]
        assert "`infiniband_ndr`" in item.help[0] and "`loopback`" not in item.help[0]


def test_a_damaged_profile_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_bytes((catalogue() / "h100_sxm.toml").read_bytes())
    profile = tmp_path / "ours.json.gz"
    good = shipped_file("h100_sxm").read_bytes()
    document = json.loads(gzip.decompress(good))

    def fault(devices: int = 1) -> str | None:
        found = diagnostics(f'cluster profile("ours.toml", devices = {devices})\nmesh (dp_shard = {devices})', tmp_path)
        return next((item.message for item in found if item.code == "LP314"), None)

    for content in (b"", b"junk", b"\x1f"):
        profile.write_bytes(content)
        assert "ours.json.gz, is neither compressed nor JSON" in str(fault()), content
    for content, words in {
        good[: len(good) // 2]: "is no profile: Compressed file ended",
        b"{": "is no profile: ",
        b"{}": "is no profile of format 1, but None",
        b' {"format": 1}': "is no complete profile: device, made, ",
        json.dumps({**document, "products": {}}).encode(): "is no complete profile: it has no rate for matrix products",
    }.items():
        profile.write_bytes(content)
        assert f"ours.json.gz, {words}" in str(fault()), content[:9]
    for content in (good, json.dumps(document).encode()):
        profile.write_bytes(content)
        assert fault(2) is None, content[:9]
    profile.write_text(json.dumps({**document, "links": {}}))
    assert fault() is None, "one device alone has no collectives"
    assert "ours.json.gz, has no figures of collectives, and the plan uses 2 devices of a host" in str(fault(2))
    profile.unlink()
    profile.mkdir()
    assert "ours.json.gz, is no file" in str(fault())


def test_a_profile_of_another_device_is_a_warning(tmp_path: Path) -> None:
    text = (catalogue() / "h100_sxm.toml").read_text(encoding="utf-8")
    (tmp_path / "ours.json.gz").write_bytes(shipped_file("h100_sxm").read_bytes())
    for name, codes_found in (("ours", {"LP319"}), ("h100_sxm", set())):
        (tmp_path / "ours.toml").write_text(text.replace('name = "h100_sxm"', f'name = "{name}"'), encoding="utf-8")
        found = [item for item in diagnostics('cluster profile("ours.toml")', tmp_path) if item.code.startswith("LP31")]
        assert {item.code for item in found} == codes_found
    (tmp_path / "ours.toml").write_text(text.replace('name = "h100_sxm"', 'name = "ours"'), encoding="utf-8")
    whole = message('cluster profile("ours.toml")', "LP319", tmp_path)
    assert whole == "the device is `ours`, and the profile beside its file is of `h100_sxm`"


def test_catalogued_devices_have_profiles() -> None:
    assert device_names() == profile_names()
