"""Steps and ranks that a run profiles: `train.profile` and `train.profile_ranks`, their syntax and their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.errors import ConfigError
from meshwright.settings.number_ranges import RANGE, format_ranges, merge_ranges, parse_ranges
from meshwright.settings.violation import Violation

STEPS, RANKS = "train.profile", "train.profile_ranks"
ALL = "all"
FIRST_RANK = ("0",)


def profiled_steps(train: TrainConfig) -> list[range]:
    """Return the steps to profile as ranges of consecutive steps, in order; the configuration has no violation."""
    return merge_ranges(parse_ranges(",".join(train.profile))) if train.profile else []


def profiled_ranks(config: RunConfig) -> list[range]:
    """Return the ranks to profile, in order; the configuration has no violation."""
    if config.train.profile_ranks == (ALL,):
        return [range(config.mesh.axes().num_ranks())]
    return merge_ranges(parse_ranges(",".join(config.train.profile_ranks)))


def profile_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for both keys: syntax, existing steps and ranks, and ranks only with steps."""
    train, num_ranks = config.train, config.mesh.axes().num_ranks()
    if train.profile:
        has = f"train.steps = {train.steps}"
        yield from _range_violations(STEPS, "step", train.profile, range(1, train.steps + 1), has, default=())
    if train.profile_ranks != (ALL,):
        has = f"the mesh has {num_ranks} rank{'s' * (num_ranks > 1)}"
        yield from _range_violations(RANKS, "rank", train.profile_ranks, range(num_ranks), has, default=FIRST_RANK)
    if train.profile_ranks != FIRST_RANK and not train.profile:
        yield Violation(
            ConfigError,
            f"{RANKS} without {STEPS} has no effect",
            RANKS,
            f"{RANKS} says which ranks write a profile of the steps in {STEPS}",
            [{STEPS: (str(train.steps),)}, {RANKS: FIRST_RANK}],
        )


def _range_violations(
    key: str, noun: str, entries: tuple[str, ...], allowed: range, has: str, *, default: tuple[str, ...]
) -> Iterator[Violation]:
    """Yield the first entry that is neither a number nor a range, or goes beyond `allowed`."""
    words = [word.strip() for word in ",".join(entries).split(",")]
    ranges = [parse_ranges(word)[0] if re.fullmatch(RANGE, word) else None for word in words]
    for word, one in zip(words, ranges, strict=True):
        if one is None:
            what = f"{key} has {word!r}"
        elif not one:
            what = f"{key} has the range {word}, whose last {noun} is before its first"
        elif one.start not in allowed or one[-1] not in allowed:
            beyond = one.start if one.start not in allowed else one[-1]
            what = f"{key} names {noun} {beyond}, but {has}"
        else:
            continue
        kept = [range(max(one.start, allowed.start), min(one.stop, allowed.stop)) for one in ranges if one is not None]
        fixes = [(format_ranges(merge_ranges(filter(len, kept))),)] if any(kept) else []
        example = f"{noun}s are numbers and ranges first-last, such as 5,10-12"
        rule = f"{example}; this run has {noun}s {allowed.start}-{allowed.stop - 1}"
        yield Violation(ConfigError, what, key, rule, [{key: fix} for fix in (*fixes, default)])
        return
