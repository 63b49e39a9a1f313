"""Say whether a case came out right: it runs and agrees with one process, or it is refused with a fix that leads on.

And find the smallest case that fails in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.config.source import preset_names
from tests.fuzz.case import Case, key_of
from tests.fuzz.commands import Outcome, Run, Status
from tests.fuzz.draw import ALWAYS
from tests.helpers import alternatives

MAX_REFUSALS = 8
EXACT = 1e-4
"""Relative difference of losses and norms that the order of float32 sums may make in two steps."""
ROUNDED = 0.05
"""The same of losses where something is rounded: wrong layouts differ more, or a proof finds them."""
SMALLEST_BETA2 = 0.5
"""Below, an update is little more than the sign of a gradient, also of one that is rounding: nothing is compared."""
LAYOUT = ("mesh.", "pipeline.", "comm.", "capture.", "recompute.")
"""Sections that no loss depends on, apart from rounding."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    case: Case
    """The case that ran in the end: the drawn one, with the fixes of its refusals."""
    failure: str = ""
    """What is wrong; empty if nothing is."""
    detail: str = ""
    fixes: tuple[str, ...] = ()
    """Fixes that were followed."""
    action: str = ""
    """Last fix, if it names something to do that isn't a key."""
    compared: str = ""
    """Which losses were compared: exact or rounded; empty if none."""

    @property
    def summary(self) -> str:
        """The row of the table that this case counts in."""
        if self.failure:
            return "failed"
        if self.action:
            return "refused, with an action as the fix"
        return "ran after fixes" if self.fixes else "ran"

    def is_like(self, other: Verdict) -> bool:
        """Return whether both fail in the same way, whatever the numbers and paths in it."""
        return bool(self.failure) and _shape(self.failure) == _shape(other.failure)


def judge(run: Run, case: Case, *, verb: str = "run", seed: int = 0, compares: bool = True) -> Verdict:
    """Run a case, follow the fixes of its refusals, and compare what ran with one process.

    Args:
        run: runs a verb with a case's words.
        case: what was drawn.
        verb: run or prove.
        seed: chooses among the fixes of a refusal.
        compares: whether what ran is compared with one process.
    """
    rng, seen, fixes, fixed = Random(seed), {case.words}, list[str](), set[str]()
    while (outcome := run(verb, case)).status is Status.REFUSED:
        error = outcome.error
        said = f"{error['error']}\nfix    {error['fix']}"
        changed = list(ways(error, case))
        if not changed:
            return Verdict(case, fixes=tuple(fixes), action=error["fix"], detail=said)
        unseen = [one for one in changed if one.words not in seen]
        if not unseen:
            return Verdict(case, f"the fix leads back: {error['error']}", said, tuple(fixes))
        # A person who has just set a key doesn't take the way that sets it back, if there is another.
        chosen = rng.choice([one for one in unseen if fixed <= set(one.words)] or unseen)
        if len(fixes) == MAX_REFUSALS:
            return Verdict(case, f"refused after {MAX_REFUSALS} fixes: {error['error']}", said, tuple(fixes))
        if stuck := [one for one in changed if one != chosen and _same(run("plan", one), error)]:
            return Verdict(stuck[0], f"a fix changes nothing: {error['error']}", said, tuple(fixes))
        fixes.append(error["fix"])
        fixed |= set(chosen.words) - set(case.words)
        seen.add(chosen.words)
        case = chosen
    if outcome.status is not Status.DONE:
        return Verdict(case, f"{outcome.status}: {_cause(outcome.text)}", outcome.text, tuple(fixes))
    if verb == "prove" or not compares:
        return Verdict(case, fixes=tuple(fixes))
    return _compare(run, case, outcome, tuple(fixes))


