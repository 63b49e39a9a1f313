"""Contact sheets of samples: images as a grid, videos as an animation and as a strip of frames.

Small samples are enlarged by an integer factor. Files are written atomically, by rename.

Shapes: n samples, c channels (1 or 3), f frames, h rows, w columns.
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
"""Approximate length, in pixels, to which the longer side of a smaller sample is enlarged."""

Bytes = NDArray[np.uint8]


def write_grid(path: Path, images: Bytes, *, columns: int, scale: int | None = None) -> None:
    """Write images as a PNG grid, row by row.

    Args:
        path: output file, in an existing folder.
        images: [n, c, 1, h, w].
        columns: images per row.
        scale: enlargement factor; None to choose it by size.
    """
    assert images.shape[2] == 1, "videos go to write_strip"
    _write_png(path, _tile(images[:, :, 0], columns=columns, scale=scale))


def write_strip(path: Path, videos: Bytes, *, scale: int | None = None) -> None:
    """Write videos as a PNG with the frames of one video per row.

    Args:
        path: output file, in an existing folder.
        videos: [n, c, f, h, w].
        scale: enlargement factor; None to choose it by size.
    """
    frames = videos.swapaxes(1, 2).reshape(-1, *np.delete(videos.shape, [0, 2]))
    _write_png(path, _tile(frames, columns=videos.shape[2], scale=scale))


def write_animation(path: Path, videos: Bytes, *, columns: int, fps: int, scale: int | None = None) -> None:
    """Write videos of one frame rate side by side as a looping animated GIF.

    Args:
        path: output file, in an existing folder.
        videos: [n, c, f, h, w].
        columns: videos per row.
        fps: frames per second; GIF delays are rounded to 1/100 s.
        scale: enlargement factor; None to choose it by size.
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
