"""Part `start`: every family trains two steps through `meshwright run`, eager and compiled. Torch-free."""

from __future__ import annotations

import math
from functools import partial

from meshwright_bench.gpu.cases import Case, CaseError, Figures, Setting
from meshwright_bench.gpu.commands import measured_run, random_tokens

TEXT = ("train.global_batch=4", "train.seq_len=128", "train.validation_samples=0", "train.sample_tokens=0")
PRESETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama-tiny": (TEXT, ()),
    "moe-tiny": (TEXT, ()),
    "hf-tiny": (TEXT, ("transformers",)),
    "module-tiny": (TEXT, ()),
    "dit-digits": (("train.global_batch=8", "train.validation_samples=0", "diffusion.num_samples=0"), ("sklearn",)),
}
"""Overrides of a small run of each family, by its preset, and the packages that it needs."""
IMAGES = ("dit-digits",)
IN_DRY = ("llama-tiny",)
EAGER, COMPILED = "eager", "compiled"
VOCABULARY, NUM_TOKENS = 256, 40_000


def text_source(setting: Setting) -> str:
    """Return the word that has text families train on random tokens: nothing is tokenized, or kept in a cache."""
    return f"data.source={random_tokens(setting, vocab_size=VOCABULARY, count=NUM_TOKENS)}"


def cases(setting: Setting) -> list[Case]:
    """Return a case for each family and way; a dry run has one, and compiles nothing."""
    text_source(setting)
    ways = (EAGER,) if setting.is_dry else (EAGER, COMPILED)
    presets = IN_DRY if setting.is_dry else PRESETS
    return [
        Case(f"{preset}.{way}", partial(start, preset, way, setting), PRESETS[preset][1])
        for way in ways
        for preset in presets
    ]


def start(preset: str, way: str, setting: Setting) -> Figures:
    """Train two steps, and return the loss of the last.

    Raises:
        CaseError: the run failed, or its losses are not those of two steps.
    """
    source = () if preset in IMAGES else (text_source(setting),)
    words = (
        preset,
        *PRESETS[preset][0],
        *source,
        "train.steps=2",
        "train.warmup_steps=1",
        f"train.compile={str(way == COMPILED).lower()}",
    )
    run = measured_run(f"{preset}.{way}", words, setting)
    if len(run.losses) != 2 or not all(map(math.isfinite, run.losses)):
        raise CaseError(f"the losses of two steps are {', '.join(map(str, run.losses))}")
    return {"loss": run.losses[-1]}
