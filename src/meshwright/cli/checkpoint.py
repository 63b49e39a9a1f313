"""`meshwright checkpoint`: list, verify, export to and import from Hugging Face's layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.checkpoint.manifest import list_checkpoints, model_arguments, newest_valid, read_manifest, verify
from meshwright.cli.colors import paint
from meshwright.errors import CheckpointError
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.models.contract.family import OtherWeights

app = typer.Typer(help="List, verify, export and import checkpoints.", no_args_is_help=True)

FOLDER_HELP = "A run folder, a folder of checkpoints, or one checkpoint."


@app.command("ls")
def ls(folder: Annotated[Path, typer.Argument(help=FOLDER_HELP)]) -> None:
    """List checkpoints with step, size and model."""
    for path in _find(folder):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            print(f"{path}  {paint('damaged', 'red', sys.stdout)}: {error.what}")
            continue
        model = " · ".join(
            f"{key} {manifest.model[key]}" for key in ("kind", "num_layers", "dim") if key in manifest.model
        )
        size = format_bytes(manifest.num_bytes())
        print(f"{path}  step {manifest.step} · {size} · {len(manifest.files)} files · {model}")


@app.command("verify")
def verify_checkpoints(folder: Annotated[Path, typer.Argument(help=FOLDER_HELP)]) -> None:
    """Check size and hash of every file; exits 2 and names the file where one is damaged."""
    failed: CheckpointError | None = None
    for path in _find(folder):
        try:
            manifest = verify(path)
        except CheckpointError as error:
            print(f"{paint('✗', 'red', sys.stdout)} {path}  {error.what}")
            failed = error
        else:
            print(f"{paint('✓', 'green', sys.stdout)} {path}  {len(manifest.files)} files verified")
    if failed is not None:
        raise failed


@app.command("export")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="The checkpoint, or a run folder whose newest valid one is taken.")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the safetensors and config.json.")],
) -> None:
    """Write the model's weights in the format that others know the model by, with its names."""
    path = _newest_valid(checkpoint)
    _weights_of(path).export(path, out)
    print(f"{path} → {out}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A folder with safetensors and config.json.")],
    out: Annotated[Path, typer.Argument(help="The run folder whose checkpoints it becomes the first of.")],
) -> None:
    """Make a checkpoint of step 0 from Hugging Face weights; `run --out OUT --resume auto` starts from it."""
    path = _weights_like(source).load(source, out / "checkpoints")
    print(f"{source} → {path}")
    print(f"model  {model_arguments(read_manifest(path).model)}")


def _weights_of(checkpoint: Path) -> OtherWeights:
    """The other format of a checkpoint's family.

    Raises:
        CheckpointError: it has none.
    """
    from meshwright.models.contract.family import family_names, find_family

    kind = str(read_manifest(checkpoint).model.get("kind"))
    found = find_family(kind).other_weights()
    if found is None:
        known = ", ".join(name for name in family_names() if find_family(name).other_weights() is not None)
        raise CheckpointError(
            f"the checkpoint is of a {kind}, whose weights have no other format",
            where=str(checkpoint),
            rule=f"weights are exported of {known}",
            fix=f"export a checkpoint of {known}",
        )
    return found


def _weights_like(source: Path) -> OtherWeights:
    """The format that a folder's config.json names; where it names none, the first one, which says what is wrong."""
    from meshwright.models.contract.family import family_names, find_family

    known = [found for found in (find_family(name).other_weights() for name in family_names()) if found is not None]
    try:
        config = json.loads((source / "config.json").read_text("utf-8"))
        model_type = config.get("model_type") if isinstance(config, dict) else None
    except (OSError, ValueError):
        model_type = None
    return next((weights for weights in known if weights.model_type == model_type), known[0])


def _newest_valid(folder: Path) -> Path:
    """The newest checkpoint that a path means and that is whole; newer ones that are passed over are named.

    Raises:
        CheckpointError: there is none.
    """
    found = _find(folder)
    if found == [folder]:
        return folder  # the one that was asked for, or an error
    path, passed_over = newest_valid(found[0].parent)
    if path is None:
        newest, reason = passed_over[0]
        raise CheckpointError(
            f"no valid checkpoint in {folder}: {reason}",
            where=str(newest),
            rule="every file of a checkpoint has the size and hash that its manifest says",
            fix=f"restore a copy of one of the {len(found)}",
        )
    for bad, reason in passed_over:
        print(f"passed over {bad}: {reason}", file=sys.stderr)
    return path


def _find(folder: Path) -> list[Path]:
    """The checkpoints that a path means, oldest first.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / "manifest.json").exists():
        return [folder]
    for root in (folder / "checkpoints", folder):
        if root.is_dir() and (found := list_checkpoints(root)):
            return found
    raise CheckpointError(
        f"no checkpoint in {folder}",
        where=str(folder),
        rule="a checkpoint is a folder with a manifest.json; a run keeps them under checkpoints/",
        fix="the path of a run folder, as in runs/llama-tiny-1",
    )
