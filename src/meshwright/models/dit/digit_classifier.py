"""Whether drawn digits can be told: by a small classifier that has seen real ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from meshwright.data.images import ImageDataset


def recognition_rates(
    pictures: ImageDataset, drawn: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Mapping[str, float]:
    """Part of the pictures whose class a support-vector machine says right, of the drawn and of real held-out ones.

    Args:
        pictures: real ones, which the classifier learns from.
        drawn: [n, c, 1, h, w].
        labels: the class that each was drawn as.
    """
    from sklearn.svm import SVC

    def features(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
        return pixels.reshape(len(pixels), -1) / 255.0

    classifier = SVC().fit(features(pictures.train), pictures.train_labels)
    return {
        "drawn_recognised": float(np.mean(classifier.predict(features(drawn)) == labels)),
        "real_recognised": float(classifier.score(features(pictures.validation), pictures.validation_labels)),
    }
