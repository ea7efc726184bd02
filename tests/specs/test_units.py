"""Values of the plan language as text."""

import pytest

from legoai.cost.words import seconds, size
from legoai.specs.units import UNITS, counted, format_bytes, format_exactly, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1100 * 2**20, "1100MiB"),
        (72 * 2**30, "72GiB"),
        (1.5 * 2**30, "1.5GiB"),
        (2048 * 2**20, "2GiB"),
        (123456 * 2**10, "123456KiB"),
        (15 * 10**6, "15MB"),
        (72 * 10**9, "72GB"),
        (1234567, "1234567B"),
        (2**30 + 1, "1073741825B"),
        (500, "500B"),
        (0, "0B"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_with_few_digits(value: float, text: str):
    assert format_exactly(value, "bytes") == text
    number = text.rstrip("BKMGTi")
    assert float(number) * UNITS[text.removeprefix(number)][1] == value


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (1.2345678, "seconds", "1.2345678s"),
        (0.0305, "seconds", "30.5ms"),
        (2.5e-7, "seconds", "0.25us"),
        (0.1, "fraction", "10%"),
        (699499.7294299278, "number", "699499.7294299278"),
    ],
)
def test_other_values_keep_all_digits(value: float, dimension, text: str):
    assert format_exactly(value, dimension) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "error", "0 errors"), (1, "micro batch", "1 micro batch"), (2, "micro batch", "2 micro batches"),
     (1024, "device", "1,024 devices")],
)  # fmt: skip
def test_counts_have_nouns(count: int, noun: str, text: str):
    assert counted(count, noun) == text


@pytest.mark.parametrize(
    ("value", "written", "shown"),
    [(2**30 - 1, "1GiB", "1.00 GiB"), (1023.6, "1023.6B", "1.00 KiB"), (1023, "1023B", "1023 B"),
     (2**30 - 2**20, "1023MiB", "1,023 MiB"), (2**40 - 2**12, "1TiB", "1.00 TiB"), (0, "0B", "0 B")],
)  # fmt: skip
def test_bytes_that_round_to_a_unit_are_written_in_it(value: float, written: str, shown: str):
    assert (format_bytes(value), size(value)) == (written, shown)


@pytest.mark.parametrize(
    ("value", "written", "shown"),
    [(0.9999999, "1s", "1.00 s"), (0.9996, "999.6ms", "1.00 s"), (0.9994, "999.4ms", "999 ms"),
     (0.00099999999, "1ms", "1.00 ms"), (0.001, "1ms", "1.00 ms"), (9.996, "9.996s", "10.0 s"), (0, "0us", "0 s")],
)  # fmt: skip
def test_seconds_that_round_to_a_unit_are_written_in_it(value: float, written: str, shown: str):
    assert (format_seconds(value), seconds(value)) == (written, shown)
