"""The layouts that both checkouts train: every way of dividing work, and what changes the numbers on the way.

After them the big ones, which are planned and never run: presets × meshes × what changes memory and traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

SMALL = "train.warmup_steps=2 train.validation_samples=4 train.threads=1 train.device=cpu checkpoint.keep=2"
LLAMA = (
    "model.num_layers=4 model.dim=32 model.num_heads=4 model.num_kv_heads=2 model.ffn_dim=96 "
    f"train.global_batch=8 train.seq_len=32 train.sample_tokens=4 {SMALL}"
)
PICTURES = (
    "model.num_layers=4 model.dim=24 model.num_heads=4 model.ffn_dim=48 train.global_batch=8 "
    f"train.num_microbatches=1 diffusion.num_samples=2 diffusion.sampling_steps=2 {SMALL}"
)
EXPERTS = (
    "model.num_layers=2 model.dim=32 model.num_heads=4 model.num_kv_heads=2 model.num_experts=4 model.expert_dim=48 "
    f"train.global_batch=8 train.seq_len=32 train.sample_tokens=4 {SMALL}"
)
TRANSFORMERS = f"train.global_batch=8 train.seq_len=32 train.sample_tokens=4 {SMALL}"
BASE = {"llama-tiny": LLAMA, "moe-tiny": EXPERTS, "dit-digits": PICTURES, "dit-digits-video": PICTURES,
        "hf-tiny": TRANSFORMERS}  # fmt: skip

CORPUS, DOCUMENTS, CHATS, TOKENIZER = "corpus.txt", "documents", "chats.jsonl", "tokenizer"
CHAT_WORDS = f"data.source={{data}}/{CHATS} data.tokenizer={{data}}/{TOKENIZER} data.chat_field=messages"
SOURCES = {"T": (f"data.source={{data}}/{CORPUS}", [CORPUS]),
           "D": (f"data.source={{data}}/{DOCUMENTS}/*.txt data.packing=documents", [DOCUMENTS]),
           "C": (f"{CHAT_WORDS} data.packing=documents", [CHATS, TOKENIZER]), "-": ("", [])}  # fmt: skip
"""What is trained on, as words of the command and as files in the folder of data: text, short documents, conversations
whose assistant's tokens count, and the digits that the package brings."""

FOUR = "train.num_microbatches=4"
TIED = "model.tie_embeddings=true"
FROZEN = 'train.freeze=["embed.*","blocks.1.*","*norm.weight"]'
FROZEN_PICTURES = 'train.freeze=["embed.*","blocks.1.*","time_embed.*"]'


@dataclass(frozen=True)
class Layout:
    """A small training, and what is asked of it."""

    name: str
    preset: str
    layout: str
    """What makes it this one: words of the command."""
    resumes: bool = False
    """NEW goes on from OLD's checkpoint too."""
    fast: bool = False
    """Of the few that cover the pairs."""
    source: str = "T"
    """The key of `SOURCES`."""

    def words(self, steps: int) -> list[str]:
        """All words of the command but where its data is."""
        schedule = [f"train.steps={steps}", f"checkpoint.every={steps // 2}", f"train.validate_every={steps // 2}"]
        return [self.preset, *BASE[self.preset].split(), *schedule, *self.layout.split()]

    def data_words(self, folder: Path, cache: Path) -> list[str]:
        """Where its data is and how it is read, in the words of the command."""
        return [*SOURCES[self.source][0].format(data=folder).split(), f"data.cache_dir={cache}"]

    def data_files(self, folder: Path) -> list[Path]:
        """The files that it reads."""
        paths = (folder / name for name in SOURCES[self.source][1])
        return [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]

    def changed(self, words: list[str]) -> Layout:
        """With more words."""
        return replace(self, layout=" ".join([self.layout, *words]))


def _layout(preset: str, marks: str, name: str, layout: str) -> Layout:
    source = next((mark for mark in marks if mark in SOURCES), "-" if preset.startswith("dit") else "T")
    return Layout(name, preset, layout, "R" in marks, "F" in marks, source)


