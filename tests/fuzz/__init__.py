"""Random configurations, run or proved, and judged: `python -m tests.fuzz`.

`draw` makes a case from a seed, without running anything; `commands` runs it; `judge` says whether what came out is
right; `shrink` drops what a failure doesn't need.
"""
