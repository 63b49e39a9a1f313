"""Image files: cropping, resizing, orientation, classes by folder, hold-out by name, error messages."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshwright.data import images
from meshwright.data.images import read_images
from meshwright.errors import DataError


def save(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values)).save(path)


def grey(value, shape=(4, 4)):
    return np.full(shape, value, dtype=np.uint8)


file_names = st.sets(st.text("abcdef/", min_size=1, max_size=9), min_size=2, max_size=200).map(sorted)


@settings(max_examples=30)
@given(names=file_names)
def test_both_parts_have_images(names):
    held_out = images._held_out_flags(names)
    assert len(held_out) == len(names) and 0 < sum(held_out) < len(names)


@settings(max_examples=30)
@given(base=st.integers(0, 10**6))
def test_adding_an_image_moves_no_other(base):
    names = [f"{number}.png" for number in range(base, base + 200)]
    assert images._held_out_flags(names)[:-1] == images._held_out_flags(names[:-1])


def test_golden_hold_out():
    """Pinned, and the same as that of text files: another choice would train on what was held out before."""
    names = [f"file{number}.txt" for number in range(100)]
    held_out = [name for name, is_held_out in zip(names, images._held_out_flags(names), strict=True) if is_held_out]
    assert held_out == [f"file{number}.txt" for number in (9, 11, 14, 21, 34, 37, 43, 79)]
    assert images._held_out_flags(["file1.txt", "file2.txt"]) == [False, True]


def test_a_class_is_the_name_of_a_folder(tmp_path, monkeypatch):
    for number, folder in enumerate(["b/zebra", "a/zebra", "a/ant", "c"]):
        save(tmp_path / folder / f"{number}.png", grey(number))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for pattern in (f"{tmp_path}/**/*.png", "**/**/*.png", "~/**/*.png"):
        images, labels, is_held_out = read_images(pattern, size=2, num_channels=1)
        assert images[:, 0, 0, 0, 0].tolist() == [2, 1, 0, 3], "sorted by name, each once"
        assert labels.tolist() == [0, 2, 2, 1]
        assert is_held_out.sum() == 1


def test_the_hold_out_does_not_depend_on_where_the_files_are(tmp_path):
    parts = []
    for place in ("one", "two/deeper"):
        for number in range(30):
            save(tmp_path / place / f"{number}.png", grey(number))
        images, _, is_held_out = read_images(f"{tmp_path}/{place}/*.png", size=2, num_channels=1)
        parts.append(sorted(images[is_held_out][:, 0, 0, 0, 0].tolist()))
    assert parts[0] == parts[1] and parts[0]


@pytest.mark.parametrize("shape", [(8, 20, 3), (20, 8, 3), (8, 8, 3), (9, 20, 3)])
def test_the_central_square_is_kept(tmp_path, shape):
    values = np.zeros(shape, dtype=np.uint8)
    height, width, _ = shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    values[..., 0] = 255
    values[top : top + side + 1, left : left + side + 1] = (0, 200, 40)
    for name in ("a", "b"):
        save(tmp_path / f"{name}.png", values)
    images, _, _ = read_images(f"{tmp_path}/*.png", size=6, num_channels=3)
    assert images.shape == (2, 3, 1, 6, 6)
    assert (images[:, :, 0, 1:-1, 1:-1] == np.array([0, 200, 40])[:, None, None]).all()


def test_an_image_of_the_right_size_is_kept_as_it_is(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    for name in ("a", "b"):
        save(tmp_path / f"{name}.png", values)
    images, _, _ = read_images(f"{tmp_path}/*.png", size=7, num_channels=3)
    assert (images[0, :, 0] == values.transpose(2, 0, 1)).all()


def test_every_kind_of_pixel_is_read(tmp_path):
    """Grey of 16 bits is scaled and not cut off; palettes and transparency become colours."""
    save(tmp_path / "a.png", np.full((4, 4), 128 * 256, dtype=np.uint16))
    save(tmp_path / "b.png", grey(128))
    save(tmp_path / "c.png", np.full((4, 4, 4), 128, dtype=np.uint8))
    Image.fromarray(grey(128)).convert("P").save(tmp_path / "d.png")
    save(tmp_path / "e.jpg", np.full((4, 4, 3), 128, dtype=np.uint8))
    for channels in (1, 3):
        images, _, _ = read_images(f"{tmp_path}/*", size=4, num_channels=channels)
        assert images.shape == (5, channels, 1, 4, 4) and (images == 128).all()


def test_a_photograph_stored_on_its_side_stands_up(tmp_path):
    values = grey(0, (4, 4))
    values[0] = 255  # The top row; turned by a quarter to the right, the last column.
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a", "b"):
        Image.fromarray(values).save(tmp_path / f"{name}.png", exif=exif)
    images, _, _ = read_images(f"{tmp_path}/*.png", size=4, num_channels=1)
    assert images[0, 0, 0].tolist() == [[0, 0, 0, 255]] * 4


DAMAGE = {
    "text": lambda whole: b"no image at all",
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "changed": lambda whole: whole[:40] + b"\1" * 40,
}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Of what it finds in the damaged files.
@pytest.mark.parametrize("kind", [*DAMAGE, "floats"])
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_what_is_no_whole_image_is_named(tmp_path, kind, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    for name in ("good", "bad"):
        save(tmp_path / f"{name}.{suffix}", noise)
    bad = tmp_path / f"bad.{suffix}"
    if kind == "floats":
        Image.fromarray(noise.astype(np.float32)).save(bad, format="TIFF")
    else:
        bad.write_bytes(DAMAGE[kind](bad.read_bytes()))
    with pytest.raises(DataError, match=f"bad.{suffix} is not a readable image") as caught:
        read_images(f"{tmp_path}/*.{suffix}", size=4, num_channels=1)
    assert f"bad.{suffix}" in caught.value.fix and str(tmp_path) in caught.value.where
    assert caught.value.rule


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    for name in ("a", "b"):
        save(tmp_path / f"{name}.png", grey(0))

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DataError, match=r"a.png cannot be read: Permission denied") as caught:
        read_images(f"{tmp_path}/*.png", size=4, num_channels=1)
    assert caught.value.fix.startswith("chmod u+r")


def test_a_folder_is_not_a_pattern_and_the_fix_finds_its_images(tmp_path):
    folder = tmp_path / "some [1] images"
    for name in ("x/a", "y/b"):
        save(folder / f"{name}.JPG.jpg", grey(0))
    with pytest.raises(DataError, match="is a directory") as caught:
        read_images(str(folder), size=4, num_channels=1)
    images, labels, _ = read_images(caught.value.fix.removeprefix("data.source=").strip("'"), size=4, num_channels=1)
    assert len(images) == 2 and labels.tolist() == [0, 1]


def test_nothing_found_says_what_is_near(tmp_path):
    save(tmp_path / "cats" / "a.png", grey(0))
    with pytest.raises(DataError) as caught:
        read_images(os.path.join(tmp_path, "cats", "tabby", "*.png"), size=4, num_channels=1)
    assert f"the nearest existing directory is {tmp_path / 'cats'})" in caught.value.what
    assert caught.value.rule.startswith(images.SOURCE_RULE) and images.USE_DIGITS in caught.value.fix
