"""What the page shows is what the command prints."""

from __future__ import annotations

import shlex
import sys

import pytest

from meshwright.cli.main import main
from tests.docs.console import ROOT, missing, shown
from tests.prove.script.scripts import FSDP2_TP, planted

PROOFS = [one for one in shown() if one.page == "prove-scripts.md" and one.lines[0].startswith("reference")]


def run(monkeypatch, capsys, *words):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", list(words))
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code or 0
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_the_proof_of_the_page(monkeypatch, capsys, tmp_path):
    (block,) = PROOFS
    code, found = run(monkeypatch, capsys, *shlex.split(block.command))
    assert code == 0 and not missing(block.lines, found, numbers=False), found


@pytest.mark.slow
def test_the_fault_of_the_page_and_its_json(monkeypatch, capsys, tmp_path):
    script = planted(FSDP2_TP, tmp_path, ("            reduce_norm_gradients(model, mesh)\n", ""))
    words = ["--layout", "1 --accumulate 1", "--layout", "4 --tp 2", "--json", str(tmp_path / "out.json")]
    code, found = run(monkeypatch, capsys, "meshwright", "prove", "script", str(script), *words, "--", "--seed", "0")
    page = (ROOT / "docs/prove-scripts.md").read_text("utf-8").partition("over tp:\n\n```\n")[2].partition("```")[0]
    assert code == 1 and not missing(page.splitlines(), found, numbers=False), found
    assert '"passed": false' in (tmp_path / "out.json").read_text("utf-8")
