"""`meshwright doctor`: installed versions, devices and limits, with fixes for what is missing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright import __version__
from meshwright.cli.wrapping import paint, show
from meshwright.units import GIB, counted, format_bytes

REQUIRED = ("torch", "numpy", "pydantic", "typer", "rich", "safetensors", "matplotlib", "pyyaml", "jinja2")
EXTRAS = {"images": "scikit-learn", "lora": "peft"} | {
    name: name
    for name in ("transformers", "tokenizers", "datasets", "tensorboard", "wandb", "trackio", "torchao", "accelerate")
}
MIN_PYTHON, MIN_TORCH, TESTED_TORCH = (3, 11), (2, 11), (2, 13)
MIN_OPEN_FILES = 1024
LIMITS_FILE = "/etc/security/limits.conf"
MIN_FREE_BYTES = 2 * GIB


@dataclass(frozen=True)
class Finding:
    """Line of the report; `state` is `ok`, `note` (works, but worth knowing) or `missing` (won't work)."""

    state: str
    name: str
    text: str
    fix: str = ""


def doctor() -> None:
    """Report versions, devices, ports and limits; exit with 1 if this machine can't run training."""
    marks = {"ok": ("✓", "green"), "note": ("·", "yellow"), "missing": ("✗", "red")}
    is_broken = False
    for finding in _findings():
        mark, style = marks[finding.state]
        show(f"{paint(mark, style, sys.stdout)} {finding.name:<12} {finding.text}", more=" " * 15)
        if finding.fix:
            show(f"  {'':<12} {finding.fix}", more=" " * 15)
        is_broken |= finding.state == "missing"
    if is_broken:
        sys.exit(1)


def _findings() -> Iterator[Finding]:
    from meshwright.cluster.host import num_cores

    yield Finding("ok", "meshwright", __version__)
    good = sys.version_info[:2] >= MIN_PYTHON
    fix = "" if good else "Python 3.11 or newer: python.org or your system's packages"
    yield Finding("ok" if good else "missing", "python", f"{platform.python_version()} ({sys.executable})", fix)
    memory = format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    yield Finding("ok", "machine", f"{platform.platform()} · {counted(num_cores(), 'core')} · {memory}")
    yield from _packages()
    yield from _torch()
    yield _compiler()
    yield from _limits()
    yield from _ports()


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        fix = "" if version else f"pip install -c constraints.txt {name}"
        yield Finding("ok" if version else "missing", name, version or "not installed", fix)
    for name in EXTRAS.values():
        version = _version(name)
        fix = "" if version else f"optional: pip install {name}"
        yield Finding("ok" if version else "note", name, version or "not installed", fix)


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library failed to load
        yield Finding("missing", "torch", f"does not import: {error}", "pip install -c constraints.txt torch")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not MIN_TORCH <= version <= TESTED_TORCH:
        text = f"{torch.__version__} is outside the tested range 2.11 … 2.13"
        yield Finding("missing" if version < MIN_TORCH else "note", "torch", text, "pip install torch==2.13.0")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            yield Finding("ok", f"cuda {index}", f"{facts.name} · {format_bytes(facts.total_memory)}")
    else:
        yield Finding("note", "cuda", "no CUDA device: runs use the CPU with gloo")
    backends = [name for name, ok in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if ok]
    state = "ok" if "gloo" in backends else "missing"
    yield Finding(state, "backends", ", ".join(backends) or "none", "" if backends else "a PyTorch build with gloo")


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    fix = "" if found else "only train.compile on CPU needs it: apt install g++"
    return Finding("ok" if found else "note", "compiler", found or "no C++ compiler", fix)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = soft >= MIN_OPEN_FILES or soft == resource.RLIM_INFINITY
    room = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    raised = f"ulimit -n {room}" if room >= MIN_OPEN_FILES else f"as root: ulimit -n 65536, or {LIMITS_FILE}"
    fix = "" if good else raised
    soft_text, hard_text = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    yield Finding("ok" if good else "note", "open files", f"{soft_text} (hard limit {hard_text})", fix)
    for name, path in (("disk", Path.cwd()), ("temporary", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(path).free
        fix = (
            "" if free >= MIN_FREE_BYTES else "checkpoints need three times the parameters' bytes: free some, or --out"
        )
        yield Finding("ok" if not fix else "note", name, f"{format_bytes(free)} free at {path}", fix)


def _ports() -> Iterator[Finding]:
    yield Finding("ok", "local runs", "rendezvous through a file, sockets on loopback only: no port to open")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        address = socket.gethostbyname(socket.gethostname())
        yield Finding(
            "ok", "torchrun", f"{socket.gethostname()} resolves to {address}; open MASTER_PORT (29500) between nodes"
        )
    except OSError as error:
        fix = "put this host's name into /etc/hosts, or give torchrun --master-addr"
        yield Finding("note", "torchrun", f"host name does not resolve: {error}", fix)
