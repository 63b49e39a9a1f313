"""Proofs on the gang's ranks: what `meshwright prove` does, without starting processes."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import RunConfig
from meshwright.data.images import ImageDataset
from meshwright.models.dit.description import DiTConfig
from meshwright.parallel import context_attention, pipeline_shared_gradients
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.conclude import conclude, sides_of
from meshwright.prove.record.evidence import RankRecord
from meshwright.prove.record.layout_run import Tamper, gather_evidence, record_rank
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.report import render, to_json
from meshwright.prove.result import ProofResult
from meshwright.prove.spec import as_proof, in_float64
from meshwright.prove.trace.conclude import find_place, with_place
from meshwright.prove.trace.probe import RankTrace, trace_rank
from meshwright.train import optimizer, pipeline_stages, train_step
from meshwright.train.build_job import choose_device
from tests.gangs.gang import GangPool
from tests.helpers import open_data, rank_context
from tests.prove.seeded_faults import Fault

NUM_STEPS = 3
FEW_STEPS = 2
"""Steps of right layouts, of which there are many."""
# Steps large enough that a wrong update stands out, and a norm that is clipped.
STEP = ("train.seq_len=16", "train.global_batch=8", "train.warmup_steps=1", "train.max_grad_norm=0.5")
SMALL = ("model.num_layers=2", "model.dim=32", "model.ffn_dim=48", "model.num_heads=4", "model.num_kv_heads=2", *STEP)
SOURCE = str(Path(sysconfig.get_paths()["stdlib"]) / "json" / "*.py")


SEPARATOR = 255
LENGTHS = (10, 90, 12, 2, 11, 41, 10, 3, 3, 11, 10, 2, 12, 64, 4, 12)
"""Tokens of documents: far less and far more than a window of 16, and many between, two of which don't fit into one, so
that ranks and micro-batches have very different numbers of documents and of targets."""


def packed_documents(folder: Path) -> list[str]:
    """Write a token file with documents of wildly different lengths, and return the words that pack them."""
    generator, path = np.random.default_rng(0), folder / "tokens.npy"
    lengths = [generator.permutation(LENGTHS)[0] for _ in range(400)]
    documents = [np.append(generator.integers(0, SEPARATOR, size=length), SEPARATOR) for length in lengths]
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return [f"data.source={path}", "data.packing=documents", f"data.separator={SEPARATOR}", "model.vocab_size=256",
            "train.sample_tokens=0"]  # fmt: skip


def small_config(*overrides: str) -> RunConfig:
    """A small Llama on the json package's source."""
    return as_proof(load("llama-tiny", [*SMALL, f"data.source={SOURCE}", *overrides]))


SMALL_EXPERTS = ("model.num_layers=2", "model.dim=16", "model.num_heads=2", "model.num_kv_heads=2",
                 "model.expert_dim=12", *STEP)  # fmt: skip


def small_expert_config(*overrides: str) -> RunConfig:
    """A small mixture of 8 experts on the json package's source."""
    return as_proof(load("moe-tiny", [*SMALL_EXPERTS, f"data.source={SOURCE}", *overrides]))


# Sizes that nothing divides: no parameter of a stage is as large as another's, or as a part of it. Zeros as initial
# values are left out as in any proof; and what starts at zero may not be frozen.
SMALL_DIT = ("model.num_layers=3", "model.dim=19", "model.num_heads=2", "model.head_dim=5", "model.ffn_dim=23",
             "model.num_classes=13", "model.zero_init=false", "train.global_batch=8", "train.warmup_steps=1",
             "train.max_grad_norm=0.1")  # fmt: skip
SMALL_PICTURES = ("model.image_size=9", "model.patch_size=3")
SMALL_VIDEOS = ("model.image_size=15", "model.patch_size=5", "model.num_frames=3", "model.patch_frames=3")
NUM_PICTURES = 50


def small_dit_config(*words: str) -> RunConfig:
    """A small diffusion transformer on digits, or on videos of them where the words name that preset."""
    preset = next((word for word in words if "=" not in word), "dit-digits")
    sizes = SMALL_VIDEOS if preset == "dit-digits-video" else SMALL_PICTURES
    return as_proof(load(preset, [*SMALL_DIT, *sizes, *(word for word in words if "=" in word)]))


@cache
def few_pictures(config: RunConfig) -> ImageDataset | None:
    """Some of the pictures that a diffusion transformer trains on; sent to the ranks, which need not read them all."""
    if not isinstance(config.model, DiTConfig):
        return None
    pictures = _pictures(config.data.source, config.model.num_frames)
    kept = {name: getattr(pictures, name)[:NUM_PICTURES] for name in ("train", "train_labels", "train_fps")}
    return replace(pictures, **kept)


@cache
def _pictures(source: str, num_frames: int) -> ImageDataset:
    found = open_data(small_dit_config("dit-digits" if num_frames == 1 else "dit-digits-video"))
    assert isinstance(found, ImageDataset) and found.source == source
    return found


