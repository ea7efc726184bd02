"""SVG pictures: room for labels, colours that can be told apart, and numbers that can be read on them."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import legoai.cost.report.page as page
import legoai.cost.report.pictures as pictures
from legoai.cost.timing.timeline import Cost, Interval
from legoai.cost.trace.records import Copy
from legoai.specs.directives.mesh import Mesh

FOLDER = Path(page.__file__).parent
SVG = "{http://www.w3.org/2000/svg}"
LETTER = 6.9
"""Pixels of a letter of DejaVu Sans at 12 pixels, on average over the labels; most other fonts are narrower."""


def schemes() -> list[dict[str, str]]:
    """The colours of the light and of the dark scheme."""
    css = (FOLDER / "page.css").read_text(encoding="utf-8")
    return [
        dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6});", block)) for block in re.findall(r":root \{([^}]*)\}", css)
    ]


def contrast(one: str, other: str) -> float:
    """The ratio of the Web Content Accessibility Guidelines, between 1 and 21."""

    def luminance(colour: str) -> float:
        digits = colour.lstrip("#")
        digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
        channels = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_numbers_on_bars_can_be_read(scheme: dict[str, str]):
    number = re.search(r"\.number\{fill:(#\w+)", pictures._STYLE)[1]  # type: ignore[index]
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    label = re.search(r'share > [^}]*?fillStyle = "(#\w+)"', script)[1]  # type: ignore[index]
    looks = {number: {*pictures._STAGES, *pictures._LOOKS.values()}, label: set(page._LOOKS)}
    for text, fills in looks.items():
        found = {fill: round(contrast(text, scheme[fill]), 2) for fill in fills}
        assert min(found.values()) >= 4.5, found


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_colours_of_stages_differ(scheme: dict[str, str]):
    for one, other in itertools.combinations(pictures._STAGES, 2):
        channels = [[int(scheme[name][place : place + 2], 16) for place in (1, 3, 5)] for name in (one, other)]
        assert max(abs(a - b) for a, b in zip(*channels, strict=True)) > 25, (one, other)


@pytest.mark.parametrize(("stages", "devices"), [(2, 8), (11, 4), (16, 8), (40, 1), (64, 16)])
def test_legend_of_a_mesh_names_the_stages_of_each_colour(stages: int, devices: int):
    picture = pictures.mesh_picture(Mesh(pp=stages, dp_shard=2), devices_per_host=devices, name="test")
    root = ElementTree.fromstring(picture)
    squares = [item for item in root if item.tag == f"{SVG}rect" and item.get("style")]
    ranks, legend = ([item for item in squares if item.get("width") == wide] for wide in ("27.00", "12.00"))
    names = [item.text or "" for item in root if re.match(r"pp \d+(,|$)", item.text or "")]
    assert len(legend) == len(names) == min(stages, 11)
    colours = {
        item.get("style"): name.removeprefix("pp ").split(", ") for item, name in zip(legend, names, strict=True)
    }
    assert len(colours) == len(legend)
    for item in ranks:
        stage = re.search(r"pp (\d+)", item[0].text or "")[1]  # type: ignore[index]
        assert stage in colours[item.get("style")] or "…" in colours[item.get("style")]
    ends = [float(item.get("x", 0)) + LETTER * len(item.text or "") for item in root if item.tag == f"{SVG}text"]
    assert max(ends) <= 1100
    if devices > 2:
        assert any(re.fullmatch(r"host 1, pp \d+(–\d+)?", item.text or "") for item in root) or stages == 2


@pytest.mark.parametrize(
    ("ranks", "devices", "heading"),
    [(1, 1, "1 rank on 1 host"), (36, 36, "36 ranks on 1 host"), (2048, 64, "2,048 ranks on 32 hosts"),
     (100, 100, "100 ranks on 1 host"), (40, 100, "40 ranks on 1 host")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["test", "long_" * 60])
def test_mesh_is_inside_of_the_picture(name: str, ranks: int, devices: int, heading: str):
    root = ElementTree.fromstring(pictures.mesh_picture(Mesh(dp_shard=ranks), devices_per_host=devices, name=name))
    texts = [item for item in root if item.tag == f"{SVG}text"]
    whole = texts[0].text or ""
    assert whole == f"test: {heading}" if name == "test" else whole.endswith(f"…: {heading}")
    assert max(float(item.get("x", 0)) + LETTER * len(item.text or "") for item in texts) <= 1100
    cells = {item.text: item for item in texts if item.get("class") == "number"}
    assert len(cells) == ranks

    def bounds(item: ElementTree.Element) -> list[float]:
        left, top, wide, high = (float(item.get(name, 0)) for name in ("x", "y", "width", "height"))
        return [left, top, left + wide, top + high]

    boxes = [bounds(item) for item in root if item.get("class") == "box"]
    squares = [bounds(item) for item in root if item.get("width") == "27.00"]
    assert len({tuple(square) for square in squares}) == ranks
    for index, (left, top, right, bottom) in enumerate(squares):
        box = boxes[index // devices]
        assert box[0] < left and box[1] < top and right < box[2] and bottom < box[3]
    high = float(root.get("height", 0))
    assert all(right <= 1100 and bottom <= high for _, _, right, bottom in boxes)
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("name", ["tp", "between 32 and 64", "dp_replicate+dp_shard+tp"])
def test_labels_of_rows_are_beside_their_bars(name: str):
    record = Copy(stream=0, direction="device_to_device", bytes=1, blocking=False, module="", phase="forward")
    one = Interval(record, Cost(seconds=1.0, resource="compute", model="test"), f"communicator {name}", 0.0, 1.0)
    item: Any = SimpleNamespace(intervals=(one,), breakdown=SimpleNamespace(seconds=1.0), rank=0)
    causes: Any = SimpleNamespace(of_kernel=lambda *_: None)
    root = ElementTree.fromstring(pictures.timeline_picture(item, causes, name="test"))
    label = next(part for part in root if part.text == name)
    bar = next(part for part in root if part.tag == f"{SVG}rect" and len(part))
    assert float(label.get("x", 0)) + LETTER * len(name) < float(bar.get("x", 0))
