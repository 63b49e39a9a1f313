"""Run a notebook in a kernel of this interpreter; as a command, store the outputs in the quickstart.

`python -m tests.docs.notebook`, after the quickstart or what it prints has changed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

QUICKSTART = Path(__file__).parents[2] / "docs" / "examples" / "quickstart.ipynb"
TIMEOUT_S = 300


class OwnPython(KernelSpecManager):
    """The only kernel there is, whatever a user has installed: the interpreter that asks."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(**get_kernel_dict())


class Client(NotebookClient):
    """Starts that kernel, with its files in `own_folder`, and ends it."""

    own_folder: str

    def create_kernel_manager(self):
        self.km = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=OwnPython(),
            transport="ipc",
            ip=f"{self.own_folder}/socket",
            connection_file=f"{self.own_folder}/kernel.json",
        )
        return self.km


def execute(path: Path, folder: Path, *more: str) -> nbformat.NotebookNode:
    """The notebook, with `more` cells after its own, and the outputs of a fresh run whose files are in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in more]
    with tempfile.TemporaryDirectory(prefix="kernel-") as own:  # a short path: sockets have one, and no port
        client = Client(notebook, timeout=TIMEOUT_S, record_timing=False, force_raise_errors=True)
        client.own_folder = own
        return client.execute(cwd=str(folder), env=_environment(own))


def text_of(cell: nbformat.NotebookNode) -> str:
    """All that a cell has printed or given, as text."""
    return "".join(
        one["text"] if one["output_type"] == "stream" else one["data"].get("text/plain", "") for one in cell.outputs
    )


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the user's settings of IPython, Jupyter or matplotlib."""
    own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"), folder)
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | own


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(QUICKSTART, Path(folder))
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
    nbformat.validate(notebook)
    nbformat.write(notebook, QUICKSTART)


if __name__ == "__main__":
    main()
