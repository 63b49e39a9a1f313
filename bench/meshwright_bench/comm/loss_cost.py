"""`bench comm-loss`: what gradients of few bits cost a training in loss, with error feedback and without.

Torch-free: runs in the launcher, and starts the ranks of one training after the other.

[Note: what two bits show] Four bits train as the preset does, and cost nothing that can be seen; so whether feedback
works shows with two. But not with AdamW: dividing by the square root of the second moment undoes what a coarse
quantiser does to a gradient's scale, so without feedback there is hardly a gap, and with it the bursts in which small
gradients are made up for enlarge that moment (the reason why 1-bit Adam freezes it; Tang et al. 2021). With eps = 1,
far over the moments, AdamW is SGD with momentum, linear in the gradient, and there the gap is of the gradient.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

from meshwright.config.facts_for_family import run_facts
from meshwright.plan.load_config import load
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.launch.run_spec import RunSpec
from meshwright.train.record.loss_curves import read_curves
from meshwright.train.record.reporter import Reporter
from meshwright.train.run_folder import RunFolder
from meshwright_bench.benchmarks import Options, Part, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

PRESET = "llama-tiny"
WORDS = ("mesh.dp_shard=2", "train.steps=200", "train.seq_len=64", "train.lr=1e-3", "train.validation_samples=512",
         "train.sample_tokens=0")  # fmt: skip
"""At the preset's learning rate, 4e-3, runs as short as these end up to 2 % above or below each other."""
LINEAR = ("train.lr=0.1", "train.eps=1.0", "train.weight_decay=0.0", "train.warmup_steps=5", "train.steps=400")
"""What makes AdamW linear in the gradient. [Note: what two bits show]

In less than 300 steps the loss falls so fast that what feedback sends some ten steps late counts for most of the gap.
"""
EXACT, WITHOUT, WITH, FOUR_BITS = "exact", "int2", "loco2", "loco4"
NUM_SEEDS = 3
RECOVERED, WITHIN = 0.4, 0.005
"""Targets: the part of 2 bits' loss that feedback wins back, and by what part 4 bits with feedback may end higher."""

Losses = Mapping[str, Sequence[float]]
"""Validation losses by way of sending gradients, one a seed."""


def bench_comm_loss(options: Options, say: Say) -> Report:
    """Train with each way of sending gradients, from each seed, on the CPU; `rounds` is the number of seeds.

    Raises:
        InputError: CUDA was asked for.
    """
    because = "it compares losses, which depend on the bits that are sent, not on the device"
    refuse_cuda(options, Part.COMM_LOSS, because=because)
    seeds = range(options.rounds or NUM_SEEDS)
    four_bits = train_all((EXACT, FOUR_BITS), seeds, WORDS, say)
    two_bits = train_all((EXACT, WITHOUT, WITH), seeds, (*WORDS, *LINEAR), say)
    notes = (
        f"four_bits: meshwright run {PRESET} {' '.join(WORDS)} comm.gradients=…",
        f"two_bits: the same with {' '.join(LINEAR)}",
        f"validation loss in nats; seeds {list(seeds)}",
    )
    figures = (*four_bits_figures(four_bits), *two_bits_figures(two_bits))
    return Report(Part.COMM_LOSS, cpu_name(), date.today().isoformat(), figures, notes)


def train_all(ways: Sequence[str], seeds: Iterable[int], words: Sequence[str], say: Say) -> Losses:
    """Train from each seed with each way, in turns."""
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for seed in seeds:
        for way in ways:
            say(f"comm.gradients={way} train.seed={seed} …")
            losses[way].append(validation_loss(way, seed=seed, words=words))
    return losses


def validation_loss(way: str, *, seed: int, words: Sequence[str]) -> float:
    """Train once, with gradients sent in one way, and give the validation loss of the last step."""
    config = load(PRESET, [*words, f"comm.gradients={way}", f"train.seed={seed}"])
    config.family.open_data(run_facts(config))  # an error before any process starts; cached for the ranks
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        spec = RunSpec(config, Reporter, folder=RunFolder(Path(name), None))
        launch(train_body, spec, num_ranks=config.mesh.axes().num_ranks(), threads=config.train.threads)
        loss = read_curves([Path(name)])[0].validation
    assert loss is not None, "the words ask for a validation"
    return loss


def four_bits_figures(losses: Losses) -> list[Figure]:
    """The losses, and by what part they end higher than without compression: over all seeds, and of single ones."""
    over = [ours / exact - 1 for ours, exact in zip(losses[FOUR_BITS], losses[EXACT], strict=True)]
    mean = sum(losses[FOUR_BITS]) / sum(losses[EXACT]) - 1
    return [
        *_losses("four_bits", losses),
        Figure("four_bits.over_exact", mean, "of exact's", spread=(min(over), max(over)), at_most=WITHIN),
    ]


def two_bits_figures(losses: Losses) -> list[Figure]:
    """The losses, and how much of the gap feedback closes."""
    gap = sum(losses[WITHOUT]) / sum(losses[EXACT]) - 1
    return [
        *_losses("two_bits", losses),
        Figure("two_bits.gap", gap, f"of {EXACT}'s, {WITHOUT}"),
        Figure("two_bits.recovered", recovered(losses), "of the gap", at_least=RECOVERED),
    ]


def _losses(name: str, losses: Losses) -> list[Figure]:
    return [of_rounds(f"{name}.{way}", found, "nats") for way, found in losses.items()]


def recovered(losses: Losses) -> float:
    """The part of the gap between 2 bits without feedback and exact that feedback closes, over all seeds."""
    exact, without, with_feedback = (sum(losses[way]) for way in (EXACT, WITHOUT, WITH))
    return (without - with_feedback) / (without - exact)


def train_body(context: RankContext, spec: RunSpec) -> None:
    """What each rank runs; imports torch only there."""
    from meshwright.train.rank_run import run_rank

    run_rank(context, spec)
