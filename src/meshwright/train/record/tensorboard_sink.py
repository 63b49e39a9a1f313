"""Sink that writes TensorBoard events to the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from meshwright.train.record.sink import RunInfo


class TensorBoardSink:
    """Events in the folder `tensorboard` of the run folder; a resumed run hides those of steps that it repeats."""

    def start(self, run: RunInfo) -> None:
        """Open a file of events."""
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.after_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, path: Path) -> None:
        """Write an image."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, verbatim."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def close(self, failed: bool) -> None:
        """Flush and close the file."""
        self._writer.close()
