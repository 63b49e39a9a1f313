"""Which device a part measures on. Torch-free: the launcher asks a rank."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from meshwright.errors import InputError
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import DeviceChoice, Options, Part, Say

NEEDS_CUDA = "needs a CUDA device"


def find_cuda(choice: DeviceChoice, say: Say) -> str | None:
    """Name of the CUDA device to measure on, or None for the CPU.

    Raises:
        InputError: CUDA was asked for and there is none.
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
            "there is no CUDA device here, so the figures for it stay unmeasured",
            where="command line, --device cuda",
            rule="--device cuda measures on a CUDA device",
            fix="--device cpu, which states them as unmeasured",
        )
    return name


def refuse_cuda(options: Options, part: Part, *, because: str) -> None:
    """For parts that measure on the CPU only; `because` is the rule.

    Raises:
        InputError: CUDA was asked for.
    """
    if options.device is DeviceChoice.CUDA:
        raise InputError(
            f"bench {part} measures on the CPU only",
            where="command line, --device cuda",
            rule=because,
            fix="--device cpu",
        )


def look_body(context: RankContext, result: Path) -> None:
    """Write the CUDA device's name, or null."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    result.write_text(json.dumps(name), "utf-8")
