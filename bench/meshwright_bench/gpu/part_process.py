"""The process of a part, and the one that says what the machine has: `python -m …gpu.part_process`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

from meshwright.cluster.host import num_cores
from meshwright_bench.gpu.cases import Setting, run_cases
from meshwright_bench.gpu.parts import load_cases

MOST_JOBS = 6
"""Commands at once on one device."""
PACKAGES = ("triton", "transformers", "torchao", "liger_kernel")


def main() -> int:
    """Run a part's cases, or write what the machine has; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--identify", type=Path)
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--cases")
    parser.add_argument("--records", type=Path)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--gpu")
    parser.add_argument("--one-by-one", action="store_true")
    given = parser.parse_args()
    if given.identify is not None:
        given.identify.write_text(json.dumps(identify(on_cpu=given.on_cpu)), "utf-8")
        return 0
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    jobs = min(MOST_JOBS, num_cores())
    setting = Setting("cpu" if given.gpu is None else "cuda", given.scratch, given.gpu, jobs)
    passed = run_cases(load_cases(given.cases, setting), given.records, jobs=1 if given.one_by_one else jobs)
    return 0 if passed else 1


def identify(*, on_cpu: bool) -> dict[str, object]:
    """Return the GPU's name, or None, versions of what affects figures, and the date; nothing else of the machine."""
    from meshwright import __version__

    versions = {"python": sys.version.split()[0], "meshwright": __version__, "torch": metadata.version("torch")}
    gpu = None
    if not on_cpu:
        import torch

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        versions["cuda"] = str(torch.version.cuda)
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"gpu": gpu, "versions": versions, "date": date.today().isoformat()}


if __name__ == "__main__":
    sys.exit(main())
