"""Check that a run ends before a source runs out, if `data.when_exhausted` says so. Torch-free."""

from __future__ import annotations

from meshwright.data.mixtures.mixture import Text, corpora
from meshwright.data.mixtures.mixture_order import MixtureOrder
from meshwright.data.sampler import SampleOrder
from meshwright.errors import DataError

KEY = "data.when_exhausted"


def check_exhaustion(text: Text, order: SampleOrder, *, steps: int, global_batch: int) -> None:
    """Check that no sample of a run is of the second epoch of a source.

    Args:
        text: text of the run.
        order: order of its samples.
        steps: steps of the run.
        global_batch: samples per step.

    Raises:
        DataError: a source runs out; the fix is the number of steps before that.
    """
    enough = order.first_repeat // global_batch
    if steps <= enough:
        return
    repeats = order.first_repeats() if isinstance(order, MixtureOrder) else (order.first_repeat,)
    at = repeats.index(order.first_repeat)
    name, size = corpora(text)[at].source, order.parts[at].num_windows
    raise DataError(
        f"{name} runs out in step {enough + 1} of {steps}: it has {size:,} samples of train.seq_len tokens",
        where=f"{KEY}; train.steps",
        rule="with data.when_exhausted = end, no sample is read twice, so the run ends before a source runs out",
        fix=f"train.steps={enough}, or {KEY}=wrap" if enough else f"{KEY}=wrap, or a smaller train.global_batch",
    )
