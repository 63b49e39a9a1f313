"""The images of a run, checked against its model. Torch-free: errors come before processes."""

from __future__ import annotations

from meshwright.data.images import ImageDataset, open_images
from meshwright.errors import DataError
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.dit.config import DiTConfig


def open_image_dataset(f: RunFacts) -> ImageDataset:
    """Open the images or videos that a run names.

    Raises:
        DataError: missing, unreadable, or of more classes than the model knows.
    """
    model = f.section(DiTConfig)
    pictures = open_images(
        f.data.source,
        image_size=model.image_size,
        num_channels=model.num_channels,
        num_frames=model.num_frames,
    )
    if pictures.num_classes > model.num_classes:
        raise DataError(
            f"model.num_classes = {model.num_classes} is too small: the pictures are of {pictures.num_classes} classes",
            where=f"model.num_classes; data.source, {f.data.source}",
            rule="every picture's class is one of the model's",
            fix=f"model.num_classes={pictures.num_classes}",
        )
    return pictures
