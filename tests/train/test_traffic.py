"""Predicted bytes against those that a step really hands to other ranks."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.comm.collective_log import group_records
from meshwright.comm.collectives import ALL_GATHER, REDUCE_SCATTER, all_reduce_sum
from meshwright.parallel.data_parallel import average_replicated_gradients, fsdp_modules
from meshwright.plan.make_plan import make_plan
from meshwright.plan.traffic import Purpose, predict_traffic
from meshwright.train import train_step
from tests.helpers import quick_and_slow
from tests.train.jobs import load_words, make_job


class Counting:
    """FSDP2's own collectives, with the bytes that leave this rank."""

    def __init__(self, found):
        self._found = found

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class CountingReduceScatter(Counting):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self._found[Purpose.GRADIENTS] += (group.size() - 1) * output_tensor.numel() * output_tensor.element_size()
        return REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class CountingAllGather(Counting):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self._found[Purpose.WEIGHTS] += (group.size() - 1) * input_tensor.numel() * input_tensor.element_size()
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


def counted(rank, world_size, words):
    """What FSDP2 sends in a step, the second one."""
    job, step = make_job(rank, world_size, words)
    found = Counter()
    for module in fsdp_modules(job.model):
        module.set_custom_reduce_scatter(CountingReduceScatter(found))
        module.set_custom_all_gather(CountingAllGather(found))
    step(1)
    found.clear()
    step(2)
    return dict(found)


VOCABULARY = "model.vocab_size=2000"  # a vocabulary that is larger than a block
MICROBATCHES = "train.num_microbatches=2"
LAYOUTS = quick_and_slow(
    [
        (2, ("mesh.dp_shard=2", "train.precision=bfloat16", "model.tie_embeddings=true")),
        (2, ("mesh.dp_shard=2", "mesh.reshard_after_forward=false", MICROBATCHES, VOCABULARY)),
        (2, ("mesh.dp_shard=2", "train.freeze=['embed.*','blocks.0.*']", VOCABULARY)),
        (2, ("mesh.dp_shard=2", "pipeline.chunks=2", MICROBATCHES, VOCABULARY)),
        (4, ("mesh.dp_shard=4", "model.ffn_dim=50")),
        (4, ("mesh.dp_shard=2", "mesh.pp=2", "train.num_microbatches=4", "model.tie_embeddings=true", VOCABULARY)),
        (4, ("mesh.dp_shard=2", "mesh.tp=2")),
        (4, ("mesh.cp=4", "model.tie_embeddings=true", "train.precision=bfloat16")),
    ],
    quick=[
        (2, ("mesh.dp_shard=2", "train.precision=bfloat16", "model.tie_embeddings=true")),
    ],
)


@pytest.mark.parametrize(("world_size", "words"), LAYOUTS)
def test_gradients_and_weights_are_predicted_exactly(gang, corpus, world_size, words):
    plan = make_plan(load_words([*words, *corpus]))
    for rank, found in enumerate(gang(world_size).run(counted, [*words, *corpus])):
        traffic = predict_traffic(plan, rank=rank)
        assert {what: traffic.of(what).sent.total() for what in (Purpose.GRADIENTS, Purpose.WEIGHTS)} == found


class Leaving(TorchDispatchMode):
    """Bytes that leave this rank in any collective, where every group has two ranks; without the step's one sum, and
    without all-to-alls."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # until it has become what is really sent
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in LEAVING:
            *_, x = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.total += LEAVING[name] * x.numel() * x.element_size()
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._one_sum = mock.patch.object(train_step, "all_reduce_sum", self._uncounted)
        self._one_sum.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._one_sum.stop()
        super().__exit__(*error)

    def _uncounted(self, totals):
        before, out = self.total, all_reduce_sum(totals)
        self.total = before
        return out


LEAVING = {
    "allreduce_": 1, "all_reduce": 1, "send": 1, "_allgather_base_": 1, "_reduce_scatter_base_": 0.5,
    "all_gather_into_tensor": 1, "reduce_scatter_tensor": 0.5,
}  # fmt: skip
"""Part of a collective's last tensor, its input, that leaves one of two ranks."""


def all_leaving(rank, world_size, words):
    """Bytes that leave a rank in a step, the second one, whatever they are for, where every group has two ranks; not
    those of the step's one final all-reduce, as predicted. By link, and of more ranks, see `compressed`."""
    job, step = make_job(rank, world_size, words)
    step(1)
    in_all_to_alls = -bytes_of_all_to_alls()
    with Leaving() as mode:
        step(2)
    return mode.total + in_all_to_alls + bytes_of_all_to_alls()


def bytes_of_all_to_alls():
    return sum(record.sent["all_to_all"] for record in group_records().values())


