"""Image data of a run, checked against its model. Torch-free: checked before processes start."""

from __future__ import annotations

from meshwright.data.images import ImageDataset, open_images
from meshwright.errors import DataError
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.dit.config import DiTConfig


def open_image_dataset(f: RunFacts) -> ImageDataset:
    """Open the images or videos of a run.

    Raises:
        DataError: the data is missing or unreadable, or has more classes than the model.
    """
    model = f.section(DiTConfig)
    dataset = open_images(
        f.data.source,
        image_size=model.image_size,
        num_channels=model.num_channels,
        num_frames=model.num_frames,
    )
    if dataset.num_classes > model.num_classes:
        raise DataError(
            f"model.num_classes = {model.num_classes} is too small: the data has {dataset.num_classes} classes",
            where=f"model.num_classes; data.source, {f.data.source}",
            rule="the model has at least as many classes as the data",
            fix=f"model.num_classes={dataset.num_classes}",
        )
    return dataset
