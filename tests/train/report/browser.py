"""Pages in a headless Chromium: what a reader would see wrong in them, at several widths and in both color schemes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser")
WIDTHS = (390, 1280, 1920)
SCHEMES = {"dark": "0", "light": "1"}
"""Values of Chromium's setting `preferredColorScheme`."""
CHECKER = Path(__file__).with_name("checker.js").read_text("utf-8")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
           "--disable-background-networking", "--disable-component-update", "--disable-sync",
           "--allow-file-access-from-files", "--window-size=2100,1200")  # fmt: skip


def faults(pages: Sequence[str], folder: Path, *, scheme: str, widths: Sequence[int] = WIDTHS) -> list[str]:
    """Return what is wrong with pages at each width, each with the page's number, counted from 0, and the width."""
    for number, page in enumerate(pages):
        checked = page.replace("<head>", f"<head><script>{CHECKER}</script>", 1)
        (folder / f"page-{number}.html").write_text(checked, "utf-8")
    frames = [(number, width) for number in range(len(pages)) for width in widths]
    (folder / "frames.html").write_text(_frames(frames), "utf-8")
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={folder / 'profile'}",
               f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--virtual-time-budget=60000",
               "--dump-dom", (folder / "frames.html").as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)[1]))
    assert sorted(found) == sorted(f"page {number}, {width} px" for number, width in frames), "a page didn't answer"
    assert all(one["scheme"] == scheme for one in found.values())
    return [f"{where}: {fault}" for where, one in found.items() for fault in one["faults"]]


def _frames(frames: Sequence[tuple[int, int]]) -> str:
    """Return a page that shows each page in a frame of each width, and collects what the checker posts."""
    shown = "".join(
        f'<iframe name="{escape(f"page {number}, {width} px")}" width="{width}" height="1000" style="border:0" '
        f'src="page-{number}.html"></iframe>'
        for number, width in frames
    )
    script = """const found = {};
addEventListener("message", e => { found[e.data.name] = e.data; document.getElementById("found").textContent =
  JSON.stringify(found); });"""
    head = f'<meta charset="utf-8"><meta name="color-scheme" content="light dark"><script>{script}</script>'
    return f'<!DOCTYPE html><html><head>{head}</head><body><pre id="found">{{}}</pre>{shown}</body></html>'
