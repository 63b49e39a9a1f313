"""Configuration schema: sections, keys, types, defaults and descriptions. Families add `model` and other sections.

Frozen pydantic models that reject unknown keys. Each key is documented once, in its description; `docs/config.md` is
generated from these. `rules` contains the cross-section rules, and `load` reads files and command lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, create_model

from meshwright.comm.compression.catalogue import GradientMethod, InsideNodeMethod, WeightMethod
from meshwright.features.float8.section import Float8Config
from meshwright.mesh.axes import Axes
from meshwright.models.contract.family import DataConfig, Family, find_family
from meshwright.settings.section import Counts, ModelSection, Names, Section


class MeshConfig(Section):
    """Mesh axis sizes and parallelism options."""

    pp: int = Field(1, ge=1, description="pipeline-parallel size: ranks that the layers are split over")
    dp_replicate: int = Field(1, ge=1, description="number of replicas of the sharded model (HSDP)")
    dp_shard: int = Field(
        1, ge=1, description="ranks that parameters, gradients and optimizer state are sharded over (FSDP2)"
    )
    cp: int = Field(1, ge=1, description="context-parallel size: ranks that the sequence is sharded over")
    cp_method: Literal["auto", "ring", "heads"] = Field(
        "auto",
        description="how attention reaches the tokens of other cp ranks: ring sends keys and values, heads exchanges "
        "tokens for heads; auto is the one that sends less, and ring for packed documents",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel size: ranks that each matrix product is split over")
    ep: int = Field(1, ge=1, description="expert-parallel size: ranks of dp_shard × cp that experts are sharded over")
    sequence_parallel: bool = Field(
        True, description="shard activations along the sequence between tensor-parallel regions"
    )
    reshard_after_forward: bool = Field(
        True,
        description="free gathered parameters after each block's forward (ZeRO-3), or keep them until the backward",
    )

    def axes(self) -> Axes:
        """Return the mesh axes."""
        return Axes(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp)

    def layout(self) -> str:
        """Describe the sizes of the axes and of ep."""
        return f"{self.axes()} (ep {self.ep})" if self.ep > 1 else str(self.axes())


class TrainConfig(Section):
    """Training loop, optimizer, precision and validation settings."""

    steps: int = Field(500, ge=1, description="optimizer steps")
    global_batch: int = Field(32, ge=1, description="samples per step, over all ranks")
    num_microbatches: int = Field(
        1, ge=1, description="micro-batches per step that each rank splits its share of the batch into"
    )
    seq_len: int = Field(256, ge=1, description="tokens per text sample; an image has one per patch")
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed for initial weights and sample order, independent of the layout"
    )
    optimizer: str = Field(
        "adamw",
        description="adamw; muon, for matrices, with AdamW for embeddings, the output head and vectors; sgd, with "
        "momentum; or package.module:factory for your own",
    )
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    lr_schedule: str = Field(
        "cosine",
        description="after warm-up: cosine decay, or wsd: stable and then linear decay (warm-up–stable–decay); or "
        "package.module:function for your own, of the step from 1 and the train section, which gives the rate",
    )
    warmup_steps: int = Field(20, ge=0, description="steps of linear warm-up")
    decay_steps: int = Field(100, ge=0, description="length of the final decay of lr_schedule=wsd, in steps")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="ratio of the final to the peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second-moment decay")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of muon and sgd")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled weight decay of all parameters but vectors, such as norm weights"
    )
    parameter_groups: Names = Field(
        (),
        description="settings of single parameters, as role:key=value,… or glob:key=value,… with keys lr and "
        "weight_decay: ['embedding:lr=0.01','*.attention.*:lr=0.001,weight_decay=0']; roles are matrix, embedding, "
        "head, vector and experts; later entries win",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability of dropping an element of a block's branches before they are added"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="clip gradients to this global norm; 1e30 disables clipping")
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="compute dtype; bfloat16 keeps float32 master weights and reduces gradients in float32"
    )
    loss_chunk: int | None = Field(
        None,
        ge=0,
        description="tokens of which output head and loss are computed at once, so that logits of all never exist; 0 "
        "computes all logits; by default chosen where logits are large",
    )
    compile: bool = Field(False, description="compile the model block by block with torch.compile")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses CUDA devices if available")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads per rank, at most 1024; cores / local ranks by default"
    )
    freeze: Names = Field((), description="globs over the names of parameters that are not trained")
    max_skipped_steps: int = Field(
        5, ge=0, description="consecutive non-finite steps that are skipped before the run stops"
    )
    timeout_s: int = Field(600, ge=1, description="seconds before a collective times out and the run is aborted")
    log_every: int = Field(10, ge=1, description="steps between plain progress lines (off a terminal)")
    validate_every: int = Field(0, ge=0, description="steps between validations; 0 validates at the end only")
    validation_samples: int = Field(128, ge=0, description="held-out samples per validation; 0 disables validation")
    sample_tokens: int = Field(120, ge=0, description="tokens of text generated at the end; 0 disables sampling")
    sample_prompt: str | None = Field(
        None, min_length=1, description="text that the generated text continues; `def ` by default"
    )
    trace: bool = Field(
        False, description="write the timelines of the last measured step, predicted and measured, to the run folder"
    )
    profile: Names = Field(
        (), description="steps to record with PyTorch's profiler, as numbers and ranges: 10-12 or 5,10-12"
    )
    profile_ranks: Names = Field(
        ("0",), description="ranks that write a profile of these steps: numbers and ranges, such as 0,4-7, or all"
    )
    trackers: Names = Field(
        (),
        description="where metrics go besides metrics.jsonl: tensorboard, wandb, trackio, or package.module:Sink for "
        "your own",
    )


class PipelineConfig(Section):
    """Split of the layers over mesh.pp ranks, and the micro-batch schedule."""

    schedule: str = Field(
        "auto",
        description="f-then-b, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, v-half, v-min, or the path to a CSV table; "
        "auto is interleaved if pipeline.chunks is greater than 1, else 1f1b",
    )
    chunks: int | None = Field(
        None, ge=1, description="stages per rank; by default 2 for interleaved and V-shaped schedules, else 1"
    )
    layers_per_stage: Counts | None = Field(
        None, description="number of blocks in each stage, in order; balanced by cost by default"
    )
    allow_empty_stages: bool = Field(False, description="allow stages without blocks")
    release: bool = Field(True, description="free inputs, outputs and gradients as early as possible")
    poison: bool = Field(False, description="fill freed buffers with NaN, to detect use after free")


class RecomputeConfig(Section):
    """Activation recomputation (activation checkpointing)."""

    policy: Literal["none", "selective", "full"] = Field(
        "none",
        description="what each block keeps for the backward: none recomputes nothing; full keeps only its input; "
        "selective also the results of matrix products, attention, top-k and collectives",
    )
    blocks: Names = Field(
        (),
        description="policies of single blocks in place of recompute.policy, as policy:layers, with layers of the "
        "whole model: full:0-3 or ['full:0-3','selective:4,6-7']",
    )


class CaptureConfig(Section):
    """CUDA graphs of parts of each block."""

    scope: Names = Field(
        (),
        description="parts of each block to capture: layer, attention, mlp, moe_router, moe, globs over the names of "
        "its modules, such as attention.w*, or region:NAME for what its code marks; nothing by default",
    )
    mode: Literal["slot", "per_microbatch"] = Field(
        "slot",
        description="slot has the graphs of each layer once per micro-batch in flight; per_microbatch once per "
        "micro-batch, in one memory pool",
    )
    backend: Literal["auto", "cuda", "eager", "simulate"] = Field(
        "auto",
        description="cuda captures graphs; on any device, simulate runs operations eagerly in memory laid out as "
        "graphs would have it, and eager runs them on the graphs' inputs and outputs; auto is cuda on CUDA devices, "
        "else simulate",
    )
    strict: bool = Field(False, description="end the run if anything that capture.scope asks for can't be captured")


class CommConfig(Section):
    """Compression of gradients and weights sent over dp_replicate and dp_shard."""

    gradients: GradientMethod = Field(
        "exact",
        description="exact uses FSDP2's reduce-scatter; exact-via-all-to-all uses the codecs' path and is exact up to "
        "the order of a float32 sum; loco4 and loco2 carry each step's error into the next (LoCo); the 2-bit methods "
        "are experimental",
    )
    weights: WeightMethod = Field(
        "exact", description="codec of weights gathered for compute (qwZ); master weights are not affected"
    )
    inside_node: InsideNodeMethod = Field(
        "int8", description="codec of compressed gradients inside a node, if dp_shard spans several (qgZ)"
    )
    ranks_per_node: int | None = Field(
        None, ge=1, description="consecutive ranks treated as one node; by default those on one machine"
    )
    secondary_shards: int | None = Field(
        None,
        ge=2,
        description="size of the groups of consecutive dp_shard ranks that keep a full copy of the weights from "
        "forward to backward, so that the backward gathers within a group (hpZ); off by default",
    )


class CheckpointConfig(Section):
    """Frequency and retention of checkpoints."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0 saves by time, and at the end")
    minutes: float = Field(
        30.0, ge=0, description="minutes of training between checkpoints, however many steps; 0 saves by steps only"
    )
    at_end: bool = Field(
        True,
        description="save after the last step, whatever checkpoint.every says; false saves gigabytes and "
        "time where nobody asks for the weights",
    )
    keep: int = Field(2, ge=1, description="number of newest checkpoints to keep")


