"""`python -m tests.prove.mutants`: random mutants of the code that trains, against proofs of fourteen small layouts."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from tests.prove.mutants.mutate import Mutant, mutants_of, mutate_import

MANY_S = 3600
"""For a process that neither ends nor hangs."""
ROOMS = ("train", "features", "parallel", "comm", "pipeline/execute.py", "nn")


def main() -> int:
    """Try mutants one after the other, and write what became of each to a JSON file."""
    options = _options()
    import torch.distributed.fsdp  # once, for all that are forked
    import torch.distributed.tensor  # noqa: F401

    work = Path(tempfile.mkdtemp(prefix="mutants-"))
    right = work / "right"
    right.mkdir()
    started = time.monotonic()
    if _in_child(lambda: _baseline(right, options.only), timeout_s=MANY_S):
        raise SystemExit("the right code fails")
    found = _all_mutants(right)
    print(f"{len(found)} mutants on lines that the layouts run ({time.monotonic() - started:.0f} s)", flush=True)
    if options.match:
        found = [mutant for mutant in found if any(text in str(mutant) for text in options.match)]
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    results = json.loads(options.json.read_text("utf-8")) if options.json and options.json.exists() else []
    tried = [{field.name: one[field.name] for field in fields(Mutant)} for one in results]
    for at, mutant in enumerate(chosen, start=1):
        if asdict(mutant) in tried:
            continue
        results.append({**asdict(mutant), **_try(mutant, work, right, options)})
        print(f"{at:4} {results[-1]['kind']:10} {mutant} | {results[-1]['layout']}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(Counter(one["kind"] for one in results))
    shutil.rmtree(work)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.prove.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="LAYOUT", help="a layout to prove, if not all")
    parser.add_argument("--match", action="append", default=[], metavar="TEXT", help="of mutants' names, if not all")
    parser.add_argument(
        "--json", type=Path, help="file for the results, written after each mutant; a run goes on with what it has"
    )
    return parser.parse_args()


def _baseline(right: Path, only: list[str]) -> None:
    from tests.prove.mutants.evaluate import baseline

    baseline(right, only)


def _all_mutants(right: Path) -> list[Mutant]:
    lines: set[tuple[str, int]] = set()
    for path in right.glob("lines-*.pickle"):
        lines |= pickle.loads(path.read_bytes())
    found = []
    for file in sorted({file for file, _ in lines}):
        inside = file.rpartition("/meshwright/")[2]
        if inside.startswith(ROOMS):
            module = "meshwright." + inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found += mutants_of(module, Path(file), {line for other, line in lines if other == file})
    return found


def _try(mutant: Mutant, work: Path, right: Path, options: argparse.Namespace) -> dict[str, str]:
    folder = work / "one"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def body() -> None:
        mutate_import(mutant)
        from tests.prove.mutants.evaluate import evaluate

        (folder / "verdict").write_text(json.dumps(asdict(evaluate(right, folder, options.only))), "utf-8")

    status = _in_child(body, timeout_s=MANY_S)
    if status:
        return {"kind": "loud", "layout": "", "why": "the process of the proof fails"}
    found: dict[str, str] = json.loads((folder / "verdict").read_text("utf-8"))
    return found


def _in_child(body, *, timeout_s: float) -> int:  # type: ignore[no-untyped-def]
    """Run `body` in a forked process group, and return its exit status; kill the whole group in the end."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            body()
        except BaseException as error:
            print(f"     {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    deadline, status = time.monotonic() + timeout_s, 1
    while time.monotonic() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = code
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
