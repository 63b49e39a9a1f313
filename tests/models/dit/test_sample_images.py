"""Sampling: identical on all ranks of every layout, and equal to plain sampling with the plain model."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from meshwright.models.dit import task as drawing
from meshwright.models.dit.task import SampleRequest, diffusion_of, sample_images
from meshwright.train.forward_only import PipelineForward
from meshwright.train.optimizer import named_state
from meshwright.train.pipeline_stages import Pipeline
from tests.models.specs import initialized
from tests.train.jobs import load_words, make_job, run_on

DIT = ["dit-digits", "train.precision=float64", "model.dim=16", "model.num_heads=2", "model.ffn_dim=32",
       "model.num_layers=4", "model.zero_init=false", "diffusion.sampling_steps=3"]  # fmt: skip
REQUEST = SampleRequest(labels=[3, 7, 0], fps=[0, 0, 0], shape=(1, 1, 8, 8), null_class=10, seed=5)
ROUNDING = {"rtol": 0.0, "atol": 1e-9}
"""Float64's, with room for what the first step makes of it: it divides by alpha, which is near zero there."""


def draw(rank, world_size, words, max_rows):
    """Return the samples, rows of each forward pass of this rank's first stage, and True if the job is unchanged."""
    job, _ = make_job(rank, world_size, [*DIT, *words])
    before, rows = {name: (type(x), x.shape) for name, x in named_state(job.model, job.optimizer).items()}, []
    part = job.parts()[min(job.parts())]
    part.module.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "MAX_ROWS", max_rows)
        forward, settings = PipelineForward(Pipeline(job)), job.config.diffusion
        samples = sample_images(forward, diffusion_of(settings), REQUEST, settings, dtypes=(torch.float64,) * 2)
    after = {name: (type(x), x.shape) for name, x in named_state(job.model, job.optimizer).items()}
    return samples, rows, after == before and job.model.training


@cache
def plain(*words):
    """Sample with the plain model on one process, one sample and one prediction at a time."""
    config = load_words([*DIT, *words])
    model = initialized(config.model.spec(), dtype=torch.float64, seed=config.train.seed)
    diffusion, found = diffusion_of(config.diffusion), []
    for number, label in enumerate(REQUEST.labels):
        sample = drawing.FIRST_SAMPLE + number
        x = drawing.draw_noise(REQUEST.seed, range(sample, sample + 1), REQUEST.shape, torch.float64)
        for at, to in ((999, 665), (665, 332), (332, None)):
            time, fps = torch.tensor([at]), torch.tensor([0])
            with torch.no_grad():
                conditional, unconditional = (
                    model(x, time, torch.tensor([class_id]), fps) for class_id in (label, REQUEST.null_class)
                )
            guided = unconditional + config.diffusion.guidance * (conditional - unconditional)
            x = diffusion.ddim_step(guided, x, time, None if to is None else torch.tensor([to]), clamp_sample=True)
        found.append(x)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("world_size", "layout", "max_rows"),
    [
        (1, [], 256),
        (1, [], 4),
        (2, ["mesh.pp=2", "pipeline.chunks=2"], 4),
        (2, ["mesh.dp_shard=2"], 256),
    ],
)
def test_every_rank_draws_what_plain_sampling_draws(gang, world_size, layout, max_rows):
    found, expected = run_on(gang, world_size, draw, layout, max_rows), plain()
    for samples, _, is_as_it_was in found:
        assert torch.equal(samples, found[0][0]) and is_as_it_was
    torch.testing.assert_close(found[0][0], expected, **ROUNDING)
    assert (expected[0] - expected[1]).abs().max() > 0.1


@pytest.mark.parametrize(("guidance", "rows_per_sample"), [(0, 2), (1, 1), (3, 2)])
def test_without_guidance_nothing_is_predicted_without_a_class(guidance, rows_per_sample):
    word = f"diffusion.guidance={guidance}"
    samples, rows, _ = draw(0, 1, [word], 256)
    assert rows == [3 * rows_per_sample] * 3
    torch.testing.assert_close(samples, plain(word), **ROUNDING)