DIT = ["dit-digits", "model.num_layers=4", "data.source=digits", "model.num_classes=11"]  # 12 rows with the null class
RECOMPUTE = "recompute.policy=full"
WHOLE = "mesh.sequence_parallel=false"
COUNTED = ["moe-tiny", "model.balance_loss=0.02", "model.balance_bias=true"]
ALL_KINDS = [
    (2, ["mesh.tp=2"]),
    (2, ["mesh.pp=2", "train.num_microbatches=2", "model.tie_embeddings=true"]),
    pytest.param(2, ["mesh.tp=2", WHOLE, RECOMPUTE, "train.num_microbatches=2", "train.precision=bfloat16"],
                 marks=pytest.mark.slow),
    pytest.param(2, [*DIT, "mesh.tp=2", RECOMPUTE, "model.num_layers=1"], marks=pytest.mark.slow),
    *(pytest.param(2, [*more, "mesh.tp=2", RECOMPUTE, "train.dropout=0.1"], marks=pytest.mark.slow)
      for more in ([], [WHOLE], ["moe-tiny"], ["moe-tiny", "model.num_shared_experts=1"], DIT)),
    pytest.param(2, ["mesh.tp=2", "train.loss_chunk=100"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
    pytest.param(4, [*DIT, "mesh.pp=2", "mesh.dp_shard=2", "pipeline.schedule=zb-v"], marks=pytest.mark.slow),
    pytest.param(2, ["mesh.cp=2", RECOMPUTE, "model.window=24", "model.global_every=2"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.cp=2", "mesh.pp=2", "pipeline.schedule=zb-v", "train.num_microbatches=4", WHOLE,
                     "model.num_layers=4"], marks=pytest.mark.slow),
    pytest.param(2, [*COUNTED, "mesh.cp=2", "model.balance_scope=global-batch"], marks=pytest.mark.slow),
    pytest.param(4, [*COUNTED, "mesh.cp=2", "mesh.tp=2", RECOMPUTE], marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "words"), ALL_KINDS)
def test_everything_that_is_sent_is_predicted_exactly(gang, corpus, world_size, words):
    words = words if "data.source=digits" in words else [*words, *corpus]
    for rank, found in enumerate(gang(world_size).run(all_leaving, words)):
        assert predict_traffic(make_plan(load_words(words)), rank=rank).sent().total() == found


def compressed(rank, world_size, words):
    """What the compressed collectives count of themselves in a step, over any number of ranks and nodes."""
    job, step = make_job(rank, world_size, words)
    step(1)
    found = job.features["compression"]._sent()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (4, ["dp_shard=4", "ranks_per_node=2", "gradients=loco4", "weights=int8"]),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (2, ["dp_shard=2", "gradients=exact-via-all-to-all", "weights=bf16", "train.precision=bfloat16"]),
                (4, ["dp_shard=2", "dp_replicate=2", "ranks_per_node=2", "gradients=int4", "weights=int8"]),
                (4, ["dp_shard=4", "secondary_shards=2", "gradients=int2", "weights=int8", "train.num_microbatches=2"]),
            )
        ),
    ],
)
def test_compressed_bytes_are_predicted_exactly(gang, corpus, world_size, words):
    """By link, and with what exact collectives would have sent. Layouts have data axes alone: the prediction is of all
    that is sent, and only gradients and weights count themselves."""
    full = ("" if "." in word else "mesh." if word.startswith("dp_") else "comm." for word in words)
    words = [*(section + word for section, word in zip(full, words, strict=True)), *corpus]
    for rank, found in enumerate(gang(world_size).run(compressed, words)):
        traffic = predict_traffic(make_plan(load_words(words)), rank=rank)
        assert (found.inside, found.between) == (traffic.sent().inside_node, traffic.sent().between_nodes)
        assert (found.exact_inside, found.exact_between) == (traffic.exact().inside_node, traffic.exact().between_nodes)


def mean_of_copies(rank, world_size, words):
    """What the mean of copies sends in a step, which every group of two ranks does."""
    job, step = make_job(rank, world_size, words)
    step(1)
    mode = Leaving()

    def counted_mean(model, mesh):
        with mode:
            average_replicated_gradients(model, mesh)

    with mock.patch("meshwright.train.pipeline_stages.average_replicated_gradients", counted_mean):
        step(2)
    return mode.total


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["train.freeze=['*norm*']"]])
def test_the_mean_of_copies_is_predicted_exactly(gang, corpus, more):
    words = ["mesh.tp=2", "mesh.dp_shard=2", "comm.gradients=int8", "model.num_layers=1", *more, *corpus]
    for rank, found in enumerate(gang(4).run(mean_of_copies, words)):
        entry = predict_traffic(make_plan(load_words(words)), rank=rank).of(Purpose.TENSOR)
        assert entry.sent.total() - entry.exact.total() == found and (found > 0) is not bool(more)
