"""`meshwright checkpoint`: list and verify checkpoints, and convert them to and from Hugging Face's format.

An import makes a run folder, whose configuration trains the weights with the tokenizer that they came with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from meshwright.checkpoint.manifest import (
    Manifest,
    list_checkpoints,
    model_arguments,
    newest_valid,
    read_manifest,
    read_sidecars,
    verify,
)
from meshwright.cli.usage_errors import Command, Commands
from meshwright.cli.wrapping import paint, show
from meshwright.config.source import CONFIG_FILE
from meshwright.data.tokenizer_files import TOKENIZER
from meshwright.errors import CheckpointError, RunError, continue_command
from meshwright.models.contract.family import OtherWeights, family_names, find_family
from meshwright.settings.toml import values_to_toml
from meshwright.train.choose_folder import IMPORTED
from meshwright.units import counted, format_bytes

app = typer.Typer(cls=Commands)


class ExportDtype(StrEnum):
    """Dtypes that weights are exported in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


FOLDER_HELP = "A run folder, a folder of checkpoints, or one checkpoint."


@app.command("ls", cls=Command)
def ls(folder: Annotated[Path, typer.Argument(help=FOLDER_HELP)]) -> None:
    """List checkpoints with step, size and model."""
    for path in _find(folder):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            show(f"{path}  {paint('damaged', 'red', sys.stdout)}: {error.what}")
            continue
        model = " · ".join(
            f"{key} {manifest.model[key]}" for key in ("kind", "num_layers", "dim") if key in manifest.model
        )
        size = format_bytes(manifest.num_bytes())
        show(f"{path}  step {manifest.step} · {size} · {counted(len(manifest.files), 'file')} · {model}")


@app.command("verify", cls=Command)
def verify_checkpoints(folder: Annotated[Path, typer.Argument(help=FOLDER_HELP)]) -> None:
    """Check size and hash of every file; exit with 2 and name the file if one is damaged."""
    failed: CheckpointError | None = None
    for path in _find(folder):
        try:
            manifest = verify(path)
        except CheckpointError as error:
            show(f"{paint('✗', 'red', sys.stdout)} {path}  {error.what}")
            failed = error
        else:
            show(f"{paint('✓', 'green', sys.stdout)} {path}  {counted(len(manifest.files), 'file')} verified")
    if failed is not None:
        raise failed


@app.command("export", cls=Command)
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder for its newest valid one.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the safetensors and config.json.")],
    merge: Annotated[bool, typer.Option("--merge", help="Add LoRA adapters into the weights that they adapt.")] = False,
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Dtype of the weights; default: that of the weights trained from.")
    ] = None,
) -> None:
    """Write the model's weights in Hugging Face's format, with its parameter names; of a LoRA run, the adapters."""
    path = _newest_valid(checkpoint)
    notes = _weights_of(path).export(path, out, merge=merge, dtype=dtype)
    show(f"{path} → {out}")
    for note in notes:
        show(note)
    if not (out / TOKENIZER).is_file():
        show("no tokenizer to export: the weights were imported without one, or trained on bytes or a token file")


