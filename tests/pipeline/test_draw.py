"""Figures and text show each computation once, in its rank's row, at its time; figures are byte-reproducible."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml

import pytest

from meshwright.errors import InputError
from meshwright.pipeline import Action, ActionKind, Costs, EdgeCosts, StageCosts, generate, simulate
from meshwright.pipeline.draw import ROW_HEIGHT, draw, draw_comparison, place_boxes, text_timeline
from meshwright.pipeline.generate import ScheduleKind
from meshwright.pipeline.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"
KINDS = [kind.value for kind in ScheduleKind]


def simulated(kind="zb-v", num_stages=4, num_microbatches=8, costs=None):
    schedule = generate(kind, num_stages=num_stages, num_microbatches=num_microbatches)
    return schedule, simulate(schedule, costs or Costs.uniform())


def uneven(num_stages):
    stages = tuple(StageCosts(1 + 0.13 * s, 1.1 + 0.07 * s, 0.8) for s in range(num_stages))
    return Costs(stages, (EdgeCosts(0.21),))


def rectangles(path):
    """Return left, top, right and bottom of the boxes in a figure, and its texts."""
    root = xml.parse(path).getroot()
    found = {}
    for group in root.iter(f"{SVG}g"):
        name = group.get("id", "")
        if re.search(r"rank\d", name):
            assert name not in found, f"{name} is there twice"
            corners = re.findall(r"[ML] ([\d.]+) ([\d.]+)", group.find(f"{SVG}path").get("d"))
            xs, ys = zip(*((float(x), float(y)) for x, y in corners), strict=True)
            found[name] = (min(xs), min(ys), max(xs), max(ys))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    return found, texts


def scale(found, spans, name):
    """Return points per unit of time and the position of time 0, from the first and the last box."""
    first, last = min(spans, key=lambda span: span.start), max(spans, key=lambda span: span.end)
    left, right = found[name(first)][0], found[name(last)][2]
    return (right - left) / (last.end - first.start), left


def assert_in_place(found, timeline, name, height):
    """Assert that each box of a timeline is in its rank's row, at its time."""
    points, zero = scale(found, timeline.spans, name)
    rows = {}
    for span in timeline.spans:
        left, top, right, bottom = found[name(span)]
        assert left == pytest.approx(zero + points * span.start, abs=0.01)
        assert right == pytest.approx(zero + points * span.end, abs=0.01)
        rows.setdefault(span.rank, set()).add((round(top, 3), round(bottom, 3)))
    assert all(len(places) == 1 for places in rows.values())
    tops = [next(iter(rows[rank]))[0] for rank in sorted(rows)]
    pitch = tops[1] - tops[0]
    assert [b - a for a, b in zip(tops, tops[1:], strict=False)] == pytest.approx([pitch] * (len(tops) - 1), abs=0.01)
    bottom = next(iter(rows[0]))[1]
    assert bottom - tops[0] == pytest.approx(height * pitch, abs=0.01)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "dualpipe-v"])
def test_a_picture_has_each_computation_once_in_its_place(tmp_path, kind):
    schedule, simulation = simulated(kind, costs=uneven(4 if kind == "1f1b" else 8))
    draw(simulation, tmp_path / "a.svg", title="Title\nsecond line", schedule=schedule)
    found, texts = rectangles(tmp_path / "a.svg")
    assert sorted(found) == sorted(f"rank{rank}-{action}" for rank, _, action in schedule.positions())
    assert_in_place(found, simulation.timeline, lambda span: f"rank{span.rank}-{span.action}", ROW_HEIGHT)
    assert {"Title", "second line", "F forward", "B backward", "idle", *(f"rank {r}" for r in range(4))} <= set(texts)
    assert ("overlapped pair" in texts) is (kind == "dualpipe-v")
    assert ("chunks 0 to 1 from dark to light" in texts) is (kind != "1f1b")
    for microbatch in range(8):
        boxes_of_it = [name for name in found if re.search(rf"[FBIW]{microbatch}$", name)]
        assert texts.count(str(microbatch)) >= len(boxes_of_it)  # an axis has numbers too


def test_numbers_are_left_out_where_they_do_not_fit(tmp_path):
    _, simulation = simulated("f-then-b", 2, 200)
    draw(simulation.timeline, tmp_path / "a.svg", title="narrow")
    found, texts = rectangles(tmp_path / "a.svg")
    assert len(found) == 800 and "199" not in texts


def test_a_timeline_of_long_ago_starts_at_zero():
    _, simulation = simulated()
    later = Timeline(
        4, tuple(span._replace(start=span.start + 77, end=span.end + 77) for span in simulation.timeline.spans)
    )
    for moved, plain in zip(place_boxes(later), place_boxes(simulation.timeline), strict=True):
        assert (moved.start, moved.end) == pytest.approx((plain.start, plain.end))
        assert (moved.rank, moved.action, moved.chunk) == (plain.rank, plain.action, plain.chunk)


def test_what_runs_at_the_same_time_shares_the_row():
    forward, backward = Action(ActionKind.FORWARD, 0, 1), Action(ActionKind.BACKWARD, 3, 0)
    alone = Action(ActionKind.FORWARD, 0, 2)
    send = Action(ActionKind.SEND_FORWARD, 0, 1)
    spans = (Span(0, forward, 0, 2), Span(0, backward, 1, 4), Span(0, send, 2, 9), Span(0, alone, 4, 5))
    found = place_boxes(Timeline(1, spans), top=-0.5, height=1.0)
    places = {box.action: (box.top, box.height, box.chunk) for box in found}
    assert places == {forward: (-0.5, 0.5, 0), backward: (0.0, 0.5, 1), alone: (-0.5, 1.0, 0)}


