"""Packed documents and conversations: losses and gradients are those of each alone, on every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.data.windows import JoinedWindows
from tests.data.chats.formats import CHATML, build, many_chats, write_lines
from tests.helpers import open_data
from tests.prove.proofs import Seed, assert_proved, packed_documents, proof, small_config
from tests.prove.seeded_faults import Fault, giving, wrapping


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Packed documents."""
    return packed_documents(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Conversations with a chat template that has no {% generation %}."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("chats")
    build(folder / "tokenizer", CHATML)
    write_lines(folder / "a.jsonl", many_chats(60))
    return [f"data.source={folder}/a.jsonl", f"data.cache_dir={folder}/cache", f"data.tokenizer={folder}/tokenizer",
            "data.chat_field=messages", "data.packing=documents", "model.vocab_size=360", "train.sample_tokens=0",
            "train.seq_len=32"]  # fmt: skip


SHARD, SHARD_TWICE = "mesh.dp_shard=2", "mesh.dp_shard=2 train.num_microbatches=2"
LAYOUTS = {
    "mesh.dp_shard=2 train.num_microbatches=4": (),
    "train.num_microbatches=2": pytest.mark.slow,
    "mesh.dp_shard=2 mesh.dp_replicate=2": pytest.mark.slow,
    "mesh.cp=2 mesh.cp_method=ring train.num_microbatches=4": pytest.mark.slow,
    "mesh.tp=2 mesh.pp=2 train.num_microbatches=4": pytest.mark.slow,
}


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=marks) for layout, marks in LAYOUTS.items()])
def test_documents_are_as_if_alone(gang, source, layout):
    assert_proved(gang, small_config(*source, *layout.split()))


@pytest.mark.parametrize("layout", [SHARD_TWICE, pytest.param("mesh.cp=2", marks=pytest.mark.slow)])
def test_conversations_are_as_if_alone(gang, chats, layout):
    assert_proved(gang, small_config(*chats, *layout.split()))


def mean_of_means(job, step):
    """Average over a micro-batch's targets first, as in transformers#34191."""
    batch, task = job.plan.batch, step._task
    loss_sum, count = task.loss_sum, batch.global_batch * batch.tokens

    def loss(out, targets):
        num = (targets != -100).sum().clamp_min(1)
        return loss_sum(out, targets) / num * (count // batch.num_microbatches)

    task.loss_sum, step._count_units = loss, lambda samples: count


def one_document_each(job, batch):
    """Attend across documents."""
    return replace(batch, layout=replace(batch.layout, documents=None))


def masks(change):
    """Change which tokens count."""

    def changed(job, windows):
        return JoinedWindows(tuple(replace(one, mask=change(one.mask)) for one in windows.sources))

    return wrapping("step._task._task._loader._windows", changed)


def tokens_of(job, task):
    """The task counts all tokens that are no padding; what the proof records is what the model reads."""

    def count(samples):
        (windows,) = task._loader._windows.sources
        bounds = (windows.first_pieces[number : number + 2] for number in task._loader.order.windows(samples))
        return sum(int(windows.pieces["length"][first:last].sum()) for first, last in bounds)

    task.count = count
    return task


FAULTS = {
    "mean of means": Fault(mean_of_means, ("train.num_microbatches=4",), ()),
    "attention across documents": Fault(wrapping("step._task._task.batch", giving(one_document_each)), (SHARD,), ()),
    "the mask is shifted by one": Fault(masks(lambda mask: replace(mask, start=mask.start + 1)), (SHARD_TWICE,), ()),
    "the divisor ignores the mask": Fault(wrapping("step._task._task", tokens_of), (SHARD_TWICE,), ()),
    "everything counts": Fault(masks(lambda mask: None), (SHARD_TWICE,), ()),
}
MASKED, SAID_OF_SAMPLES = "the targets of samples differ", ("the mask is shifted by one", "everything counts")
QUICK = ("mean of means", "the divisor ignores the mask")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTS])
def test_packing_gone_wrong_fails(gang, source, chats, name):
    data = chats if FAULTS[name].layout == (SHARD_TWICE,) else source
    config = small_config(*data, *" ".join(FAULTS[name].layout).split())
    result = proof(gang, config, Seed(__name__, "FAULTS", name))
    assert not result.passed
    assert any(MASKED in one.diagnosis.symptom for one in result.findings) == (name in SAID_OF_SAMPLES)


def test_samples_differ_wildly(source: list[str]) -> None:
    windows = open_data(small_config(*source)).packed.train
    counts = [windows.count(np.array([window])) for window in range(windows.num_windows)]
    documents = [len(one) for one in windows.documents(np.arange(windows.num_windows))]
    assert min(counts) <= 9 and max(counts) == 16 and min(documents) == 1 and max(documents) >= 4
