"""Pictures side by side in one file for a person to look at: a grid of images, videos as an animation and a strip.

Small pictures are enlarged by whole pixels. A file appears whole: it is written beside its place and renamed.

Shapes: n pictures, c channels (1 or 3), f frames, h rows, w columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

_LINE_WIDTH = 2
_LINE_GREY = 96
_MIN_DISPLAY_SIZE = 64
"""Pixels on screen that the longer side of a picture gets when it has fewer, about."""

Bytes = NDArray[np.uint8]


def write_grid(path: Path, pictures: Bytes, *, columns: int, scale: int | None = None) -> None:
    """Write images as a PNG, row by row.

    Args:
        path: the file; its folder exists.
        pictures: [n, c, 1, h, w].
        columns: images in a row.
        scale: pixels on screen for each pixel; chosen by size when None.
    """
    assert pictures.shape[2] == 1, "videos go to write_strip"
    _write_png(path, _tile(pictures[:, :, 0], columns=columns, scale=scale))


def write_strip(path: Path, pictures: Bytes, *, scale: int | None = None) -> None:
    """Write videos as a PNG in which each row is one video's frames.

    Args:
        path: the file; its folder exists.
        pictures: [n, c, f, h, w].
        scale: pixels on screen for each pixel; chosen by size when None.
    """
    frames = pictures.swapaxes(1, 2).reshape(-1, *np.delete(pictures.shape, [0, 2]))
    _write_png(path, _tile(frames, columns=pictures.shape[2], scale=scale))


def write_animation(path: Path, pictures: Bytes, *, columns: int, fps: int, scale: int | None = None) -> None:
    """Write videos of one frame rate side by side as an endless animated GIF.

    Args:
        path: the file; its folder exists.
        pictures: [n, c, f, h, w].
        columns: videos in a row.
        fps: frames per second, to the hundredth of a second that the format has.
        scale: pixels on screen for each pixel; chosen by size when None.
    """
    num_frames = pictures.shape[2]
    images = [_image(_tile(pictures[:, :, frame], columns=columns, scale=scale)) for frame in range(num_frames)]
    ends_ms = [round(100 * frame / fps) * 10 for frame in range(num_frames + 1)]
    durations_ms = [end - start for start, end in zip(ends_ms, ends_ms[1:], strict=False)]
    with _atomic_replace(path) as temporary:
        images[0].save(temporary, format="GIF", save_all=True, append_images=images[1:], duration=durations_ms, loop=0)


def _tile(images_nchw: Bytes, *, columns: int, scale: int | None) -> Bytes:
    """One image [h, w, c] of many, with thin lines between and around them; left-over places are line-coloured."""
    num, channels, height, width = images_nchw.shape
    assert num and columns > 0 and channels in (1, 3), "some pictures, grey or RGB"
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
    """A temporary name in the folder of `path`, renamed to it when the block ends well and removed otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
