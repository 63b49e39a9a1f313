"""Open a corpus in this process and print seconds and the most memory it had, as JSON: `python -m …measure`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from meshwright.data.text_corpus import open_corpus


def measure(source: str, text_field: str | None, tokenizer: str, cache_dir: str) -> dict[str, float]:
    """Tokenise a corpus that is not in the cache.

    Returns:
        Seconds that it took, seconds of all cores together, and the most bytes that the process has had in memory.
    """
    begin, begin_cpu = time.perf_counter(), time.process_time()
    open_corpus(
        source, tokenizer=tokenizer, token_dtype="uint16", cache_dir=cache_dir, with_documents=True,
        text_field=text_field,
    )  # fmt: skip
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    # Of this program only: what getrusage says includes the process that started it.
    status = Path("/proc/self/status").read_text("ascii")
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return {"s": seconds, "cpu_s": cpu_seconds, "peak_bytes": 1024 * int(peak_kib)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*json.loads(sys.argv[1]))))
