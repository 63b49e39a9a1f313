"""The image task: files and recognition rates after validation, byte conversion and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.data.images import open_images
from meshwright.models.dit import task as task_module
from meshwright.models.dit.task import to_bytes, to_floats
from meshwright.train.forward_only import PipelineForward
from meshwright.train.pipeline_stages import Pipeline
from tests.train.jobs import make_job, make_task

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
