"""Choose the device to measure on. Torch-free: CUDA devices are detected on a rank."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from meshwright.errors import InputError
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, DeviceChoice, Options, Say

NEEDS_CUDA = "needs a CUDA device"


def find_cuda(choice: DeviceChoice, say: Say) -> str | None:
    """Return the name of the CUDA device to measure on, or None for the CPU.

    Raises:
        InputError: CUDA was requested and is not available.
    """
    if choice is DeviceChoice.CPU:
        return None
    say("looking for a CUDA device …")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        result = Path(folder) / "device.json"
        launch(look_body, result, num_ranks=1, threads=None)
        name: str | None = json.loads(result.read_text("utf-8"))
    if name is None and choice is DeviceChoice.CUDA:
        raise InputError(
            "no CUDA device is available on this machine",
            where="command line, --device cuda",
            rule="--device cuda measures on a CUDA device",
            fix="--device cpu, which lists the CUDA figures as unmeasured",
        )
    return name


def refuse_cuda(options: Options, part: Benchmark, *, because: str) -> None:
    """Raise if CUDA was requested for a benchmark that runs on the CPU only.

    Raises:
        InputError: CUDA was requested; `because` states the reason.
    """
    if options.device is DeviceChoice.CUDA:
        raise InputError(
            f"bench {part} runs on the CPU only",
            where="command line, --device cuda",
            rule=because,
            fix="--device cpu",
        )


def look_body(context: RankContext, result: Path) -> None:
    """Write the name of the CUDA device, or null, as JSON."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    result.write_text(json.dumps(name), "utf-8")
