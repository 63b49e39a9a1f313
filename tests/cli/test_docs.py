"""What the docs say is what the command does: the table of keys is its output, and its words are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from meshwright.plan.rules import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"meshwright (run|prove) ((?:llama|dit)[\w.-]+)((?:\s+[a-z_]+(?:\.[a-z_]+)?=[^\s`]+)*)")
"""A verb, a preset and overrides, which may go on over several lines."""


def test_the_table_of_keys_is_what_the_command_prints(here):
    assert (ROOT / "docs/config.md").read_text("utf-8") == here("presets", "--keys").stdout


def commands():
    return [
        pytest.param(preset, shlex.split(words), id=f"{page.name}: {verb} {preset} {' '.join(words.split())}")
        for page in PAGES
        for verb, preset, words in COMMAND.findall(page.read_text("utf-8"))
    ]


@pytest.mark.parametrize(("preset", "words"), commands())
def test_commands_have_valid_words(preset, words):
    if "mesh.tp=3" in words:  # the README's example of an error
        with pytest.raises(Exception, match="does not divide 4 attention heads"):
            load(preset, words)
    else:
        load(preset, words)
