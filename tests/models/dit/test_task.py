"""The image task: files and recognition rates after validation, padding, and sampling that is alike on all layouts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from meshwright.data.images import open_images
from meshwright.models.dit import task as drawing
from meshwright.models.dit import task as task_module
from meshwright.models.dit.task import (
    SampleRequest,
    diffusion_of,
    recognition_rates,
    sample_images,
    to_bytes,
    to_floats,
)
from meshwright.train.forward_only import PipelineForward
from meshwright.train.optimizer import named_state
from meshwright.train.pipeline_stages import Pipeline
from tests.models.specs import initialized
from tests.train.jobs import load_words, make_job, make_task, run_on

SMALL_DIT = ["dit-digits", "model.num_layers=1", "model.dim=16", "model.num_heads=2", "model.ffn_dim=32"]
VIDEO = ["dit-digits-video", *SMALL_DIT[1:], "model.image_size=12", "model.num_frames=4"]


@pytest.fixture
def after_validation(monkeypatch, tmp_path):
    """Run `after_validation` of a task whose model generates `images`; return its metrics and files."""

    def run(words, images):
        monkeypatch.setattr(task_module, "sample_images", lambda *args, **named: images)
        job, _ = make_job(0, 1, words)
        figures = make_task(job.config).after_validation(PipelineForward(Pipeline(job)), 7, tmp_path)
        return figures, {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*.*")}

    return run


def size(path):
    from PIL import Image

    with Image.open(path) as image:
        return image.size


@pytest.mark.slow
def test_a_grid_is_written_of_every_class_with_the_part_that_is_recognised(after_validation):
    """Real digits, class after class, three of each, but for the last two classes, which are not what they should be.

    Of those that are, the classifier may take some for another.
    """
    digits = open_images("digits", image_size=8, num_channels=1, num_frames=1)
    chosen = [np.flatnonzero(digits.train_labels == label)[n] for label in range(10) for n in range(3)]
    drawn = to_floats(digits.train[chosen], torch.float32)
    drawn[-6:] = drawn[0]
    figures, files = after_validation([*SMALL_DIT, "diffusion.num_samples=30"], drawn)
    assert 0.7 <= figures["drawn_recognised"] <= 0.8 and figures["real_recognised"] >= 0.95
    (name,) = files
    assert name == "samples/step-00000007.png" and figures["samples"] == files[name]
    width, height = size(files[name])
    assert 10 * width == pytest.approx(3 * height, rel=0.1)  # three digits a row, with lines between them


def test_videos_are_written_by_frame_rate_and_not_judged(after_validation):
    """Of five, at the rates in turn, there are two at each but the last; they stand one under another."""
    drawn = torch.linspace(-1, 1, 5 * 4 * 12 * 12).view(5, 1, 4, 12, 12)
    figures, files = after_validation([*VIDEO, "diffusion.num_samples=5"], drawn)
    animations = [f"samples/step-00000007.{rate}fps.gif" for rate in (4, 8, 16)]
    assert figures == {"samples": files["samples/step-00000007.png"]} and files.keys() == {
        "samples/step-00000007.png",
        *animations,
    }
    two, same, one = (size(files[name]) for name in animations)
    assert two == same and two[0] == one[0] and two[1] == pytest.approx(2 * one[1], rel=0.1)


def test_nothing_is_drawn_without_samples(after_validation):
    assert after_validation([*SMALL_DIT, "diffusion.num_samples=0"], None) == ({}, {})


def test_bytes_are_what_they_were_after_the_way_to_numbers_and_back():
    every = np.arange(256, dtype=np.uint8)
    numbers = to_floats(every, torch.float64)
    assert (numbers.min(), numbers.max()) == (-1, 1) and np.array_equal(to_bytes(numbers), every)
    assert to_bytes(torch.tensor([-1.7, 3.0, -0.999, 0.999])).tolist() == [0, 255, 0, 255]


def test_padding_leaves_the_noise_of_their_batch_alone():
    """The targets are the noise itself, and padding rows of the targets are set to NaN."""
    job, _ = make_job(0, 1, [*SMALL_DIT, "train.validation_samples=1"])
    (batch,) = make_task(job.config).validation(batch_size=3, data_parallel=1, data_index=0)
    assert batch.targets[1:].isnan().all() and not batch.targets[:1].isnan().any()
    assert batch.inputs.isfinite().all()


@pytest.fixture(scope="module")
def digits():
    return open_images("digits", image_size=8, num_channels=1, num_frames=1)


def test_real_digits_are_recognised_as_what_they_are_and_as_nothing_else(digits):
    right = recognition_rates(digits, digits.validation, digits.validation_labels)
    assert right["drawn_recognised"] == right["real_recognised"] >= 0.95
    wrong = recognition_rates(digits, digits.validation, (digits.validation_labels + 1) % 10)
    assert wrong["drawn_recognised"] <= 0.05 and wrong["real_recognised"] == right["real_recognised"]


def test_images_without_a_digit_are_of_one_class_at_most(digits):
    black = np.zeros((20, *digits.train.shape[1:]), dtype=np.uint8)
    assert recognition_rates(digits, black, np.arange(20) % 10)["drawn_recognised"] == 0.1


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
