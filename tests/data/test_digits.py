"""Digits: a balanced hold-out; videos differ only in frame rate and keep the digit in view."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.images import (
    DIGIT_SIZE,
    MIN_CANVAS,
    VIDEO_FPS,
    digit_positions,
    moving_digits,
    render_digits,
    still_digits,
)
from meshwright.errors import DataError

NUM = 60
rooms = st.integers(MIN_CANVAS - DIGIT_SIZE, 56)


@pytest.fixture(scope="module")
def stills():
    return still_digits(DIGIT_SIZE)


@pytest.fixture(scope="module")
def videos():
    """Of 16 × 16 and 9 frames, by digit and frame rate: [n, rate, f, h, w]."""
    videos, _, _ = moving_digits(16, 9)
    return videos.reshape(-1, len(VIDEO_FPS), 9, 16, 16)


def test_all_levels_of_grey_are_scaled_to_a_byte(stills):
    assert stills[0].shape == (1797, 1, 1, 8, 8) and stills[0].dtype == np.uint8
    assert np.unique(stills[0]).tolist() == [round(level * 255 / 16) for level in range(17)]


def test_a_tenth_of_each_class_is_held_out(stills):
    _, labels, is_held_out = stills
    shares = np.bincount(labels[is_held_out]) / np.bincount(labels)
    assert is_held_out.sum() == 179
    assert (abs(shares - 0.1) < 0.034).all(), shares


def test_golden_hold_out(stills):
    """Pinned: another choice would silently train on what was held out before."""
    assert np.flatnonzero(stills[2])[:12].tolist() == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99, 100, 111]


def test_a_resized_digit_is_the_same_digit(stills):
    large, labels, is_held_out = still_digits(16)
    assert large.shape == (1797, 1, 1, 16, 16)
    assert (labels == stills[1]).all() and (is_held_out == stills[2]).all()
    shrunk = large.reshape(1797, 8, 2, 8, 2).mean(axis=(2, 4))
    small = stills[0][:, 0, 0].astype(float)
    agreement = (shrunk * small).sum((1, 2)) / np.sqrt((shrunk**2).sum((1, 2)) * (small**2).sum((1, 2)))
    # Interpolated strokes are softer: 1 would be the same image, two random digits have 0.7.
    assert agreement.min() > 0.95


def test_a_digit_s_videos_are_held_out_together(stills):
    videos, labels, is_held_out = moving_digits(12, 2)
    assert len(videos) == len(VIDEO_FPS) * 1797
    assert (labels == stills[1].repeat(3)).all() and (is_held_out == stills[2].repeat(3)).all()


@settings(max_examples=30)
@given(room=rooms, fps=st.sampled_from(VIDEO_FPS), num_frames=st.integers(1, 40))
def test_a_digit_never_leaves_the_canvas_and_its_speed_is_constant(room, fps, num_frames):
    place = digit_positions(NUM, room=room, num_frames=num_frames, fps=fps)
    assert place.shape == (NUM, num_frames, 2)
    assert (place >= 0).all() and (place <= room).all()
    step = abs(np.diff(place, axis=1)) * fps
    assert (step < 12 + 1e-9).all()
    # Steps that meet no edge have the full length, the others are shorter.
    longest = step.max(axis=1, keepdims=True, initial=0)
    assert num_frames < 12 or ((longest > 4 - 1e-9).all() and (abs(step - longest) < 1e-9).mean() > 0.4)


@settings(max_examples=30)
@given(room=rooms, fps=st.sampled_from(VIDEO_FPS[:-1]), num_frames=st.integers(2, 20))
def test_half_the_frame_rate_is_every_other_frame(room, fps, num_frames):
    slow = digit_positions(NUM, room=room, num_frames=num_frames, fps=fps)
    fast = digit_positions(NUM, room=room, num_frames=2 * num_frames, fps=2 * fps)
    assert (fast[:, ::2] == slow).all()


def test_positions_depend_on_the_index_alone():
    few, many = (digit_positions(number, room=8, num_frames=3, fps=4) for number in (5, 50))
    assert (many[:5] == few).all()
    assert len({place.tobytes() for place in many}) == 50


def test_the_displacement_a_frame_is_twice_at_half_the_rate(videos):
    """Measured by the centre of mass, where the digit does not bounce in between."""
    grey = videos.astype(float)
    axis = np.arange(16)
    mass = grey.sum((3, 4))
    centre = np.stack([(grey * axis[:, None]).sum((3, 4)), (grey * axis).sum((3, 4))], axis=-1) / mass[..., None]
    moved = centre[:, :, 1] - centre[:, :, 0]
    place = digit_positions(len(videos), room=8, num_frames=2, fps=4)
    start, end = place[:, 0], place[:, 1]
    middle = digit_positions(len(videos), room=8, num_frames=2, fps=8)[:, 1]
    is_straight = abs(start + end - 2 * middle) < 1e-9
    assert is_straight.mean() > 0.5
    for slow, fast in ((0, 1), (1, 2)):
        assert abs(moved[:, slow] - 2 * moved[:, fast])[is_straight].max() < 0.05
    assert abs(moved[:, 0])[is_straight].min() > 0.95


def test_the_videos_of_a_digit_start_alike_and_share_the_moments_they_share(videos):
    assert (videos[:, 0, 0] == videos[:, 1, 0]).all() and (videos[:, 0, 0] == videos[:, 2, 0]).all()
    assert (videos[:, 0, :5] == videos[:, 1, ::2]).all() and (videos[:, 1, :5] == videos[:, 2, ::2]).all()
    assert (videos[:, 0, 1] != videos[:, 2, 1]).any(axis=(1, 2)).all(), "a video that stands still"


def test_no_light_is_lost(videos, stills):
    """Interpolation spreads a digit over at most 81 pixels, each rounded by at most a half."""
    mass = videos.sum((3, 4), dtype=np.int64)
    own = stills[0].sum((1, 2, 3, 4), dtype=np.int64)
    assert abs(mass - own[:, None, None]).max() <= 40
    assert abs(mass - own[:, None, None]).mean() < 5


@settings(max_examples=30)
@given(down=st.floats(0, 4), right=st.floats(0, 4))
def test_a_digit_is_drawn_as_the_plain_sum_over_its_pixels(down, right):
    digit = np.random.default_rng(0).integers(0, 256, (1, 8, 8), dtype=np.uint8)
    weight_of_row, weight_of_column = (
        np.maximum(0, 1 - abs(np.arange(12)[:, None] - np.arange(8) - shift)) for shift in (down, right)
    )
    expected = weight_of_row @ digit[0] @ weight_of_column.T
    found = render_digits(digit, np.array([[down, right]]), size=12)
    assert found.shape == (1, 12, 12) and found.dtype == np.uint8
    assert abs(found[0] - expected).max() <= 0.5 + 1e-6


def test_a_whole_pixel_moves_the_digit_unchanged():
    digit = np.random.default_rng(1).integers(0, 256, (1, 8, 8), dtype=np.uint8)
    for place in ((0, 0), (4, 4), (1, 3)):
        canvas = render_digits(digit, np.array([place], dtype=float), size=12)
        down, right = place
        assert (canvas[0, down : down + 8, right : right + 8] == digit[0]).all()
        assert canvas.sum(dtype=int) == digit.sum(dtype=int)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for attempt in (lambda: still_digits(8), lambda: moving_digits(16, 4)):
        with pytest.raises(DataError, match="scikit-learn is not installed") as caught:
            attempt()
        assert caught.value.fix == "pip install scikit-learn"


def test_they_are_those_of_scikit_learn():
    """Whose file is read without importing it."""
    from sklearn.datasets import load_digits

    levels, labels = load_digits(return_X_y=True)
    images, classes, _ = still_digits(8)
    assert np.array_equal(images.reshape(len(levels), 64), np.rint(levels * (255 / 16)).astype(np.uint8))
    assert np.array_equal(classes, labels) and classes.dtype == np.int64
