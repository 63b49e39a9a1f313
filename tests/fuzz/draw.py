"""A random case from a seed and a number: always the same one, without running or reading anything.

First comes what a draw must know of keys beyond their schema: sizes that fit a layout, names that exist, what goes
together. A feature draws the keys of one thought. Most draws fit together, so that most cases run; the rest are
refused, and the refusal's fix is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from random import Random

from meshwright.config.source import smallest_preset
from meshwright.models.contract.family import family_names
from meshwright.optim.catalogue import BUILT_IN
from meshwright.pipeline.generate import ScheduleKind
from tests.fuzz.case import Case, Drawing, schema_values

FAMILY_WEIGHTS: Mapping[str, int] = {"llama": 4, "moe": 4, "dit": 3, "hf": 4, "module": 2}
"""How often a family is drawn; others once."""
NUM_RANKS: Mapping[int, int] = {1: 2, 2: 16, 3: 4, 4: 16, 6: 1, 8: 1}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
HF_TYPES = ("qwen3", "llama", "gpt2", "gpt_neox", "mistral", "phi3", "olmo2", "gemma3_text", "granite", "qwen2_moe",
            "mixtral", "starcoder2", "stablelm", "opt", "bloom", "cohere2", "glm4")  # fmt: skip
V_SHAPED = ("zb-v", "dualpipe-v", "v-half", "v-min")

ALWAYS = {
    "train.steps": 2, "train.threads": 1, "train.timeout_s": 120, "train.log_every": 1, "data.cache_dir": "cache",
}  # fmt: skip
"""Words of every case: two steps, and no time limit that a busy machine meets."""
NEVER: Mapping[str, str] = {
    "name": "changes only the folder's name",
    "model.kind": "the preset's",
    "train.device": "the outcome would depend on the machine",
    "train.compile": "compiling takes a minute a case",
    "train.profile": "needs a number of steps in the run",
    "train.max_skipped_steps": "no step is skipped",
    "model.routing": "for measurements",
    "model.weights": "those of a folder aren't small",
    "model.num_channels": "the digits are grey",
    "model.num_classes": "there are ten digits",
}
"""Keys that are not drawn, and why. Nor are texts without a feature: a schema doesn't say which ones mean something."""


def mesh(d: Drawing) -> None:
    """Draw a number of ranks and its factors on the axes."""
    left = d.rng.choices(list(NUM_RANKS), list(NUM_RANKS.values()))[0]
    sizes = dict.fromkeys(AXES, 1)
    for prime in (2, 2, 2, 3):
        if left % prime == 0:
            left //= prime
            sizes[d.choose(*AXES, "dp_shard", "pp")] *= prime
    d.words |= {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1}
    if d.chance(0.6 if "model.num_experts" in d.keys else 0.05):
        shards = d.axis("dp_shard", "cp")
        d.put(mesh__ep=d.choose(*(size for size in range(1, shards + 1) if shards % size == 0)))
    if d.axis("cp") > 1:
        d.put(mesh__cp_method=d.choose("auto", "auto", "ring", "heads"))
    if d.axis("tp") > 1 and d.chance(0.5):
        d.put_from_schema("mesh.sequence_parallel")
    if d.axis("dp_shard") > 1 and d.chance(0.3):
        d.put_from_schema("mesh.reshard_after_forward")


def pipeline(d: Drawing) -> None:
    """Draw micro-batches and, with pp, a schedule and the layers of its stages."""
    d.put(train__num_microbatches=d.choose(1, 2, 2, 3, 4, 2 * d.axis("pp")))
    if d.axis("pp") == 1:
        return
    d.put(pipeline__schedule=d.choose("auto", *(kind.value for kind in ScheduleKind)))
    if d.get("pipeline.schedule") in ("auto", "interleaved") and d.chance(0.5):
        d.put(pipeline__chunks=d.choose(1, 2, 3))
    for key in ("pipeline.release", "pipeline.poison"):
        if d.chance(0.2):
            d.put_from_schema(key)


