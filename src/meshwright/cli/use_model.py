"""`meshwright evaluate` and `meshwright generate`: a trained model's loss on held-out data, and what it writes."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.wrapping import show
from meshwright.errors import InputError

MODEL_HELP = "A run folder, a checkpoint, or a folder in Hugging Face's format, then section.key=value …"
Model = Annotated[list[str], typer.Argument(metavar="RUN|CHECKPOINT|FOLDER [KEY=VALUE]...", help=MODEL_HELP)]


def evaluate(
    words: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print the loss as JSON.")] = False,
) -> None:
    """Compute a trained model's validation loss, on the run's data or data.source=…, on any layout (mesh.…)."""
    from meshwright.train.trained_model import find_model, use

    source, given = _model_of(words)
    model = find_model(source, given)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        found = use(model, Path(folder))
    samples, where = model.config.train.validation_samples, str(model.checkpoint or source)
    if as_json:
        print(json.dumps({**found, "samples": samples, "model": where}))
        return
    show(f"validation {found['loss']:.3f} {found['unit']} · at most {samples} samples · {where}")


def generate(
    words: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue, or with --chat what a user says.")] = "def ",
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt, by the tokenizer's chat template.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", "--max-new-tokens", min=1, help="Most tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder for images, of a model that generates them.")] = Path("generated"),
) -> None:
    """Generate with a trained model, on one process: text after a prompt or an answer to it, or images."""
    from meshwright.models.contract.run_facts import Prompt
    from meshwright.train.trained_model import find_model, use

    source, given = _model_of(words)
    model = find_model(source, given)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        found: dict[str, Any] = use(model, Path(folder), Prompt(prompt, tokens, temperature, chat))
        if "text" in found:
            print(found["text"] if chat else prompt + found["text"])
            return
        for file in found["files"]:
            out.mkdir(parents=True, exist_ok=True)
            show(str(shutil.copy(file, str(out))))


def _model_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the model and the overrides."""
    if "=" not in words[0]:
        return words[0], words[1:]
    raise InputError(
        f"{words[0]} comes before a model",
        where="command line",
        rule="a model comes first: a run folder, a checkpoint, or a folder in Hugging Face's format",
        fix=f"the path of one, such as runs/llama-tiny-1, before {words[0]}",
    )
