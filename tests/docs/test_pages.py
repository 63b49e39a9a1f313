"""Every command and every piece of Python on the pages runs as printed, in order, in a folder of its page's own."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from meshwright.checkpoint.manifest import newest_valid
from meshwright.models.module import example
from tests.data.chats.formats import CHATML, build, many_chats, write_lines
from tests.docs.console import PAGES, ROOT, Shown, commands_of, fences, missing, shown
from tests.docs.test_console import INSTANT
from tests.helpers import clean_environment

ELSEWHERE = {
    "$ make demo": ".ci/run runs it",
    "make demo": ".ci/run runs it",
    "make test": ".ci/run runs it",
    "python3 -m venv": ".ci/run installs what it does",
    "lm_eval": "needs lm-eval, which no extra has: run by hand, with 0.4.13",
    "hf download": "needs the internet; the page makes a folder of its own",
    "torchrun --nnodes 8": "needs eight nodes; tests/cli/test_launch_runs.py starts such commands with stand-ins",
    "torchrun --nproc-per-node 2 docs/examples/compressed_fsdp2.py": "tests/comm/test_compression_docs.py",
    "python docs/examples/shared_parameter.py": "tests/parallel/test_shared_example.py",
    "meshwright prove script docs/examples/script_": "tests/prove/script runs each example with more layouts",
    "meshwright prove --catalogue": "tests/prove/catalogue",
    "meshwright bench": "tests/bench runs each part, smaller",
    "python bench/gpu": "tests/bench/gpu runs it dry",
    "torchrun --nproc-per-node 2 docs/examples/shared_drift.py": "tests/parallel/test_drift_example.py, shorter",
    "meshwright run llama-tiny float8.recipe=current train.compile": "tests/features/float8/test_run.py, smaller",
    "meshwright draw loss runs/exact": "three of its four runs are said in words; tests/cli/test_draw_loss.py",
}
"""Beginnings of commands that don't run here, and why."""
PYTHON_ELSEWHERE = {
    "class Trained(GPT):": "needs nanoGPT",
    "recorder = Recorder(model, optimizer)": "a pattern; tests/prove/script runs scripts that have it",
    "replicate_fallback()": "needs four ranks: tests/dtensor_ops/test_operator_docs.py",
    "only four lines are specific to Meshwright": "a file of docs/examples: tests/comm",
    "Two pipeline stages that share an embedding": "a file of docs/examples: tests/parallel",
    "y = redistribute(x, [Shard(1), Shard(0)])": "needs ranks: tests/reshard/test_redistribute.py",
    "prepare(mesh)": "needs ranks: tests/reshard/test_redistribute.py",
}
"""What blocks of Python that don't run here have, and why."""
SHORT = {
    "run": ("train.steps=1", "train.warmup_steps=0", "train.validation_samples=8", "train.threads=1"),
    "prove": ("--steps", "1"),
    "evaluate": ("train.validation_samples=8",),
    "generate": ("--tokens", "3"),
}
"""Words that make commands short."""
SMALL_PROOF = ("train.global_batch=8", "train.seq_len=64")
"""Sizes that pages give to proofs whose output they show, for those that name none."""
MORE = {
    "dit-": ("diffusion.num_samples=0",),
    "train.profile=": ("train.steps=12",),
    "--sample-prompt": ("train.sample_tokens=2",),
    "--plan ": ("train.seq_len=128",),
}
"""Words for commands that have something."""
CHECKPOINT = re.compile(r"([\w/-]+/checkpoints)/\d{8}")
TEXT = ("train.sample_tokens=0", "train.seq_len=64")


def write_text(folder: Path, *names: str) -> None:
    """Write files of text: Python sources, small."""
    text = "".join(path.read_text("utf-8") for path in (Path(sysconfig.get_paths()["stdlib"]) / "json").glob("*.py"))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def script_of(page: str) -> str:
    """Return the script that a page gives to Python first."""
    found = (command for _, text in fences(ROOT / "docs" / page) for command, _ in commands_of(text))
    return next(command.partition("\n")[2] for command in found if command.startswith("python - "))


def write_qwen(folder: Path) -> None:
    """Write the model's folder of the page on Hugging Face models, and what that page says that there is."""
    pytest.importorskip("transformers")
    write_text(folder, "text/a.txt", "text/b.txt", "other/a.txt")
    exec(script_of("huggingface.md"), {})
    write_lines(folder / "train.jsonl", many_chats(60))
    write_lines(folder / "valid.jsonl", many_chats(9, seed=1))


