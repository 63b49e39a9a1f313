"""Runs a script on local processes with the environment variables of torchrun, and reports the first that fails.

Ranks are forked from a server that has imported torch, as in `meshwright run`. They meet at a store that rank 0 opens
on a free port of its own choice, so that no port is taken between choosing and opening it.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError, RunError
from meshwright.prove.script.layout_choice import FOLDER, REFERENCE, SEED, STEPS, ScriptRun
from meshwright.prove.script.recorder import RecordingComplete
from meshwright.train.launch.rank_context import RankContext

POLL_S = 0.005


def run_rank(context: RankContext, run: ScriptRun) -> None:
    """Run the script as one rank until its recorder ends it; what it prints goes to a file.

    Raises:
        RunError: the script failed; the error names the line.
    """
    output = os.open(run.output(context.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.dump_traceback_later(run.timeout_s, exit=True)
    context.post("step", 0)
    _store = _meet(context, run)  # held until the end
    os.environ |= {FOLDER: str(run.folder), STEPS: str(run.num_steps)}
    os.environ |= {SEED: str(run.perturbation), REFERENCE: str(run.reference)}
    sys.argv = run.command
    sys.path.insert(0, str(run.script.parent))
    dist.destroy_process_group = _keeping(dist.destroy_process_group)
    try:
        runpy.run_path(str(run.script), run_name="__main__")
    except RecordingComplete:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise _failure(context, run, f"exit code {error.code}", "") from None
    except MeshwrightError:
        raise
    except Exception as error:
        traceback.print_exc()
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(run.script)]
        line = f", line {own[-1].lineno}" if own else ""
        raise _failure(context, run, f"{type(error).__name__}: {str(error).splitlines()[0][:300]}", line) from error
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the destructors of process groups, which may wait for ranks that are gone


def _failure(context: RankContext, run: ScriptRun, what: str, line: str) -> RunError:
    printed = "\n       ".join(run.printed(context.rank).splitlines())
    return RunError(
        f"{run.script.name} failed on rank {context.rank} of {run.layout}: {what}",
        where=f"{run.script}{line}\n       {printed}",
        rule="a script must run on every layout that is to be proved",
        fix=f"run it alone: torchrun --nproc-per-node {run.layout.num_ranks} {' '.join(run.command)}",
    )


def _meet(context: RankContext, run: ScriptRun) -> TCPStore | None:
    """Set the variables of torchrun; rank 0 opens the store that all ranks use, as torchrun's agent does."""
    port, store = run.folder / "port", None
    if context.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
        temporary = port.with_suffix(".tmp")
        temporary.write_text(str(store.port))
        temporary.rename(port)
    while not port.exists():
        time.sleep(POLL_S)
    os.environ |= {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.num_ranks),
        "LOCAL_RANK": str(context.rank),
        "LOCAL_WORLD_SIZE": str(context.num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port.read_text(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "prove",
    }
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return store


def _keeping(destroy: Callable[..., None]) -> Callable[..., None]:
    """Return what destroys process groups but keeps the default one's object, whose destructor may wait for ranks that
    are gone."""
    kept = []

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        kept.append(dist.group.WORLD)
        destroy(*args, **kwargs)

    return destroy_process_group
