"""Part `train`: tokens per second and memory of our training step beside transformers' model in a loop like Trainer's.

Each arm is a process of its own, so its peak is its own, and reads the same file of random tokens. Torch-free: the arms
of transformers are `trainer_loop`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import device_for
from meshwright.config.facts_for_family import model_facts
from meshwright_bench.gpu.cases import Case, CaseError, Figures, NotRunError, Setting
from meshwright_bench.gpu.commands import WARMUP_STEPS, config_of, measured_run, run_command, run_words
from meshwright_bench.gpu.sizes import ARMS, COMPILED, DRY, DRY_STEPS, LARGE, STEPS, our_words
from meshwright_bench.gpu.trainer_loop import OUT_OF_MEMORY, Loop

FROM_UNIFORM = 1.0
"""Nats per token that the first loss may differ from the logarithm of the vocabulary, that of equal probabilities."""
THEIRS = {"transformers.eager": {}, "transformers.liger": {"liger": True}, "transformers.compiled": {"compile": True}}
LIGER = "liger_kernel"


def cases(setting: Setting) -> list[Case]:
    """Return the arms, most valuable first; a dry run has the first of each side."""
    ours = [Case(arm, partial(our_arm, arm, setting)) for arm in ARMS]
    theirs = [
        Case(arm, partial(their_arm, arm, setting), ("transformers", *([LIGER] if more.get("liger") else [])))
        for arm, more in THEIRS.items()
    ]
    our_words(COMPILED, setting)  # writes the tokens
    return [ours[0], theirs[0]] if setting.is_dry else [ours[0], theirs[0], *ours[1:], *theirs[1:]]


def our_arm(arm: str, setting: Setting) -> Figures:
    """Return the figures of one of our arms, as `meshwright run` records them."""
    run = measured_run(arm, our_words(arm, setting), setting)
    check_first_loss(run.losses, run.config.model.vocab_size)  # type: ignore[attr-defined]
    phases = {f"start.{phase}_s": seconds for phase, seconds in run.start_s.items()}
    found = figures(run.tokens, run.flops, run.step_s, run.peak_bytes, setting)
    return {**found, "predicted_bytes": run.predicted_bytes, **phases}


def their_arm(arm: str, setting: Setting) -> Figures:
    """Return the figures of one of transformers' arms.

    Raises:
        NotRunError: the device's memory is too small for it.
    """
    size, steps = (DRY, DRY_STEPS) if setting.is_dry else (LARGE, STEPS)
    words = size.words(setting, steps=steps)
    tokens = next(word.removeprefix("data.source=") for word in words if word.startswith("data.source="))
    result = setting.scratch / f"{arm}.json"
    loop = Loop(size=size, steps=steps, device=setting.device, tokens=tokens, result=str(result), **THEIRS[arm])
    run_command(arm, "-m", "meshwright_bench.gpu.trainer_loop", loop.to_json())
    if not result.is_file():
        raise CaseError("it ended well, and wrote no result")
    answer: dict[str, Any] = json.loads(result.read_text("utf-8"))
    if answer.get(OUT_OF_MEMORY):
        raise NotRunError("the device's memory is too small for it")
    check_first_loss(answer["losses"], size.vocab_size)
    config = config_of(run_words(words, setting))
    tokens_per_step = size.global_batch * size.seq_len
    flops = tokens_per_step * model_facts(config).flops_per_token
    return figures(tokens_per_step, flops, median(answer["seconds"][WARMUP_STEPS:]), answer["peak_bytes"], setting)


def figures(
    tokens: int, flops: float, step_s: float, peak_bytes: int | None, setting: Setting
) -> dict[str, float | None]:
    """Return tokens per second, MFU where the device's peak rate is known, and peak memory."""
    known = None if setting.gpu is None else device_for(setting.gpu)
    mfu = None if known is None else flops / step_s / known.peak(Rate.BF16)
    return {"tokens_per_s": tokens / step_s, "mfu": mfu, "peak_bytes": peak_bytes}


def check_first_loss(losses: Sequence[float], vocab_size: int) -> None:
    """Check that an arm computes the loss of a model without training on random tokens.

    Raises:
        CaseError: it doesn't, or a loss is not finite.
    """
    if not all(map(math.isfinite, losses)) or abs(losses[0] - math.log(vocab_size)) > FROM_UNIFORM:
        raise CaseError(
            f"the first loss is {losses[0]:.3f}, not {math.log(vocab_size):.3f} ± {FROM_UNIFORM:g} nats per token"
        )
