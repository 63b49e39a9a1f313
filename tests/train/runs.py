"""Whole runs: through the launcher in this process, whose fork server has torch imported already, or by the command.

A run can be told to fail: a rank ends itself at a moment that it reaches by itself, so the same moment each time.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.plan.rules import load
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext, RunSpec, StatusBoard
from meshwright.train.record.reporter import Reporter
from meshwright.train.run_folder import RunFolder
from tests.helpers import SMALL, clean_environment, open_data

STEPS = ["train.steps=8", "checkpoint.every=2", "checkpoint.keep=3", "train.validate_every=4", *SMALL,
         "train.validation_samples=4", "train.sample_tokens=2", "train.seq_len=32"]  # fmt: skip
DETERMINISTIC = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "samples",
    "skipped",
    "validation_loss",
    "expert_load",
    "expert_counts",
)
"""What of a metrics line depends on the run alone, not on the machine."""

LIMIT_S = 120.0
"""How long the other ranks may live after one was killed: longer than a busy machine takes to end them, and far from
the 600 s of `train.timeout_s`, after which they would end by themselves."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong: on `rank`, when it says that it starts `phase` at `step`.

    `action` is kill, stop (a wish to stop arrives), raise, nan (this step's loss and the later ones'), or the number
    of the operation on files, from 1, at which the rank is killed while it does the phase.
    """

    rank: int = 0
    phase: str = "step"
    step: int = 3
    action: str | int = "kill"


class FaultyBoard:
    """A board on which posting can be the last thing that a rank does."""

    def __init__(self, board: StatusBoard, fault: Fault, folder: Path) -> None:
        self._board = board
        self._fault = fault
        self._folder = folder
        self.spoilt = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    def post(self, rank: int, phase: str, step: int) -> None:
        self._board.post(rank, phase, step)
        fault = self._fault
        if (rank, phase, step) != (fault.rank, fault.phase, fault.step):
            return
        if fault.action == "kill":
            die(self._folder)
        elif fault.action == "stop":
            self._board.request_stop()
        elif fault.action == "raise":
            raise OSError(5, "Input/output error")
        elif fault.action == "nan":
            self.spoilt = True
        else:
            die_at_operation(int(fault.action), self._folder)


def die(folder: Path) -> None:
    (folder / "killed-at").write_text(str(time.monotonic()))  # one clock for all processes
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_operation(last: int, folder: Path) -> None:
    """From now on, count what this process does to files, and end it before operation number `last`."""
    count = 0

    def counted(real: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                die(folder)
            return real(*args, **kwargs)

        return operation

    for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def faulty_body(context: RankContext, argument: tuple[RunSpec, Fault | None, Path]) -> None:
    """What a rank runs: a training, with a fault in it."""
    import torch

    from meshwright.train import train_step
    from meshwright.train.rank_run import run_rank

    spec, fault, folder = argument
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    if fault is not None:
        board = FaultyBoard(context.board, fault, folder)
        context = replace(context, board=board)
        context.post("starting")
        accumulate = train_step.TrainStep.accumulate

        def spoilt(self: train_step.TrainStep, number: int) -> torch.Tensor:
            return accumulate(self, number) * (float("nan") if board.spoilt else 1.0)

        train_step.TrainStep.accumulate = spoilt
    run_rank(context, spec)


def choose(words: Sequence[str], *, out: Path | None, resume: str | None) -> RunFolder:
    """Where a run with these words would write, and what it would start from."""
    config = load(None, [*STEPS, *words])
    with ExitStack() as hold:
        return choose_folder(config, out=out, resume=resume, corpus=open_data(config).fingerprint, hold=hold)


def train(words: Sequence[str], out: Path, *, fault: Fault | None = None, resume: str | None = None) -> None:
    """A run in `out` through the launcher, in this process. Raises what the launcher raises.

    Asserts that no rank is left, and that a kill ended the run within the limit.
    """
    config = load(None, [*STEPS, *words])
    spec = RunSpec(config, Reporter, folder=choose(words, out=out, resume=resume))
    (out / "killed-at").unlink(missing_ok=True)
    num_ranks = config.mesh.axes().num_ranks()
    try:
        launch(faulty_body, (spec, fault, out), num_ranks=num_ranks, threads=1, on_interrupt=lambda: None)
    finally:
        if (out / "killed-at").exists():
            assert time.monotonic() - float((out / "killed-at").read_text()) < LIMIT_S
        pids = [int(path.read_text()) for path in out.glob("pid-*")]
        wait_until(lambda: not any(map(is_alive, pids)), timeout_s=60)


def metrics(out: Path) -> list[dict[str, Any]]:
    """The deterministic part of a run's metrics; the names of losses are without their unit."""
    from meshwright.train.record.record_files import loss_key, read_metrics

    lines = list(read_metrics(out / "metrics.jsonl"))
    unit = loss_key(lines[0] if lines else {}).removeprefix("loss")
    lines = [{key.removesuffix(unit): value for key, value in line.items()} for line in lines]
    return [{k: line[k] for k in DETERMINISTIC if k in line} for line in lines]


