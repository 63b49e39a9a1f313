"""The run's own sections and keys, their types, defaults and meaning; a family brings `model` and what else it needs.

Frozen pydantic models that refuse unknown keys. What a key means stands once, in its description; `docs/config.md` is
written from these. Rules that cross sections live in `rules`, reading of files and command lines in `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, create_model

from meshwright.comm.compression.catalogue import GradientMethod, InsideNodeMethod, WeightMethod
from meshwright.mesh.axes import Axes
from meshwright.models.contract.family import Family, find_family
from meshwright.settings.section import Counts, ModelSection, Names, Section


class DataConfig(Section):
    """Where the text or the pictures come from."""

    source: str = Field(
        "stdlib",
        description="text: stdlib (this Python's own source files), a glob of text files, or a token file "
        "(.npy, or .bin of data.token_dtype); pictures: digits, digits-video, or a glob of image files",
    )
    tokenizer: str = Field("bytes", description="bytes, or the path of a Hugging Face tokenizer.json")
    token_dtype: Literal["uint8", "uint16", "uint32"] = Field("uint16", description="element type of a .bin token file")
    cache_dir: str | None = Field(
        None, min_length=1, description="where tokenised text is kept; ~/.cache/meshwright when not given"
    )


class MeshConfig(Section):
    """How many ranks divide the work, and in which ways."""

    pp: int = Field(1, ge=1, description="ranks that divide the layers (pipeline parallel)")
    dp_replicate: int = Field(1, ge=1, description="replicas of the sharded model (HSDP)")
    dp_shard: int = Field(1, ge=1, description="ranks that shard parameters, gradients and optimizer state (FSDP2)")
    cp: int = Field(1, ge=1, description="ranks that divide the sequence in attention")
    tp: int = Field(1, ge=1, description="ranks that divide each matrix product (tensor parallel)")
    ep: int = Field(1, ge=1, description="expert-parallel ranks within dp_shard")
    sequence_parallel: bool = Field(True, description="between tp's products, divide activations along the sequence")
    reshard_after_forward: bool = Field(
        True, description="free gathered parameters after each block's forward (ZeRO-3) or keep them until backward"
    )

    def axes(self) -> Axes:
        """The mesh's axes as a value."""
        return Axes(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp)


class TrainConfig(Section):
    """The training itself."""

    steps: int = Field(500, ge=1, description="optimizer steps")
    global_batch: int = Field(32, ge=1, description="samples a step, over all ranks")
    num_microbatches: int = Field(1, ge=1, description="parts each rank's share of the batch is worked through in")
    seq_len: int = Field(256, ge=1, description="tokens a sample of text; a picture has as many as it has patches")
    seed: int = Field(0, ge=0, lt=2**63, description="decides initial weights and sample order, on every layout alike")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    lr_schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="after warm-up: cosine decay, or stable and then linear decay (warm-up–stable–decay)"
    )
    warmup_steps: int = Field(20, ge=0, description="steps of linear warm-up")
    decay_steps: int = Field(100, ge=0, description="length of the final decay of lr_schedule=wsd, in steps")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate over the peak")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second-moment decay")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of matrices (norm weights have none)")
    max_grad_norm: float = Field(
        1.0, gt=0, description="global gradient norm above which gradients are scaled down; 1e30 never does"
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="compute dtype; bfloat16 keeps float32 master weights, gradients reduced in float32"
    )
    compile: bool = Field(False, description="compile the model block by block with torch.compile")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA devices when there are any")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads a rank; cores / local ranks when not given; at most 1024"
    )
    freeze: Names = Field((), description="parameters that stay as they start, as globs over their names")
    max_skipped_steps: int = Field(5, ge=0, description="non-finite steps skipped in a row before the run stops")
    timeout_s: int = Field(600, ge=1, description="seconds a collective may take before the run is ended")
    log_every: int = Field(10, ge=1, description="steps between plain progress lines (off a terminal)")
    validate_every: int = Field(0, ge=0, description="steps between validations; 0 validates at the end only")
    validation_samples: int = Field(128, ge=0, description="held-out samples a validation reads; 0 turns it off")
    sample_tokens: int = Field(120, ge=0, description="tokens of text generated at the end; 0 turns it off")
    trace: bool = Field(
        False, description="measure each computation of the last step, and leave timelines in the run folder"
    )
    tensorboard: bool = Field(False, description="also write TensorBoard events into the run folder")


