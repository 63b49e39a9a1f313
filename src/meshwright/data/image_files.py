"""Image files as an array: a glob becomes pictures of one size, each with its folder as its class.

The rule of what is held out: an image is when the SHA-256 of its name, as a number, is divisible by ten, as whole
text files are (`documents.py`), so that adding an image moves no other. Where that leaves a part empty (few
images), a tenth of them is, at least one: those whose SHA-256 is lowest.

Read through PIL, which comes with matplotlib: PNG, JPEG, WebP, TIFF and more. Of animations the first frame is
taken; transparency is left out.
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
"""PIL's names of what a pixel is, by the number of channels."""

MIN_IMAGES = 2
SOURCE_RULE = "a source of pictures is digits, digits-video or a glob of image files"
USE_DIGITS = "data.source=digits model.num_channels=1 model.num_frames=1"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_HOLD_OUT_DIVISOR = 10

Bytes = NDArray[np.uint8]


def is_image_source(source: str) -> bool:
    """Whether a source can be image files: it has wildcards, or is the path of something that exists."""
    return glob.has_magic(source) or os.path.exists(os.path.expanduser(source))


def read_images(source: str, *, size: int, num_channels: int) -> tuple[Bytes, NDArray[np.int64], NDArray[np.bool_]]:
    """Images of a glob (`**` and `~` are expanded), sorted by name, cropped to their central square and resized.

    Args:
        source: the glob.
        size: rows and columns of each.
        num_channels: 1 (grey) or 3 (RGB).

    Returns:
        The images [n, c, 1, size, size]; the class of each, which is the name of the folder it lies in, numbered
        in the order of names; and whether it is held out.

    Raises:
        DataError: nothing matches, fewer than two images, or a file that is no image or cannot be read.
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
    """Which images are held out, by the rule at the top of this file."""
    by_name = [text_documents.is_held_out(name) for name in names]
    if any(by_name) and not all(by_name):
        return by_name
    lowest = set(sorted(names, key=text_documents.name_hash)[: max(1, len(names) // _HOLD_OUT_DIVISOR)])
    return [name in lowest for name in names]


def _read(path: str, *, source: str, size: int, num_channels: int) -> Bytes:
    """One image, [c, h, w]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)  # Photographs are often stored lying on their side.
            image = _to_8_bit(upright).convert(PIL_MODES[num_channels])
            square = ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
    except Exception as error:  # PIL raises many kinds of them for what is damaged.
        if isinstance(error, OSError) and error.errno is not None:
            raise text_documents.unreadable_file(path, source, error) from None
        raise DataError(
            f"{path} is not an image that can be read: {error}",
            where=f"data.source, {source}",
            rule="every file that matches is a whole image (PNG, JPEG …) of 8 or 16 bits a channel",
            fix=f"a pattern without {os.path.basename(path)}, or another copy of that file",
        ) from None
    return np.asarray(square).reshape(size, size, num_channels).transpose(2, 0, 1)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """An image of a byte a channel: PIL's own conversion cuts greys of 16 bits off at 255."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("it has 32 bits a pixel, of unknown range")
    return image


def _too_few(source: str, paths: list[str]) -> DataError:
    place = os.path.expanduser(source)
    if os.path.isdir(place):
        suffix = next(_suffixes_in(place), None)
        what = f"{source} is a directory"
        fix = f"data.source='{os.path.join(glob.escape(source), '**', f'*{suffix}')}'" if suffix else USE_DIGITS
    elif paths:
        what = f"{source} is one image"
        fix = f"a pattern that matches more, or {USE_DIGITS}"
    else:
        what = f"no file matches {source} (the nearest existing directory is {text_documents.nearest_existing_directory(place)})"
        fix = f"a pattern that matches, or {USE_DIGITS}"
    return DataError(
        what,
        where=f"data.source, {source}",
        rule=f"{SOURCE_RULE} with at least {MIN_IMAGES} of them, so that one can be held out",
        fix=fix,
    )


def _suffixes_in(folder: str) -> Iterator[str]:
    """Suffixes of the image files below a folder."""
    for _, _, names in os.walk(folder):
        yield from (Path(name).suffix for name in sorted(names) if name.lower().endswith(_SUFFIXES))