def test_a_comparison_has_both(tmp_path):
    schedule, predicted = simulated("zb-h1", 4, 6)
    measured = simulate(schedule, uneven(4)).timeline
    draw_comparison(predicted.timeline, measured, tmp_path / "a.svg", title="both", unit="ms", schedule=schedule)
    found, texts = rectangles(tmp_path / "a.svg")
    actions = [f"rank{rank}-{action}" for rank, _, action in schedule.positions()]
    assert sorted(found) == sorted(f"{side}{action}" for side in ("predicted", "measured") for action in actions)
    for side, timeline in (("predicted", predicted.timeline), ("measured", measured)):
        assert_in_place(found, timeline, lambda span, side=side: f"{side}rank{span.rank}-{span.action}", 0.40)
    points = [scale(found, t.spans, lambda span, s=s: f"{s}rank{span.rank}-{span.action}")
              for s, t in (("predicted", predicted.timeline), ("measured", measured))]  # fmt: skip
    assert points[0] == pytest.approx(points[1], abs=0.001), "one time axis for both"
    for rank in range(4):
        upper, lower = (max(b[3] for n, b in found.items() if n.startswith(f"{side}rank{rank}-"))
                        for side in ("predicted", "measured"))  # fmt: skip
        assert upper < lower
    note = next(text for text in texts if text and "makespan" in text)
    more = measured.makespan / predicted.makespan - 1
    assert f"predicted, makespan {predicted.makespan:.4g} " in note and f"{measured.makespan:.4g} ({more:+.1%})" in note
    assert "ms" in texts


def test_the_same_timeline_has_the_same_bytes(tmp_path, monkeypatch):
    _, simulation = simulated("1f1b", 3, 4)
    draw(simulation, tmp_path / "a.svg", title="one")
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 7, "axes.grid": True}):
        draw(simulation, tmp_path / "b.svg", title="one")
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_png_is_one(tmp_path):
    _, simulation = simulated("1f1b", 2, 2)
    draw(simulation, tmp_path / "a.PNG", title="one")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.svg.gz", "none/a.svg"])
def test_a_picture_that_can_not_be_written(tmp_path, name):
    _, simulation = simulated("1f1b", 2, 2)
    with pytest.raises(InputError) as raised:
        draw(simulation, tmp_path / name, title="one")
    assert raised.value.where == str(tmp_path / name) and raised.value.rule and raised.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_picture_in_place_of_a_folder(tmp_path):
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(InputError, match="can't write"):
        draw(simulated("1f1b", 2, 2)[1], tmp_path / "a.svg", title="one")


def test_an_empty_timeline(tmp_path):
    draw(Timeline(2, ()), tmp_path / "a.svg", title="nothing")
    assert text_timeline(Timeline(2, ()), columns=20).splitlines() == ["0 ", "1 "]


def test_text_is_exact_where_it_fits():
    _, simulation = simulated("zb-h1", 2, 3)
    assert text_timeline(simulation.timeline, columns=80).splitlines() == [
        "0 F0F1··I0W0F2I1W1I2W2",
        "1 ··F0I0F1I1W0F2I2W1W2",
    ]
    _, simulation = simulated("1f1b", 2, 3)
    assert text_timeline(simulation.timeline, columns=16).splitlines() == ["0 FF··B0FB1·B2", "1 ·FB0FB1FB2··"]


def read(line):
    """Return the boxes in a line of text: letter, number, first character, width."""
    return [(box[1], box[2], box.start(), box.end() - box.start()) for box in re.finditer(r"([FBIWfbiw])(\d*) *", line)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_shows_each_computation(kind):
    schedule, simulation = simulated(kind, 4, 12)
    lines = text_timeline(simulation.timeline, columns=1000).splitlines()
    assert len(lines) == 4
    for rank, line in enumerate(lines):
        number, _, cells = line.partition(" ")
        assert number == str(rank) and len(cells) == round(simulation.makespan) * 3
        stages = schedule.stages_of(rank)
        expected = []
        for span in simulation.timeline.of_rank(rank):
            letter = span.action.kind.value
            letter = letter.lower() if stages.index(span.action.stage) % 2 else letter
            width = round(3 * (span.end - span.start))
            expected.append((letter, str(span.action.microbatch), round(3 * span.start), width))
        assert read(cells) == expected


@pytest.mark.parametrize("columns", [1, 10, 33, 79, 100, 140])
@pytest.mark.parametrize(("kind", "num_stages", "num_microbatches"), [("1f1b", 8, 32), ("v-min", 12, 16)])
@pytest.mark.parametrize("costs", [None, uneven])
def test_text_fits_the_columns(columns, kind, num_stages, num_microbatches, costs):
    schedule, simulation = simulated(kind, num_stages, num_microbatches)
    if costs is not None:
        simulation = simulate(schedule, costs(schedule.num_stages))
    lines = text_timeline(simulation.timeline, columns=columns).splitlines()
    prefix = len(str(num_stages - 1)) + 1
    assert len(lines) == num_stages and len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= max(columns, prefix + 1)
    cells = len(lines[0]) - prefix
    if cells >= 30:
        for rank, line in enumerate(lines):
            assert set(line[prefix:]) <= set("FBIWfbiw·0123456789 ")
            busy = sum(cell != "·" for cell in line[prefix:])
            assert busy == pytest.approx(cells * simulation.busy[rank] / simulation.makespan, abs=2)
