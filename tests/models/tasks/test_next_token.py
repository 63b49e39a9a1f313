"""Text generation."""

from __future__ import annotations

import pytest

from meshwright.train.forward_only import PipelineForward
from tests.helpers import small_corpus
from tests.train.jobs import generate_on, make_job, make_task


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("generate")), "model.num_layers=1"]


def test_text_longer_than_the_context(corpus):
    job, _ = make_job(0, 1, [*corpus, "train.seq_len=8"])
    tokens = generate_on(job, list(range(20)), num_tokens=20, temperature=1.0, seed=0)
    assert len(tokens) == 20 and all(0 <= token < 256 for token in tokens)


def test_seeds_and_temperatures_matter(corpus):
    job, step = make_job(0, 1, corpus)

    def text(seed, temperature):
        return generate_on(job, [32], num_tokens=16, temperature=temperature, seed=seed)

    assert text(0, 9.0) == text(0, 9.0) and text(0, 0.001) != text(0, 9.0) != text(1, 9.0)


def test_a_sample_continues_the_prompt_of_the_run(corpus):
    def sample(*words):
        job, step = make_job(0, 1, [*corpus, "train.sample_tokens=4", "train.seq_len=16", *words])
        return make_task(job.config).sample(PipelineForward(step.pipeline))

    assert sample().startswith("def ")
    for prompt in ("Grüße", "a", "sixteen letters!"):
        text = sample(f"train.sample_prompt={prompt}")
        assert text.startswith(prompt) and len(text) > len(prompt)
