"""Sections of a run's report on what was predicted and measured: time, timeline, memory and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.timeline import Timeline, from_values
from meshwright.plan.memory import LIBRARIES, predict_memory, predict_process_memory
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.traffic import LinkBytes, predict_traffic
from meshwright.train.measure.step_parts import StepParts
from meshwright.train.report.html import Section
from meshwright.train.report.run_data import RunData
from meshwright.train.report.svg import Lane, bars, timeline
from meshwright.units import counted, format_bytes

MAX_BARS = 8
"""Most ranks with a bar of their own; of more, the fastest, median and slowest in computing are shown."""
MAX_LANES = 32
PARTS = {
    "compute": "forward and backward",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "data": "data",
    "optimizer": "optimizer",
    "core": "waiting for a core",
    "other": "other",
}
"""Name of each field of `StepParts`, in the order of the bars."""
KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
}
NO_MEASUREMENT = (
    "Not measured: the run has not ended or it failed, or the steps to measure were profiled or captured graphs."
)


def time_of_step(run: RunData, prefix: str) -> Section:
    """Return the section on where a step's time went, and its timeline."""
    section = Section("Where a step's time went", prefix=prefix)
    found = run.measured
    if found is None:
        return section.paragraph(NO_MEASUREMENT)
    ranks = [StepParts(**parts) for parts in found["parts"]]
    steps = found["steps"]
    shown = _shown_ranks(ranks)
    section.paragraph(
        f"Mean over {counted(len(steps), 'measured step')}: {', '.join(map(str, steps))}. Measuring took "
        f"{1000 * found['cost_s']:.2g} ms in all, {found['cost_s'] / found['steps_s']:.2%} of the time of all steps."
    )
    section.add(
        bars(
            [(label, [1000 * getattr(parts, name) for name in PARTS]) for label, parts in shown],
            list(PARTS.values()),
            title="Time of a step in milliseconds, by rank",
            unit="ms",
        )
    )
    times = {part: [getattr(parts, name) for parts in ranks] for name, part in PARTS.items()}
    total = sum(sum(seconds) for seconds in times.values()) or 1.0
    rows = [
        (
            part,
            *(f"{1000 * value(seconds):.3g}" for value in (statistics.fmean, min, max)),
            f"{sum(seconds) / total:.1%}",
        )
        for part, seconds in times.items()
    ]
    section.table(("part", "mean, ms", "fastest rank, ms", "slowest rank, ms", "share"), rows)
    if (run.last_event("start") or {}).get("device") != "cpu":
        section.paragraph("On a GPU, communication inside blocks counts as forward and backward.")
    return section


def timelines(run: RunData, prefix: str) -> Section | None:
    """Return the section with the last measured step's timeline, predicted over measured."""
    found = run.measured
    if found is None:
        return None
    both = from_values(found["timeline"])
    predicted, measured = both["predicted"], both["measured"]
    section = Section("Timeline of a step", prefix=prefix)
    section.paragraph(
        f"Step {found['steps'][-1]}: predicted {1000 * predicted.makespan:.3g} ms from the measured times of "
        f"computations with transfers that take no time, measured {1000 * measured.makespan:.3g} ms."
    )
    groups = [("predicted", _lanes(predicted)), ("measured", _lanes(measured))]
    title = "Computations of a step, predicted over measured"
    section.add(timeline(groups, list(KINDS.values()), title=title, unit="ms"))
    if predicted.num_ranks > MAX_LANES:
        section.paragraph(f"The first {MAX_LANES} of {predicted.num_ranks} pipeline ranks.")
    return section


def memory(run: RunData, prefix: str) -> Section | None:
    """Return the section on memory, predicted against measured by type."""
    if run.plan is None:
        return None
    predicted = predict_memory(run.plan)
    section = Section("Memory of a rank", prefix=prefix)
    found = run.measured
    if found is None:
        rows = [(_name(name), format_bytes(size)) for name, size in vars(predicted).items() if size]
        section.paragraph("Predicted, of the rank with the most; not measured.")
        return section.table(("type", "predicted"), [*rows, ("total", format_bytes(predicted.total()))])
    rank = max(range(len(found["memory"])), key=lambda rank: found["memory"][rank]["peak"])
    section.paragraph(f"Predicted for the rank with the most, measured on rank {rank}, which held the most.")
    on_cpu = (run.last_event("start") or {}).get("device") == "cpu"
    compared = _memory_rows(run.plan, found["memory"][rank], on_cpu=on_cpu)
    return section.table(("type", "predicted", "measured", "difference"), compared)


