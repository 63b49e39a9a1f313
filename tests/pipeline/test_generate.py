"""Generated tables match the papers' closed forms exactly; invalid numbers raise helpful errors."""

from __future__ import annotations

import pytest

from meshwright.errors import ScheduleError
from meshwright.pipeline import Costs, Schedule, generate, simulate
from meshwright.pipeline.generate import V_SHAPED, ScheduleKind
from meshwright.pipeline.simulate import Simulation

RANKS = (2, 3, 4, pytest.param(8, marks=pytest.mark.slow))
TIMES = [(1, 1, 1), (2, 3, 1), (3, 5, 2), (1, 2, 4), (4, 1, 0)]
"""F, I and W of a stage; ints, so that sums are exact."""


def run(kind: str, p: int, m: int, v: int | None = None, times=(1, 1, 1)) -> Simulation:
    forward, backward_input, backward_weight = times
    schedule = generate(kind, num_stages=p, num_microbatches=m, num_chunks=v)
    costs = Costs.uniform(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    return simulate(schedule, costs)


def worst_idle(simulation: Simulation) -> tuple[float, float]:
    """Return the worst idle time by both definitions."""
    return max(idle.in_span for idle in simulation.idle), max(idle.in_makespan for idle in simulation.idle)


def peaks(simulation: Simulation) -> list[int]:
    """Return peak activations per rank, in units of one stage and micro-batch."""
    return [peak.total for peak in simulation.peak_bytes]


def num_warmup(schedule: Schedule, rank: int) -> int:
    """Return the number of forwards before the one that precedes the first backward."""
    kinds = [part.kind.value for action in schedule.actions[rank] for part in action.parts()]
    return max(0, next(i for i, kind in enumerate(kinds) if kind != "F") - 1)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", RANKS)
def test_gpipe_and_1f1b(p, times):
    for m in range(p, 4 * p + 1):
        for kind, held in (("f-then-b", [m] * p), ("1f1b", [p - r for r in range(p)])):
            simulation = run(kind, p, m, times=times)
            assert worst_idle(simulation) == ((p - 1) * sum(times),) * 2
            assert peaks(simulation) == held


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("p", RANKS)
def test_interleaved_where_p_divides_m(p, v, times):
    """Times and peaks are per chunk, i.e. 1/v of a rank, which accounts for the closed form's division by v."""
    for m in range(p, 4 * p + 1, p):
        simulation = run("interleaved", p, m, v, times)
        assert worst_idle(simulation) == ((p - 1) * sum(times),) * 2
        expected = [2 * (p - r - 1) + (v - 1) * p + 1 if v > 1 else p - r for r in range(p)]
        assert peaks(simulation) == [min(peak, m * v) for peak in expected]


@pytest.mark.parametrize("times", [(f, i, w) for f, i, w in TIMES if w <= f and w <= i] + [(5, 4, 4), (2, 5, 1)])
@pytest.mark.parametrize("p", RANKS)
def test_zb_h1(p, times):
    """(p−1)(F+I−W) holds for W ≤ F and W ≤ I (measured): a longer W delays neighbours that wait for an I."""
    forward, backward_input, backward_weight = times
    for m in range(p, 4 * p + 1):
        simulation = run("zb-h1", p, m, times=times)
        assert worst_idle(simulation)[1] == (p - 1) * (forward + backward_input - backward_weight)
        assert worst_idle(simulation)[0] <= worst_idle(simulation)[1]
        assert peaks(simulation) == [p] * p


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_has_no_bubble_inside_the_span(p):
    """Units are half those of the paper, where both chunks of a rank together take F=I=W=1. From m = 2p−1 on, there
    are enough micro-batches for the first rank's warm-up."""
    for m in range(p, 4 * p + 1):
        simulation = run("zb-v", p, m)
        assert max(peaks(simulation)) == 2 * p
        if m >= 2 * p - 1:
            in_span, in_makespan = worst_idle(simulation)
            assert (in_span, in_makespan / 2) == (0, (p - 1) / 2)


def test_both_definitions_of_zb_vs_bubble():
    in_span, in_makespan = worst_idle(run("zb-v", 4, 8, times=(0.5, 0.5, 0.5)))
    assert (in_span, in_makespan) == (0, 1.5)


@pytest.mark.parametrize(
    ("kind", "bubble_share", "peak"),
    [("v-half", 1 / 2, lambda p: (p + 2) // 2), ("v-min", 2 / 3, lambda p: (p + 4) // 3)],
)
@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_v_half_and_v_min_within_ten_percent_of_what_was_published(kind, bubble_share, peak, p):
    for m in range(p, 4 * p + 1, 3):
        simulation = run(kind, p, m, times=(0.5, 0.5, 0.5))
        assert max(peaks(simulation)) / 2 <= peak(p)
        idle_of_1f1b = worst_idle(run("1f1b", p, m))[1]
        assert worst_idle(simulation)[1] <= 1.1 * bubble_share * idle_of_1f1b


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v(p):
    """In units of a chunk; there is no published form for this unit model, these are ours, measured."""
    for m in range(2 * p, 4 * p + 1):
        simulation = run("dualpipe-v", p, m)
        assert worst_idle(simulation) == (2 * (p - 1), 2 * (p - 1))
        assert max(peaks(simulation)) == 2 * p + 1


@pytest.mark.parametrize("p", [1, *RANKS])
def test_warm_up(p):
    for m in range(1, 4 * p + 1):
        plain = generate("1f1b", num_stages=p, num_microbatches=m)
        assert [num_warmup(plain, r) for r in range(p)] == [min(p - r - 1, m - 1) for r in range(p)]
        if m % p == 0:
            for v in (2, 4):
                chunked = generate("interleaved", num_stages=p, num_microbatches=m, num_chunks=v)
                warmups = [min(2 * (p - r - 1) + (v - 1) * p, v * m - 1) for r in range(p)]
                assert [num_warmup(chunked, r) for r in range(p)] == warmups


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-h1"])
def test_one_rank_has_no_warm_up(kind):
    schedule = generate(kind, num_stages=1, num_microbatches=6, num_chunks=1)
    kinds = [action.parts()[0].kind.value for action in schedule.actions[0]]
    assert kinds == (["F", "I", "W"] if kind == "zb-h1" else ["F", "B"]) * 6
    assert worst_idle(simulate(schedule, Costs.uniform())) == (0, 0)
    assert peaks(simulate(schedule, Costs.uniform())) == [1]


def test_one_rank_with_chunks_holds_one_micro_batch():
    assert [peaks(run("interleaved", 1, 6, v)) for v in (2, 3, 4)] == [[2], [3], [4]]


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_a_kind_has_its_name_and_number_of_chunks(kind):
    """`verify` tells that each piece of work is there once."""
    schedule = generate(kind, num_stages=3, num_microbatches=7)
    assert schedule.num_chunks == (2 if kind in V_SHAPED or kind is ScheduleKind.INTERLEAVED else 1)
    assert schedule.kind == kind.value


@pytest.mark.parametrize(
    ("words", "what", "rule", "fix"),
    [
        ({"kind": "2f2b"}, "unknown schedule '2f2b'", "f-then-b, 1f1b, interleaved, zb-h1, zb-v", "1f1b"),
        ({"kind": "1F1B"}, "unknown schedule '1F1B'", "dualpipe-v, v-half, v-min", "1f1b"),
        ({"kind": "1f1b", "num_chunks": 2}, "1f1b with 2 chunks", "1f1b has 1 chunk per rank", "interleaved"),
        ({"kind": "zb-v", "num_chunks": 3}, "zb-v with 3 chunks", "zb-v has 2 chunks per rank", "2,"),
        ({"kind": "v-half", "num_chunks": 1}, "v-half with 1 chunk", "v-half has 2 chunks per rank", "2,"),
        ({"kind": "dualpipe-v", "num_microbatches": 7}, "7 micro-batches", "two micro-batches per rank", "8 or more"),
        ({"kind": "1f1b", "num_stages": 0}, "0 stages", "at least 1", "1 or more stages"),
        ({"kind": "1f1b", "num_microbatches": 0}, "0 micro-batches", "at least 1", "1 or more micro-batches"),
        ({"kind": "interleaved", "num_chunks": -1}, "-1 chunks", "at least 1", "1 or more chunks"),
    ],
)
def test_bad_numbers_are_explained(words, what, rule, fix):
    with pytest.raises(ScheduleError) as caught:
        generate(**{"num_stages": 4, "num_microbatches": 8, **words})
    assert what in caught.value.what
    assert rule in caught.value.rule
    assert fix in caught.value.fix