def stages(d: Drawing) -> int:
    """Number of stages that the schedule needs."""
    two = d.get("pipeline.schedule") in (*V_SHAPED, "interleaved")
    return d.axis("pp") * (d.get("pipeline.chunks") or (2 if two else 1))


def batch(d: Drawing) -> None:
    """Draw a global batch that divides over ranks and micro-batches, and what is saved and validated when."""
    unit = d.axis("dp_replicate", "dp_shard") * d.get("train.num_microbatches")
    d.put(train__global_batch=unit * d.choose(1, 1, 2, 3))
    d.put(train__validation_samples=d.choose(0, 0, 3, 8))
    if d.chance(0.2):
        d.put(train__validate_every=1)
    if d.chance(0.2):
        d.put(checkpoint__every=1)


def precision(d: Drawing) -> None:
    """Draw the dtype, float8 layers, and what is recomputed."""
    d.put(train__precision=d.rng.choices(("float32", "bfloat16", "float64"), (13, 6, 1))[0])
    if d.chance(0.12):
        d.put(train__precision="bfloat16", float8__recipe=d.choose("current", "delayed"))
        for key in ("float8.cache_weights", "float8.keep_first", "float8.keep_last", "float8.amax_history"):
            if d.chance(0.4):
                d.put_from_schema(key)
    if d.chance(0.4):
        d.put_from_schema("recompute.policy")
    if d.chance(0.15):
        d.put(recompute__blocks=d.choose(("full:0",), ("full:0", "selective:1"), ("none:1",), ("selective:0-1",)))
    if d.chance(0.15):
        d.put(train__dropout=d.choose(0.1, 0.5))


