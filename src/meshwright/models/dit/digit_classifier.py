"""Recognition rate of generated digits, by a small classifier trained on real ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from meshwright.data.images import ImageDataset


def recognition_rates(
    dataset: ImageDataset, generated: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Mapping[str, float]:
    """Return the accuracy of a support-vector machine on generated and on real held-out images.

    Args:
        dataset: real images; the classifier is trained on its training split.
        generated: generated images [n, c, 1, h, w].
        labels: the class each image was generated for.
    """
    from sklearn.svm import SVC

    def features(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
        return pixels.reshape(len(pixels), -1) / 255.0

    classifier = SVC().fit(features(dataset.train), dataset.train_labels)
    return {
        "drawn_recognised": float(np.mean(classifier.predict(features(generated)) == labels)),
        "real_recognised": float(classifier.score(features(dataset.validation), dataset.validation_labels)),
    }
