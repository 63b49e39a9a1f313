"""A trained model's loss and text: those of the run that trained it, and of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import CheckpointError, InputError
from meshwright.models.contract.family import Prompt
from meshwright.models.hf import private
from meshwright.models.tasks.next_token import generate
from meshwright.plan.rules import load
from meshwright.train import trained_model
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.rank_run import run_rank
from meshwright.train.record.reporter import Reporter
from meshwright.train.trained_model import TrainedModel, UseSpec, find_model, use, use_body
from tests.docs.console import run_here
from tests.helpers import SMALL, open_data, rank_context, small_corpus
from tests.models.hf.folders import write_model

STEPS = [*SMALL, "train.steps=2", "train.validation_samples=4", "train.sample_tokens=0", "train.seq_len=32"]


def train(out: Path, *words: str, preset: str | None = None) -> Path:
    """Train in this process, to a run folder."""
    config = load(preset, words)
    with ExitStack() as hold:
        folder = choose_folder(config, out=out, resume=None, corpus=open_data(config).fingerprint, hold=hold)
        run_rank(rank_context(), RunSpec(config, Reporter, folder=folder))
    return out


def used(model: TrainedModel, folder: Path, prompt: Prompt | None = None) -> dict[str, Any]:
    """What `use` returns, of a rank in this process."""
    spec = UseSpec(model, folder, prompt)
    use_body(rank_context(), spec)
    return json.loads(spec.result.read_text())


def validation_of(out: Path) -> float:
    last = (out / "metrics.jsonl").read_text("utf-8").splitlines()[-1]
    return float(json.loads(last)["validation_loss_bits_per_byte"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("trained")
    return train(here / "run", *STEPS, *small_corpus(here), "train.precision=bfloat16", "train.global_batch=8",
                 "train.num_microbatches=2", "checkpoint.every=1")  # fmt: skip


@pytest.mark.parametrize("source", ["", "checkpoints/00000002"])
def test_the_loss_is_that_of_the_run(run: Path, source: str, tmp_path: Path) -> None:
    model = find_model(str(run / source), [])
    assert model.config.train.global_batch == 4, "the run's micro-batches"
    assert used(model, tmp_path) == {"loss": validation_of(run), "unit": "bits/byte"}


def test_an_earlier_checkpoint_has_another_loss(run: Path, tmp_path: Path) -> None:
    assert used(find_model(str(run / "checkpoints/00000001"), []), tmp_path)["loss"] > validation_of(run)


@pytest.mark.slow
@pytest.mark.usefixtures("gang")  # whose server ranks are forked from
@pytest.mark.parametrize("layout", ["mesh.dp_shard=2", "mesh.pp=2", "mesh.tp=2"])
def test_the_loss_is_the_same_on_every_layout(layout: str, tmp_path: Path) -> None:
    out = train(tmp_path / "run", *STEPS, *small_corpus(tmp_path), "train.precision=float64")
    found = use(find_model(str(out), [layout]), tmp_path)
    assert found["loss"] == pytest.approx(validation_of(out), abs=1e-9)


def test_other_data_is_evaluated_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("0123456789 " * 2000, "utf-8")
    model = find_model(str(run), [f"data.source={tmp_path}/other.txt"])
    assert model.config.data.validation_source == f"{tmp_path}/other.txt", "all of it, and not a part held out"
    assert used(model, tmp_path)["loss"] != pytest.approx(validation_of(run), rel=0.05)


def test_other_data_takes_the_place_of_all_sources(run: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text of its own. " * 1000, "utf-8")
    a, b = (f"{tmp_path}/{name}.txt" for name in "ab")
    words = ["data.validation_source=" + b, f'data.mixture=["1:{a}"]']
    out = train(tmp_path / "run", *STEPS, *words)
    model = find_model(str(out), [f"data.source={b}"])
    assert (model.config.data.mixture, model.config.data.source, model.config.data.validation_source) == ((), b, b)
    assert used(model, tmp_path)["loss"] == pytest.approx(validation_of(out), abs=1e-6)


def test_the_loss_has_the_run_s_float8_scales(tmp_path: Path) -> None:
    words = ["float8.recipe=delayed", "train.precision=bfloat16", "train.lr=0.02"]
    out = train(tmp_path / "run", *STEPS, *small_corpus(tmp_path), *words)
    assert used(find_model(str(out), []), tmp_path)["loss"] == validation_of(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return write_model(tmp_path_factory.mktemp("models") / "model", initializer_range=0.3)


@pytest.mark.parametrize("is_chat", [False, True])
def test_text_of_a_folder_is_that_of_transformers(folder: Path, is_chat: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = find_model(str(folder), [])
    assert model.checkpoint is None
    found = used(model, tmp_path, Prompt("What is two", 24, 0.0, is_chat))["text"]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with private.quiet():
        theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    if is_chat:
        question = [{"role": "user", "content": "What is two"}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer("What is two", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = theirs.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert len(set(out.tolist())) > 3, "a text that says something"
    assert found == tokenizer.decode(out[:-1] if out[-1] == tokenizer.eos_token_id else out)


def test_a_temperature_draws_other_tokens(folder: Path, tmp_path: Path) -> None:
    first, second = (used(find_model(str(folder), []), tmp_path, Prompt("What", 24, one))["text"] for one in (0.0, 2.0))
    assert first != second


class Counting:
    """A forward whose likeliest token is the one after the last."""

    rank, source, device = 0, 0, torch.device("cpu")

    @contextmanager
    def evaluating(self, num_batches: int, batch_size: int) -> Iterator[Callable[..., list[torch.Tensor]]]:
        yield lambda batches: [torch.nn.functional.one_hot(batches[0].inputs + 1, 100).float()]


@pytest.mark.parametrize(("ends", "expected"), [((), [4, 5, 6, 7, 8]), ((6, 50), [4, 5, 6])])
def test_generation_stops_after_an_end(ends: tuple[int, ...], expected: list[int]) -> None:
    options = {"seq_len": 16, "num_tokens": 5, "temperature": 0.0, "seed": 0}
    assert generate(Counting(), [2, 3], **options, ends=ends) == expected


def test_the_number_of_tokens_has_two_names(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' is one of them."""
    asked = []
    monkeypatch.setattr(
        trained_model, "use", lambda model, folder, prompt: asked.append(prompt.num_tokens) or {"text": ""}
    )
    for option in ("--tokens", "--max-new-tokens"):
        run_here("generate", str(run), option, "7")
    assert asked == [7, 7]


def test_a_prompt_without_tokens_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no tokens"):
        used(find_model(str(run), []), tmp_path, Prompt("", 5, 0.0))


def test_images_are_written(tmp_path: Path) -> None:
    words = ["data.source=digits", "model.num_layers=1", "train.steps=1", "train.warmup_steps=0",
             "train.validation_samples=8", "diffusion.num_samples=10", "diffusion.sampling_steps=2"]  # fmt: skip
    train(tmp_path / "run", *words, preset="dit-digits")
    model = find_model(str(tmp_path / "run"), ["data.source=digits"])  # which has no held-out source of its own
    assert used(model, tmp_path)["unit"] == "squared error"
    found = used(model, tmp_path, Prompt("", 1, 0.0))
    assert [Path(file).read_bytes()[:4] for file in found["files"]] == [b"\x89PNG"]


def test_what_is_no_model_is_refused(run: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        find_model(str(tmp_path), [])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(InputError, match="has no weights"):
        find_model(str(tmp_path), [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_bytes((run / "config.toml").read_bytes())
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_model(str(tmp_path / "run"), [])
