"""The quickstart runs in a real kernel, and shows what it says."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.docs.notebook import QUICKSTART, execute, text_of
from tests.prove.proofs import SOURCE

FIGURES = """
import json, sys
print(json.dumps({
    "memory": predict_memory(plan).total(),
    "sent": predict_traffic(plan).sent().total(),
    "losses": result.losses,
    "proved": proof is not None and bool(proof) and proof.report["passed"],
    "folder": str(result.folder.resolve()),
    "imported": "torch" in sys.modules,
}))
"""


LAST_WORD = '    "train.validate_every=0",\n'
SMALLER = (f"data.source={SOURCE}", "model.num_layers=1", "train.validation_samples=0", "train.sample_tokens=0")


def small_quickstart(path):
    """The notebook, with a smaller model and corpus."""
    notebook = nbformat.read(QUICKSTART, as_version=4)
    [cell] = [cell for cell in notebook.cells if LAST_WORD in cell.source]
    cell.source = cell.source.replace(LAST_WORD, LAST_WORD + "".join(f"    {word!r},\n" for word in SMALLER))
    nbformat.write(notebook, path)
    return path


@pytest.mark.slow
def test_the_quickstart_plans_runs_and_proves(tmp_path):
    notebook = execute(small_quickstart(tmp_path / "small.ipynb"), tmp_path, FIGURES)
    figures = json.loads(text_of(notebook.cells[-1]))
    assert figures["memory"] > figures["sent"] > 0
    losses = figures["losses"]
    assert len(losses) == 30
    assert max(losses[-5:]) < losses[0] - 1
    assert figures["proved"] is True
    assert figures["folder"].startswith(str(tmp_path.resolve()))
    assert not figures["imported"]  # the kernel only waits
    shown = {key for cell in notebook.cells for one in cell.get("outputs", ()) for key in one.get("data", ())}
    assert "image/png" in shown
    assert kinds(notebook.cells[:-1]) == kinds(nbformat.read(QUICKSTART, as_version=4).cells)


def test_the_quickstart_stores_small_outputs_and_nothing_of_a_machine():
    notebook = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(one["output_type"] != "error" for cell in code for one in cell.outputs)
    assert any(text_of(cell).endswith("\nPROVED\n") for cell in code)
    assert all(not cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert QUICKSTART.stat().st_size < 64 * 1024


@pytest.mark.slow
def test_a_cell_that_fails_is_an_error(tmp_path):
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("proof = False\nassert proof")])
    nbformat.write(bad, tmp_path / "bad.ipynb")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(tmp_path / "bad.ipynb", tmp_path)


def kinds(cells):
    """The kinds of outputs, cell by cell."""
    return [[one["output_type"] for one in cell.get("outputs", ())] for cell in cells]
