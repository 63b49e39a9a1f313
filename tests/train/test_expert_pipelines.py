"""Experts in pipelines: deferred products, balance losses on inner stages, and DualPipeV's overlapped pairs."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwright.comm import alltoallv
from meshwright.nn.linear import WeightGradStore
from meshwright.pipeline import overlapped_pair
from meshwright.train.pipeline_stages import ModelStage
from tests.train.jobs import make_job, pieces, run_on, trace

TINY = ["moe-tiny", "model.dim=32", "model.expert_dim=24", "model.num_heads=2", "train.seq_len=32",
        "model.num_layers=4", "mesh.pp=2", "train.num_microbatches=4"]  # fmt: skip


def deferred_shapes(rank, world_size, words):
    """Shapes of the gradients that a step defers, of local shards."""
    put, found = WeightGradStore.put, []

    def counting(self, parameter, compute, *tensors):
        found.append(tuple(getattr(parameter, "shape", ())))
        put(self, parameter, compute, *tensors)

    _, step = make_job(rank, world_size, words)
    WeightGradStore.put = counting
    try:
        step(1)
    finally:
        WeightGradStore.put = put
    return found


@pytest.mark.slow
def test_zb_v_defers_the_products_of_experts(gang, corpus):
    """Three stacked matrices and the router's of each of a rank's two layers, in each split backward."""
    words = [*corpus, *TINY, "mesh.dp_shard=2", "mesh.ep=2", "pipeline.schedule=zb-v"]
    for found in run_on(gang, 4, deferred_shapes, words):
        stacked, routers = (sum(len(shape) == 3 for shape in found), found.count((8, 32)))
        assert stacked == 2 * 4 * 3 and routers == 2 * 4


def router_gradients(rank, world_size, words):
    job, step = make_job(rank, world_size, words)
    step.accumulate(1)
    return {name: piece for name, piece in pieces(job, gradients=True).items() if "router" in name}


def test_balance_losses_of_inner_stages_have_gradients(gang, corpus):
    words = [*corpus, *TINY, "pipeline.schedule=zb-v", "train.precision=float64"]
    losses = {weight: [*words, f"model.balance_loss={weight}"] for weight in (0.0, 1.0)}
    without, balanced = (run_on(gang, 2, router_gradients, losses[weight]) for weight in (0.0, 1.0))
    names = set()
    for ours, theirs in zip(balanced, without, strict=True):
        for name, piece in ours.items():
            names.add(name)
            assert (piece.values - theirs[name].values).norm() > 1e-2 * theirs[name].values.norm()
    assert len(names) == 4


class Transfers:
    """Counts the all-to-alls of rows during which another task started one of its own."""

    def __init__(self):
        self.num_overlapped, self._starts = 0, []
        self._real = alltoallv.start_into, alltoallv.wait_rows

    def start(self, out, x, **named):
        self._starts.append((threading.get_ident(), out.data_ptr() if x.is_floating_point() else None))
        self._real[0](out, x, **named)

    def wait(self, out):
        mine, address = threading.get_ident(), out.data_ptr()
        starts = [at for at, (_, one) in enumerate(self._starts) if one == address]
        since = starts[-1] if starts else len(self._starts)
        self.num_overlapped += any(thread != mine for thread, _ in self._starts[since:])
        self._real[1](out)

    def __enter__(self):
        alltoallv.start_into, alltoallv.wait_rows = self.start, self.wait
        return self

    def __exit__(self, *raised):
        alltoallv.start_into, alltoallv.wait_rows = self._real


def dualpipe_trace(rank, world_size, words, overlaps):
    """A trace, and the numbers of pairs that took turns and of all-to-alls that hid behind another task."""
    stage, run, pairs = ModelStage.__init__, overlapped_pair.run_overlapped, []

    def init(self, *args):
        stage(self, *args)
        assert self.overlaps, "the stages have all-to-alls in flight"
        self.overlaps = overlaps

    def counting(first, second, **named):
        pairs.append(1)
        return run(first, second, **named)

    ModelStage.__init__, overlapped_pair.run_overlapped = init, counting
    try:
        with Transfers() as transfers:
            return trace(rank, world_size, words, 2), len(pairs), transfers.num_overlapped
    finally:
        ModelStage.__init__, overlapped_pair.run_overlapped = stage, run


@pytest.mark.slow
def test_overlapped_pairs_compute_the_same_bits(gang, corpus):
    words = [*corpus, *TINY, "mesh.dp_shard=2", "mesh.ep=2", "pipeline.schedule=dualpipe-v",
             "model.num_shared_experts=1", "recompute.policy=full"]  # fmt: skip
    together, apart = (run_on(gang, 4, dualpipe_trace, words, overlaps) for overlaps in (True, False))
    assert all(pairs > 0 and hidden >= 2 * pairs for _, pairs, hidden in together)
    assert not any(pairs or hidden for _, pairs, hidden in apart)
    for (ours, *_), (theirs, *_) in zip(together, apart, strict=True):
        assert ours.results == theirs.results
        assert all(torch.equal(piece.values, theirs.final[name].values) for name, piece in ours.final.items())
