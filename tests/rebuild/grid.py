"""Big layouts, which are planned and never run: presets × meshes × what changes memory and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    "mesh.dp_shard=4 mesh.pp=2 mesh.tp=2 pipeline.chunks=2 train.num_microbatches=4",
    "mesh.dp_shard=8 mesh.pp=2 pipeline.schedule=zb-v train.num_microbatches=4",
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


def grid() -> Iterator[tuple[str, list[str]]]:
    """Name and words of each, some of which are refused: that is compared too."""
    kinds: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
        "llama3-8b": (LLAMA_MESHES, (*VARIANTS, *LLAMA_VARIANTS), COMMON),
        "llama3-70b": (LLAMA_MESHES, (*VARIANTS[::2], *LLAMA_VARIANTS), COMMON),
        "llama3-405b": (LLAMA_MESHES, VARIANTS[1:4], COMMON),
        "dit-xl-2": (DIT_MESHES, VARIANTS, COMMON),
        "video-dit-xl": (DIT_MESHES, VARIANTS, f"{COMMON} pipeline.schedule=auto pipeline.chunks=1"),
    }
    for preset, (meshes, variants, common) in kinds.items():
        yield preset, [preset]
        for mesh in meshes:
            for variant in variants:
                words = f"{mesh} {variant}".split()
                yield " ".join([preset, *words]), [preset, *_last_of_each(f"{common} {mesh} {variant}".split())]


def _last_of_each(words: list[str]) -> list[str]:
    return list({word.partition("=")[0]: word for word in words}.values())