def traffic(run: RunData, prefix: str) -> Section | None:
    """Return the section on bytes sent, by purpose and link, predicted against counted."""
    if run.plan is None:
        return None
    section = Section("Bytes that a rank sends per step", prefix=prefix)
    predicted, found = predict_traffic(run.plan), run.measured
    if not predicted.entries:
        return section.paragraph("None: there is one rank.")
    if found is None or found["sent"] is None:
        rows = [(f"{one.purpose}, {link}", format_bytes(size)) for one in predicted.entries
                for link, size in _by_link(one.sent).items() if size]  # fmt: skip
        section.paragraph(f"Predicted for rank {predicted.rank}, which sends the most; not counted.")
        return section.table(("purpose", "predicted"), rows)
    section.paragraph(f"Rank {found['sent_by']}, which sends the most; counted in step {found['steps'][-1]}.")
    entries = [
        (" and ".join(one["purposes"]), LinkBytes(**one["predicted"]), LinkBytes(**one["counted"]))
        for one in found["sent"]
    ]
    total = sum((one for _, one, _ in entries), LinkBytes()), sum((one for _, _, one in entries), LinkBytes())
    compared = [row for entry in (*entries, ("total", *total)) for row in _compared_links(*entry)]
    section.table(("purpose", "predicted", "counted", "difference"), compared)
    for event in run.all_events("counted")[-1:]:
        steps = counted(event["steps"], "step")
        for one in event["all_to_alls"]:
            known = f", from the {one['basis']} {format_bytes(one['explained'])}" if one["basis"] else ""
            section.paragraph(
                f"All-to-alls of {one['purpose']} on rank 0, in {steps}: {format_bytes(one['sent'])}, "
                f"predicted {format_bytes(one['predicted'])}{known}."
            )
    return section


def _memory_rows(plan: RunPlan, measured: Mapping[str, int], *, on_cpu: bool) -> list[tuple[str, str, str, str]]:
    """Return a row for each type that can be measured, and one for the others, whose sum is."""
    predicted = predict_memory(plan)
    alone = [field.name for field in fields(predicted) if field.name in measured]
    others = [_name(field.name) for field in fields(predicted) if field.name not in measured]
    types = [(_name(name), getattr(predicted, name), measured[name]) for name in alone]
    base = LIBRARIES if on_cpu else measured["base"]
    total = predict_process_memory(plan) if on_cpu else base + predicted.total()
    others += ["holes between tensors"] * on_cpu
    rows = [
        ("Python and its libraries" if on_cpu else "held before the run", base, measured["base"]),
        *types,
        (
            f"{', '.join(others[:-1])} and {others[-1]}",
            total - base - sum(one for _, one, _ in types),
            max(0, measured["peak"] - measured["base"] - sum(one for _, _, one in types)),
        ),
        ("total", total, measured["peak"]),
    ]
    return [(name, format_bytes(one), format_bytes(other), _difference(one, other))
            for name, one, other in rows if one or other]  # fmt: skip


def _name(name: str) -> str:
    return {"errors": "error feedback", "buffers": "receive buffers"}.get(name, name.replace("_", " "))


def _difference(predicted: int, measured: int) -> str:
    """Return how far the measured value is from the predicted one."""
    if predicted == measured:
        return "0"
    return f"{measured / predicted - 1:+.1%}" if predicted else f"+{format_bytes(measured)}"


def _by_link(one: LinkBytes) -> dict[str, int]:
    return {"inside a node": one.inside_node, "between nodes": one.between_nodes}


def _compared_links(name: str, predicted: LinkBytes, found: LinkBytes) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each kind of link that is used."""
    for (link, one), other in zip(_by_link(predicted).items(), _by_link(found).values(), strict=True):
        if one or other:
            yield f"{name}, {link}", format_bytes(one), format_bytes(other), _difference(one, other)


def _lanes(one: Timeline) -> Sequence[Lane]:
    return [
        Lane(
            f"rank {rank}",
            [(KINDS[span.action.kind], 1000 * span.start, 1000 * span.end) for span in one.of_rank(rank)],
        )
        for rank in range(min(one.num_ranks, MAX_LANES))
    ]


def _shown_ranks(ranks: Sequence[StepParts]) -> list[tuple[str, StepParts]]:
    named = [(f"rank {rank}", parts) for rank, parts in enumerate(ranks)]
    if len(ranks) <= MAX_BARS:
        return named
    named.sort(key=lambda one: one[1].compute)
    places = {"fastest": 0, "median": len(named) // 2, "slowest": len(named) - 1}
    return [(f"{word}, {named[place][0]}", named[place][1]) for word, place in places.items()]