def write_corpora(folder: Path) -> None:
    """Write what the page on data reads."""
    datasets = pytest.importorskip("datasets")
    texts = ["def step(x): return x\n" * 40] * 300
    for name, field in (("corpus/a", "text"), ("web/a", "text"), ("books/a", "body")):
        (folder / name).parent.mkdir(exist_ok=True)
        table = datasets.Dataset.from_dict({field: texts})
        table.to_json(f"{name}.jsonl")
        table.to_parquet(f"{name}.parquet")
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": texts})).save_to_disk("saved")
    write_lines(folder / "chats.jsonl", many_chats(60))
    build(folder / "model", CHATML)
    write_text(folder, "train.txt", "valid.txt")
    (folder / "valid.txt").write_text((folder / "valid.txt").read_text("utf-8") * 2)


def write_module(folder: Path) -> None:
    """Write the example of a module where the pages say that it is."""
    shutil.copy(str(example.__file__), folder / "tiny_gpt.py")


def write_both(folder: Path) -> None:
    """Write the module and the model's folder that the README has."""
    write_module(folder)
    write_qwen(folder)


def write_beside_the_model(folder: Path) -> None:
    """Write what the page on Hugging Face models has before it makes its folder."""
    write_qwen(folder)
    shutil.rmtree(folder / "qwen")


def write_tuned(folder: Path) -> None:
    """Write other texts, and a folder in the place of an exported one."""
    write_qwen(folder)
    (folder / "qwen").rename(folder / "qwen-chat")


GIVEN: dict[str, Callable[[Path], None]] = {
    "README.md": write_both,
    "own_module.md": write_module,
    "from-trainer.md": write_qwen,
    "huggingface.md": write_beside_the_model,
    "data.md": write_corpora,
    "running.md": write_tuned,
    "checkpoints.md": lambda folder: write_text(folder, "my-text/a.txt"),
    "clusters.md": lambda folder: write_text(folder, "my corpus/a.txt"),
}
"""What a page's reader has."""
BEFORE = {
    "checkpoints.md": ("meshwright run llama-tiny --out runs/one", "meshwright run llama-tiny"),
    "reports.md": ("meshwright run llama-tiny mesh.dp_shard=2 --out runs/dp2",),
    "planning.md": ("meshwright plan llama-tiny mesh.dp_shard=2 -o plan.json",),
}
"""Commands that a page's reader has run."""


class Reader:
    """Someone who types what a page says, in a folder."""

    def __init__(self, page: Path, folder: Path, start: Callable[..., CompletedProcess[str]]) -> None:
        self.page, self._folder, self._start = page, folder, start
        self._env = clean_environment() | {"WANDB_MODE": "offline"}
        self.names: dict[str, Any] = {}
        self.printed = ""

    def type(self, command: str, lines: tuple[str, ...] = ()) -> None:
        """Run a command, or know where it runs; it prints what is shown."""
        if command.startswith(tuple(ELSEWHERE)) or Shown(self.page.name, command, lines) in INSTANT:
            return
        command = CHECKPOINT.sub(self._newest, command)
        if command.startswith("export "):
            self._env |= dict([command.removeprefix("export ").split("=", 1)])
        elif command.startswith("python - "):
            self.python(command.partition("\n")[2])
        else:
            program, verb, *words = shlex.split(command, comments=True)
            assert program == "meshwright", command
            done = self._start(verb, *words, *self._short(command, verb, words, lines), cwd=self._folder, env=self._env,
                               timeout_s=400)  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            varying = ("step ", "  ", "…") if verb == "run" else ("largest relative error",)  # names what rounds most
            told = [line for line in lines if not line.startswith(varying)][: 2 if verb == "run" else None]
            assert not missing(told, done.stdout, numbers=False), f"{command}\n{done.stdout}"

    def python(self, code: str) -> None:
        """Run a piece of Python, after those before it."""
        if not any(part in code for part in PYTHON_ELSEWHERE):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, self.names)
            self.printed += printed.getvalue()

    def _newest(self, found: re.Match[str]) -> str:
        """Return the newest checkpoint of a run's folder, in place of a step that a short run doesn't reach."""
        newest, _ = newest_valid(self._folder / found[1])
        return str(newest and newest.relative_to(self._folder))

    def _short(self, command: str, verb: str, words: list[str], lines: tuple[str, ...]) -> list[str]:
        """Return words that make a command short, but for a proof whose output is shown."""
        if verb == "prove" and (lines or words[0] == "script"):
            return []
        found = list(SHORT.get(verb, ()))
        if verb == "prove" and not any(part in command for part in ("dit-", "--plan")):  # a plan has its own sizes
            found += [word for word in SMALL_PROOF if word.partition("=")[0] not in command]
        if verb == "run":
            source = self._folder / words[0]
            if source.is_dir():  # it goes on by a step, with what it has
                newest, _ = newest_valid(source / "checkpoints")
                return [f"train.steps={int(newest.name) + 1 if newest else 1}"]
            found += () if "dit-" in command or ".toml" in words[0] else TEXT
        return found + [word for part, more in MORE.items() if verb == "run" and part in command for word in more]


