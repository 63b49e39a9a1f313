"""Conversations: losses and gradients are those of each alone, with a loss on what the assistant says only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from meshwright.data.mixtures.joined_windows import JoinedPacked
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.data.chats.formats import CHATML, build, many_chats, write_lines
from tests.gangs.gang import GangPool
from tests.helpers import quick_and_slow
from tests.prove.proofs import assert_proved, proof, small_config
from tests.prove.seeded_faults import Fault

pytest.importorskip("tokenizers")

SHARD = ("mesh.dp_shard=2", "train.num_microbatches=2")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Conversations with a chat template that has no {% generation %}."""
    folder = tmp_path_factory.mktemp("chats")
    build(folder / "tokenizer", CHATML)
    write_lines(folder / "a.jsonl", many_chats(60))
    return [f"data.source={folder}/a.jsonl", f"data.cache_dir={folder}/cache", f"data.tokenizer={folder}/tokenizer",
            "data.chat_field=messages", "data.packing=documents", "model.vocab_size=360", "train.sample_tokens=0",
            "train.seq_len=32"]  # fmt: skip


def test_conversations_are_as_if_alone(gang: GangPool, words: list[str]) -> None:
    assert_proved(gang, small_config(*words, *SHARD))


@pytest.mark.slow
def test_conversations_on_another_layout(gang: GangPool, words: list[str]) -> None:
    assert_proved(gang, small_config(*words, "mesh.cp=2"))


def _loader(step: TrainStep) -> Any:
    return cast(Any, step._task)._task._loader  # what the proof records is what the model reads


def shifted_mask(job: Job, step: TrainStep) -> None:
    """Count the token before each that counts."""
    loader = _loader(step)
    loader._windows = JoinedPacked(
        tuple(replace(one, mask=replace(one.mask, start=one.mask.start + 1)) for one in loader._windows.sources)
    )


def no_mask(job: Job, step: TrainStep) -> None:
    """Train on what everybody says."""
    loader = _loader(step)
    loader._windows = JoinedPacked(tuple(replace(one, mask=None) for one in loader._windows.sources))


def divisor_of_all_tokens(job: Job, step: TrainStep) -> None:
    """Divide by the tokens that are no padding, as if all of them counted."""
    loader = _loader(step)

    def count(samples: range) -> int:
        (windows,) = loader._windows.sources
        bounds = (windows.first_pieces[number : number + 2] for number in loader.order.windows(samples))
        return sum(int(windows.pieces["length"][first:last].sum()) for first, last in bounds)

    cast(Any, step._task)._task.count = count


FAULTS = {
    "the mask is shifted by one": Fault(shifted_mask, SHARD, ("the targets of samples differ",)),
    "the divisor ignores the mask": Fault(divisor_of_all_tokens, SHARD, ()),
    "everything counts": Fault(no_mask, SHARD, ("the targets of samples differ",)),
}


@pytest.mark.parametrize("name", quick_and_slow(((name,) for name in FAULTS), [("the divisor ignores the mask",)]))
def test_masks_gone_wrong_fail(gang: GangPool, words: list[str], name: str) -> None:
    result = proof(gang, small_config(*words, *SHARD), "tests.prove.test_chats", "FAULTS", name, few=True)
    assert not result.passed
