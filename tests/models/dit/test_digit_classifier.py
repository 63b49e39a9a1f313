"""The digit classifier's recognition rates."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.images import open_images
from meshwright.models.dit.task import recognition_rates


@pytest.fixture(scope="module")
def digits():
    return open_images("digits", image_size=8, num_channels=1, num_frames=1)


def test_real_digits_are_recognised_as_what_they_are_and_as_nothing_else(digits):
    right = recognition_rates(digits, digits.validation, digits.validation_labels)
    assert right["drawn_recognised"] == right["real_recognised"] >= 0.95
    wrong = recognition_rates(digits, digits.validation, (digits.validation_labels + 1) % 10)
    assert wrong["drawn_recognised"] <= 0.05 and wrong["real_recognised"] == right["real_recognised"]


def test_images_without_a_digit_are_of_one_class_at_most(digits):
    black = np.zeros((20, *digits.train.shape[1:]), dtype=np.uint8)
    assert recognition_rates(digits, black, np.arange(20) % 10)["drawn_recognised"] == 0.1
