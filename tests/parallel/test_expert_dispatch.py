"""Experts on several ranks compute what all experts on one rank do, whoever gets no tokens, and send each row once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collective_log import group_record
from meshwright.nn.experts.router import Routing
from meshwright.nn.kept_results import ForwardCache
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from tests.parallel.expert_layers import EXPERTS, NUM_EXPERTS, B, Case, D, T, make, on_rank, reference

LIMIT_S = 20
"""For a body: a rank that stays out of a collective is one that the others wait for."""
WAYS = [
    {}, {"how": "recompute"}, {"how": "deferred"}, {"frozen": ("experts",), "how": "recompute"},
    {"frozen": ("router", "x")}, {"frozen": ("router", "x"), "how": "recompute"},
]  # fmt: skip


def last_experts(world_size):
    """Those of the last rank."""
    return tuple(range(NUM_EXPERTS - NUM_EXPERTS // world_size, NUM_EXPERTS))


def cases(world_size):
    all_experts = tuple(range(NUM_EXPERTS))
    others = tuple(e for e in all_experts if e not in last_experts(world_size))
    return {
        "chosen": Case(),
        "chosen, shared experts": Case(shared_dim=8),
        "chosen, capacity": Case(capacity_factor=0.5),
        "every expert": Case(top_k=NUM_EXPERTS),
        "one expert gets none": Case(all_experts[1:]),
        "one rank gets none": Case(others),
        "all ranks but one get none": Case(last_experts(world_size)),
        "one expert gets all": Case((5,), top_k=1),
        "nobody gets any": Case(without_room=tuple(range(world_size))),
        "nobody gets any, shared experts": Case(without_room=tuple(range(world_size)), shared_dim=8),
        "one rank sends none": Case(without_room=(1,)),
        "only one rank sends": Case(last_experts(world_size), without_room=tuple(range(1, world_size))),
    }


def assert_equal(found, expected):
    torch.testing.assert_close(found.out_btd, expected.out_btd, rtol=0, atol=1e-12)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        if gradient is None:
            assert found.gradients[name] is None, name
        else:
            assert found.gradients[name] is not None, f"{name} has no gradient, not even zeros"
            torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=1e-12, msg=name)


QUICK = [
    (2, "chosen, shared experts"), (2, "chosen, capacity"), (2, "one rank gets none"), (2, "one rank sends none"),
    (4, "only one rank sends"),
]  # fmt: skip
SLOW = [
    (4, "chosen"), (4, "every expert"), (2, "one expert gets none"), (4, "all ranks but one get none"),
    (4, "one expert gets all"), (2, "nobody gets any"), (4, "nobody gets any, shared experts"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "name"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_experts_on_several_ranks_compute_what_those_on_one_do(gang, world_size, name):
    case = cases(world_size)[name]
    found = gang(world_size).run(on_rank, case, WAYS, timeout_s=LIMIT_S)
    for n, named in enumerate(WAYS):
        for of_rank, due in zip(found, reference(case, world_size, **named), strict=True):
            assert_equal(of_rank[n], due)


@pytest.mark.parametrize("name", ["chosen, shared experts", "nobody gets any"])
def test_collectives_host_reads_and_nothing_left_in_flight(gang, name):
    """A forward exchanges counts, sends rows and choices and returns rows; a backward sends three gradients.

    A recomputation adds none.
    """
    for of_rank in gang(2).run(on_rank, cases(2)[name], WAYS, timeout_s=LIMIT_S):
        for named, result in zip(WAYS, of_rank, strict=True):
            assert result.split_reads == (1, 0)
            assert result.num_collectives == (4, 1 if "x" in named.get("frozen", ()) else 3), named
            assert result.in_flight == 0


def choices(case, world_size):
    """By rank, the experts of each of its tokens."""
    found = []
    for rank in range(world_size):
        layer, x_btd = make(case, rank)
        found.append(layer.router(x_btd.tanh()).experts_nk.tolist())
    return found


@pytest.mark.parametrize(("world_size", "name"), [(2, "one expert gets all"), (4, "chosen"), (4, "every expert")])
def test_a_token_travels_once_to_a_rank_and_back(gang, world_size, name):
    case, per_rank = cases(world_size)[name], NUM_EXPERTS // world_size
    found = gang(world_size).run(on_rank, case, WAYS[:2], timeout_s=LIMIT_S)
    by_rank = choices(case, world_size)
    rows, sent = [[0] * world_size for _ in range(world_size)], [0] * world_size
    for a, tokens in enumerate(by_rank):
        for experts in tokens:
            targets = [e // per_rank for e in experts if e < NUM_EXPERTS]
            for b in set(targets) - {a}:
                rows[a][b] += 1
            sent[a] += sum(b != a for b in targets)
    for rank, of_rank in enumerate(found):
        arriving = sum(row[rank] for row in rows)
        got = sum(e // per_rank == rank for a, tokens in enumerate(by_rank) if a != rank for one in tokens for e in one)
        counts = (world_size - 1) * (per_rank + 1) * 8
        forward = counts + (sum(rows[rank]) + arriving) * D * 8 + sent[rank] * 2 * 8
        backward = (sum(rows[rank]) + arriving) * D * 8 + got * 2 * 8
        assert all(result.bytes_sent == (forward, backward) for result in of_rank)


def test_under_a_capacity_every_slot_travels_and_nothing_is_read(gang):
    case, per_rank = cases(2)["chosen, capacity"], NUM_EXPERTS // 2
    slots = per_rank * B * case.config().capacity(T)
    for of_rank in gang(2).run(on_rank, case, WAYS[:2], timeout_s=LIMIT_S):
        for result in of_rank:
            assert result.split_reads == (0, 0) and result.in_flight == 0
            assert result.bytes_sent == (slots * (2 * D * 8 + 8),) * 2


def received(rank, world_size, experts_by_rank):
    """Rows, weights and sizes that a rank's experts get; rows and weights tell whence they are."""
    experts_nk = torch.tensor(experts_by_rank[rank], dtype=torch.int64).view(-1, 2)
    n, k = experts_nk.shape
    x_n2 = torch.tensor([[100.0 * rank, t] for t in range(n)]).view(n, 2)
    weights_nk = experts_nk + 10.0 * torch.arange(n)[:, None] + 1000.0 * rank
    routing = Routing(experts_nk, weights_nk, num_samples=1, capacity=None)
    dispatch = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD).start(x_n2, routing, ForwardCache())
    dispatch.send()
    rows = dispatch.receive()
    dispatch.combine(rows, rows.rows_rd * 2)
    sums = dispatch.finish()
    return rows.rows_rd.tolist(), rows.weights_r.tolist(), rows.groups.sizes, sums.tolist(), group_record(None).count


