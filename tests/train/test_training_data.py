"""Data in runs: mixtures and conversations train alike on every layout; batches prepared ahead are the same ones."""

from __future__ import annotations

import json
import threading
import traceback

import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.errors import DataError
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.task import BatchUse, Task, prepare_batch
from meshwright.models.tasks.next_token import TextTask
from meshwright.plan.make_plan import make_plan
from meshwright.train.forward_only import validate
from meshwright.train.train_step import microbatch_order
from tests.data.chats.formats import CHATML, build, many_chats, write_lines
from tests.helpers import meshwright, open_data, small_corpus
from tests.train import runs
from tests.train.jobs import load_words, make_job, make_task, run_on, trace

TEXT, PICTURES = ("llama-tiny",), ("dit-digits",)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("batches")), "model.num_layers=2"]


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def trained(rank, world_size, words, ahead):
    """Losses, norms and weights after six steps in two contexts, with a validation in between; threads left over."""
    job, step = make_job(rank, world_size, [*words, f"data.prefetch={ahead}"])
    results, threads, prepare = [], set(), step._task.prepare

    def noted(samples, use):
        threads.add(threading.current_thread().name)
        return prepare(samples, use)

    step._task.prepare = noted
    for steps in (range(1, 4), range(4, 7)):
        with step.prefetching(steps):
            for number in steps:
                results.append(step(number))
                if number == 2:
                    results.append(validate(step.pipeline, step._task))
    assert ("prefetch" in threads) == (ahead > 0)
    weights = {name: to_local(p.detach()).clone() for name, p in job.model.named_parameters()}
    return results, weights, len(workers())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "preset", "layout"),
    [
        (2, TEXT, ["mesh.dp_shard=2", "train.num_microbatches=2"]),
        (2, TEXT, ["mesh.pp=2", "train.num_microbatches=4"]),
        (2, PICTURES, ["mesh.pp=2", "train.num_microbatches=2"]),
        (2, TEXT, ["mesh.pp=2", "train.num_microbatches=4", "pipeline.schedule=dualpipe-v", "model.num_layers=4"]),
    ],
)  # fmt: skip
def test_training_is_bitwise_the_same(gang, corpus, world_size, preset, layout):
    words = [*preset, *(corpus if preset is TEXT else corpus[2:]), *layout]
    needed, ahead = (run_on(gang, world_size, trained, words, number) for number in (0, 2))
    for one, other in zip(needed, ahead, strict=True):
        assert other[0] == one[0] and other[2] == 0
        assert all(torch.equal(other[1][name], one[1][name]) for name in one[1])