class PipelineConfig(Section):
    """How the layers are divided over mesh.pp ranks, and the order in which train.num_microbatches run through them."""

    schedule: str = Field(
        "auto",
        description="f-then-b, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, v-half, v-min, or the path of a CSV table; "
        "auto is interleaved where pipeline.chunks is over 1, else 1f1b",
    )
    chunks: int | None = Field(
        None, ge=1, description="stages a rank; 2 for interleaved and the V-shaped, else 1, when not given"
    )
    layers_per_stage: Counts | None = Field(
        None, description="blocks of each stage, first stage first; balanced by cost when not given"
    )
    allow_empty_stages: bool = Field(False, description="a stage may have no block")
    release: bool = Field(True, description="free inputs, outputs and gradients as soon as they can be")
    poison: bool = Field(False, description="fill freed buffers with NaN, to find what uses them later")


class RecomputeConfig(Section):
    """What is computed again in the backward instead of kept."""

    policy: Literal["none", "full"] = Field("none", description="none, or full: each block keeps only its input")


class CommConfig(Section):
    """In how many bits gradients and weights travel between the ranks of dp_replicate and dp_shard."""

    gradients: GradientMethod = Field(
        "exact",
        description="exact is FSDP2's own; exact-via-all-to-all is the way of the others without loss; loco4 and loco2 "
        "carry each step's error into the next (LoCo); the two of 2 bits are for experiments",
    )
    weights: WeightMethod = Field(
        "exact", description="in what weights are gathered for compute (qwZ); masters stay as they are"
    )
    inside_node: InsideNodeMethod = Field(
        "int8", description="in what gradients of fewer bits travel inside a node, when dp_shard spans several (qgZ)"
    )
    ranks_per_node: int | None = Field(
        None, ge=1, description="neighbouring ranks that count as a node; those of one machine when not given"
    )
    secondary_shards: int | None = Field(
        None,
        ge=2,
        description="neighbouring ranks of dp_shard that keep a whole copy of the weights between them from forward to "
        "backward, which gathers among them alone (hpZ); none when not given",
    )


class CheckpointConfig(Section):
    """When the run is saved."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0 saves at the end only")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")


class RunConfig(Section):
    """A whole run.

    `run_type` gives the type with a family's sections.
    """

    name: str = Field(
        "run", pattern=r"^[^/\x00]+$", description="the preset it came from; names the run folder, so it has no slash"
    )
    model: SerializeAsAny[ModelSection]
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    pipeline: PipelineConfig = PipelineConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    comm: CommConfig = CommConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def family(self) -> Family:
        """The family of its model."""
        return find_family(self.model.kind)

    def family_sections(self) -> dict[str, Section]:
        """The sections that the family brings, by name."""
        return {name: getattr(self, name) for name in self.family.sections}

    def with_keys(self, values: Mapping[str, Any]) -> RunConfig:
        """The same with other values of some dotted keys, not validated."""
        sections: dict[str, Any] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections[section] = sections.get(section, getattr(self, section)).model_copy(update={name: value})
        return self.model_copy(update=sections)

    def __reduce__(self) -> tuple[Any, ...]:
        # The type is made at run time, so pickle does not find it by name.
        return _restored, (self.model.kind, self.model_dump_json())


@cache
def run_type(kind: str) -> type[RunConfig]:
    """The type of runs of a family: its sections have their own types and defaults.

    Raises:
        ConfigError: there is no such family.
    """
    fields: dict[str, Any] = {
        # A family that somebody brings has its kind's name only here.
        name: (section, section(kind=kind) if issubclass(section, ModelSection) else section())
        for name, section in find_family(kind).sections.items()
    }
    return create_model("RunConfig", __base__=RunConfig, __module__=__name__, **fields)


def _restored(kind: str, text: str) -> RunConfig:
    return run_type(kind).model_validate_json(text)


PLANNED_SECTIONS = ("capture", "attention")
"""Sections of parts that are not built yet: naming one is answered with that, not with `unknown key`."""
