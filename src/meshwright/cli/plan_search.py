"""`meshwright plan --devices`: the fastest layouts of a run on a number of devices, and why others aren't."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.config_arguments import split_words
from meshwright.cli.plan_page import COLUMNS, SHOWN
from meshwright.cli.wrapping import show, wrapped
from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import find_cluster
from meshwright.config import load as config_load
from meshwright.config.schema import RunConfig
from meshwright.config.source import to_toml
from meshwright.errors import InputError, LayoutError
from meshwright.output_files import write_output
from meshwright.plan.search.changes import fitting_changes
from meshwright.plan.search.finalist import Finalist
from meshwright.plan.search.layout import LAYOUT_KEYS, Layout, layout_keys
from meshwright.plan.search.search import MEMORY_RULE, Candidate, Found, Search
from meshwright.settings.violation import Violation
from meshwright.units import counted, format_bytes, format_count, format_time, join_words

DEVICES = "command line, --devices"
MOST_ON_FRONT = 6
"""Rows of layouts that take less memory."""
MOST_RULES, MOST_REASONS = 4, 2
SHORT = {"microbatches": "train.num_microbatches", "recompute": "recompute.policy", "dp": "mesh.dp_shard"}
"""Names of keys beside their own without the section."""


def search_page(
    words: Sequence[str] | None, *, devices: str, cluster: str | None, batch: int | None, top: int, why: str | None,
    price: float | None, out: Path | None, figure: Path | None = None,
) -> None:  # fmt: skip
    """Search for the fastest layouts, show them, and write the configuration of the first to a file."""
    number, chosen = _devices(devices, cluster)
    source, overrides = split_words(words)
    overrides += [] if batch is None else [f"train.global_batch={batch}"]
    base = config_load.load(source, overrides, rules=no_rules)
    fixed = _fixed(base, overrides)
    found = Search(base, chosen, number, fixed=fixed).run(top=top)
    if why is not None:
        every = [*overrides, *_full(why)]
        fixed = _fixed(config_load.load(source, every, rules=no_rules), every)
        for line in _why(found, Search(base, chosen, number, fixed=fixed).run(top=1), why):
            show(line)
        return
    if not found.best:
        raise _nothing_fits(found, fixed)
    if out is not None:
        write_output(out, _file(found.best[0], found, devices), where="command line, -o")
    if figure is not None:
        from meshwright.plan.search.figure import draw_candidates

        draw_candidates(f"{base.name} on {number} × {chosen.name}", found, figure)
    for line in _page(found, top=top, price=price):
        show(line)


def no_rules(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    """Leave the rules to the search, as it changes the layout that the configuration has."""
    return iter(())


def _devices(devices: str, cluster: str | None) -> tuple[int, Cluster]:
    """Return the number of devices and the cluster of words such as `64xH100`, or `64` beside --cluster."""
    parts = re.fullmatch(r"(\d+)(?:[x×](.+))?", devices)
    if parts is None or int(parts[1]) < 1 or (parts[2] is None) == (cluster is None):
        rule = "--devices takes a number and a device, or a number beside --cluster"
        raise InputError(f"--devices {devices}", where=DEVICES, rule=rule, fix="--devices 64xH100")
    return int(parts[1]), find_cluster(cluster or parts[2])


def _fixed(config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a layout's keys that the command line gives."""
    given = {word.partition("=")[0] for word in overrides}
    return {key: value for key, value in layout_keys(config).items() if key in given}


def _full(words: str) -> list[str]:
    """Return words such as `tp=16,pp=3` with full names of keys."""
    names = {key.partition(".")[2]: key for key in LAYOUT_KEYS} | SHORT
    pairs = (word.partition("=") for word in words.replace(",", " ").split())
    return [f"{names.get(name, name)}={value}" for name, _, value in pairs]


def describe(layout: Layout) -> str:
    """Return a layout in words."""
    inner = layout.inner
    sizes = {
        "pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "cp": inner.cp,
        "tp": inner.tp, "ep": inner.ep,
    }  # fmt: skip
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.pp > 1:
        words.append(layout.schedule + (f" of {layout.chunks} chunks" if layout.schedule == "interleaved" else ""))
    words.append(f"{counted(layout.num_microbatches, 'micro-batch')} of {inner.samples}")
    words += [f"{inner.recompute} recomputation"] if inner.recompute != "none" else []
    words += [] if layout.reshard or layout.dp_shard * inner.cp == 1 else ["weights kept"]
    words += ["without sequence_parallel"] if inner.tp > 1 and not inner.sequence_parallel else []
    return ", ".join(words + ["compiled"] * inner.compiled)


def _page(found: Found, *, top: int, price: float | None) -> Iterator[str]:
    base, name = found.base, f"{found.num_devices} × {found.cluster.name}"
    batch, tokens = base.train.global_batch, found.best[0].step.tokens // found.base.train.global_batch
    yield f"{base.name} on {name}: {counted(batch, 'sample')} of {tokens} tokens per step"
    shown = found.best[:top]
    for number, one in enumerate(shown):
        yield from wrapped(_row(found, number + 1, one, price), COLUMNS, more="   ")
        yield from wrapped(describe(one.layout), COLUMNS, indent="   ", more="     ")
        yield from wrapped(_parts(one), COLUMNS, indent="   ", more="     ")
        if number + 1 < len(found.best):
            yield from wrapped(_gains(one, found.best[number + 1], number + 2), COLUMNS, indent="   ", more="     ")
    smaller = [one for one in found.front if one.num_bytes < 0.95 * shown[0].num_bytes]
    if smaller:
        yield "less memory, priced in closed form"
        yield from _front(smaller)
    yield from _excluded(found)
    yield from wrapped(f"rates: {found.cluster.performance.source}", COLUMNS, indent="  ")