def sizes(d: Drawing) -> None:
    """Draw sizes of a decoder or a diffusion transformer that fit the layout."""
    if "model.dim" not in d.keys:
        return
    unit = 16 if d.get("float8.recipe") != "none" else 1
    groups = d.axis("tp") * (d.axis("cp") if d.get("mesh.cp_method") == "heads" else 1) * d.choose(1, 1, 2)
    heads = groups * d.choose(1, 1, 2, 3)
    d.put(model__num_layers=max(2, stages(d) + d.choose(0, 0, 0, 1, 2)))
    d.put(model__num_heads=heads, model__num_kv_heads=d.choose(groups, heads))
    d.put(model__head_dim=max(unit, d.choose(4, 8, 16)), model__dim=max(unit, d.choose(16, 24, 32)) // unit * unit)
    d.put(model__ffn_dim=unit * d.axis("tp") * (d.choose(1, 2) if unit > 1 else d.choose(5, 12, 24)))
    if d.chance(0.3):
        d.put(model__tie_embeddings=True)
    if d.chance(0.2):
        d.put(model__window=d.choose(1, 5, 8, 100), model__global_every=d.choose(0, 0, 2))
    if d.chance(0.1):
        d.put(model__rope_scaling__factor=4.0, model__rope_scaling__original_seq_len=d.choose(8, 64))


def experts(d: Drawing) -> None:
    """Draw the experts of a layer and their routing."""
    if "model.num_experts" not in d.keys:
        return
    num = d.axis("ep") * d.choose(1, 2, 4)
    unit = 16 if d.get("float8.recipe") != "none" else 1
    d.put(model__num_experts=num, model__top_k=d.choose(*range(1, min(num, 3) + 1)))
    d.put(model__expert_dim=unit * d.axis("tp") * d.choose(1, 2) if unit > 1 else d.axis("tp") * d.choose(4, 6))
    d.put(model__num_shared_experts=d.choose(0, 0, 1, 2), model__num_dense_layers=d.choose(0, 0, 1))
    for key in ("score", "normalize", "balance_bias", "balance_scope"):
        if d.chance(0.3):
            d.put_from_schema(f"model.{key}")
    d.put(model__balance_loss=d.choose(0.0, 0.01), model__z_loss=d.choose(0.0, 0.0, 0.001))
    if d.chance(0.2):
        d.put(model__drop="over-capacity", model__capacity_factor=d.choose(0.5, 1.0, 2.0))
    if d.chance(0.2):
        d.put(model__num_groups=2, model__top_groups=d.choose(1, 2))


def transformers(d: Drawing) -> None:
    """Draw a model type of transformers, and adapters."""
    if "lora.rank" not in d.keys:
        return
    d.put(model__config=d.choose(*HF_TYPES))
    if d.chance(0.2):
        d.put_from_schema("model.attention")
    if d.chance(0.3):
        d.put(lora__rank=d.choose(1, 2, 4))
        for key in ("lora.alpha", "lora.rslora", "lora.zero_init"):
            if d.chance(0.3):
                d.put_from_schema(key)


def own_module(d: Drawing) -> None:
    """Draw arguments of the example's builder."""
    if "model.builder" in d.keys:
        d.words |= {"model.arguments.depth": max(2, stages(d) + d.choose(0, 1))}
        d.words |= {"model.arguments.width": 16 * d.axis("tp") * d.choose(1, 2)}


def data(d: Drawing) -> None:
    """Draw what the samples are read from, of the files that `commands` writes."""
    if "model.image_size" in d.keys:
        d.put(diffusion__num_samples=d.choose(0, 0, 10), diffusion__sampling_steps=2)
        d.put(model__image_size=d.choose(4, 6, 8), model__patch_size=2)
        if d.chance(0.3):
            d.put(data__source="digits-video", model__image_size=16, model__patch_size=d.choose(4, 8))
            d.put(model__num_frames=d.choose(2, 4), model__patch_frames=d.choose(1, 2))
        return
    d.put(train__seq_len=2 * d.axis("cp", "tp") * d.choose(4, 6, 8), train__sample_tokens=d.choose(0, 0, 0, 5))
    d.put(data__source="text/*.txt")
    source = d.rng.choices(("text", "lines", "tokens", "chats", "mixture"), (6, 2, 2, 2, 1))[0]
    if source == "lines":
        d.put(data__source="lines.jsonl", data__text_field="text")
    elif source == "tokens":
        d.put(data__source=d.choose("tokens.npy", "tokens.bin"))
        if d.chance(0.2):
            d.put_from_schema("data.token_dtype")
        if d.chance(0.5):
            d.put(data__separator=0, data__packing="documents")
    elif source == "mixture":
        del d.words["data.source"]
        d.put(data__mixture=("0.7:text/*.txt", "0.3:lines.jsonl#text"))
    elif source == "chats":
        d.put(data__source="chats.jsonl", data__chat_field="messages", data__tokenizer="tokenizer")
        d.put(data__packing="documents", train__seq_len=max(48, d.get("train.seq_len")))
        d.put(model__vocab_size=384, model__config="model")
        if "model.builder" in d.keys:
            d.words["model.arguments.vocab_size"] = 384
    if source in ("text", "lines", "mixture") and d.chance(0.25):
        d.put(data__packing="documents")
    if d.chance(0.1):
        d.put(data__validation_source=d.choose("held.txt", "held.txt", "text/0.txt"))


def optimizer(d: Drawing) -> None:
    """Draw the optimizer, its schedule, and settings of single parameters."""
    d.put(train__optimizer=d.choose("adamw", *BUILT_IN), train__lr_schedule=d.choose("cosine", "cosine", "wsd"))
    d.put(train__warmup_steps=d.choose(0, 1, 2, 20), train__lr=d.choose(1e-4, 1e-3, 3e-3))
    if d.get("train.lr_schedule") == "wsd":
        d.put(train__decay_steps=d.choose(0, 1))
    if d.chance(0.15):
        d.put(train__parameter_groups=d.choose(("embedding:lr=0.001",), ("*norm*:weight_decay=0.1", "matrix:lr=0.002")))
    if d.chance(0.1):
        d.put(train__freeze=d.choose("*norm*", "*embed*", "*.0.*", "blocks.0.*"))
    if d.chance(0.2):
        d.put(train__max_grad_norm=d.choose(0.01, 1e30))


def codecs(d: Drawing) -> None:
    """Draw compression, where there is something to compress."""
    if d.axis("dp_replicate", "dp_shard") == 1 or not d.chance(0.3):
        return
    d.put_from_schema("comm.gradients")
    for key in ("comm.weights", "comm.inside_node"):
        if d.chance(0.4):
            d.put_from_schema(key)
    if d.chance(0.3):
        d.put(comm__ranks_per_node=d.choose(1, 2))
    if d.axis("dp_shard") > 1 and d.chance(0.3):
        d.put(comm__secondary_shards=2)


def capture(d: Drawing) -> None:
    """Draw graphs, simulated."""
    if not d.chance(0.15):
        return
    scopes = (("layer",), ("attention",), ("mlp",), ("attention", "mlp"), ("moe_router",), ("moe",), ("attention.w*",))
    d.put(capture__scope=d.choose(*scopes), capture__backend=d.choose("auto", "simulate", "eager"))
    for key in ("capture.mode", "capture.strict"):
        if d.chance(0.5):
            d.put_from_schema(key)


FEATURES: tuple[Callable[[Drawing], None], ...] = (
    mesh, pipeline, batch, precision, sizes, experts, transformers, own_module, data, optimizer, codecs, capture,
)  # fmt: skip
BY_HAND = frozenset({
    *ALWAYS, *NEVER,
    *(f"mesh.{axis}" for axis in (*AXES, "ep", "cp_method", "sequence_parallel", "reshard_after_forward")),
    *chain.from_iterable([f"{section}.{key}" for key in keys.split()] for section, keys in {
        "train": "num_microbatches global_batch seq_len validation_samples sample_tokens validate_every precision "
                 "dropout lr_schedule warmup_steps lr decay_steps max_grad_norm optimizer",
        "pipeline": "schedule chunks release poison", "checkpoint": "every", "float8": "recipe",
        "recompute": "policy", "capture": "mode strict backend", "lora": "rank",
        "comm": "gradients weights inside_node ranks_per_node secondary_shards",
        "data": "packing token_dtype separator", "diffusion": "num_samples sampling_steps",
        "model": "num_layers num_heads num_kv_heads head_dim dim ffn_dim vocab_size window global_every tie_embeddings "
                 "rope_scaling.factor rope_scaling.original_seq_len num_experts top_k expert_dim num_groups top_groups "
                 "drop capacity_factor image_size patch_size num_frames patch_frames",
    }.items()),
})  # fmt: skip
"""Keys that the schema alone doesn't draw: a feature does, or none may."""


def families() -> tuple[list[str], list[int]]:
    """Families and how often each is drawn."""
    return list(family_names()), [FAMILY_WEIGHTS.get(kind, 1) for kind in family_names()]


SLIP = 0.12
"""How often one word is slightly wrong, as typed ones are."""


def draw(seed: int, number: int) -> Case:
    """Draw a case: a family's smallest preset, a layout and features, then other keys from the schema alone."""
    rng = Random(f"{seed} {number}")
    kinds, weights = families()
    kind = rng.choices(kinds, weights)[0]
    drawing = Drawing(rng, _preset(kind), kind)
    for feature in FEATURES:
        feature(drawing)
    free = free_keys(drawing)
    for key in rng.sample(free, min(rng.choice((0, 0, 1, 2, 3)), len(free))):
        drawing.put_from_schema(key)
    case = drawing.case()
    if drawing.chance(SLIP):
        case = _slip(case, rng)
    always = Drawing(rng, drawing.preset, kind)
    always.words = {key: value for key, value in ALWAYS.items() if key in drawing.keys}
    return case.with_words(always.case().words)


@cache
def _preset(kind: str) -> str:
    return smallest_preset([kind])


def free_keys(drawing: Drawing) -> list[str]:
    """Keys of the family that no feature draws, and whose schema has values to draw."""
    return [key for key, field in drawing.keys.items() if key not in BY_HAND and schema_values(field)]


def _slip(case: Case, rng: Random) -> Case:
    """The case with a number beside the right one, or a letter left out."""
    word = rng.choice(case.words)
    key, _, value = word.partition("=")
    if value.isdecimal():
        wrong = f"{key}={int(value) + rng.choice((-1, 1))}"
    else:
        at = rng.randrange(len(word))
        wrong = word[:at] + word[at + 1 :]
    return Case(case.preset, tuple(wrong if one == word else one for one in case.words))
