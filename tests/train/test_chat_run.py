"""Runs on conversations: losses, gradient norms and validations are those of one process, and a run goes to its end."""

from __future__ import annotations

import pytest
import torch

from tests.data.chats.formats import CHATML, build, many_chats, write_lines
from tests.helpers import meshwright
from tests.train.jobs import run_on, trace

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    build(folder / "tokenizer", CHATML)
    write_lines(folder / "a.jsonl", many_chats(80))
    write_lines(folder / "b.jsonl", many_chats(10, seed=1))
    return [f"data.source={folder}/a.jsonl", f"data.validation_source={folder}/b.jsonl", "data.chat_field=messages",
            f"data.tokenizer={folder}/tokenizer", f"data.cache_dir={folder}/cache", "data.packing=documents",
            "model.vocab_size=360"]  # fmt: skip


@pytest.mark.slow
def test_ranks_train_as_one_process(gang, words):
    words = [*words, "train.precision=float64"]
    (alone,) = run_on(gang, 1, trace, words, 3)
    for found in run_on(gang, 2, trace, [*words, "mesh.dp_shard=2", "train.num_microbatches=2"], 3):
        torch.testing.assert_close(found.losses, alone.losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.norms, alone.norms, rtol=1e-10, atol=0)


@pytest.mark.slow
def test_a_run_says_what_counts_and_generates(words, tmp_path):
    more = ["train.steps=3", "train.seq_len=64", "train.global_batch=8", "train.sample_tokens=4", "model.num_layers=2"]
    done = meshwright("run", "llama-tiny", *words, *more, "train.sample_prompt=What is", "mesh.dp_shard=2",
                      "--out", tmp_path / "run", cwd=tmp_path, timeout_s=400)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of tokens count in the loss" in done.stdout and "nats/token" in done.stdout and "What is" in done.stdout
