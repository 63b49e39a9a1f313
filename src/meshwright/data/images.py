"""Image and video datasets as arrays, opened from `data.source` for a diffusion transformer; and contact sheets.

A dataset is held in memory, one byte per channel and pixel: a million RGB images of 64 × 64 take 12 GB in every process
that opens them, and briefly twice that while the splits are copied. There are three kinds:

- Scikit-learn's handwritten digits, real data without a download: 1,797 digits of 8 × 8 pixels and 17 grey levels
  (Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits"). One digit of every ten consecutive ones is
  held out: number 0 of the first ten, number 1 of the second, and so on. This holds out a tenth of each class to within
  a third; taking every tenth digit would not, since many digits were written in order from 0 to 9.
- Videos of a digit that moves across a black canvas at constant velocity and bounces off the edges. Those of one digit
  have the same start and velocity, in pixels per second, and differ only in frame rate. Positions are fractional; the
  digit is interpolated.
- Image files of a glob, resized to one size, with the folder name as the class; read with PIL, the first frame only and
  without transparency. An image is held out by its name, like text files (`text_documents.py`). If that leaves a split
  empty (few images), the tenth with the lowest hashes is held out, at least one.

Shapes: n samples, c channels, f frames (1 for images), h rows, w columns, d = 2 directions (down, right).
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.data import text_documents
from meshwright.data.text_documents import DIGITS, DIGITS_VIDEO
from meshwright.errors import DataError
from meshwright.settings.import_object import download_fix

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Training and validation splits of an image or video dataset.

    Args:
        train: training samples [n, c, f, h, w], 0 … 255.
        train_labels: class of each training sample, 0 … num_classes - 1.
        train_fps: frames per second of each training video, 0 for images.
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
            image files.
        num_frames: frames per video; 1 for images.

    Raises:
        DataError: the source is missing, unreadable or too small, or has no samples of that shape.
    """
    if source not in (DIGITS, DIGITS_VIDEO) and not is_image_source(source):
        raise _unknown(source)
    _check_shape(source, image_size=image_size, num_channels=num_channels, num_frames=num_frames)
    size = f"{image_size} × {image_size}"
    if source == DIGITS_VIDEO:
        samples, labels, is_held_out = moving_digits(image_size, num_frames)
        fps = np.tile(np.array(VIDEO_FPS, dtype=np.int64), len(samples) // len(VIDEO_FPS))
        rates = ", ".join(map(str, VIDEO_FPS[:-1])) + f" and {VIDEO_FPS[-1]}"
        title = f"videos of scikit-learn's handwritten digits, {size}, {num_frames} frames at {rates} fps"
    else:
        if source == DIGITS:
            samples, labels, is_held_out = still_digits(image_size)
            title = f"scikit-learn's handwritten digits, {size}"
        else:
            samples, labels, is_held_out = read_images(source, size=image_size, num_channels=num_channels)
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
    allowed = (1,) if source in (DIGITS, DIGITS_VIDEO) else PIL_MODES
    if num_channels not in allowed:
        raise DataError(
            f"model.num_channels = {num_channels}, but {source} has {' or '.join(map(str, allowed))}",
            where=f"model.num_channels; data.source, {source}",
            rule="the digits have one channel (grey); image files are read with 1 (grey) or 3 (RGB)",
            fix=" or ".join(f"model.num_channels={number}" for number in allowed),
        )
    if is_video and image_size < MIN_CANVAS:
        raise DataError(
            f"model.image_size = {image_size} leaves digits of {DIGIT_SIZE} pixels no room to move",
            where=f"model.image_size; data.source, {source}",
            rule=f"the videos of {source} are at least {MIN_CANVAS} × {MIN_CANVAS}",
            fix="model.image_size=16",
        )


def _unknown(source: str) -> DataError:
    near = difflib.get_close_matches(source, (DIGITS, DIGITS_VIDEO), n=1)
    download = download_fix(source, "data.source={}", kind="--repo-type dataset")
    return DataError(
        f"unknown data source or file: {source}",
        where=f"data.source, {source}",
        rule=SOURCE_RULE,
        fix=download or (f"data.source={near[0]}" if near else USE_DIGITS),
    )


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


PIL_MODES = {1: "L", 3: "RGB"}
"""PIL's image modes by number of channels."""

MIN_IMAGES = 2
SOURCE_RULE = "an image source is digits, digits-video or a glob of image files"
USE_DIGITS = "data.source=digits model.num_channels=1 model.num_frames=1"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_HOLD_OUT_DIVISOR = 10


def is_image_source(source: str) -> bool:
    """Return True if the source can name image files: it has wildcards or is an existing path."""
    return glob.has_magic(source) or os.path.exists(os.path.expanduser(source))


def read_images(source: str, *, size: int, num_channels: int) -> tuple[Bytes, NDArray[np.int64], NDArray[np.bool_]]:
    """Read the images of a glob (`**` and `~` are expanded), sorted by name, center-cropped and resized.

    Returns:
        The images [n, c, 1, size, size]; their classes, which are the names of their folders, numbered in
        alphabetical order; and the held-out mask.

    Raises:
        DataError: fewer than two files match, or a file is unreadable or not an image.
    """
    root, paths = text_documents.find_files(source)
    if len(paths) < MIN_IMAGES:
        raise _too_few(source, paths)
    path_of = {text_documents.relative_name(path, root): path for path in paths}
    names = sorted(path_of)
    folders = [Path(os.path.abspath(path_of[name])).parent.name for name in names]
    class_of = {folder: number for number, folder in enumerate(sorted(set(folders)))}
    images = np.empty((len(names), num_channels, 1, size, size), dtype=np.uint8)
    for image, name in zip(images, names, strict=True):
        image[:, 0] = _read(path_of[name], source=source, size=size, num_channels=num_channels)
    labels = np.array([class_of[folder] for folder in folders], dtype=np.int64)
    return images, labels, np.array(_held_out_flags(names), dtype=np.bool_)


def _held_out_flags(names: list[str]) -> list[bool]:
    """Apply the hold-out rule at the top of this file to each image name."""
    by_name = [text_documents.is_held_out(name) for name in names]
    if any(by_name) and not all(by_name):
        return by_name
    lowest = set(sorted(names, key=text_documents.name_hash)[: max(1, len(names) // _HOLD_OUT_DIVISOR)])
    return [name in lowest for name in names]


def _read(path: str, *, source: str, size: int, num_channels: int) -> Bytes:
    """Read one image, [c, h, w]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)  # Photographs are often stored rotated.
            image = _to_8_bit(upright).convert(PIL_MODES[num_channels])
            square = ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
    except Exception as error:  # PIL raises many exception types for damaged files.
        if isinstance(error, OSError) and error.errno is not None:
            raise text_documents.unreadable_file(path, source, error) from None
        raise DataError(
            f"{path} is not a readable image: {error}",
            where=f"data.source, {source}",
            rule="every matching file is an intact image (PNG, JPEG …) with 8 or 16 bits per channel",
            fix=f"use a pattern without {os.path.basename(path)}, or replace that file",
        ) from None
    return np.asarray(square).reshape(size, size, num_channels).transpose(2, 0, 1)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Convert 16-bit greyscale to 8 bits per channel: PIL's own conversion clips values at 255."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32 bits per pixel, of unknown range")
    return image


def _too_few(source: str, paths: list[str]) -> DataError:
    pattern = os.path.expanduser(source)
    if os.path.isdir(pattern):
        suffix = next(_suffixes_in(pattern), None)
        what = f"{source} is a directory"
        fix = f"data.source='{os.path.join(glob.escape(source), '**', f'*{suffix}')}'" if suffix else USE_DIGITS
    elif paths:
        what = f"{source} is a single image"
        fix = f"a pattern that matches more, or {USE_DIGITS}"
    else:
        nearest = text_documents.nearest_existing_directory(pattern)
        what = f"no file matches {source} (the nearest existing directory is {nearest})"
        fix = f"a pattern that matches, or {USE_DIGITS}"
    return DataError(
        what,
        where=f"data.source, {source}",
        rule=f"{SOURCE_RULE} that matches at least {MIN_IMAGES}, so that one can be held out",
        fix=fix,
    )


def _suffixes_in(folder: str) -> Iterator[str]:
    """Yield the suffixes of the image files below a folder."""
    for _, _, names in os.walk(folder):
        yield from (Path(name).suffix for name in sorted(names) if name.lower().endswith(_SUFFIXES))


_LINE_WIDTH = 2
_LINE_GREY = 96
_MIN_DISPLAY_SIZE = 64
"""Approximate length, in pixels, to which the longer side of a smaller sample is enlarged."""


def write_grid(path: Path, images: Bytes, *, columns: int, scale: int | None = None) -> None:
    """Write images as a PNG grid, row by row.

    Args:
        scale: enlargement factor; None to choose it by size.
    """
    assert images.shape[2] == 1, "videos go to write_strip"
    _write_png(path, _tile(images[:, :, 0], columns=columns, scale=scale))


def write_strip(path: Path, videos: Bytes, *, scale: int | None = None) -> None:
    """Write videos as a PNG with the frames of one video per row."""
    frames = videos.swapaxes(1, 2).reshape(-1, *np.delete(videos.shape, [0, 2]))
    _write_png(path, _tile(frames, columns=videos.shape[2], scale=scale))


def write_animation(path: Path, videos: Bytes, *, columns: int, fps: int, scale: int | None = None) -> None:
    """Write videos of one frame rate side by side as a looping animated GIF.

    Args:
        fps: frames per second; GIF delays are rounded to 1/100 s.
    """
    num_frames = videos.shape[2]
    images = [_image(_tile(videos[:, :, frame], columns=columns, scale=scale)) for frame in range(num_frames)]
    ends_ms = [round(100 * frame / fps) * 10 for frame in range(num_frames + 1)]
    durations_ms = [end - start for start, end in zip(ends_ms, ends_ms[1:], strict=False)]
    with _atomic_replace(path) as temporary:
        images[0].save(temporary, format="GIF", save_all=True, append_images=images[1:], duration=durations_ms, loop=0)


def _tile(images_nchw: Bytes, *, columns: int, scale: int | None) -> Bytes:
    """Tile images into one [h, w, c], with thin lines between and around them; unused cells have the line colour."""
    num, channels, height, width = images_nchw.shape
    assert num and columns > 0 and channels in (1, 3), "expected at least one grey or RGB image"
    scale = scale or max(1, _MIN_DISPLAY_SIZE // max(height, width))
    columns = min(columns, num)
    rows = -(-num // columns)
    down, right = height * scale + _LINE_WIDTH, width * scale + _LINE_WIDTH
    canvas = np.full((rows * down + _LINE_WIDTH, columns * right + _LINE_WIDTH, channels), _LINE_GREY, dtype=np.uint8)
    for index, image_chw in enumerate(images_nchw):
        row, column = divmod(index, columns)
        top, left = row * down + _LINE_WIDTH, column * right + _LINE_WIDTH
        enlarged = image_chw.repeat(scale, axis=1).repeat(scale, axis=2).transpose(1, 2, 0)
        canvas[top : top + height * scale, left : left + width * scale] = enlarged
    return canvas


def _image(canvas_hwc: Bytes) -> Image.Image:
    from PIL import Image

    return Image.fromarray(canvas_hwc[..., 0] if canvas_hwc.shape[2] == 1 else canvas_hwc)


def _write_png(path: Path, canvas_hwc: Bytes) -> None:
    with _atomic_replace(path) as temporary:
        _image(canvas_hwc).save(temporary, format="PNG")


@contextmanager
def _atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to it if the block succeeds and removed otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
