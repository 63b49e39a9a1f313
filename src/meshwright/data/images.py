"""Image and video datasets as arrays, opened from `data.source` for a diffusion transformer.

Torch-free. A dataset is held in memory, one byte per channel and pixel: a million RGB images of 64 × 64 take 12 GB in
every process that opens them, and briefly twice that while the splits are copied.

Shapes: n samples, c channels, f frames (1 for images), h rows, w columns.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.data import digits, image_files
from meshwright.errors import DataError
from meshwright.settings.hub_names import download_fix

DIGITS, DIGITS_VIDEO = "digits", "digits-video"


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Training and validation splits of an image or video dataset.

    Args:
        source: `data.source`, for messages.
        description: human-readable line with the sizes of both splits.
        train: training samples [n, c, f, h, w], 0 … 255.
        validation: held-out samples, same layout.
        train_labels: class of each training sample, 0 … num_classes - 1.
        validation_labels: class of each held-out sample.
        train_fps: frames per second of each training video, 0 for images.
        validation_fps: frames per second of each held-out video, 0 for images.
        num_classes: number of classes in both splits together.
        fingerprint: hex SHA-256 of all arrays, the same on every machine.
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
    """Open the dataset named by `data.source`; nothing is cached on disk.

    Args:
        source: `digits` (scikit-learn's handwritten digits), `digits-video` (videos of them), or else a glob of
            image files. `digits.py` and `image_files.py` define the held-out samples.
        image_size: height and width of every sample.
        num_channels: 1 (grey) or 3 (RGB, image files only).
        num_frames: frames per video; 1 for images.

    Raises:
        DataError: the source is missing, unreadable or too small, or has no samples of that shape.
    """
    if source not in (DIGITS, DIGITS_VIDEO) and not image_files.is_image_source(source):
        raise _unknown(source)
    _check_shape(source, image_size=image_size, num_channels=num_channels, num_frames=num_frames)
    size = f"{image_size} × {image_size}"
    if source == DIGITS_VIDEO:
        samples, labels, is_held_out = digits.moving_digits(image_size, num_frames)
        fps = np.tile(np.array(digits.VIDEO_FPS, dtype=np.int64), len(samples) // len(digits.VIDEO_FPS))
        rates = ", ".join(map(str, digits.VIDEO_FPS[:-1])) + f" and {digits.VIDEO_FPS[-1]}"
        title = f"videos of scikit-learn's handwritten digits, {size}, {num_frames} frames at {rates} fps"
    else:
        if source == DIGITS:
            samples, labels, is_held_out = digits.still_digits(image_size)
            title = f"scikit-learn's handwritten digits, {size}"
        else:
            samples, labels, is_held_out = image_files.read_images(source, size=image_size, num_channels=num_channels)
            title = f"images of {source}, {size}"
        fps = np.zeros(len(samples), dtype=np.int64)
    train, validation = samples[~is_held_out], samples[is_held_out]
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
    """Return the hex SHA-256 of each array's dtype, shape and little-endian bytes."""
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
            f"model.num_channels = {num_channels}, but {source} has {' or '.join(map(str, allowed))}",
            where=f"model.num_channels; data.source, {source}",
            rule="the digits have one channel (grey); image files are read with 1 (grey) or 3 (RGB)",
            fix=" or ".join(f"model.num_channels={number}" for number in allowed),
        )
    if is_video and image_size < digits.MIN_CANVAS:
        raise DataError(
            f"model.image_size = {image_size} leaves digits of {digits.DIGIT_SIZE} pixels no room to move",
            where=f"model.image_size; data.source, {source}",
            rule=f"the videos of {source} are at least {digits.MIN_CANVAS} × {digits.MIN_CANVAS}",
            fix="model.image_size=16",
        )


def _unknown(source: str) -> DataError:
    near = difflib.get_close_matches(source, (DIGITS, DIGITS_VIDEO), n=1)
    download = download_fix(source, "data.source={}", kind="--repo-type dataset")
    return DataError(
        f"unknown data source or file: {source}",
        where=f"data.source, {source}",
        rule=image_files.SOURCE_RULE,
        fix=download or (f"data.source={near[0]}" if near else image_files.USE_DIGITS),
    )