def weights_are_those_of_the_run(reader: Reader, folder: Path) -> None:
    """Check that the page's Python has opened the weights that its run has saved."""
    import torch

    from meshwright.checkpoint import safetensors_file
    from meshwright.checkpoint.reader import read_tensor

    checkpoint, _ = newest_valid(folder / "runs/tiny/checkpoints")
    assert checkpoint is not None
    stored, weights = safetensors_file.read_layout(checkpoint), dict(reader.names["model"].named_parameters())
    assert weights
    for name, weight in weights.items():
        torch.testing.assert_close(weight, read_tensor(stored, f"model.{name}"), rtol=0, atol=0)


def exports_talk(reader: Reader, folder: Path) -> None:
    """Check that the exported folder was asked the page's question, with the template of the model."""
    assert "<|im_start|>user\nWhat is two and two?<|im_end|>" in reader.printed
    assert all((folder / out / "chat_template.jinja").is_file() for out in ("qwen-text", "qwen-chat"))


CHECKS = {"own_module.md": weights_are_those_of_the_run, "huggingface.md": exports_talk}
"""What must be so in the end."""


def pieces(page: Path) -> list[tuple[str, Any]]:
    """Return the commands, with what is shown after them, and the pieces of Python of a page, in order."""
    found: list[tuple[str, Any]] = []
    for language, text in fences(page):
        found += [("python", text)] if language == "python" else [("command", one) for one in commands_of(text)]
    return found


WITH_PIECES = [page for page in PAGES if pieces(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PIECES, ids=lambda page: page.stem)
def test_what_a_page_says_runs(page, forked_meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(ROOT / "docs/examples", tmp_path / "docs/examples")
    reader = Reader(page, tmp_path, forked_meshwright)
    GIVEN.get(page.name, lambda folder: None)(tmp_path)
    for command in BEFORE.get(page.name, ()):
        reader.type(command)
    for kind, piece in pieces(page):
        reader.python(piece) if kind == "python" else reader.type(*piece)
    CHECKS.get(page.name, lambda reader, folder: None)(reader, tmp_path)


def test_what_runs_elsewhere_is_on_a_page():
    commands = [piece[0] for page in PAGES for kind, piece in pieces(page) if kind == "command"]
    python = [piece for page in PAGES for kind, piece in pieces(page) if kind == "python"]
    commands += [f"$ {one.command}" for one in shown()]
    assert [one for one in ELSEWHERE if not any(command.startswith(one) for command in commands)] == []
    assert [one for one in PYTHON_ELSEWHERE if not any(one in code for code in python)] == []
    assert len(commands) > 80 and len(python) > 10


LEFT_OUT = (
    "meshwright bench PART",
    "meshwright launch slurm|kubernetes|torchrun",
    "srun --ntasks 64",
    "meshwright calibrate [",
    "meshwright calibrate --from RUN [",
)
"""Beginnings of lines that are patterns of commands."""
WRITTEN = "clusters.md"
"""Page with files that `meshwright launch` writes, which tests/cli/test_launch.py compares."""


def test_no_line_with_a_command_is_left_out_unseen():
    command = re.compile(r"\s*(?:\$ )?((?:meshwright|python3?|torchrun|make|hf|srun|export|accelerate) .*)")
    for page in PAGES:
        for language, text in fences(page):
            typed = [one.partition("\n")[0] for one, _ in commands_of(text)]
            lines = [
                found[1] for line in re.sub(r"\\\n\s*", "", text).splitlines() if (found := command.fullmatch(line))
            ]
            unseen = [line for line in lines if line not in typed and not line.startswith(LEFT_OUT)]
            assert language == "python" or unseen == [] or (page.name == WRITTEN and language == "bash"), page


def test_the_page_shows_the_example():
    shown = next(text for language, text in fences(ROOT / "docs/own_module.md") if language == "python")
    assert shown == Path(str(example.__file__)).read_text("utf-8")


def test_the_files_of_walks_through_the_code_exist() -> None:
    rows = [row for row in (ROOT / "docs/walks.md").read_text("utf-8").splitlines() if row.startswith("|")]
    paths = [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / "src/meshwright" / path).is_file()] == []