@pytest.mark.parametrize("lengths", [(5, 4), (3, 7, 1, 4), (6, 0), (0, 5, 0, 2), (0, 0)], ids=str)
def test_rows_are_by_expert_then_source_rank_then_token(gang, lengths):
    """Also of ranks with different numbers of tokens, or with none. Dropped choices are nobody's."""
    generator = torch.Generator().manual_seed(len(lengths))
    by_rank = [torch.rand(n, NUM_EXPERTS + 1, generator=generator).argsort(-1)[:, :2].tolist() for n in lengths]
    found = gang(len(lengths)).run(received, by_rank, timeout_s=LIMIT_S)
    per_rank = NUM_EXPERTS // len(lengths)
    for rank, (rows, weights, sizes, sums, _) in enumerate(found):
        mine = range(rank * per_rank, (rank + 1) * per_rank)
        due = [(e, a, t) for e in mine for a, tokens in enumerate(by_rank) for t, one in enumerate(tokens) if e in one]
        assert rows == [[100.0 * a, t] for _, a, t in due]
        assert weights == [e + 10.0 * t + 1000.0 * a for e, a, t in due]
        assert sizes == [sum(one[0] == e for one in due) for e in mine]
        copies = [sum(e < NUM_EXPERTS for e in one) for one in by_rank[rank]]
        assert sums == [[200.0 * rank * c, 2.0 * t * c] for t, c in enumerate(copies)]


def test_zeros_where_no_token_came():
    """The reference does what the others are compared with."""
    case = cases(2)["all ranks but one get none"]
    first, last = reference(case, 2)
    for name in EXPERTS:
        assert not first.gradients[name].any() and last.gradients[name].flatten(1).any(1).all()
    nobody = reference(cases(2)["nobody gets any"], 2)[0]
    assert not any(nobody.gradients[name].any() for name in EXPERTS)
    assert nobody.out_btd.shape == (B, T, D) and nobody.gradients["router.gate.weight"].any(), "the balance loss's"
