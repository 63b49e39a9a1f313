"""Quantities as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.units import GIB, KIB, MIB, counted, format_bytes, format_count, format_duration, format_time

UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1024, "1.00 KiB"), (3.1 * MIB, "3.10 MiB"), (0.42 * GIB, "0.42 GiB"),
     (31 * GIB, "31.0 GiB"), (1.5 * 1024 * GIB, "1.50 TiB"), (-2048, "-2.00 KiB"), (140 * GIB, "140 GiB")],
)  # fmt: skip
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (18_200, "18.2 k"), (853_120, "0.85 M"), (70.6e9, "70.6 B"),
     (405.9e9, "406 B"), (1.2e12, "1.20 T"), (999_999, "1.00 M"), (799_999, "800 k")],
)  # fmt: skip
def test_counts(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.42, "0.4 s"), (9.94, "9.9 s"), (9.96, "10 s"), (12.3, "12 s"), (59.4, "59 s"), (59.6, "1:00"),
     (60, "1:00"), (221, "3:41"), (3599.6, "1:00:00"), (3729, "1:02:09")],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@given(st.integers(0, 2**50))
def test_bytes_are_right_to_three_digits_or_two(count):
    value, unit = format_bytes(count).split()
    assert float(value) * UNITS[unit] == pytest.approx(count, rel=0.052 if value.startswith("0.") else 0.006, abs=0.5)


@given(st.floats(0, 1e15))
def test_counts_are_right_to_two_digits(count):
    value, unit = re.fullmatch(r"([\d.]+) ?([kMBT]?)", format_count(count)).groups()
    size = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]
    assert float(value) * size == pytest.approx(count, rel=0.007, abs=0.5)


@given(st.floats(0, 1e7))
def test_durations_are_right_to_half_a_second(seconds):
    text = format_duration(seconds)
    parts = [float(part) for part in text.removesuffix(" s").split(":")]
    assert sum(part * 60**i for i, part in enumerate(reversed(parts))) == pytest.approx(seconds, abs=0.51)
    assert all(part < 60 for part in parts[1:])


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [(1, "rank", "1 rank"), (2, "rank", "2 ranks"), (0, "step", "0 steps"), (3, "micro-batch", "3 micro-batches"),
     (1, "micro-batch", "1 micro-batch"), (2, "process", "2 processes"), (2, "mesh axis", "2 mesh axes"),
     (0, "entry", "0 entries"), (2, "query", "2 queries"), (2, "key", "2 keys")],
)  # fmt: skip
def test_nouns_agree_with_their_number(number, noun, expected):
    assert counted(number, noun) == expected


def test_times_have_three_digits():
    assert [format_time(t) for t in (0, 3.4, 12.66, 999.0, 1234, 2.5e6)] == [
        "0 µs", "3.4 µs", "12.7 µs", "999 µs", "1.23 ms", "2.5 s"
    ]  # fmt: skip
