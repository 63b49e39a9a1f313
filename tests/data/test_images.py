"""Image datasets: disjoint splits, requested shapes, fingerprints, and errors with working fixes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from meshwright.data import images as image_room
from meshwright.data.images import SOURCE_RULE, VIDEO_FPS, open_images
from meshwright.errors import DataError
from tests.helpers import alternatives, clean_environment

DEFAULT = {"source": "digits", "image_size": 16, "num_channels": 1, "num_frames": 1}


@pytest.fixture(scope="module")
def stills():
    return open_images("digits", image_size=8, num_channels=1, num_frames=1)


@pytest.fixture(scope="module")
def videos():
    return open_images("digits-video", image_size=16, num_channels=1, num_frames=4)


@pytest.fixture
def folder(tmp_path):
    """Twelve images in two classes."""
    from PIL import Image

    for number in range(12):
        path = tmp_path / ("cat", "ape")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (5, 4), (20 * number, 0, 255)).save(path)
    return tmp_path


def whole(found):
    """Return all samples of both splits as bytes, with labels and frame rates."""
    parts = ((found.train, found.train_labels, found.train_fps),
             (found.validation, found.validation_labels, found.validation_fps))  # fmt: skip
    return sorted(
        (image.tobytes(), int(label), int(fps)) for part in parts for image, label, fps in zip(*part, strict=True)
    )


@pytest.mark.parametrize("source, size, frames", [("digits", 8, 1), ("digits", 12, 1), ("digits-video", 13, 3)])
def test_both_parts_have_the_shape_that_was_asked_for(source, size, frames):
    found = open_images(source, image_size=size, num_channels=1, num_frames=frames)
    for images, labels, fps in (
        (found.train, found.train_labels, found.train_fps),
        (found.validation, found.validation_labels, found.validation_fps),
    ):
        assert images.shape == (len(labels), 1, frames, size, size) and images.dtype == np.uint8
        assert labels.dtype == fps.dtype == np.int64 and fps.shape == labels.shape
        assert set(labels) == set(range(found.num_classes)) == set(range(10))
        assert set(fps) == ({0} if source == "digits" else set(VIDEO_FPS))
        assert images.min() == 0 and images.max() > 250
        assert images.max(axis=(1, 2, 3, 4)).min() > 120, "an empty sample"


def test_the_whole_data_set_is_in_one_part_or_the_other(stills, videos):
    assert len(stills.train) == 1618 and len(stills.validation) == 179
    assert len(videos.train) == 3 * 1618 and len(videos.validation) == 3 * 179
    train, validation = ({image.tobytes() for image in part} for part in (stills.train, stills.validation))
    assert not train & validation


def test_images_have_no_frame_rate_and_videos_have_three(stills, videos):
    assert not stills.train_fps.any() and not stills.validation_fps.any()
    assert {*videos.train_fps} == {*videos.validation_fps} == {4, 8, 16}
    assert (np.bincount(videos.validation_fps)[[4, 8, 16]] == 179).all()


def test_a_video_of_a_higher_frame_rate_changes_less_from_frame_to_frame(videos):
    for part, fps in ((videos.train, videos.train_fps), (videos.validation, videos.validation_fps)):
        change = abs(np.diff(part.astype(int), axis=2)).mean(axis=(1, 2, 3, 4))
        slow, middle, fast = (change[fps == rate].mean() for rate in (4, 8, 16))
        assert slow > 1.2 * middle > 1.2 * 1.2 * fast


def test_the_description_says_what_and_how_much(stills, videos):
    assert stills.description == "scikit-learn's handwritten digits, 8 × 8: 1,618 train / 179 validation"
    assert "16 × 16, 4 frames at 4, 8 and 16 fps: 4,854 train / 537 validation" in videos.description


def test_golden_fingerprint(stills):
    """Pinned: checkpoints store it, and another choice would train on what was held out before."""
    assert stills.fingerprint == "702f548eccece48fc2559d479f875cfcc7f6a53c3cd5f6103ff9b3748cac0a61"


def test_the_fingerprint_is_that_of_the_arrays(folder):
    one, again = (open_images(f"{folder}/*/*.png", image_size=4, num_channels=3, num_frames=1) for _ in range(2))
    assert one.fingerprint == again.fingerprint and whole(one) == whole(again)
    arrays = [one.train, one.validation, one.train_labels, one.validation_labels, one.train_fps, one.validation_fps]
    assert image_room._fingerprint(*arrays) == one.fingerprint
    for index, array in enumerate(arrays):
        changed = array.copy()
        changed.flat[-1] ^= 1
        variants = (changed, array[..., None], array[:-1], array.astype(np.int32))
        for variant in variants:
            assert image_room._fingerprint(*arrays[:index], variant, *arrays[index + 1 :]) != one.fingerprint
        swapped = array.astype(array.dtype.newbyteorder(">"))
        assert image_room._fingerprint(*arrays[:index], swapped, *arrays[index + 1 :]) == one.fingerprint


def test_one_pixel_of_one_file_changes_the_fingerprint(folder):
    from PIL import Image

    words = {**DEFAULT, "source": f"{folder}/*/*.png", "image_size": 4}
    before = open_images(**words)
    image = Image.open(folder / "ape" / "11.png")
    image.putpixel((2, 2), (0, 0, 0))
    image.save(folder / "ape" / "11.png")
    after = open_images(**words)
    assert after.fingerprint != before.fingerprint
    assert before.num_classes == 2 and len(before.train) + len(before.validation) == 12


# Requested options and the expected error message.
WRONG = [
    ({"source": "digit"}, "unknown data source or file: digit"),
    ({"source": "digits_video", "num_frames": 4}, "unknown data source or file: digits_video"),
    ({"source": "mnist"}, "unknown data source or file: mnist"),
    ({"source": "no/such/image.png"}, "unknown data source or file: no/such/image.png"),
    ({"num_frames": 2}, "model.num_frames = 2, but digits has images"),
    ({"source": "{folder}/*/*.png", "num_frames": 2}, "model.num_frames = 2, but .*png has images"),
    ({"source": "digits-video"}, "model.num_frames = 1, but digits-video has videos"),
    ({"num_channels": 3}, "model.num_channels = 3, but digits has 1\n"),
    ({"source": "digits-video", "num_channels": 3, "num_frames": 4}, "num_channels = 3, but digits-video"),
    ({"source": "{folder}/*/*.png", "num_channels": 4}, "model.num_channels = 4, but .*png has 1 or 3"),
    ({"source": "digits-video", "image_size": 11, "num_frames": 4}, "model.image_size = 11 leaves digits .* no room"),
    ({"source": "{folder}", "num_channels": 3}, "is a directory"),
    ({"source": "{folder}/*/*.jpg", "num_channels": 3}, r"no file matches .*\(the nearest existing directory is "),
    ({"source": "{folder}/cat/0.png", "num_channels": 3}, "is a single image"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, message", WRONG)
def test_every_mistake_is_explained_and_every_fix_works(folder, wrong, message):
    words = {**DEFAULT, **wrong}
    words["source"] = words["source"].format(folder=folder)
    with pytest.raises(DataError, match=message) as caught:
        open_images(**words)
    error = caught.value
    assert error.where.endswith(words["source"]) and error.rule
    ways = alternatives(error.fix)
    assert ways, error.fix
    for way in ways:
        changed = dict(word.removeprefix("model.").removeprefix("data.").split("=", 1) for word in way)
        numbers = {key: int(value) for key, value in changed.items() if key != "source"}
        source = changed.get("source", words["source"]).strip("'")
        assert len(open_images(**{**words, **numbers, "source": source}).train)


def test_a_close_word_is_suggested():
    for word, near in (("digit", "digits"), ("digits_video", "digits-video"), ("digits-vidoe", "digits-video")):
        with pytest.raises(DataError) as caught:
            open_images(**{**DEFAULT, "source": word})
        assert caught.value.fix == f"data.source={near}" and caught.value.rule == SOURCE_RULE


def test_importing_it_imports_neither_torch_nor_what_reads_images():
    names = ("torch", "sklearn", "scipy", "PIL", "matplotlib")
    code = f"import sys, meshwright.data.images, meshwright.data.images; print(*(sys.modules.keys() & {names}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    assert done.stdout == "\n", done