def _row(found: Found, number: int, one: Finalist, price: float | None) -> str:
    step = one.step
    words = [
        f"{format_time(step.total)} per step ({format_time(step.low)} to {format_time(step.high)})",
        f"{step.tokens_per_s(found.num_devices):,.0f} tokens/s per device",
        format_bytes(one.num_bytes),
    ]
    if price is not None:
        hours = step.total / 3.6e9 * found.num_devices
        words.append(f"${1e6 * hours * price / step.tokens:.3g} per M tokens")
    return f"{number}  {' · '.join(words)}"


def _parts(one: Finalist) -> str:
    parts = sorted(one.step.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {format_time(us)}" for part, us in parts if us >= 2 * SHOWN * one.step.total)


def _gains(one: Finalist, other: Finalist, number: int) -> str:
    """Return in words in which parts a layout gains against the next."""
    names = dict.fromkeys([*one.step.parts, *other.step.parts])
    changes = {name: other.step.parts.get(name, 0.0) - one.step.parts.get(name, 0.0) for name in names}
    large = sorted((item for item in changes.items() if abs(item[1]) > SHOWN * one.step.total), key=lambda i: -i[1])
    saved = [f"{format_time(us)} of {name}" for name, us in large if us > 0]
    costs = [f"{format_time(-us)} of {name}" for name, us in reversed(large) if us < 0]
    ratio = 100 * (other.step.total / one.step.total - 1)
    text = f"{ratio:.2g} % faster than {number}" if ratio >= 0.1 else f"as fast as {number}"
    text += f": saves {join_words(saved)}" if saved else ": all parts are within 0.5 % of the step"
    return text + (f", for {join_words(costs)}" if costs else "")


def _front(smaller: Sequence[Candidate]) -> Iterator[str]:
    step = max(1, -(-len(smaller) // MOST_ON_FRONT))
    for one in smaller[::step]:
        row = f"{format_time(one.us)}  {format_bytes(one.num_bytes)}  {describe(one.layout)}"
        yield from wrapped(row, COLUMNS, indent="  ", more="      ")


def _excluded(found: Found) -> Iterator[str]:
    groups, priced = format_count(found.num_groups), format_count(found.num_priced)
    yield f"of {groups} meshes and schedules, {priced} layouts could be among these; excluded are"
    for rule, number in found.excluded.most_common(MOST_RULES):
        yield from wrapped(f"{format_count(number)}: {rule}", COLUMNS, indent="  ", more="    ")


def _why(found: Found, asked: Found, words: str) -> Iterator[str]:
    """Yield why layouts with given values were excluded, or what the best of them was priced at."""
    if asked.best:
        one = asked.best[0]
        yield f"{words} fits: the fastest takes {format_time(one.step.total)} and {format_bytes(one.num_bytes)}"
        yield from wrapped(describe(one.layout), COLUMNS, indent="  ")
        if found.best:
            best = found.best[0]
            yield f"the fastest of all takes {format_time(best.step.total)} and {format_bytes(best.num_bytes)}"
            yield from wrapped(describe(best.layout), COLUMNS, indent="  ")
            yield from wrapped(_gains(best, one, 0).replace(" than 0", "").replace(" as 0", ""), COLUMNS, indent="  ")
        return
    yield f"{words} is excluded"
    if asked.smallest is not None:
        yield from wrapped(_misfit(asked), COLUMNS, indent="  ")
        return
    for rule, _ in asked.excluded.most_common(MOST_REASONS):
        yield from wrapped(rule, COLUMNS, indent="  ")


def _misfit(found: Found) -> str:
    """Return in words by how much the smallest layout doesn't fit."""
    one = found.smallest
    assert one is not None
    types = sorted(vars(one.memory).items(), key=lambda item: -item[1])
    sizes = join_words([f"{kind} {format_bytes(size)}" for kind, size in types[:3] if size])
    size, most = format_bytes(one.num_bytes), format_bytes(found.capacity)
    over, where = format_bytes(one.num_bytes - found.capacity), _where(one.place, one.layout)
    return (
        f"the smallest takes {size}, {over} over the {most} that a rank may take on {found.cluster.device.name}: "
        f"{sizes} on {where} with {describe(one.layout)}"
    )


def _where(place: int, layout: Layout) -> str:
    return f"the ranks of pipeline place {place}" if layout.pp > 1 else "every rank"


def _nothing_fits(found: Found, fixed: dict[str, Any]) -> LayoutError:
    name = f"{found.base.name} on {found.num_devices} × {found.cluster.name}"
    if found.smallest is None:
        rules = "; ".join(rule for rule, _ in found.excluded.most_common(MOST_RULES))
        return LayoutError(f"no layout of {name}", where=DEVICES, rule=rules, fix="another number of devices or batch")
    fix = "; or ".join(fitting_changes(found, fixed)) or "a smaller model"
    return LayoutError(f"no layout of {name} fits", where=DEVICES, rule=f"{MEMORY_RULE}: {_misfit(found)}", fix=fix)


def _file(one: Finalist, found: Found, devices: str) -> str:
    """Return the configuration of a layout as a file."""
    head = f"# {describe(one.layout)}\n# {format_time(one.step.total)} per step predicted on {devices}\n"
    return head + to_toml(one.config)