@pytest.mark.parametrize("words", [TEXT, (*TEXT, "data.packing=documents"), PICTURES], ids=["text", "packed", "images"])
@pytest.mark.parametrize("use", [BatchUse(), BatchUse(inputs=False), BatchUse(inputs=False, targets=False)])
def test_a_prepared_batch_is_the_batch(corpus, words, use):
    task = make_task(load_words([*words, *(corpus if words is not PICTURES else ())]))
    samples = range(3, 7)
    prepared, expected = prepare_batch(task, samples, use).to(CPU), task.batch(samples)
    for a, b in ((prepared.inputs, expected.inputs), (prepared.targets, expected.targets)):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for a, b in zip(prepared.conditions, expected.conditions, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert task.count(samples) > 0


def test_stages_without_samples_draw_no_noise():
    task = make_task(load_words(PICTURES))
    sizes = [len(prepare_batch(task, range(2), BatchUse(one, two)).tensors) for one in (0, 1) for two in (0, 1)]
    assert sizes == [3, 5, 5, 5]


def test_a_task_that_prepares_nothing_makes_its_batches_in_the_step(corpus):
    """A task written before `prepare` existed: derived from `Task`, from another task, or changed on the instance."""
    config = load_words([*TEXT, *corpus])
    where = []

    class Shifted(TextTask):
        def batch(self, samples: range):
            where.append(threading.current_thread().name)
            return super().batch(range(samples.start + 1, samples.stop + 1))

    shifted = Shifted(run_facts(config), open_data(config), CPU)
    host = prepare_batch(shifted, range(2), BatchUse())
    assert host.tensors == () and not where
    assert torch.equal(host.to(CPU).inputs, make_task(config).batch(range(1, 3)).inputs)

    changed = make_task(config)
    changed.batch = lambda samples: "changed"
    assert prepare_batch(changed, range(2), BatchUse()).to(CPU) == "changed"

    class Both(Shifted):
        def prepare(self, samples: range, use: BatchUse):
            return super().prepare(range(samples.start + 1, samples.stop + 1), use)

    both = prepare_batch(Both(run_facts(config), open_data(config), CPU), range(2), BatchUse())
    assert torch.equal(both.tensors[0], host.to(CPU).inputs)
    assert Task.prepare is not TextTask.prepare

    _, step = make_job(0, 1, [*TEXT, *corpus])
    step._batches._task = shifted
    where.clear()
    with step.prefetching(range(1, 3)):
        step(1), step(2)
    assert where == ["MainThread"] * 2


def read_the_corpus(samples, use):
    raise DataError("the token file has vanished", where="data.source", rule="it stays", fix="put it back")


def test_an_error_of_the_worker_is_raised_in_the_step_that_needs_the_batch(corpus):
    _, step = make_job(0, 1, [*TEXT, *corpus])
    real = step._task.prepare
    step._task.prepare = lambda samples, use: (read_the_corpus if samples.start >= 16 else real)(samples, use)
    with pytest.raises(DataError, match="vanished") as raised, step.prefetching(range(1, 10)):
        for number in range(1, 10):
            done = number - 1
            step(number)
    assert done == 2 and not workers()
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names.index("accumulate") < names.index("read_the_corpus")


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe-v", "zb-v", "interleaved"])
def test_micro_batches_are_prepared_in_the_order_of_the_schedule(schedule):
    words = ["mesh.pp=2", "train.num_microbatches=4", f"pipeline.schedule={schedule}", "model.num_layers=4"]
    table = make_plan(load_words(words)).schedule
    for rank in range(2):
        order = microbatch_order(table, rank)
        assert sorted(order) == [0, 1, 2, 3]


class _Recorded:
    """The samples for which batches were prepared."""

    def __init__(self, task):
        self.real, self.samples = task.prepare, []
        task.prepare = self

    def __call__(self, samples, use):
        self.samples += samples
        return self.real(samples, use)


def test_nothing_is_prepared_beyond_the_last_step(corpus):
    _, step = make_job(0, 1, [*TEXT, *corpus, "data.prefetch=100"])
    recorded = _Recorded(step._task)
    with step.prefetching(range(3, 6)):
        for number in range(3, 6):
            step(number)
    assert recorded.samples == list(range(2 * 8, 5 * 8))


@pytest.mark.slow
def test_a_run_that_stops_and_resumes_is_the_run_without_prefetching(corpus, tmp_path):
    words = [*corpus, "mesh.dp_shard=2", "train.num_microbatches=2"]
    runs.train([*words, "data.prefetch=0"], tmp_path / "whole")
    out = tmp_path / "stopped"
    with pytest.raises(Exception, match="stopped after step 3"):
        runs.train([*words, "data.prefetch=2"], out, fault=runs.Fault(rank=1, step=3, action="stop"))
    runs.train([*words, "data.prefetch=3"], out, resume="auto")
    assert runs.metrics(out) == runs.metrics(tmp_path / "whole")
    runs.assert_bitwise_equal(out, tmp_path / "whole")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("chats")
    build(folder / "tokenizer", CHATML)
    write_lines(folder / "a.jsonl", many_chats(80))
    write_lines(folder / "b.jsonl", many_chats(10, seed=1))
    return [f"data.source={folder}/a.jsonl", f"data.validation_source={folder}/b.jsonl", "data.chat_field=messages",
            f"data.tokenizer={folder}/tokenizer", f"data.cache_dir={folder}/cache", "data.packing=documents",
            "model.vocab_size=360"]  # fmt: skip


@pytest.mark.slow
def test_ranks_train_as_one_process(gang, words):
    words = [*words, "train.precision=float64"]
    (alone,) = run_on(gang, 1, trace, words, 3)
    for found in run_on(gang, 2, trace, [*words, "mesh.dp_shard=2", "train.num_microbatches=2"], 3):
        torch.testing.assert_close(found.losses, alone.losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.norms, alone.norms, rtol=1e-10, atol=0)


@pytest.mark.slow
def test_a_run_says_what_counts_and_generates(words, tmp_path):
    more = ["train.steps=3", "train.seq_len=64", "train.global_batch=8", "train.sample_tokens=4", "model.num_layers=2"]
    done = meshwright("run", "llama-tiny", *words, *more, "train.sample_prompt=What is", "mesh.dp_shard=2",
                      "--out", tmp_path / "run", cwd=tmp_path, timeout_s=400)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of tokens count in the loss" in done.stdout and "nats/token" in done.stdout and "What is" in done.stdout


RATE = ("train.lr_schedule=wsd", "train.decay_steps=0", "train.warmup_steps=2")
"""A learning rate that doesn't depend on the number of steps."""


@pytest.mark.slow
def test_a_run_on_a_mixture_goes_on_with_another_layout(tmp_path):
    for name in ("first", "second"):
        small_corpus(tmp_path / name)
    lines = [json.dumps({"body": f"line {number} of a corpus\n" * 20}) for number in range(200)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    sources = [f"3:{tmp_path}/first/*.txt", f"1:{tmp_path}/lines.jsonl#body"]
    data = [f"data.mixture={json.dumps(sources)}", f"data.validation_source={tmp_path}/second/*.txt"]
    words = [*data, f"data.cache_dir={tmp_path}/cache", "data.packing=documents", "train.precision=float64", *RATE]
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    runs.train(words, tmp_path / "whole")
    runs.train([*words, "train.steps=4"], tmp_path / "parts")
    runs.train([*words, "mesh.dp_shard=2"], tmp_path / "parts", resume="auto")
    whole, parts = runs.metrics(tmp_path / "whole"), runs.metrics(tmp_path / "parts")
    assert [line["samples"] for line in parts] == [line["samples"] for line in whole] and len(parts) == 8
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in parts] == pytest.approx([line[key] for line in whole], rel=1e-9)
    assert parts[-1]["validation_loss"] == pytest.approx(whole[-1]["validation_loss"], rel=1e-9)
