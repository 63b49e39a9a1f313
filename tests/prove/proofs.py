"""Proofs on the gang's ranks: what `meshwright prove` does, without starting processes."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import tee
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from meshwright.config.schema import RunConfig
from meshwright.data.images import ImageDataset
from meshwright.models.dit.description import DiTConfig
from meshwright.parallel import context_attention, pipeline_shared_gradients
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import ProofResult
from meshwright.prove.driver import context_contributions, known_variants
from meshwright.prove.locate.conclude import find_place, step_to_locate, with_place
from meshwright.prove.locate.layout_pass import RankPass, record_activations
from meshwright.prove.placement import stage_placement_of
from meshwright.prove.record.evidence import ReferenceEvidence, Variant, Variants
from meshwright.prove.record.layout_run import RankRecord, Tamper, gather_evidence, record_rank
from meshwright.prove.record.reference_run import compute_reference
from meshwright.prove.report import render, to_json
from meshwright.prove.spec import as_proof
from meshwright.prove.untaken_paths.diagnose_branches import diagnose_branches
from meshwright.train import optimizer, pipeline_stages, train_step
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


def _damage(module: str, table: str, fault: str) -> Tamper | None:
    return getattr(importlib.import_module(module), table)[fault].tamper if fault else None


def locate_on_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    module: str,
    table: str,
    fault: str,
    step: int,
    data: ImageDataset | None = None,
) -> RankPass:
    """Gang body: the second pass of this rank, with the same fault seeded."""
    context, corpus, plan = rank_context(rank, world_size), data or open_data(config), make_plan(config)
    with restored(*REPLACED):
        tamper = _damage(module, table, fault)
        return record_activations(config, context, corpus, step=step, plan=plan, tamper=tamper)


def record_on_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    module: str,
    table: str,
    fault: str,
    data: ImageDataset | None = None,
    *,
    few: bool = False,
) -> RankRecord:
    """Gang body: train as this rank, with the fault of that name in that table of that module seeded.

    A few steps are enough for what is wrong in the first; steps that must be skipped are tried after the others only.
    """
    context, corpus, steps = rank_context(rank, world_size), data or open_data(config), FEW_STEPS if few else NUM_STEPS
    with restored(*REPLACED):
        tamper = _damage(module, table, fault)
        return record_rank(config, context, corpus, num_steps=steps, tamper=tamper, nonfinite=not few)


def record_few_steps(rank: int, world_size: int, config: RunConfig, data: ImageDataset | None = None) -> RankRecord:
    """Gang body: train as this rank for two steps, and try no steps that must be skipped."""
    corpus = data or open_data(config)
    return record_rank(config, rank_context(rank, world_size), corpus, num_steps=FEW_STEPS, nonfinite=False)


REPLACED = (
    train_step, pipeline_stages, optimizer, pipeline_shared_gradients, context_attention,
    context_attention.RingAttention, dist,
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
def reference(config: RunConfig, num_steps: int = NUM_STEPS) -> ReferenceEvidence:
    """The reference of a configuration, computed once."""
    data, stages = few_pictures(config) or open_data(config), stage_placement_of(make_plan(config))
    return compute_reference(config, data, num_steps=num_steps, stages=stages)


class Remembered:
    """Known variants that several proofs of a configuration share: computing them takes most of a failed proof.

    Each is computed once, when it is first asked for.
    """

    def __init__(self, variants: Variants) -> None:
        self._first, self._later = variants.of_first_step(), variants.of_later_steps()

    def of_first_step(self) -> Iterator[Variant]:
        self._first, found = tee(self._first)
        return found

    def of_later_steps(self) -> Iterator[Variant]:
        self._later, found = tee(self._later)
        return found


@lru_cache(maxsize=8)
def remembered_variants(config: RunConfig, num_steps: int) -> Remembered:
    """The known variants of a configuration."""
    plan, data = make_plan(config), few_pictures(config) or open_data(config)
    return Remembered(known_variants(config, data, plan, num_steps=num_steps))


def prove_with(records: list[RankRecord], config: RunConfig) -> ProofResult:
    """What the proof concludes from the ranks' records."""
    plan, data = make_plan(config), few_pictures(config) or open_data(config)
    layout, num_steps = gather_evidence(config, records), len(records[0].losses)
    return compare(
        layout,
        reference(config, num_steps),
        variants=remembered_variants(config, num_steps),
        by_context=context_contributions(config, data, plan),
        branches=diagnose_branches(config, data, layout),
    )


def proof(
    gang: GangPool,
    config: RunConfig,
    module: str = "",
    table: str = "",
    fault: str = "",
    *,
    second_pass: bool = False,
    few: bool = False,
) -> ProofResult:
    """The proof of a configuration on a gang, with a fault where one is named; one rank is this process.

    The second pass that names the place of a forward's fault is left out unless a test is about it. `few`: as
    `record_on_rank`.
    """
    world_size, pictures = config.mesh.axes().num_ranks(), few_pictures(config)
    seeded = (config, module, table, fault)

    def on_ranks(body: Callable[..., Any], *more: Any, **named: Any) -> list[Any]:
        if world_size == 1:
            return [body(0, 1, *seeded, *more, **named)]
        return gang(world_size).run(body, *seeded, *more, **named)

    result = prove_with(on_ranks(record_on_rank, pictures, few=few), config)
    step = step_to_locate(result) if second_pass else None
    if step is None:
        return result
    data = pictures or open_data(config)
    place = find_place(config, data, make_plan(config), on_ranks(locate_on_rank, step, pictures), step=step)
    return with_place(result, place)


def records_of(gang: GangPool, config: RunConfig) -> list[RankRecord]:
    """What the ranks of a right layout record in a few steps; one rank is this process."""
    world_size, arguments = config.mesh.axes().num_ranks(), (config, few_pictures(config))
    if world_size == 1:
        return [record_few_steps(0, 1, *arguments)]
    return gang(world_size).run(record_few_steps, *arguments)


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
