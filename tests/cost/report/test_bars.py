"""Bars of a timeline: their bound, and that merging them does not make an idle queue look busy."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from legoai.cost.report.bars import Bar, Track, rank_tracks
from legoai.cost.timing.timeline import Cost, Interval
from legoai.cost.trace.records import Copy, Phase

MOST = 200
STEP = 30.0
QUEUES = {
    # Operations, seconds of each.
    "stream 0": (6_000, 0.005),
    "communicator tp": (3_000, 0.001),
    "communicator between 32 and 64": (120, 0.002),
    "communicator dp_shard": (16, 0.02),
}


def interval(queue: str, start: float, seconds: float, module: str, phase: Phase) -> Interval:
    record = Copy(stream=0, direction="device_to_device", bytes=1, blocking=False, module=module, phase=phase)
    return Interval(record, Cost(seconds=seconds, resource="compute", model="test"), queue, start, start + seconds)


def drawn(most: int) -> dict[str, Track]:
    phases: tuple[Phase, ...] = ("forward", "backward")
    found = [
        interval(queue, place * STEP / count, seconds, f"layers.{place % 7}", phases[place // 10 % 2])
        for queue, (count, seconds) in QUEUES.items()
        for place in range(count)
    ]
    item: Any = SimpleNamespace(intervals=tuple(found))
    lines: Any = SimpleNamespace(of=lambda record: "")
    return {track.name: track for track in rank_tracks(item, lines, most=most)}


@pytest.fixture(scope="module")
def tracks() -> dict[str, Track]:
    return drawn(MOST)


def seconds(bars: tuple[Bar, ...]) -> float:
    return sum(bar.end - bar.start for bar in bars)


def test_number_of_bars_is_bounded(tracks: dict[str, Track]):
    assert sum(len(track.bars) for track in tracks.values()) <= MOST
    for most in (1, 5, 40, 1_000, 5_000):
        found = drawn(most).values()
        assert sum(len(track.bars) for track in found) <= max(most, len(QUEUES))
        assert all(a.end <= b.start + 1e-9 for track in found for a, b in itertools.pairwise(track.bars))


def test_bars_cover_little_more_than_their_operations(tracks: dict[str, Track]):
    longest = STEP / (MOST // len(tracks))
    for (count, each), track in zip(QUEUES.values(), tracks.values(), strict=True):
        assert sum(bar.busy for bar in track.bars) == pytest.approx(count * each)
        assert count * each <= seconds(track.bars) + 1e-9 <= count * each + len(track.bars) * longest


def test_queue_with_few_operations_is_drawn_as_it_is(tracks: dict[str, Track]):
    bars = tracks["dp_shard"].bars
    assert [bar.name for bar in bars] == ["copy device to device"] * 16
    assert seconds(bars) == pytest.approx(16 * 0.02)
    assert all(bar.share == pytest.approx(1.0) for bar in bars)


def test_merged_bars_state_their_busy_share(tracks: dict[str, Track]):
    assert all(bar.share == pytest.approx(0.1, rel=0.2) for bar in tracks["tp"].bars)
