"""Image grids: written samples can be read back, and writes are atomic."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from meshwright.data.images import write_animation, write_grid, write_strip

LINE, LINE_GREY = 2, 96


def some(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def cell(canvas_hwc, index, *, columns, size, scale):
    """The image at a place of a grid, [c, h, w], after checking that each pixel became a square."""
    row, column = divmod(index, columns)
    (top, height), (left, width) = ((place * (side * scale + LINE) + LINE, side * scale)
                                    for place, side in zip((row, column), size, strict=True))  # fmt: skip
    large = canvas_hwc[top : top + height, left : left + width]
    small = large[::scale, ::scale]
    assert (small.repeat(scale, axis=0).repeat(scale, axis=1) == large).all()
    assert (canvas_hwc[top - 1, left : left + width] == LINE_GREY).all()
    assert (canvas_hwc[top + height, left : left + width] == LINE_GREY).all()
    assert (canvas_hwc[top : top + height, [left - 1, left + width]] == LINE_GREY).all()
    return small.transpose(2, 0, 1)


def opened(image):
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num=st.integers(1, 9), channels=st.sampled_from([1, 3]), columns=st.integers(1, 5), scale=st.integers(1, 3))
def test_every_image_of_a_grid_can_be_read_back(tmp_path, num, channels, columns, scale):
    images = some(num, channels, 1, 5, 7)
    write_grid(tmp_path / "grid.png", images, columns=columns, scale=scale)
    canvas = opened(Image.open(tmp_path / "grid.png"))
    shown = min(columns, num)
    assert canvas.shape == (-(-num // shown) * (5 * scale + LINE) + LINE, shown * (7 * scale + LINE) + LINE, channels)
    for index in range(num):
        found = cell(canvas, index, columns=shown, size=(5, 7), scale=scale)
        assert (found == images[index, :, 0]).all()
    assert os.listdir(tmp_path) == ["grid.png"]


@pytest.mark.parametrize("size, side", [(8, 64), (16, 64), (28, 56), (32, 64), (64, 64), (100, 100)])
def test_small_images_are_enlarged(tmp_path, size, side):
    write_grid(tmp_path / "grid.png", some(1, 1, 1, size, size), columns=1)
    assert Image.open(tmp_path / "grid.png").size == (side + 2 * LINE,) * 2


@pytest.mark.parametrize("channels", [1, 3])
def test_a_strip_has_a_video_in_each_row(tmp_path, channels):
    videos = some(3, channels, 4, 6, 6)
    write_strip(tmp_path / "a.png", videos, scale=2)
    write_animation(tmp_path / "a.gif", videos, columns=2, fps=8, scale=2)
    canvas = opened(Image.open(tmp_path / "a.png"))
    for index, frame in np.ndindex(3, 4):
        found = cell(canvas, index * 4 + frame, columns=4, size=(6, 6), scale=2)
        assert (found == videos[index, :, frame]).all()
    assert sorted(os.listdir(tmp_path)) == ["a.gif", "a.png"]


@pytest.mark.parametrize("fps", [4, 8, 16])
def test_an_animation_shows_every_frame_for_its_time(tmp_path, fps):
    videos = some(3, 1, 8, 6, 6)
    write_strip(tmp_path / "a.png", videos, scale=2)
    write_animation(tmp_path / "a.gif", videos, columns=2, fps=fps, scale=2)
    durations_ms = []
    with Image.open(tmp_path / "a.gif") as animation:
        assert animation.n_frames == 8 and animation.info["loop"] == 0
        for frame, image in enumerate(ImageSequence.Iterator(animation)):
            canvas = opened(image.convert("L"))
            durations_ms.append(image.info["duration"])
            for index in range(3):
                assert (cell(canvas, index, columns=2, size=(6, 6), scale=2) == videos[index, :, frame]).all()
    assert sum(durations_ms) == pytest.approx(8000 / fps, abs=5)
    assert max(abs(duration - 1000 / fps) for duration in durations_ms) < 10


def test_an_animation_in_colour(tmp_path):
    """Two colours fit any palette, so they come back as they were."""
    videos = np.zeros((2, 3, 3, 4, 4), dtype=np.uint8)
    for frame in range(3):
        videos[:, 0, frame, frame] = 255
    write_strip(tmp_path / "a.png", videos, scale=1)
    write_animation(tmp_path / "a.gif", videos, columns=2, fps=4, scale=1)
    with Image.open(tmp_path / "a.gif") as animation:
        for frame, image in enumerate(ImageSequence.Iterator(animation)):
            canvas = opened(image.convert("RGB"))
            assert (cell(canvas, 1, columns=2, size=(4, 4), scale=1) == videos[1, :, frame]).all()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "grid.png"
    write_grid(path, some(2, 1, 1, 4, 4), columns=2)
    before = path.read_bytes()

    def half(image, place, **options):
        place.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(OSError, match="No space left"):
        write_grid(path, some(2, 1, 1, 4, 4, seed=1), columns=2)
    assert os.listdir(tmp_path) == ["grid.png"] and path.read_bytes() == before