def final_state(out: Path) -> dict[str, Any]:
    """All tensors of a run's last checkpoint, whole."""
    from meshwright.checkpoint.manifest import verify
    from meshwright.checkpoint.save_load import read_tensors, tensor_names

    path = list_checkpoints(out / "checkpoints")[-1]
    verify(path)
    return read_tensors(path, tensor_names(path))


def assert_bitwise_equal(out: Path, reference: Path) -> None:
    """Two runs have the same metrics and the same last checkpoint, optimizer state included, bit for bit."""
    import torch

    assert metrics(out) == metrics(reference)
    ours, theirs = final_state(out), final_state(reference)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


# The command, as a process of its own


@dataclass(frozen=True)
class Hold:
    """Keeps a rank of a command where it posts `phase` at `step`, so that what is done to the run meets it there.

    By a `sitecustomize` that the command's processes import: nothing of the run knows of it.
    """

    folder: Path
    rank: int
    phase: str
    step: int

    def environment(self) -> dict[str, str]:
        """What the command is started with."""
        self.folder.mkdir()
        facts = (self.rank, self.phase, self.step)
        (self.folder / "sitecustomize.py").write_text(HOLDING.format(facts=facts, folder=str(self.folder)))
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH", ""))))}

    def wait(self) -> None:
        """Until the rank is there."""
        wait_until((self.folder / "held").exists, timeout_s=300)

    def release(self) -> None:
        """Let it go on."""
        (self.folder / "go").touch()


HOLDING = """
import time
from pathlib import Path
from meshwright.train.launch.rank_context import StatusBoard

post = StatusBoard.post

def holding(board, *facts):
    post(board, *facts)
    folder = Path({folder!r})
    if facts == {facts!r}:
        (folder / "held").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)

StatusBoard.post = holding
"""


def start(
    words: Sequence[str], out: Path, *, resume: bool = False, new_session: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start `meshwright run`; the caller waits for it or kills it.

    In a new session it is a process group of its own. Where tests run in the background Ctrl-C would be ignored.
    """
    more = ["--resume", "auto"] if resume else []
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "run", *words, "--out", str(out), *more],
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=new_session,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """All processes under `pid`, parents first, each generation in the order of its start."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = _stat(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(fields[1]), []).append((int(fields[19]), int(entry.name)))
    found, generation = [], [pid]
    while generation:
        generation = [child for parent in generation for _, child in sorted(children.get(parent, []))]
        found += generation
    return found


def rank_pids(launcher: int) -> list[int]:
    """The ranks that a launcher has started, by rank: the children of the process that it forks them from."""
    for child in descendants(launcher):
        try:
            is_server = b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if is_server:
            below = descendants(child)
            return [pid for pid in below if is_alive(pid) and int(_stat(pid)[1]) == child]
    return []


def wait_until(condition: Any, *, timeout_s: float = 300.0) -> Any:
    """What `condition()` gives, once that is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{condition} did not come true in {timeout_s:g} s")


@dataclass(frozen=True)
class Listener:
    """An open port: who listens, and at which address."""

    pid: int
    address: str
    port: int

    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address).is_loopback


def listeners(pids: Sequence[int]) -> list[Listener]:
    """The TCP ports on which these processes listen, by the kernel's tables."""
    owners = {}
    for pid in pids:
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has ended, or a descriptor was closed meanwhile
            continue
        owners |= {link[8:-1]: pid for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in owners:
                address, port = fields[1].split(":")
                found.append(Listener(owners[fields[9]], _address(address), int(port, 16)))
    return found


LISTENING = "0A"
"""The state in the kernel's tables."""


def _address(text: str) -> str:
    """The kernel writes an address as 32-bit words in the machine's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def num_steps(out: Path) -> int:
    """Steps whose metrics are written."""
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0
