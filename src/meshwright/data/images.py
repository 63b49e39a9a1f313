"""A collection of images or videos as arrays: what `data.source` describes for a diffusion transformer, opened.

Torch-free. All of it is kept in memory, a byte for each channel of each pixel: a million RGB images of 64 × 64
take 12 GB in every process that opens them, and twice that for the moment in which the parts are divided.

Shapes: n pictures, c channels, f frames (1 for images), h rows, w columns.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.data import digits, image_files
from meshwright.errors import DataError

DIGITS, DIGITS_VIDEO = "digits", "digits-video"


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """ImageDataset to train on and to validate with.

    Args:
        source: `data.source`, for messages.
        description: one line for people, with the sizes of both parts.
        train: [n, c, f, h, w], 0 … 255.
        validation: pictures that are never trained on, likewise.
        train_labels: class of each picture, 0 … num_classes - 1.
        validation_labels: likewise.
        train_fps: frames per second of each video, 0 for images.
        validation_fps: likewise.
        num_classes: classes in both parts together.
        fingerprint: SHA-256 in hex; the same on every machine where all the arrays are the same.
    """

    source: str
    description: str
    train: NDArray[np.uint8] = field(repr=False)
    validation: NDArray[np.uint8] = field(repr=False)
    train_labels: NDArray[np.int64] = field(repr=False)
    validation_labels: NDArray[np.int64] = field(repr=False)
    train_fps: NDArray[np.int64] = field(repr=False)
    validation_fps: NDArray[np.int64] = field(repr=False)
    num_classes: int
    fingerprint: str


def open_images(source: str, *, image_size: int, num_channels: int, num_frames: int) -> ImageDataset:
    """Open what `data.source` names; nothing is cached on disk.

    Args:
        source: `digits` (scikit-learn's handwritten digits), `digits-video` (those, moving), or else a glob of
            image files. What is held out: see `digits.py` and `image_files.py`.
        image_size: rows and columns that every picture gets.
        num_channels: 1 (grey) or 3 (RGB, image files only).
        num_frames: frames of a video; 1 for images.

    Raises:
        DataError: the source is missing, unreadable or too small, or has no pictures of that shape.
    """
    if source not in (DIGITS, DIGITS_VIDEO) and not image_files.is_image_source(source):
        raise _unknown(source)
    _check_shape(source, image_size=image_size, num_channels=num_channels, num_frames=num_frames)
    size = f"{image_size} × {image_size}"
    if source == DIGITS_VIDEO:
        pictures, labels, is_held_out = digits.moving_digits(image_size, num_frames)
        fps = np.tile(np.array(digits.VIDEO_FPS, dtype=np.int64), len(pictures) // len(digits.VIDEO_FPS))
        rates = ", ".join(map(str, digits.VIDEO_FPS[:-1])) + f" and {digits.VIDEO_FPS[-1]}"
        title = f"videos of scikit-learn's handwritten digits, {size}, {num_frames} frames at {rates} a second"
    else:
        if source == DIGITS:
            pictures, labels, is_held_out = digits.still_digits(image_size)
            title = f"scikit-learn's handwritten digits, {size}"
        else:
            pictures, labels, is_held_out = image_files.read_images(source, size=image_size, num_channels=num_channels)
            title = f"images of {source}, {size}"
        fps = np.zeros(len(pictures), dtype=np.int64)
    train, validation = pictures[~is_held_out], pictures[is_held_out]
    train_labels, validation_labels = labels[~is_held_out], labels[is_held_out]
    train_fps, validation_fps = fps[~is_held_out], fps[is_held_out]
    return ImageDataset(
        source=source,
        description=f"{title}: {len(train):,} train / {len(validation):,} validation",
        train=train,
        validation=validation,
        train_labels=train_labels,
        validation_labels=validation_labels,
        train_fps=train_fps,
        validation_fps=validation_fps,
        num_classes=int(labels.max()) + 1,
        fingerprint=_fingerprint(train, validation, train_labels, validation_labels, train_fps, validation_fps),
    )


def _fingerprint(*arrays: NDArray[np.integer]) -> str:
    """SHA-256 over each array's type, shape and little-endian bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{little.dtype.str} {little.shape}\n".encode("ascii"))
        digest.update(little.data)
    return digest.hexdigest()


def _check_shape(source: str, *, image_size: int, num_channels: int, num_frames: int) -> None:
    is_video = source == DIGITS_VIDEO
    if is_video != (num_frames > 1):
        raise DataError(
            f"model.num_frames = {num_frames}, but {source} has {'videos' if is_video else 'images'}",
            where=f"model.num_frames; data.source, {source}",
            rule="images have one frame, videos more than one",
            fix="model.num_frames=8" if is_video else "model.num_frames=1",
        )
    allowed = (1,) if source in (DIGITS, DIGITS_VIDEO) else image_files.PIL_MODES
    if num_channels not in allowed:
        raise DataError(
            f"model.num_channels = {num_channels}, and pictures of {source} have {' or '.join(map(str, allowed))}",
            where=f"model.num_channels; data.source, {source}",
            rule="the digits have one channel (grey); image files are read with 1 (grey) or 3 (RGB)",
            fix=" or ".join(f"model.num_channels={number}" for number in allowed),
        )
    if is_video and image_size < digits.MIN_CANVAS:
        raise DataError(
            f"model.image_size = {image_size} leaves a digit of {digits.DIGIT_SIZE} pixels no room to move",
            where=f"model.image_size; data.source, {source}",
            rule=f"the videos of {source} are at least {digits.MIN_CANVAS} × {digits.MIN_CANVAS}",
            fix="model.image_size=16",
        )


def _unknown(source: str) -> DataError:
    near = difflib.get_close_matches(source, (DIGITS, DIGITS_VIDEO), n=1)
    return DataError(
        f"no source and no file is called {source}",
        where=f"data.source, {source}",
        rule=image_files.SOURCE_RULE,
        fix=f"data.source={near[0]}" if near else image_files.USE_DIGITS,
    )