@app.command("import", cls=Command)
def import_(
    source: Annotated[Path, typer.Argument(help="A folder with safetensors and config.json.")],
    out: Annotated[Path, typer.Argument(help="A new run folder, which gets the checkpoint and a config.toml.")],
) -> None:
    """Make a checkpoint of step 0 and a configuration from Hugging Face weights, and keep their tokenizer."""
    from meshwright.models.hf_format.checks import check_source

    check_source(source, out)
    check_unused(out)
    path = _weights_like(source).load(source, out / "checkpoints")
    manifest = read_manifest(path)
    has_tokenizer = write_run(manifest, out, name=source.resolve().name or out.resolve().name)
    show(f"{source} → {path}")
    if not has_tokenizer:
        show(
            f"no {TOKENIZER} in {source}: data.tokenizer is bytes. Train on a token file, or set data.tokenizer to a "
            "file written by AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    show(f"model  {model_arguments(own_keys(manifest.model))}")
    show(f"train  {continue_command(out)} data.source=…", more=" " * 7)


def _weights_of(checkpoint: Path) -> OtherWeights:
    """Return the external weight format of a checkpoint's family.

    Raises:
        CheckpointError: the family has no external weight format.
    """
    kind = str(read_manifest(checkpoint).model.get("kind"))
    weights = find_family(kind).other_weights()
    if weights is None:
        known = ", ".join(name for name in family_names() if find_family(name).other_weights() is not None)
        raise CheckpointError(
            f"the checkpoint holds a {kind} model, which has no export format",
            where=str(checkpoint),
            rule=f"families with an export format: {known}",
            fix=f"export a checkpoint of {known}",
        )
    return weights


def _weights_like(source: Path) -> OtherWeights:
    """Return the format of the model in a folder's config.json.

    Returns the first format if the file can't be read: loading raises a clear error.
    """
    formats = (find_family(name).other_weights() for name in family_names())
    known = [weights for weights in formats if weights is not None]
    try:
        config = json.loads((source / "config.json").read_text("utf-8"))
        model_type = config.get("model_type") if isinstance(config, dict) else None
    except (OSError, ValueError):
        model_type = None
    if not isinstance(model_type, str):
        return known[0]
    # The format of any model comes last.
    known.sort(key=lambda weights: weights.model_type is None)
    return next(weights for weights in known if weights.model_type in (model_type, None))


def _newest_valid(folder: Path) -> Path:
    """Return the newest valid checkpoint at a path, and report newer ones that were skipped.

    Raises:
        CheckpointError: no checkpoint is valid.
    """
    checkpoints = _find(folder)
    if checkpoints == [folder]:
        return folder  # an explicitly requested checkpoint: don't fall back to another one
    path, skipped = newest_valid(checkpoints[0].parent)
    if path is None:
        newest, reason = skipped[0]
        raise CheckpointError(
            f"no valid checkpoint in {folder}: {reason}",
            where=str(newest),
            rule="every checkpoint file matches the size and hash in the manifest",
            fix="restore a checkpoint from a backup",
        )
    for bad, reason in skipped:
        show(f"skipped {bad}: {reason}", sys.stderr)
    return path


def _find(folder: Path) -> list[Path]:
    """Return the checkpoints at a path, oldest first.

    Raises:
        CheckpointError: there is no checkpoint at the path.
    """
    if (folder / "manifest.json").exists():
        return [folder]
    for root in (folder / "checkpoints", folder):
        if root.is_dir() and (checkpoints := list_checkpoints(root)):
            return checkpoints
    found = _near(folder)
    raise CheckpointError(
        f"no checkpoint in {folder}",
        where=str(folder),
        rule="a checkpoint is a folder with a manifest.json; a run keeps them under checkpoints/",
        fix=f"pass {quote(str(found))}, which has checkpoints" if found else "meshwright run, which saves some",
    )


def _near(folder: Path) -> Path | None:
    """Return the newest run folder with checkpoints in a folder, or else beside it or in `runs`."""
    for place in (folder, folder.parent, Path("runs")):
        if found := [path.parents[2] for path in place.glob("*/checkpoints/*/manifest.json")]:
            return max(found, key=lambda run: run.stat().st_mtime)
    return None


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
    """Write the configuration and the kept files of an imported checkpoint into its run folder `out`.

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
    from meshwright.config.schema import TrainConfig

    train: dict[str, Any] = {"lr": FINE_TUNING_LR}
    context = json.loads(kept["config.json"]).get("max_position_embeddings")
    if context and context < TrainConfig().seq_len:
        train["seq_len"] = context
    values: dict[str, Any] = {"name": name, "model": own_keys(manifest.model), "train": train}
    if TOKENIZER in kept:
        values["data"] = {"tokenizer": str(folder / TOKENIZER)}
    limit = f", for at most {counted(context, 'token')}" if context else ""
    return f"# Imported from Hugging Face's format{limit}.\n{values_to_toml(values)}"
