"""The commands of the page, from a model's folder to exported checkpoints, one after the other."""

from __future__ import annotations

import re
import shlex
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.chats.formats import many_chats, write_lines
from tests.docs.console import ROOT, run_here

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

SCRIPT = "python - <<'END'\n"
SHORT = {
    "run": ("train.steps=1", "train.warmup_steps=0", "train.validation_samples=8", "train.sample_tokens=2",
            "train.threads=1"),
    "prove": ("--steps", "1"),
}  # fmt: skip


def commands() -> Iterator[str]:
    """Yield the commands of the section, a script as one, but for the download."""
    section = (ROOT / "docs/huggingface.md").read_text("utf-8").partition("## From a model's folder")[2]
    for block in re.findall(r"^```text\n(.*?)^```", section.partition("\n## ")[0], re.M | re.S):
        if block.startswith(SCRIPT):
            yield block.removesuffix("END\n")
        else:
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            yield from (line for line in lines if line.startswith("meshwright "))


def write_texts(folder: Path) -> None:
    """Write what the page says that there is: a folder of text, and conversations."""
    (folder / "text").mkdir()
    for path in (Path(sysconfig.get_paths()["stdlib"]) / "json").glob("*.py"):
        (folder / "text" / f"{path.stem}.txt").write_text(path.read_text("utf-8"), "utf-8")
    write_lines(folder / "train.jsonl", many_chats(60))
    write_lines(folder / "valid.jsonl", many_chats(9, seed=1))


@pytest.mark.slow
def test_from_a_models_folder_to_exported_checkpoints(
    forked_meshwright: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    verbs = []
    for command in commands():
        if command.startswith(SCRIPT):
            exec(command.removeprefix(SCRIPT), {})
            continue
        _, verb, *words = shlex.split(command)
        verbs.append(verb)
        if verb == "checkpoint":
            run_here(verb, *words)
            continue
        done = forked_meshwright(verb, *words, *SHORT[verb], cwd=tmp_path, timeout_s=400)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert verbs == ["prove", "run", "checkpoint", "run", "checkpoint"]
    assert "<|im_start|>user\nWhat is two and two?<|im_end|>" in capsys.readouterr().out
    assert all((tmp_path / out / "chat_template.jinja").is_file() for out in ("qwen-text", "qwen-chat"))
