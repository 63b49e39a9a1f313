"""Part `memory`: the peak that a run allocates against the one its plan predicts. Torch-free.

Rows that are also arms of `train` are read from the runs that it left.
"""

from __future__ import annotations

from functools import partial

from meshwright_bench.gpu.cases import Case, Figures, Setting
from meshwright_bench.gpu.commands import measured_run
from meshwright_bench.gpu.sizes import ARMS, COMPILED, SMALL, our_words

SMALL_STEPS = 6
SMALL_ROWS = {"small.eager": (), "small.captured": ("capture.scope=layer", "capture.strict=true")}
LOGITS = "ours.all_logits"
"""The compiled arm with all logits at once."""


def cases(setting: Setting) -> list[Case]:
    """Return the rows; a dry run has the first."""
    rows = {arm: our_words(arm, setting) for arm in ARMS}
    if not setting.is_dry:
        plain = (word for word in rows[COMPILED] if not word.startswith("train.profile="))
        rows[LOGITS] = (*plain, "train.loss_chunk=0")
        rows |= {name: (*SMALL.words(setting, steps=SMALL_STEPS), *more) for name, more in SMALL_ROWS.items()}
    else:
        rows = {COMPILED: rows[COMPILED]}
    return [Case(name, partial(row, name, words, setting)) for name, words in rows.items()]


def row(name: str, words: tuple[str, ...], setting: Setting) -> Figures:
    """Return a run's predicted and measured peak in bytes, and the relative error of the prediction."""
    run = measured_run(name, words, setting)
    return {
        "predicted_bytes": run.predicted_bytes,
        "peak_bytes": run.peak_bytes,
        "error": run.predicted_bytes / run.peak_bytes - 1,
    }
