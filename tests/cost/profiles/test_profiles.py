"""Shipped profiles load, name their sources, and meet the limits on held-out errors."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai.cost.machine.kernel_time import GROUPED
from legoai.cost.profiles import ProfileError, load, profile, profile_names, read_document, write_document
from legoai.cost.profiles.schema import check
from legoai.specs.cluster import device, device_names
from support import ROOT

SHIPPED = ROOT / "cost" / "profiles"


def test_every_catalogued_device_has_a_profile() -> None:
    assert set(profile_names()) == set(device_names())


@pytest.mark.parametrize("name", device_names())
def test_profile_states_sources_and_errors(name: str) -> None:
    shipped = profile(name)
    assert shipped.name == name
    assert shipped.sources
    assert all(source["from"] and source["dated"] for source in shipped.sources)
    assert all(constant.source for constant in shipped.constants.values())
    assert shipped.held_out
    assert all("rows" in error for error in shipped.held_out.values())


@pytest.mark.parametrize("name", [name for name in device_names() if name != "cpu"])
def test_peaks_equal_the_catalogue(name: str) -> None:
    shipped, datasheet = profile(name), device(name)
    for rate, model in shipped.products.items():
        like = "bf16" if rate == "fp16" else rate.removesuffix(GROUPED)
        assert model.curve.peak == datasheet.peak(like), rate
        assert model.curve.sustained is None or model.curve.sustained < 1


def test_unmeasured_models_state_their_derivation() -> None:
    for name in ("h100_sxm96", "h200"):
        shipped = profile(name)
        models = [*shipped.products.values(), *shipped.attention.values()]
        assert all("H100" in model.derived for model in models), name
    small = profile("a100_sxm40")
    models = [*small.products.values(), *small.attention.values()]
    assert all("the A100 SXM of 80 GB's, of the same processor" in model.derived for model in models)
    assert all("80 GB" in derived for _, derived in small.movement.values())
    assert all(derived for _, derived in profile("b200").movement.values())
    assert not profile("h100_sxm").products["bf16"].derived


def test_held_out_errors_are_within_their_limits() -> None:
    for name in ("h100_sxm", "a100_sxm80", "b200"):
        errors = profile(name).held_out
        for label in ("products bf16", *(key for key in errors if key.startswith("attention"))):
            if errors[label]["rows"] > 2:
                assert errors[label]["median"] <= 0.05, (name, label)


def test_unknown_profile_error_names_known_profiles() -> None:
    with pytest.raises(ProfileError, match="h100_sxm"):
        profile("h1000")


def test_constant_without_a_source_is_missing() -> None:
    assert profile("h100_sxm").constant("dispatch_seconds") > 0
    with pytest.raises(ProfileError, match="does not state device_to_host_bytes_per_second"):
        profile("b200").constant("device_to_host_bytes_per_second")


def test_profile_file_round_trip_is_reproducible(tmp_path: Path) -> None:
    document, digest = read_document(SHIPPED / "h100_sxm.json.gz")
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write_document(tmp_path / name, document)
        assert read_document(tmp_path / name) == (document, digest)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz", "c.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json", "no profile"),
        (b"[]", "no profile of format 1, but list"),
        (b'{"format": 7}', "no profile of format 1, but 7"),
        (b"\x1f\x8bbroken", "no profile"),
        (b'{"format": 1}', "device: Field required"),
    ],
)
def test_invalid_profile_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=said):
        load(path)


def test_damaged_compression_is_refused(tmp_path: Path) -> None:
    path, raw = tmp_path / "x.json.gz", (SHIPPED / "cpu.json.gz").read_bytes()
    for at in range(20, len(raw) - 8, len(raw) // 50):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        with pytest.raises(ProfileError, match=r"no profile|cannot be read"):
            read_document(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        load(tmp_path / "nothing.json.gz")


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profile_follows_the_user_schema(name: str) -> None:
    check(read_document(SHIPPED / f"{name}.json.gz")[0])


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def damage(document: dict[str, Any]) -> None:
        *above, last = path.split(".")
        inner = document
        for key in above:
            inner = inner[key]
        inner[last] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            put("products.bf16.curve.peak", -1.0),
            r"products\.bf16\.curve\.peak: Input should be greater than or equal to",
        ),
        (
            put("products.bf16.curve.peak", 1e-300),
            r"products\.bf16\.curve\.peak: Input should be greater than or equal",
        ),
        (put("arithmetic.fp32", 1e300), r"arithmetic\.fp32: Input should be less than or equal to 10{21}"),
        (put("movement.copy.floor", 1e300), r"movement\.copy\.floor: Input should be less than or equal to 1"),
        (put("products.bf16.table.ratios", [1e6]), r"products\.bf16\.table\.ratios\.0: Input should be less than or"),
        (put("constants.context_bytes.value", 1e300), r"constants\.context_bytes\.value: Input should be less than or"),
        (put("products.bf16.curve.peak", math.nan), r"products\.bf16\.curve\.peak: Input should be a finite number"),
        (put("products.bf16.curve.peak", "fast"), r"products\.bf16\.curve\.peak: Input should be a valid number"),
        (put("products.fp16.like", "bf17"), "fp16: like `bf17`, which has no curve"),
        (put("products.fp16", {}), "needs `curve`, or `like`"),
        (put("attention.flash", {"like": "x"}), "should match pattern"),
        (put("movement", {}), "elementwise, reduction"),
        (put("links.all_gather.some", {}), "should match pattern"),
        (put("constants.gap", {"value": 1.0}), r"constants\.gap\.source: Field required"),
        (put("speed", 1), "speed: Extra inputs are not permitted"),
        (put("products.bf16.table.ratios", [1.0]), "points and ratios do not match"),
        (put("products.bf16.table.points", [[1.0, 2.0, 3.0]]), r"products\.bf16\.table\.points\.0\.3: Field required"),
        (put("products.bf16.curve.split", 0), r"products\.bf16\.curve\.split: Input should be greater than"),
        (put("products.bf16.forest.names", ["m"]), r"products\.bf16\.forest\.names: .*expected batch, m"),
        (put("products.fp16.derived", ""), "needs `derived` beside `like`"),
        (put("links.all_gather", {}), r"links\.all_gather: Dictionary should have at least 1 item"),
        (put("links.all_gather.1", {}), "should match pattern"),
        (put("movement.copy.first", None), "no complete profile"),
    ],
)
def test_damaged_field_error_names_the_field(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    document = json.loads(gzip.decompress((SHIPPED / "a100_sxm80.json.gz").read_bytes()))
    damage(document)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=said):
        load(path)
