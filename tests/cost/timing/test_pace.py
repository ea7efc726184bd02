"""Extrapolated spans, where the host or the device is the bottleneck."""

from __future__ import annotations

from legoai.cost.timing.pace import Paced, keeps_pace
from legoai.cost.timing.repeats import Span


def paced(start: float, *, took: float, by_host: float, more: int = 10, lag: float = 0.0) -> Paced:
    return Paced(Span(start, start + took, more), by_host, lag)


def test_a_span_goes_on_while_the_device_takes_longer():
    assert keeps_pace([paced(0, took=2, by_host=1), paced(20, took=2, by_host=1)], [])


def test_a_span_at_the_pace_of_the_host_goes_on():
    assert keeps_pace([paced(0, took=2, by_host=2), paced(20, took=3, by_host=3)], [])


def test_a_device_that_works_off_what_waits_for_it_goes_on_as_long_as_something_waits():
    assert keeps_pace([paced(0, took=2, by_host=2.5, lag=5)], [])
    assert not keeps_pace([paced(0, took=2, by_host=2.5, lag=4.9)], [])
    assert not keeps_pace([paced(0, took=2, by_host=2.5)], [])


def test_what_waits_grows_with_the_spans_before():
    forward, backward = paced(0, took=2, by_host=1), paced(20, took=2, by_host=3, lag=1)
    assert keeps_pace([forward, backward], [])
    assert not keeps_pace([paced(0, took=2, by_host=1.5), backward], [])


def test_a_span_at_the_pace_of_the_host_is_another_where_the_host_gets_ahead_before_it():
    assert not keeps_pace([paced(0, took=2, by_host=1), paced(20, took=2, by_host=2)], [])
    assert keeps_pace([paced(0, took=2, by_host=2), paced(20, took=2, by_host=1)], [])


def test_micro_batches_go_on_while_the_device_takes_longer_with_all_their_blocks():
    blocks = [paced(0, took=2, by_host=1)]
    assert keeps_pace(blocks, [paced(0, took=20, by_host=29)])
    assert not keeps_pace(blocks, [paced(0, took=20, by_host=31)])