def ways(error: Mapping[str, str], case: Case) -> Iterator[Case]:
    """Yield the case as each way out of a refusal that names keys changes it; those of actions are left out."""
    words_of = {key_of(word): word for word in case.words}
    replaced = re.search(r"in place of ([^()]+)", error["fix"])
    foreign = [f"{name}=" for name in replaced[1].rstrip().split(", ")] if replaced else []
    for words in alternatives(error["fix"]):
        if not any(sign in word for word in words for sign in "<…"):
            yield case.without(*foreign).with_words(words)
    for way in re.split(r",? or |; ", error["fix"]):
        if options := re.findall(r"(--[a-z-]+) (?!with )([^\s,;]+)", way):
            yield case.with_words(f"{name}={value}" for name, value in options)
    for preset in re.findall(r"(?:^|the preset )([\w-]+)(?:,| or |$)", error["fix"]):
        if preset in preset_names():
            yield replace(case, preset=preset)
    for key in re.findall(r"\bremove ([\w.*]+)", error["fix"]):
        if key in words_of:
            yield case.without(f"{key}=")
    nearest = re.match(r"([\w.]+) \(the nearest valid key\)", error["fix"])
    wrong = re.match(r"unknown key (\S+)", error["error"])
    if nearest and wrong and wrong[1] in words_of:
        value = words_of[wrong[1]].partition("=")[2]
        yield case.without(f"{wrong[1]}=").with_words([f"{nearest[1]}={value}"])


def _same(outcome: Outcome, error: Mapping[str, str]) -> bool:
    return outcome.status is Status.REFUSED and outcome.error["error"] == error["error"]


def _compare(run: Run, case: Case, outcome: Outcome, fixes: tuple[str, ...]) -> Verdict:
    """Compare a run's losses with those of one process without what only the layout has."""
    alone = case.without(*LAYOUT)
    if alone.words == case.words or float(case.setting("train.beta2")) < SMALLEST_BETA2:
        return Verdict(case, fixes=fixes)
    reference = run("run", alone)
    if reference.status is Status.REFUSED:
        return Verdict(case, fixes=fixes)
    if reference.status is not Status.DONE:
        return Verdict(alone, f"alone {reference.status}: {_cause(reference.text)}", reference.text, fixes)
    exact = is_exact(case)
    found = list(differences(outcome.metrics, reference.metrics, exact=exact))
    if found:
        return Verdict(case, f"{found[0][0]} differs from one process", "\n".join(text for _, text in found), fixes)
    return Verdict(case, fixes=fixes, compared="exact" if exact else "rounded")


def is_exact(case: Case) -> bool:
    """Return whether nothing in a run is rounded to less than float32."""
    rounds = case.setting("train.precision") == "bfloat16" or case.setting("float8.recipe") != "none"
    return not rounds and not any(is_lossy(case.setting(f"comm.{use}")) for use in ("gradients", "weights"))


def differences(
    metrics: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]], *, exact: bool
) -> Iterator[tuple[str, str]]:
    """Yield the name and a line for each number of a run that isn't that of one process."""
    if len(metrics) != len(expected) or not metrics:
        yield "number of steps", f"{len(metrics)} steps, {len(expected)} by one process"
    for step, (line, right) in enumerate(zip(metrics, expected, strict=False), start=1):
        for name in sorted(line.keys() | right.keys()):
            one, other = line.get(name), right.get(name)
            is_compared = exact or name != "grad_norm"
            if one is None or other is None:
                yield name, f"step {step}: {name} {one}, {other} by one process"
            elif is_compared and not abs(one - other) <= (EXACT if exact else ROUNDED) * abs(other):
                yield name, f"step {step}: {name} {one:.9g}, {other:.9g} by one process ({one / other - 1:.1e})"


def _cause(text: str) -> str:
    """The line of a failed command's output that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error +|✗ |[\w.]*(Error|Exception)\b)", line)]
    return (errors or lines or ["nothing was printed"])[0]


def _shape(text: str) -> str:
    return re.sub(r"[\d.]+|/\S+", "#", text)


def shrink(verdict: Verdict, judge: Callable[[Case], Verdict], *, max_tries: int = 30) -> Case:
    """Drop words of a failed case while it still fails in the same way: first many at once, then one by one.

    Args:
        verdict: the failure.
        judge: judges a case.
        max_tries: cases to judge at most.
    """
    case, tries = verdict.case, 0
    size = len(_droppable(case)) // 2
    while size:
        for smaller in _smaller(case, size):
            tries += 1
            if tries > max_tries:
                return case
            if judge(smaller).is_like(verdict):
                case = smaller
                break
        else:
            size //= 2
        size = min(size, len(_droppable(case)))
    return case


def _droppable(case: Case) -> list[str]:
    return [word for word in case.words if key_of(word) not in ALWAYS]


def _smaller(case: Case, size: int) -> Iterator[Case]:
    words = _droppable(case)
    for first in range(0, len(words), size):
        dropped = set(words[first : first + size])
        yield Case(case.preset, tuple(word for word in case.words if word not in dropped))
