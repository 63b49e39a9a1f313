"""Reports in a real browser, and the checker of what a reader would see wrong, which must find seeded faults."""

from __future__ import annotations

import pytest

from meshwright.api import load_config, run
from meshwright.train.report.page import report
from tests.helpers import SMALL, small_corpus
from tests.train.report.browser import SCHEMES, WIDTHS, faults, needs_browser
from tests.train.report.folders import write_folder

pytestmark = [needs_browser, pytest.mark.slow]

FAULTS = {
    "overlaps": '<p style="margin-bottom:-1.2em">one line of text</p><p>another line of text</p>',
    "leaves the page": '<p style="white-space:nowrap;overflow-wrap:normal">' + "far too long a line " * 300 + "</p>",
    "px wide": '<div style="width:3000px">wide</div>',
    "contrast": '<p style="color:#888;background:#777">hard to read</p>',
    "of the figure": '<img alt="x" src="data:image/svg+xml,%3Csvg xmlns=%22http://www.w3.org/2000/svg%22 width=%2250%22'
    ' height=%2250%22%3E%3Crect width=%2250%22 height=%2250%22 fill=%22gray%22/%3E%3C/svg%3E">'
    "<style>body{background:#777}</style>",
    "alternative text": '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA=">',
    "doesn't load": '<img alt="x" src="data:image/png;base64,AAAA">',
    "request": '<img alt="x" src="http://127.0.0.1:9/x.png">',
    "error": "<script>throw new Error('broken')</script>",
    "console": "<script>console.error('said')</script>",
    "there twice": '<p id="a">a</p><p id="a">b</p>',
    "link to nowhere": '<a href="#missing">somewhere</a>',
    "no link to": "<table><caption>c</caption><thead><tr><th scope=col>a</th></tr></thead><tbody><tr><th>b</th></tr>"
    "</tbody></table>",
    "no caption": "<table><tbody></tbody></table>",
    "skips a level": "<h3>deep</h3>",
    "small text": '<p style="font-size:7px">small print</p>',
}


def test_seeded_faults_are_found(tmp_path):
    whole = report([write_folder(tmp_path / "run", ["llama-tiny", "mesh.pp=2", "train.num_microbatches=4"])])
    pages = [whole.replace("</header>", f"</header>{fault}", 1) for fault in FAULTS.values()]
    found = faults([*pages, whole], tmp_path, scheme="light", widths=WIDTHS[:1])
    for number, expected in enumerate(FAULTS):
        mine = [fault for fault in found if fault.startswith(f"page {number},")]
        assert any(expected in fault for fault in mine), (expected, mine)
    assert not [fault for fault in found if fault.startswith(f"page {len(pages)},")]


@pytest.mark.parametrize(("scheme", "widths"), [("dark", WIDTHS[:1]), ("light", WIDTHS)], ids=SCHEMES)
def test_pages_of_all_kinds_are_right(tmp_path, scheme, widths):
    """Colors are the scheme's and places the width's."""
    many = write_folder(tmp_path / "many", ["llama-tiny", "mesh.pp=2", "mesh.dp_shard=8", "train.num_microbatches=2"])
    stopped = write_folder(tmp_path / "failed", ["dit-digits"], steps=0, ended="failed", measured=False)
    image = write_folder(tmp_path / "image", ["dit-digits"], steps=1200)
    names = [f"run with a rather long name {i}" for i in range(7)]
    compared = [write_folder(tmp_path / name, ["llama-tiny", f"train.seed={i}"]) for i, name in enumerate(names)]
    pages = [report([many]), report([stopped]), report([image]), report([*compared, image, stopped])]
    assert not faults(pages, tmp_path, scheme=scheme, widths=widths)


def test_reports_that_runs_leave_are_right(tmp_path):
    words = [*SMALL, "train.steps=3", "train.validation_samples=8", *small_corpus(tmp_path)]
    text = run(load_config("llama-tiny", "mesh.pp=2", "train.num_microbatches=4", *words), out=tmp_path / "text")
    image = run(
        load_config("dit-digits", "train.steps=2", "model.num_layers=1", "diffusion.num_samples=4"),
        out=tmp_path / "image",
    )
    pages = [(one.folder / "report.html").read_text("utf-8") for one in (text, image)]
    assert all(">complete<" in page and "measured step" in page for page in pages)
    assert "data:image/png" in pages[1]
    assert not faults([*pages, report([text.folder, image.folder])], tmp_path, scheme="dark")
