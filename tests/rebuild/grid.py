"""Big layouts, which are planned and never run: presets × meshes × what changes memory and traffic."""

from __future__ import annotations

from collections.abc import Iterator

LLAMA_MESHES = (
    "mesh.dp_shard=8 mesh.tp=1",
    "mesh.dp_shard=64 mesh.tp=1",
    "mesh.dp_shard=8 mesh.tp=8",
    "mesh.dp_shard=16 mesh.dp_replicate=4 mesh.tp=1",
    "mesh.dp_shard=8 mesh.tp=4 mesh.pp=2 train.num_microbatches=4",
    "mesh.dp_shard=8 mesh.tp=1 mesh.pp=4 pipeline.schedule=zb-v train.num_microbatches=8",
    "mesh.dp_shard=4 mesh.dp_replicate=2 mesh.tp=2 mesh.pp=4 pipeline.chunks=2 train.num_microbatches=8",
    "mesh.dp_shard=16 mesh.tp=1 mesh.pp=2 pipeline.schedule=dualpipe-v train.num_microbatches=4",
    "mesh.dp_shard=1 mesh.dp_replicate=8 mesh.tp=1",
    "mesh.dp_shard=32 mesh.tp=8 mesh.pp=2 pipeline.schedule=zb-h1 train.num_microbatches=4",
)
DIT_MESHES = (
    "mesh.dp_shard=8 mesh.pp=1",
    "mesh.dp_shard=64 mesh.pp=1",
    "mesh.dp_replicate=4 mesh.dp_shard=8 mesh.pp=1",
    "mesh.dp_shard=8 mesh.tp=4 mesh.pp=1",
    "mesh.dp_shard=8 mesh.pp=4 train.num_microbatches=8",
    "mesh.dp_shard=4 mesh.pp=2 mesh.tp=2 pipeline.schedule=interleaved pipeline.chunks=2 train.num_microbatches=4",
    "mesh.dp_shard=8 mesh.pp=2 pipeline.schedule=zb-v pipeline.chunks=2 train.num_microbatches=4",
    "mesh.dp_replicate=8 mesh.dp_shard=1 mesh.pp=1",
)
VARIANTS = (
    "",
    "comm.ranks_per_node=8",
    "comm.gradients=loco4 comm.weights=int8 comm.ranks_per_node=8",
    "comm.gradients=int8 comm.inside_node=exact comm.ranks_per_node=4",
    "comm.gradients=exact-via-all-to-all comm.weights=bf16",
    "comm.gradients=int4 comm.secondary_shards=4 comm.ranks_per_node=8",
    "train.precision=float32 recompute.policy=full",
    "mesh.reshard_after_forward=false",
    "train.freeze=blocks.0.*",
)
LLAMA_VARIANTS = ("model.tie_embeddings=true", "mesh.sequence_parallel=false train.seq_len=4096")

COMMON = "train.compile=false train.global_batch=1024"
FEWER_LAYERS = "model.num_layers=16"
"""Of the deepest models but for their first variant: planning takes as long as a model is deep."""


def grid() -> Iterator[tuple[str, list[str]]]:
    """Name and words of each, some of which are refused: that is compared too."""
    for variant in (*VARIANTS, *LLAMA_VARIANTS):
        for mesh in LLAMA_MESHES:
            yield _line("llama3-8b", mesh, variant)
    for preset in ("llama3-70b", "llama3-405b"):
        for mesh in LLAMA_MESHES:
            yield _line(preset, mesh, VARIANTS[0])
            for variant in (*VARIANTS[2::2], *LLAMA_VARIANTS):
                yield _line(preset, mesh, f"{variant} {FEWER_LAYERS}")
    for preset in ("dit-xl-2", "video-dit-xl"):
        for variant in VARIANTS:
            for mesh in DIT_MESHES:
                yield _line(preset, mesh, variant)
    for preset in ("llama3-8b", "llama3-70b", "llama3-405b", "dit-xl-2", "video-dit-xl"):
        yield preset, [preset]


def _line(preset: str, mesh: str, variant: str) -> tuple[str, list[str]]:
    """With what the preset says of the pipeline taken back, where the mesh has one of its own."""
    alone = "pipeline.schedule=auto pipeline.chunks=1" if "pipeline" not in mesh and preset == "video-dit-xl" else ""
    words = f"{mesh} {variant} {alone}".split()
    return " ".join([preset, *words]), [preset, *COMMON.split(), *words]
