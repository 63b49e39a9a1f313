"""Sidecar files: small files that a checkpoint carries for its export, such as the tokenizer's.

They are in a folder of the checkpoint and in its manifest, and every later checkpoint of the run has them too: a path
to them could be gone by the time of the export, and earlier checkpoints are removed.
"""

from __future__ import annotations

from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError

SIDECARS = "sidecars"
"""Their folder in a checkpoint."""


def sidecar_path(name: str) -> str:
    """Return the path of a sidecar file inside its checkpoint, as listed in the manifest."""
    return f"{SIDECARS}/{name}"


def read_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Read a checkpoint's sidecar files, by name; without checking their hashes.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = [name for name in manifest.files if name.startswith(sidecar_path(""))]
    try:
        return {name.removeprefix(sidecar_path("")): (manifest.path / name).read_bytes() for name in names}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read: {error.strerror}",
            where=str(manifest.path),
            rule="a checkpoint carries the files in its manifest",
            fix="use another checkpoint or restore a copy",
        ) from None
