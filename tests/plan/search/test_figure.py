"""The figure of a search shows what was priced and the best."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from meshwright.cli.main import app


def test_a_search_is_drawn_the_same_each_time(tmp_path):
    words = ["plan", "llama3-8b", "--devices", "16xH100", "--top", "2", "--figure"]
    paths = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in paths:
        assert CliRunner().invoke(app, [*words, str(path)], catch_exceptions=False).exit_code == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = re.findall(r"<text[^>]*>([^<]*)</text>", paths[0].read_text())
    assert {"1", "2", "memory that a rank may take", "no other is faster and smaller"} <= set(found)
