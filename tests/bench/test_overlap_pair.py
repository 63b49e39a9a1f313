"""The measurement of overlapped tasks runs; how long a pair takes is tested on a simulated clock (tests/comm)."""

from __future__ import annotations

from meshwright_bench.overlap_pair import PairSeconds, measure_pair, switch_seconds


def test_a_pair_is_measured():
    measured = measure_pair(compute_s=(1e-4, 1e-4), all_to_all_s=1e-4, num_layers=1, rounds=1)
    assert measured.pair_s > 0 and measured.sum_s > 0
    assert switch_seconds(num_switches=2) > 0


def test_the_ratio_is_that_of_the_pair_to_the_sum():
    assert PairSeconds(pair_s=3.0, sum_s=6.0).ratio() == 0.5
