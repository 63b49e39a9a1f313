"""Check that what is to be imported is a folder with `config.json`, not a model's name on a hub."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from meshwright.errors import CheckpointError
from meshwright.models.huggingface.checks import CONFIG
from meshwright.settings.import_object import download_fix


def check_source(source: Path, out: Path) -> None:
    """Check that a folder with a `config.json` is given.

    Args:
        source: what is to be imported.
        out: folder of the new run, for the fix.

    Raises:
        CheckpointError: it is the name of a model on a hub, missing, a file, or has no `config.json`.
    """
    command = "meshwright checkpoint import {} " + quote(str(out))
    if source.is_dir():
        if not (source / CONFIG).exists():
            raise _no_config(source, command)
        return
    what, rule = f"folder not found: {source}", "weights are imported from a local folder; nothing is downloaded"
    fix = "pass the folder of a model in Hugging Face's format, which has a config.json"
    if source.exists():
        what, fix = f"{source} is a file, not a folder", command.format(quote(str(source.parent)))
    raise CheckpointError(what, where=str(source), rule=rule, fix=download_fix(str(source), command) or fix)


def _no_config(source: Path, command: str) -> CheckpointError:
    # The hub's cache has the files of each revision in a folder below that of the model.
    found = (path.parent for glob in ("*", "snapshots/*") for path in sorted(source.glob(f"{glob}/{CONFIG}")))
    inner = next(found, None)
    return CheckpointError(
        f"{CONFIG} is missing from {source}",
        where=str(source),
        rule="a Hugging Face model directory holds config.json and safetensors",
        fix=command.format(quote(str(inner))) if inner else f"download the model's {CONFIG} into the same folder",
    )