@dataclass(frozen=True)
class Seed:
    """A fault of a table of a module, or none; modules may name more of what faults replace, and what comes first."""

    module: str = ""
    table: str = ""
    fault: str = ""

    @contextmanager
    def planted(self, *, as_run: bool = False) -> Iterator[Tamper | None]:
        """Yield what damages a job, and put back in the end what it replaced: the gang's processes live on."""
        module = importlib.import_module(self.module) if self.module else None
        with restored(*REPLACED, *getattr(module, "REPLACED", ())):
            if as_run:  # beside others a rank runs the graphs of compiled blocks as they are: Inductor takes a minute
                nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
            getattr(module, "BEFORE", {}).get(self.fault, lambda: None)()
            found = getattr(module, self.table)[self.fault] if module is not None and self.fault else None
            yield getattr(found, "tamper", found)


RIGHT = Seed()


def trace_on_rank(rank, world_size, config: RunConfig, seed: Seed, step: int, data=None) -> RankTrace:
    """Gang body: the second pass of this rank, with the same fault seeded."""
    job = config, rank_context(rank, world_size), data or open_data(config)
    with seed.planted() as tamper:
        return trace_rank(*job, step=step, plan=make_plan(config), tamper=tamper)


def record_on_rank(rank, world_size, config, seed=RIGHT, data=None, *, steps=NUM_STEPS, as_run=False) -> RankRecord:
    """Gang body: train as this rank, with a fault seeded.

    A few steps are enough for what is wrong in the first; steps that must be skipped are tried after `NUM_STEPS` only.
    """
    job, plan = (config, rank_context(rank, world_size), data or open_data(config)), make_plan(config)
    with seed.planted(as_run=as_run and world_size > 1) as tamper:
        tried = {"as_run": as_run, "nonfinite": steps == NUM_STEPS}
        return record_rank(*job, num_steps=steps, plan=plan, tamper=tamper, **tried)


REPLACED = (
    train_step, pipeline_stages, optimizer, pipeline_shared_gradients, context_attention,
    context_attention.RingAttention, dist, nn.Module,
)  # fmt: skip
"""Modules and classes in which faults replace functions."""


@contextmanager
def restored(*owners: ModuleType | type) -> Iterator[None]:
    """Put back what a fault replaced in these modules and classes: the gang's processes live on."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, names in zip(owners, before, strict=True):
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


@cache
def plain_model(config: RunConfig) -> PlainModel:
    """The reference's module of a configuration, made once."""
    return PlainModel(config, data_of(config), choose_device(config, rank_context(0, 1)))


def data_of(config: RunConfig) -> Any:
    """What a configuration trains on, or some of it."""
    return few_pictures(config) or open_data(config)


def prove_with(records: list[RankRecord], config: RunConfig, *, as_run: bool = False) -> ProofResult:
    """What the proof concludes from the ranks' records."""
    made = make_plan(config), records, data_of(config)
    return conclude(config, *made, num_steps=len(records[0].steps), as_run=as_run, plain=plain_model(config))


def on_ranks(gang: GangPool, config: RunConfig, body: Callable[..., Any], *more: Any, **named: Any) -> list[Any]:
    """What the ranks of a configuration return; one rank is this process."""
    world_size = config.mesh.axes().num_ranks()
    if world_size == 1 and not named.get("as_run"):
        return [body(0, 1, config, *more, **named)]
    return gang(world_size).run(body, config, *more, timeout_s=300, **named)


def records_of(gang: GangPool, config: RunConfig, seed: Seed = RIGHT, **named: Any) -> list[RankRecord]:
    """What the ranks record."""
    return on_ranks(gang, config, record_on_rank, seed, few_pictures(config), **{"steps": FEW_STEPS, **named})


def proof(
    gang: GangPool, config: RunConfig, seed: Seed = RIGHT, *, steps: int = FEW_STEPS, as_run: bool = False
) -> ProofResult:
    """The proof of a configuration on a gang, with a fault seeded, and the second pass where one is due."""
    records = records_of(gang, config, seed, steps=steps, as_run=as_run)
    result = prove_with(records, config, as_run=as_run)
    if result.asks_for_float64:
        return result.explained_by(proof(gang, in_float64(config), seed))
    if result.locate_step is None:
        return result
    pictures, plan, plain = few_pictures(config), make_plan(config), plain_model(config)
    ranks, data = on_ranks(gang, config, trace_on_rank, seed, result.locate_step, pictures), data_of(config)
    sides = sides_of(config, gather_evidence(config, plan, records), plain, as_run=as_run)
    return with_place(result, find_place(config, plan, ranks, data, plain, sides, step=result.locate_step), plan)


def assert_proved(gang: GangPool, config: RunConfig, records: list[RankRecord] | None = None) -> ProofResult:
    """A right layout is proved, in a few steps."""
    result = prove_with(records or records_of(gang, config), config)
    assert result.passed, "\n".join(render(result))
    return result


def assert_named(result: ProofResult, fault: Fault) -> None:
    """A proof fails, says what the fault says, and gives a cause for its parameter."""
    assert_says(to_json(result, loss_unit="nats/token"), render(result), fault)


def assert_says(report: dict[str, Any], lines: Sequence[str], fault: Fault) -> None:
    """What a report and its lines must say of a fault."""
    assert not report["passed"]
    text = " ".join(" ".join(lines).lower().split())
    missing = [words for words in fault.says if words.lower() not in text]
    assert not missing, "\n".join([f"missing: {missing}", *lines])
    if fault.at:
        (entry,) = (entry for entry in report["parameters"] if entry["name"] == fault.at)
        assert entry["verdict"] == "wrong" and entry["cause"]
