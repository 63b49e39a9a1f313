"""Run folder of imported weights: a configuration that trains them, with the tokenizer it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from meshwright.checkpoint.manifest import Manifest, read_sidecars
from meshwright.config.schema import TrainConfig
from meshwright.config.source import CONFIG_FILE, values_to_toml
from meshwright.data.tokenizer_files import TOKENIZER
from meshwright.errors import CheckpointError, RunError
from meshwright.models.contract.family import find_family
from meshwright.train.run_folder import IMPORTED
from meshwright.units import counted

FINE_TUNING_LR = 2e-5
"""Peak learning rate; the default is for new weights, and would destroy trained ones."""


def check_unused(out: Path) -> None:
    """Check that a folder has no configuration that an import would overwrite.

    Raises:
        CheckpointError: it has one.
    """
    if (out / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{out} already has a {CONFIG_FILE}",
            where=str(out),
            rule="imported weights start a new run, and an import overwrites no files",
            fix=f"import into a new folder, such as {quote(str(out / 'imported'))}",
        )


def write_run(manifest: Manifest, out: Path, *, name: str) -> bool:
    """Write the configuration and the kept files of an imported checkpoint into its run folder.

    Args:
        manifest: of the checkpoint.
        out: the run folder.
        name: name of the run.

    Returns:
        Whether there is a tokenizer for training.

    Raises:
        RunError: a file cannot be written.
    """
    kept, folder = read_sidecars(manifest), (out / IMPORTED).resolve()
    try:
        for file, content in kept.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        (out / CONFIG_FILE).write_text(_configuration(manifest, kept, folder, name), "utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {error.filename}: {error.strerror}",
            where=str(out),
            rule="an import writes a configuration and the model's tokenizer beside the checkpoint",
            fix=f"free some disk space, remove {quote(str(out))}, and import again",
        ) from None
    return TOKENIZER in kept


def own_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's keys in the configuration, without what follows from other keys."""
    keys = find_family(str(model["kind"])).sections["model"].model_fields
    return {name: value for name, value in model.items() if name in keys}


def _configuration(manifest: Manifest, kept: Mapping[str, bytes], folder: Path, name: str) -> str:
    train: dict[str, Any] = {"lr": FINE_TUNING_LR}
    context = json.loads(kept["config.json"]).get("max_position_embeddings")
    if context and context < TrainConfig().seq_len:
        train["seq_len"] = context
    values: dict[str, Any] = {"name": name, "model": own_keys(manifest.model), "train": train}
    if TOKENIZER in kept:
        values["data"] = {"tokenizer": str(folder / TOKENIZER)}
    limit = f", for at most {counted(context, 'token')}" if context else ""
    return f"# Imported from Hugging Face's format{limit}.\n{values_to_toml(values)}"
