"""`bench comm-loss`: the effect of low-bit gradients on the loss, with and without error feedback.

Torch-free: this module runs in the launcher and starts the training runs one after the other.

[Note: two bits and SGD] Four bits cause no visible degradation, so error feedback is tested with two bits. AdamW would
hide the effect: dividing by the square root of the second moment cancels the change in gradient scale caused by a
coarse quantizer, so there is hardly a gap without feedback. With feedback, the bursts that compensate for small
gradients increase the second moment (which is why 1-bit Adam freezes it; Tang et al. 2021). With eps = 1, far above the
moments, AdamW is SGD with momentum and linear in the gradient, so the gap reflects the gradient error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

from meshwright.config.facts_for_family import run_facts
from meshwright.models.contract.model_facts import LossUnit
from meshwright.plan.rules import load
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext, RunSpec
from meshwright.train.record.loss_curves import read_curves
from meshwright.train.record.reporter import Reporter
from meshwright.train.run_folder import RunFolder
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

PRESET = "llama-tiny"
WORDS = ("mesh.dp_shard=2", "train.steps=200", "train.seq_len=64", "train.lr=1e-3", "train.validation_samples=512",
         "train.sample_tokens=0", "checkpoint.at_end=false")  # fmt: skip
"""Overrides for all runs. At the preset's learning rate of 4e-3, losses of such short runs vary by up to 2 %."""
LINEAR = ("train.lr=0.1", "train.eps=1.0", "train.weight_decay=0.0", "train.warmup_steps=5", "train.steps=400")
"""Overrides that make AdamW linear in the gradient; see [Note: two bits and SGD].

In runs of under 300 steps the loss falls so fast that the feedback's delay of about ten steps causes most of the gap.
"""
EXACT, INT2, LOCO2, LOCO4 = "exact", "int2", "loco2", "loco4"
NUM_SEEDS = 3
RECOVERED, WITHIN = 0.4, 0.005
"""Targets: the fraction of the 2-bit gap that feedback closes, and the relative increase of the 4-bit loss."""

Losses = Mapping[str, Sequence[float]]
"""Validation losses in `UNIT` by gradient compression method, one per seed."""
UNIT = "bits/byte"


def bench_comm_loss(options: Options, say: Say) -> Report:
    """Train with each compression method and seed, on the CPU; `rounds` is the number of seeds.

    Raises:
        InputError: CUDA was requested.
    """
    because = "it compares losses, which depend on the bits that are sent, not on the device"
    refuse_cuda(options, Benchmark.COMM_LOSS, because=because)
    seeds = range(options.rounds or NUM_SEEDS)
    four_bits = train_all((EXACT, LOCO4), seeds, WORDS, say)
    two_bits = train_all((EXACT, INT2, LOCO2), seeds, (*WORDS, *LINEAR), say)
    notes = (
        f"four_bits: meshwright run {PRESET} {' '.join(WORDS)} comm.gradients=…",
        f"two_bits: the same with {' '.join(LINEAR)}",
        f"validation loss in {UNIT}; seeds {list(seeds)}",
    )
    figures = (*four_bits_figures(four_bits), *two_bits_figures(two_bits))
    return Report(Benchmark.COMM_LOSS, cpu_name(), date.today().isoformat(), figures, notes)


def train_all(methods: Sequence[str], seeds: Iterable[int], words: Sequence[str], say: Say) -> Losses:
    """Train with each method, seed by seed."""
    losses: dict[str, list[float]] = {method: [] for method in methods}
    for seed in seeds:
        for method in methods:
            say(f"comm.gradients={method} train.seed={seed} …")
            losses[method].append(validation_loss(method, seed=seed, words=words))
    return losses


def validation_loss(method: str, *, seed: int, words: Sequence[str]) -> float:
    """Train once with a compression method and return the final validation loss in `UNIT`."""
    config = load(PRESET, [*words, f"comm.gradients={method}", f"train.seed={seed}"])
    config.family.open_data(run_facts(config))  # fails before any process starts; cached for the ranks
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        spec = RunSpec(config, Reporter, folder=RunFolder(Path(name), None))
        launch(train_body, spec, num_ranks=config.mesh.axes().num_ranks(), threads=config.train.threads)
        curve = read_curves([Path(name)])[0]
    assert curve.validation is not None and curve.unit == UNIT, "the arguments request a validation, of text"
    return curve.validation


def four_bits_figures(losses: Losses) -> list[Figure]:
    """Return the 4-bit losses and their relative increase over exact gradients; the spread is over seeds."""
    over = [ours / exact - 1 for ours, exact in zip(losses[LOCO4], losses[EXACT], strict=True)]
    mean = sum(losses[LOCO4]) / sum(losses[EXACT]) - 1
    return [
        *_losses("four_bits", losses),
        Figure("four_bits.over_exact", mean, "of the exact loss", spread=(min(over), max(over)), at_most=WITHIN),
    ]


def two_bits_figures(losses: Losses) -> list[Figure]:
    """Return the 2-bit losses and the fraction of the gap that feedback closes."""
    gap = sum(losses[INT2]) / sum(losses[EXACT]) - 1
    return [
        *_losses("two_bits", losses),
        Figure("two_bits.gap", gap, f"of the {EXACT} loss, {INT2}"),
        Figure("two_bits.recovered", recovered(losses), "of the gap", at_least=RECOVERED),
    ]


def _losses(name: str, losses: Losses) -> list[Figure]:
    loss = LossUnit(UNIT).metric("loss")
    return [of_rounds(f"{name}.{method}.{loss}", found, UNIT) for method, found in losses.items()]


def recovered(losses: Losses) -> float:
    """Return the fraction of the gap between `int2` and exact gradients that feedback closes, over all seeds."""
    exact, without, with_feedback = (sum(losses[method]) for method in (EXACT, INT2, LOCO2))
    return (without - with_feedback) / (without - exact)


def train_body(context: RankContext, spec: RunSpec) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright.train.rank_run import run_rank

    run_rank(context, spec)
