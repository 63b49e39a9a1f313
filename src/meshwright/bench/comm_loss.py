"""`bench comm-loss`: what gradients of few bits cost a training in loss, with error feedback and without.

Torch-free: runs in the launcher, and starts the ranks of one training after the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from meshwright.bench.parts import DeviceChoice, Options, Part, Say
from meshwright.bench.report import Figure, Report, cpu_name, of_rounds
from meshwright.config.load import load
from meshwright.errors import InputError
from meshwright.train.context import RankContext
from meshwright.train.corpus import open_training_corpus
from meshwright.train.curves import read_curves
from meshwright.train.folder import RunFolder
from meshwright.train.launch import launch
from meshwright.train.reporter import Reporter
from meshwright.train.runspec import RunSpec

PRESET = "llama-tiny"
WORDS = ("mesh.dp_shard=2", "train.lr=5e-4", "train.steps=400", "train.seq_len=64", "train.warmup_steps=5",
         "train.validation_samples=512", "train.sample_tokens=0")  # fmt: skip
EXACT, WITHOUT, WITH, FOUR_BITS = "exact", "int2", "loco2", "loco4"
WAYS = (EXACT, WITHOUT, WITH, FOUR_BITS)
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
    if options.device is DeviceChoice.CUDA:
        raise InputError(
            "bench comm-loss trains on the CPU only",
            where="command line, --device cuda",
            rule="it compares losses, which depend on the bits that are sent, not on the device",
            fix="--device cpu",
        )
    seeds = range(options.rounds or NUM_SEEDS)
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in seeds:
        for way in WAYS:
            say(f"comm.gradients={way} train.seed={seed} …")
            losses[way].append(validation_loss(way, seed=seed, words=WORDS))
    notes = (f"meshwright run {PRESET} {' '.join(WORDS)} comm.gradients=…", f"validation loss; seeds {list(seeds)}")
    return Report(Part.COMM_LOSS, cpu_name(), date.today().isoformat(), tuple(loss_figures(losses)), notes)


def validation_loss(way: str, *, seed: int, words: Sequence[str]) -> float:
    """Train once, with gradients sent in one way, and give the validation loss of the last step."""
    config = load(PRESET, [*words, f"comm.gradients={way}", f"train.seed={seed}"])
    open_training_corpus(config)  # an error before any process starts; cached for the ranks
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        spec = RunSpec(config, Reporter, folder=RunFolder(Path(name), None))
        launch(train_body, spec, num_ranks=config.mesh.axes().num_ranks(), threads=config.train.threads)
        loss = read_curves([Path(name)])[0].validation
    assert loss is not None, "the words ask for a validation"
    return loss


def loss_figures(losses: Losses) -> list[Figure]:
    """The losses, and what the targets say of them."""
    over = [ours / exact - 1 for ours, exact in zip(losses[FOUR_BITS], losses[EXACT], strict=True)]
    return [
        *(of_rounds(f"{way}.validation_loss", losses[way], "nats") for way in WAYS),
        Figure(f"{WITH}.recovered", recovered(losses), f"of {WITHOUT}'s gap", at_least=RECOVERED),
        Figure(f"{FOUR_BITS}.over_exact", max(over), "of exact's loss", spread=(min(over), max(over)), at_most=WITHIN),
    ]


def recovered(losses: Losses) -> float:
    """The part of the gap between 2 bits without feedback and exact that feedback closes, over all seeds."""
    exact, without, with_feedback = (sum(losses[way]) for way in (EXACT, WITHOUT, WITH))
    return (without - with_feedback) / (without - exact)


def train_body(context: RankContext, spec: RunSpec) -> None:
    """What each rank runs; imports torch only there."""
    from meshwright.train.run import run_rank

    run_rank(context, spec)