class RunConfig(Section):
    """Configuration of a run.

    `run_type` creates a subclass with the family's sections.
    """

    name: str = Field(
        "run",
        pattern=r"^[^/\x00]+$",
        description="name of the preset or file; part of the run folder's name, so it can't contain a slash",
    )
    model: SerializeAsAny[ModelSection]
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    pipeline: PipelineConfig = PipelineConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    capture: CaptureConfig = CaptureConfig()
    float8: Float8Config = Float8Config()
    comm: CommConfig = CommConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def family(self) -> Family:
        """Family of the model."""
        return find_family(self.model.kind)

    def family_sections(self) -> dict[str, Section]:
        """Return the sections added by the family, by name."""
        return {name: getattr(self, name) for name in self.family.sections}

    def with_keys(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with the given dotted keys replaced, without validation."""
        sections: dict[str, Any] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections[section] = sections.get(section, getattr(self, section)).model_copy(update={name: value})
        return self.model_copy(update=sections)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is created at run time, so pickle can't find it by name.
        return _restored, (self.model.kind, self.model_dump_json())


@cache
def run_type(kind: str) -> type[RunConfig]:
    """Return the `RunConfig` subclass for a family, with the family's own sections.

    Raises:
        ConfigError: the family is unknown.
    """
    fields: dict[str, Any] = {
        # An external family's section does not know the name it was selected by.
        name: (section, section(kind=kind) if issubclass(section, ModelSection) else section())
        for name, section in find_family(kind).sections.items()
    }
    return create_model("RunConfig", __base__=RunConfig, __module__=__name__, **fields)


def _restored(kind: str, text: str) -> RunConfig:
    return run_type(kind).model_validate_json(text)


PLANNED_SECTIONS = ("attention",)
"""Sections for features that are not implemented yet, to give a better error than `unknown key`."""
