"""Conversion of a notebook to a page: Markdown, code and stored outputs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def notebook_page(notebook: Path, page: str) -> dict[str, bytes]:
    """Return the page and its images, by their paths under `docs/`."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    files: dict[str, bytes] = {}
    parts = []
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(_fenced(text, "python"))
        for output in cell["outputs"]:
            image = output.get("data", {}).get("image/png")
            if image:
                name = f"{page}-{number}.png"
                files[name] = base64.b64decode("".join(image))
                parts.append(f"![output of the cell above]({name.rpartition('/')[2]})")
            else:
                parts.append(_fenced(_text(output).rstrip("\n"), "text"))
    source = notebook.relative_to(notebook.parents[1]).as_posix()
    heading, *rest = parts
    file = f"{{download}}`{notebook.name} <../{source}>`"
    download = f"This page is the notebook {file}, with the outputs that are stored in it."
    files[f"{page}.md"] = ("\n\n".join([heading, download, *rest]) + "\n").encode()
    return files


def _text(output: dict[str, Any]) -> str:
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````"
