"""Measure a case of `bench train` on one rank: build and warm up both arms, compare their losses, time them.

Both arms live in the same processes and alternate, so they share machine, threads, libraries and noise. The losses of
the first steps are compared, because a benchmark of different computations is meaningless.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.comm.collectives import all_reduce_sum, barrier
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Corpus, Tokens
from meshwright.data.windows import num_windows
from meshwright.errors import RunError
from meshwright.mesh.process_groups import process_group
from meshwright.models.contract.model_facts import Role
from meshwright.parallel.apply_plan import needs_mesh
from meshwright.plan.make_plan import make_plan
from meshwright.train.build_job import build_job, choose_device
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep
from meshwright_bench.alternate import Alternation, Timer, Work, alternate
from meshwright_bench.train.cases import BARE, OURS, Case
from meshwright_bench.train.plain_loop import BareBatches, bare_step


@dataclass
class Arm:
    """Side of the comparison, with its progress."""

    name: str
    run: Callable[[int], Any]
    """Function that runs the step of a given number and returns its result."""
    mean_loss: Callable[[Any], float]
    """Function from the result of `run` to the global batch's loss; synchronizes and is not timed."""
    done: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the warm-up steps."""
    memory_bytes: int | None = None
    """Peak memory of this arm alone; None on CPU, where both arms share the process memory."""

    def step(self) -> Any:
        """Run the next step."""
        self.done += 1
        return self.run(self.done)


def measure_case(context: RankContext, case: Case, result: Path) -> None:
    """Measure a case; rank 0 writes seconds, memory and device as JSON to `result`.

    Raises:
        RunError: `compare` failed.
    """
    config = case.config
    device = choose_device(config, context)
    with process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=device,
        timeout_s=config.train.timeout_s,
        store_path=context.store_path,
        needed=needs_mesh(make_plan(config)),
    ):
        arms, timed = compare(context, case, device)
        if context.rank == 0:
            answer = {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
                "seconds": timed.seconds,
                "memory_bytes": {arm.name: arm.memory_bytes for arm in arms},
            }
            result.write_text(json.dumps(answer), "utf-8")


def compare(context: RankContext, case: Case, device: torch.device) -> tuple[list[Arm], Alternation]:
    """Build both arms, check that their losses agree, and time them alternately in an existing process group.

    Raises:
        RunError: the losses of the arms differ, or a stop was requested.
    """
    arms = build_arms(context, case, device)
    check_losses(case, arms)
    timer = _stoppable(timer_on(device), context)
    steps = {arm.name: arm.step for arm in arms}
    return arms, alternate(steps, timer=timer, rounds=case.rounds, steps=case.steps)


def build_arms(context: RankContext, case: Case, device: torch.device) -> list[Arm]:
    """Build the arms and run their warm-up steps, one arm after the other."""
    config = case.config
    tokens = _tokens(case)
    order = WindowOrder(num_windows(tokens, config.train.seq_len), config.train.seed)
    arms = []
    for build in (_ours, _bare):
        before = _start_peak(device)
        arm = build(context, case, tokens, order, device)
        for _ in range(case.warmup):
            context.post("step", arm.done + 1)
            arm.losses.append(arm.mean_loss(arm.step()))
        arm.memory_bytes = None if before is None else torch.cuda.max_memory_allocated(device) - before
        arms.append(arm)
    context.post("comparing")
    return arms


def _ours(context: RankContext, case: Case, tokens: Tokens, order: WindowOrder, device: torch.device) -> Arm:
    """Build the arm with the training step of `meshwright run`."""
    no_tokens = tokens[:0]
    corpus = Corpus("", "", tokens, no_tokens, vocab_size=0, validation_bytes_per_token=None, fingerprint="")
    task = case.config.family.task(run_facts(case.config), corpus, device)
    job = build_job(case.config, make_plan(case.config), context, device)
    step = TrainStep(job, task, context.board.stop_requested)
    return Arm(OURS, step, lambda result: result.loss)


def _bare(context: RankContext, case: Case, tokens: Tokens, order: WindowOrder, device: torch.device) -> Arm:
    """Build the arm with the same training in plain PyTorch."""
    batches = BareBatches(tokens, order, case.config, num_steps=case.num_steps, rank=context.rank, device=device)

    def mean_loss(loss: torch.Tensor) -> float:
        return float(all_reduce_sum(loss.clone()).item()) / context.num_ranks

    return Arm(BARE, bare_step(case.config, batches, device=device), mean_loss)


def _tokens(case: Case) -> Tokens:
    """Return the training tokens of both arms."""
    if not case.random_tokens:
        corpus = case.config.family.open_data(run_facts(case.config))
        assert isinstance(corpus, Corpus), "the bare loop trains language models only"
        return corpus.train
    generator = np.random.default_rng(case.config.train.seed)
    return generator.integers(_vocab_size(case.config), size=case.random_tokens, dtype=np.uint32)


def _vocab_size(config: RunConfig) -> int:
    """Return the number of rows of the model's embedding."""
    ends = model_facts(config).first
    return next(p.shape[0] for kind in ends for p in kind.parameters if p.role is Role.EMBEDDING)


def check_losses(case: Case, arms: Sequence[Arm]) -> None:
    """Check that the arms' warm-up losses agree.

    Raises:
        RunError: the losses differ.
    """
    ours, bare = arms
    for step, (our_loss, bare_loss) in enumerate(zip(ours.losses, bare.losses, strict=True), start=1):
        if not (math.isfinite(our_loss) and abs(our_loss - bare_loss) <= case.loss_tolerance):
            raise RunError(
                f"the two sides compute different losses: ours {our_loss:.6f}, bare loop {bare_loss:.6f}",
                where=f"bench train, {case.name}, step {step}",
                rule=f"the first {case.warmup} losses must agree to {case.loss_tolerance:g} nats per token, "
                "else the comparison is meaningless",
                fix="this is a bug in one of them: please report it with this message",
            )


def timer_on(device: torch.device) -> Timer:
    """Return a timer of all device work launched by a block of steps, between two barriers."""
    return _cuda_timer(device) if device.type == "cuda" else _host_timer


def _host_timer(work: Work) -> float:
    barrier()
    start = time.perf_counter()
    work()
    barrier()
    return time.perf_counter() - start


def _cuda_timer(device: torch.device) -> Timer:
    """Return a timer based on CUDA events: the device is idle at the first, and the host waits only for the last."""

    def timer(work: Work) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        barrier()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return timer


def _stoppable(timer: Timer, context: RankContext) -> Timer:
    """Return a timer that raises before the next block once a stop has been requested."""

    def stoppable(work: Work) -> float:
        if context.board.stop_requested():
            raise RunError("stopped before the end of the measurement, as requested", where="bench train")
        return timer(work)

    return stoppable


def _start_peak(device: torch.device) -> int | None:
    """Reset the peak memory statistics of a CUDA device and return the bytes allocated now; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
