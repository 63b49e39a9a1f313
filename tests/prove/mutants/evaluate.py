"""Run the quick proofs under a mutant: in forked ranks, layout by layout, until one catches it."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.prove.record.evidence import RankRecord
from meshwright.prove.record.layout_run import record_rank
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.report import render
from tests.helpers import open_data, rank_context
from tests.prove.proofs import (
    NUM_STEPS,
    few_pictures,
    prove_with,
    small_config,
    small_dit_config,
    small_expert_config,
)

CHECK_S = 0.05
HUNG = 200
"""Checks in a row that find all ranks asleep if they hang."""
MOST_CPU_S = 300
ROUNDING = 1e-11
"""Relative differences up to here are of rounding."""


@dataclass(frozen=True)
class Layout:
    """A small configuration by name."""

    name: str
    make: Callable[..., RunConfig]
    words: tuple[str, ...]

    @cache  # noqa: B019
    def config(self) -> RunConfig:
        """Return the configuration of its proof."""
        return self.make(*self.words)

    @cache  # noqa: B019
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.config().mesh.axes().num_ranks()


VEE = ("pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4")
LAYOUTS = [
    Layout("tp", small_config, ("mesh.tp=2", "train.num_microbatches=2")),
    Layout("tp, whole sequences", small_config, ("mesh.tp=2", "mesh.sequence_parallel=false", "train.dropout=0.25")),
    Layout("dp_shard, packed", small_config, ("mesh.dp_shard=2", "train.num_microbatches=2", "data.packing=documents")),
    Layout("cp ring, window", small_config, ("mesh.cp=2", "model.window=6", "model.global_every=2")),
    Layout("cp heads, packed", small_config, ("mesh.cp=2", "mesh.cp_method=heads", "data.packing=documents",
                                              "recompute.policy=selective")),
    Layout("pp zb-v", small_config, ("mesh.pp=2", *VEE)),
    Layout("ep", small_expert_config, ("mesh.dp_shard=2", "mesh.ep=2", "train.num_microbatches=2")),
    Layout("ep, groups", small_expert_config, (
        "mesh.dp_shard=2", "mesh.ep=2", "model.score=sigmoid", "model.num_groups=4", "model.top_groups=2",
        "model.balance_bias=true", "model.bias_rate=0.05", "model.route_scale=2.5", "model.num_dense_layers=1",
        "model.num_shared_experts=1", "recompute.policy=full")),
    Layout("dit tp", small_dit_config, ("mesh.tp=2", "model.ffn_dim=22")),
    Layout("dit pp", small_dit_config, ("mesh.pp=2", "train.num_microbatches=2")),
    Layout("hsdp", small_config, ("mesh.dp_replicate=2", "mesh.dp_shard=2")),
    Layout("tp, pp", small_config, ("mesh.tp=2", "mesh.pp=2", "pipeline.schedule=1f1b", "train.num_microbatches=2")),
    Layout("cp, dp_shard", small_config, ("mesh.cp=2", "mesh.dp_shard=2", "data.packing=documents", "model.window=4")),
    Layout("ep, tp", small_expert_config, (
        "mesh.dp_shard=2", "mesh.ep=2", "mesh.tp=2", "model.balance_scope=global-batch", "model.z_loss=0.01")),
]  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Outcome of a mutant: what the proofs say, in which layout, and why."""

    kind: str
    """`loud` (an error or a hang), `caught`, `same` (bit by bit the results of the right code), `rounding`,
    `both sides` (the reference computes the same wrong values) or `survived`."""
    layout: str = ""
    why: str = ""


def baseline(folder: Path, only: Sequence[str] = ()) -> None:
    """Record these layouts, or all, of the right code in `folder`, and which lines of which files were run."""
    for layouts in _by_size(only):
        with _ranks(layouts, folder, lines=True) as wait:
            for layout in layouts:
                records, error = wait(layout)
                if records is None:
                    raise RuntimeError(f"{layout.name}: {error}")
                proof = prove_with(records, layout.config())
                if not proof.passed:
                    raise RuntimeError("\n".join([layout.name, *render(proof)]))
                (folder / f"{layout.name}.pickle").write_bytes(pickle.dumps((records, _reference(layout))))


def evaluate(right: Path, folder: Path, only: Sequence[str] = ()) -> Verdict:
    """Return what the proofs of these layouts, or of all, say, in a process that imports mutated code.

    What `baseline` recorded is in `right`; what the ranks do now goes to `folder`.
    """
    changed: list[Verdict] = []
    for layouts in _by_size(only):
        with _ranks(layouts, folder) as wait:
            for layout in layouts:
                records, error = wait(layout)
                if records is None:
                    return Verdict("loud", layout.name, error)
                right_records, right_reference = pickle.loads((right / f"{layout.name}.pickle").read_bytes())
                if _difference(records, right_records) == 0:
                    continue
                try:
                    proof = prove_with(records, layout.config())
                except Exception as error:
                    return Verdict("loud", layout.name, f"{type(error).__name__}: {error}")
                if not proof.passed:
                    return Verdict("caught", layout.name, "\n".join(render(proof)))
                changed.append(_survivor(layout, records, right_records, right_reference))
    return min(changed, key=lambda one: SEVERITY.index(one.kind), default=Verdict("same"))


