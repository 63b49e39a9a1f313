"""Scikit-learn's handwritten digits as still images and as videos: real data without a download.

1,797 digits of 8 × 8 pixels and 17 grey levels (Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten
Digits"). One digit of every ten consecutive ones is held out: number 0 of the first ten, number 1 of the second, and
so on. This holds out a tenth of each class to within a third; taking every tenth digit would not, since many digits
were written in order from 0 to 9.

A video shows a digit that moves across a black canvas at constant velocity and bounces off the edges. The videos of a
digit have the same start and the same velocity, in pixels per second, and differ only in frame rate. Positions are
fractional; the digit is interpolated.

Shapes: n digits or videos, f frames, h rows, w columns, d = 2 directions (down, right).
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

DIGIT_SIZE = 8
MIN_CANVAS = 12
VIDEO_FPS = (4, 8, 16)
_MAX_LEVEL = 16
_MIN_SPEED, _MAX_SPEED = 4.0, 12.0
"""Speed in pixels per second along each axis: 1 … 3 pixels per frame at the lowest frame rate."""

Bytes = NDArray[np.uint8]
LabelledImages = tuple[Bytes, NDArray[np.int64], NDArray[np.bool_]]
"""Samples [n, c, f, h, w], their classes, and the held-out mask."""


def still_digits(size: int) -> LabelledImages:
    """Return the digits as images of `size` × `size`, resized if necessary.

    Raises:
        DataError: scikit-learn is not installed.
    """
    digits_nhw, labels_n = _load()
    if size != DIGIT_SIZE:
        from PIL import Image

        images = (Image.fromarray(digit_hw) for digit_hw in digits_nhw)
        digits_nhw = np.stack([np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)) for image in images])
    return digits_nhw[:, None, None], labels_n, _held_out_mask(len(labels_n))


def moving_digits(size: int, num_frames: int) -> LabelledImages:
    """Return videos of each digit at each of `VIDEO_FPS`, grouped by digit.

    All videos of a digit are held out together. Values are rounded to bytes.

    Args:
        size: height and width of the canvas, at least `MIN_CANVAS`.
        num_frames: frames per video, for every frame rate.

    Raises:
        DataError: scikit-learn is not installed.
    """
    digits_nhw, labels_n = _load()
    num_rates = len(VIDEO_FPS)
    videos = np.empty((len(digits_nhw), num_rates, num_frames, size, size), dtype=np.uint8)
    for rate, fps in enumerate(VIDEO_FPS):
        positions_nfd = digit_positions(len(digits_nhw), room=size - DIGIT_SIZE, num_frames=num_frames, fps=fps)
        for frame in range(num_frames):
            videos[:, rate, frame] = render_digits(digits_nhw, positions_nfd[:, frame], size=size)
    return (
        videos.reshape(-1, 1, num_frames, size, size),
        labels_n.repeat(num_rates),
        _held_out_mask(len(labels_n)).repeat(num_rates),
    )


def digit_positions(num_digits: int, *, room: int, num_frames: int, fps: int) -> NDArray[np.float64]:
    """Compute the top left corner of each digit in each frame, [n, f, d], from 0 to `room`.

    Start and velocity are derived from the SHA-256 of the digit's index using only products and sums, since
    trigonometric functions may differ in the last bit between machines.
    """
    hashes = (hashlib.sha256(f"digits-video {index}".encode("ascii")).digest() for index in range(num_digits))
    uniform = np.frombuffer(b"".join(hashes), dtype="<u4").reshape(num_digits, 8) / 2.0**32
    start_nd, speed_nd, sign_nd = uniform[:, 0:2], uniform[:, 2:4], uniform[:, 4:6]
    velocity_nd = np.where(sign_nd < 0.5, -1.0, 1.0) * (_MIN_SPEED + (_MAX_SPEED - _MIN_SPEED) * speed_nd)
    seconds_f = np.arange(num_frames) / fps
    free_nfd = room * start_nd[:, None] + velocity_nd[:, None] * seconds_f[:, None]
    # Motion between two reflecting walls is straight motion, folded at the walls.
    folded_nfd = np.mod(free_nfd, 2 * room)
    positions_nfd: NDArray[np.float64] = np.minimum(folded_nfd, 2 * room - folded_nfd)
    return positions_nfd


def render_digits(digits_nhw: Bytes, positions_nd: NDArray[np.float64], *, size: int) -> Bytes:
    """Render each digit on a black canvas at its position, bilinearly interpolated, [n, size, size]."""
    corner_nd = np.floor(positions_nd).astype(np.int64)
    down_n, right_n = (positions_nd - corner_nd).T[:, :, None, None]
    height, width = digits_nhw.shape[1:]
    spread_nhw = np.zeros((len(digits_nhw), height + 1, width + 1))
    for row, row_weight_n in enumerate((1 - down_n, down_n)):
        for column, column_weight_n in enumerate((1 - right_n, right_n)):
            spread_nhw[:, row : row + height, column : column + width] += row_weight_n * column_weight_n * digits_nhw
    # One extra row and column, cropped below: at the far edge the last row and column of `spread` fall outside.
    canvas_nhw = np.zeros((len(digits_nhw), size + 1, size + 1), dtype=np.uint8)
    rows = corner_nd[:, 0, None, None] + np.arange(height + 1)[:, None]
    columns = corner_nd[:, 1, None, None] + np.arange(width + 1)
    canvas_nhw[np.arange(len(digits_nhw))[:, None, None], rows, columns] = np.rint(spread_nhw).astype(np.uint8)
    return canvas_nhw[:, :size, :size]


def _load() -> tuple[Bytes, NDArray[np.int64]]:
    """Load the digits [n, h, w], 0 … 255, and their labels."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(
            "scikit-learn is not installed",
            where="data.source, digits",
            rule="the handwritten digits are part of scikit-learn",
            fix="pip install scikit-learn",
        )
    # As `sklearn.datasets.load_digits` reads it, whose import takes each rank seconds.
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    levels_nd, labels_n = table[:, :-1], table[:, -1]
    digits_nd = np.rint(levels_nd * (255 / _MAX_LEVEL)).astype(np.uint8)
    return digits_nd.reshape(-1, DIGIT_SIZE, DIGIT_SIZE), labels_n


def _held_out_mask(num_digits: int) -> NDArray[np.bool_]:
    tens_n, ones_n = np.divmod(np.arange(num_digits), 10)
    mask_n: NDArray[np.bool_] = ones_n == tens_n % 10
    return mask_n