LAYOUTS = (
    _layout("llama-tiny", "R", "one", ""),
    _layout("llama-tiny", "", "accumulate-wsd", f"{FOUR} train.lr_schedule=wsd train.decay_steps=4"),
    _layout("llama-tiny", "", "one-chunks", f"pipeline.chunks=2 {FOUR}"),
    _layout("llama-tiny", "", "one-float64-tied", f"{TIED} train.precision=float64"),
    _layout("llama-tiny", "", "compile", "train.compile=true model.num_layers=2"),
    _layout("llama-tiny", "RF", "dp_shard", "mesh.dp_shard=2"),
    _layout("llama-tiny", "", "dp_shard-kept", "mesh.dp_shard=2 mesh.reshard_after_forward=false"),
    _layout("llama-tiny", "", "dp_shard-accumulate-bf16", f"mesh.dp_shard=2 {FOUR} train.precision=bfloat16"),
    _layout("llama-tiny", "", "dp_shard-recompute-tied", f"mesh.dp_shard=2 recompute.policy=full {TIED}"),
    _layout("llama-tiny", "", "dp_shard-frozen", f"mesh.dp_shard=2 {FROZEN}"),
    _layout("llama-tiny", "", "dp_replicate", "mesh.dp_replicate=2 train.max_grad_norm=0.1"),
    _layout("llama-tiny", "", "hsdp", "mesh.dp_replicate=2 mesh.dp_shard=2"),
    _layout("llama-tiny", "", "tp", "mesh.tp=2"),
    _layout("llama-tiny", "", "tp-whole-tied", f"mesh.tp=2 mesh.sequence_parallel=false {TIED}"),
    _layout("llama-tiny", "RF", "tp-dp_shard", "mesh.tp=2 mesh.dp_shard=2"),
    _layout("llama-tiny", "", "tp-dp_shard-int8", "mesh.tp=2 mesh.dp_shard=2 comm.gradients=int8"),
    _layout("llama-tiny", "R", "pp-1f1b", f"mesh.pp=2 {FOUR} pipeline.schedule=1f1b"),
    _layout("llama-tiny", "", "pp-uneven-frozen", f"mesh.pp=2 {FOUR} pipeline.layers_per_stage=[1,3] {FROZEN}"),
    _layout("llama-tiny", "", "pp-f-then-b-recompute",
            f"mesh.pp=2 {FOUR} pipeline.schedule=f-then-b recompute.policy=full"),
    _layout("llama-tiny", "F", "pp-zb-h1-bf16", f"mesh.pp=2 {FOUR} pipeline.schedule=zb-h1 train.precision=bfloat16"),
    _layout("llama-tiny", "R", "pp-zb-v-dp_shard-tied",
            f"mesh.pp=2 mesh.dp_shard=2 {FOUR} pipeline.schedule=zb-v {TIED}"),
    _layout("llama-tiny", "", "pp-interleaved-tied", f"mesh.pp=2 {FOUR} pipeline.chunks=2 {TIED}"),
    _layout("llama-tiny", "", "pp-dualpipe-v", f"mesh.pp=2 {FOUR} pipeline.schedule=dualpipe-v"),
    _layout("llama-tiny", "", "pp-v-half-tp", f"mesh.pp=2 mesh.tp=2 {FOUR} pipeline.schedule=v-half"),
    _layout("llama-tiny", "RF", "loco4", "mesh.dp_shard=2 comm.gradients=loco4"),
    _layout("llama-tiny", "", "loco4-int8-nodes",
            "mesh.dp_shard=4 comm.gradients=loco4 comm.weights=int8 comm.ranks_per_node=2"),
    _layout("llama-tiny", "", "loco4-hsdp-accumulate",
            "mesh.dp_replicate=2 mesh.dp_shard=2 comm.gradients=loco4 train.num_microbatches=2"),
    _layout("llama-tiny", "F", "secondary-shards",
            "mesh.dp_shard=4 comm.secondary_shards=2 comm.weights=int8 train.precision=bfloat16"),
    _layout("llama-tiny", "", "exact-via-all-to-all-bf16-weights",
            "mesh.dp_shard=2 comm.gradients=exact-via-all-to-all comm.weights=bf16"),
    _layout("llama-tiny", "", "bf16-nodes-int4",
            "mesh.dp_shard=4 comm.gradients=bf16 comm.inside_node=int4 comm.ranks_per_node=2"),
    _layout("llama-tiny", "", "int4-nodes-exact-int8-weights",
            "mesh.dp_shard=4 comm.gradients=int4 comm.inside_node=exact comm.weights=int8 comm.ranks_per_node=2"),
    _layout("llama-tiny", "", "int2-dp_replicate-bf16-weights",
            "mesh.dp_replicate=2 mesh.dp_shard=2 comm.gradients=int2 comm.weights=bf16"),
    _layout("llama-tiny", "R", "loco2-nodes-bf16",
            "mesh.dp_shard=4 comm.gradients=loco2 comm.inside_node=bf16 comm.ranks_per_node=2"),
    _layout("llama-tiny", "", "loco4-secondary-shards-bf16-weights",
            "mesh.dp_shard=4 comm.gradients=loco4 comm.weights=bf16 comm.secondary_shards=2 train.num_microbatches=2"),
    _layout("llama-tiny", "RF", "float8-delayed-tp",
            "mesh.tp=2 model.num_kv_heads=4 float8.recipe=delayed float8.amax_history=3 float8.cache_weights=true"),
    _layout("llama-tiny", "", "float8-current-pp", f"mesh.pp=2 {FOUR} pipeline.schedule=zb-v float8.recipe=current"),
    _layout("llama-tiny", "F", "capture-pp", f"mesh.pp=2 {FOUR} capture.scope=layer"),
    _layout("llama-tiny", "", "capture-attention", "mesh.dp_shard=2 capture.scope=attention train.num_microbatches=2"),
    _layout("llama-tiny", "", "cp-ring", "mesh.cp=2 mesh.cp_method=ring"),
    _layout("llama-tiny", "F", "cp-heads-packed", "mesh.cp=2 mesh.cp_method=heads data.packing=documents"),
    _layout("llama-tiny", "RD", "packed-dp_shard", "mesh.dp_shard=2 train.num_microbatches=2"),
    _layout("llama-tiny", "D", "packed-pp-tp", f"mesh.pp=2 mesh.tp=2 {FOUR}"),
    _layout("llama-tiny", "RFC", "chats-dp_shard", "mesh.dp_shard=2 train.num_microbatches=2 model.vocab_size=360"),
    _layout("llama-tiny", "C", "chats-cp", "mesh.cp=2 model.vocab_size=360"),
    _layout("llama-tiny", "RF", "muon-dp_shard", "mesh.dp_shard=2 train.optimizer=muon"),
    _layout("llama-tiny", "", "muon-pp-tp", f"mesh.pp=2 mesh.tp=2 {FOUR} train.optimizer=muon"),
    _layout("llama-tiny", "", "selective-profile", "mesh.tp=2 recompute.policy=selective train.trace=true"),
    _layout("moe-tiny", "RF", "ep", "mesh.dp_shard=2 mesh.ep=2"),
    _layout("moe-tiny", "", "ep-capacity-pp",
            f"mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 {FOUR} model.drop=over-capacity model.capacity_factor=1.25"),
    _layout("moe-tiny", "", "experts-tp-cp", "mesh.tp=2 mesh.cp=2"),
    _layout("hf-tiny", "F", "hf-pp", f"mesh.pp=2 {FOUR}"),
    _layout("hf-tiny", "RF", "hf-lora-dp_shard", "mesh.dp_shard=2 lora.rank=4"),
    _layout("hf-tiny", "", "hf-lora-tp-recompute",
            "mesh.tp=2 lora.rank=2 lora.targets=*.mlp.* lora.rslora=true recompute.policy=full"),
    _layout("dit-digits", "", "dit-one", "train.num_microbatches=2 diffusion.prediction=velocity"),
    _layout("dit-digits", "RF", "dit-dp_shard", "mesh.dp_shard=2"),
    _layout("dit-digits", "", "dit-tp", "mesh.tp=2"),
    _layout("dit-digits", "F", "dit-pp-zb-v-dp_shard", f"mesh.pp=2 mesh.dp_shard=2 {FOUR} pipeline.schedule=zb-v"),
    _layout("dit-digits", "", "dit-loco4-bf16",
            "mesh.dp_shard=2 comm.gradients=loco4 train.precision=bfloat16 recompute.policy=full"),
    _layout("dit-digits", "", "dit-pp-frozen", f"mesh.pp=2 {FOUR} pipeline.schedule=f-then-b {FROZEN_PICTURES}"),
    _layout("dit-digits-video", "RF", "video-pp-interleaved", f"mesh.pp=2 {FOUR} pipeline.chunks=2"),
    _layout("dit-digits-video", "", "video-dp_shard-recompute", "mesh.dp_shard=2 recompute.policy=full"),
    _layout("dit-digits-video", "", "video-dp_replicate-int8", "mesh.dp_replicate=2 comm.gradients=int8"),
)  # fmt: skip


def write_data(folder: Path, layouts: list[Layout]) -> None:
    """What layouts train on: the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"def step_{n}(x):\n    return x * {n} + {n * 7919 % 1000}\n" for n in range(1500)]
    (folder / CORPUS).write_text("".join(lines), "utf-8")
    (folder / DOCUMENTS).mkdir(exist_ok=True)
    for n in range(100):
        (folder / DOCUMENTS / f"{n:03}.txt").write_text("".join(lines[n : n + 1 + n * n % 7])[: 5 + n * 37 % 80])
    if any(layout.source == "C" for layout in layouts):
        from tests.data.chats import formats  # imports tokenizers

        formats.build(folder / TOKENIZER, formats.CHATML)
        formats.write_lines(folder / CHATS, formats.many_chats(80))


def chosen(globs: Sequence[str], *, fast: bool) -> Iterator[Layout]:
    """The layouts whose name fits one of the patterns."""
    return (one for one in LAYOUTS if any(fnmatchcase(one.name, glob) for glob in globs) and (one.fast or not fast))


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