SEVERITY = ("survived", "both sides", "rounding")


def _survivor(layout: Layout, records: list[RankRecord], right: list[RankRecord], right_reference: Any) -> Verdict:
    difference = _difference(records, right)
    if difference <= ROUNDING:
        return Verdict("rounding", layout.name, f"{difference:.1e}")
    both = _difference(_reference(layout), right_reference)
    return Verdict("both sides" if both > ROUNDING else "survived", layout.name, f"{difference:.1e}")


def _reference(layout: Layout) -> list[Any]:
    """Return the initial weights, and what the reference computes from them in each step."""
    plain = PlainModel(layout.config(), few_pictures(layout.config()) or open_data(layout.config()))
    return [plain.initial, *(vars(plain.step(step, plain.initial)) for step in range(1, NUM_STEPS + 1))]


def _difference(a: Any, b: Any) -> float:
    """Return the largest difference of numbers in two values of the same shape, relative to the largest of a tensor."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return float("inf")
        if not a.numel() or torch.equal(a, b):
            return 0.0
        found = ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item()
        return found if found == found else float("inf")
    if isinstance(a, dict) and isinstance(b, dict):
        return max((_difference(a[k], b[k]) for k in a), default=0.0) if a.keys() == b.keys() else float("inf")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        pairs = zip(a, b, strict=False)
        return max((_difference(x, y) for x, y in pairs), default=0.0) if len(a) == len(b) else float("inf")
    if isinstance(a, RankRecord):
        return _difference(vars(a), vars(b))
    if isinstance(a, float) and isinstance(b, float):
        return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-300)
    return 0.0 if a == b else float("inf")


def _by_size(only: Sequence[str]) -> list[list[Layout]]:
    chosen = [layout for layout in LAYOUTS if not only or layout.name in only]
    sizes = sorted({layout.num_ranks() for layout in chosen})
    return [[layout for layout in chosen if layout.num_ranks() == size] for size in sizes]


Wait = Callable[[Layout], tuple[list[RankRecord] | None, str]]


@contextmanager
def _ranks(layouts: list[Layout], folder: Path, *, lines: bool = False) -> Iterator[Wait]:
    """Fork ranks that record the layouts one after the other, and yield a function that waits for one's records."""
    size = layouts[0].num_ranks()
    store = folder / f"store-{size}-{os.getpid()}"
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _rank_main(rank, size, layouts, folder, store, lines)
        pids.append(pid)

    def wait(layout: Layout) -> tuple[list[RankRecord] | None, str]:
        paths = [folder / f"{layout.name}-{rank}.pickle" for rank in range(size)]
        num_asleep = 0
        while not all(path.exists() for path in paths):
            errors = [path.read_text("utf-8") for rank in range(size) if (path := folder / f"error-{rank}").exists()]
            if errors:
                return None, errors[0]
            num_asleep = num_asleep + 1 if all(map(_is_asleep, pids)) else 0
            if num_asleep > HUNG:
                return None, "hangs: all ranks wait"
            time.sleep(CHECK_S)
        return [pickle.loads(path.read_bytes()) for path in paths], ""

    try:
        yield wait
    finally:
        for pid in pids:
            if not lines:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _is_asleep(pid: int) -> bool:
    """Whether no thread of a process runs or waits for a core, however busy the machine is."""
    try:
        stats = [path.read_text("ascii") for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return all(stat.rpartition(") ")[2][0] in "SZ" for stat in stats)


def _rank_main(rank: int, size: int, layouts: list[Layout], folder: Path, store: Path, lines: bool) -> None:
    """Record the layouts as this rank, and end the process."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    run: set[tuple[str, int]] = set()
    if not lines:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))  # a loop that doesn't end
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        for layout in layouts:
            if lines:
                sys.settrace(_tracer(run))
            config = layout.config()
            corpus = few_pictures(config) or open_data(config)
            context = rank_context(rank, size)
            record = record_rank(config, context, corpus, num_steps=NUM_STEPS, plan=make_plan(config))
            sys.settrace(None)
            _put(folder / f"{layout.name}-{rank}.pickle", pickle.dumps(record))
        if lines:
            _put(folder / f"lines-{size}-{rank}.pickle", pickle.dumps(run))
    except BaseException as error:
        _put(folder / f"error-{rank}", f"{type(error).__name__}: {error}".encode())
    os._exit(0)


def _put(path: Path, data: bytes) -> None:
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def _tracer(run: set[tuple[str, int]]) -> Callable[[FrameType, str, Any], Any]:
    def of_line(frame: FrameType, event: str, argument: Any) -> Any:
        run.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    def of_call(frame: FrameType, event: str, argument: Any) -> Any:
        return of_line if "/meshwright/" in frame.f_code.co_filename else None

    return of_call
