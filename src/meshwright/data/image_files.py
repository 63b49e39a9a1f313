"""Image files of a glob as one array, all resized to one size, with the folder name as the class.

Hold-out rule: an image is held out if the SHA-256 of its name, as a number, is divisible by ten, like text files
(`text_documents.py`), so that adding an image does not reassign others. If that leaves a split empty (few images), the
tenth with the lowest hashes is held out, at least one.

Read with PIL, which comes with matplotlib: PNG, JPEG, WebP, TIFF and more. Only the first frame of an animation is
read; transparency is discarded.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.data import text_documents
from meshwright.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

PIL_MODES = {1: "L", 3: "RGB"}
"""PIL's image modes by number of channels."""

MIN_IMAGES = 2
SOURCE_RULE = "an image source is digits, digits-video or a glob of image files"
USE_DIGITS = "data.source=digits model.num_channels=1 model.num_frames=1"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_HOLD_OUT_DIVISOR = 10

Bytes = NDArray[np.uint8]


def is_image_source(source: str) -> bool:
    """Return True if the source can name image files: it has wildcards or is an existing path."""
    return glob.has_magic(source) or os.path.exists(os.path.expanduser(source))


def read_images(source: str, *, size: int, num_channels: int) -> tuple[Bytes, NDArray[np.int64], NDArray[np.bool_]]:
    """Read the images of a glob (`**` and `~` are expanded), sorted by name, center-cropped and resized.

    Args:
        source: the glob.
        size: height and width of each image.
        num_channels: 1 (grey) or 3 (RGB).

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
