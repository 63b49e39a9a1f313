"""Sphinx extension of the site: the API reference, the README and the notebook as pages, and links to files.

The pages are written into ignored folders of `docs/` before Sphinx collects its sources. The package is parsed, not
imported, so the site builds without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

from meshwright_docs.links import Links
from meshwright_docs.notebook import notebook_page
from meshwright_docs.prose import linked
from meshwright_docs.reference import Reference
from meshwright_docs.source import Source

README, CHANGES, NOTEBOOK = "README.md", "CHANGELOG.md", "docs/examples/quickstart.ipynb"
PAGES = {README: "project/readme", CHANGES: "project/changes", NOTEBOOK: "project/quickstart"}
"""Docnames of the repository files that become pages of the site."""


def setup(app: Any) -> dict[str, Any]:
    """Connect to the events of Sphinx."""
    docs = Path(app.srcdir)
    reference = Reference(Source.read(docs.parent / "src" / "meshwright"))
    app.connect("config-inited", lambda app, config: write_pages(docs, reference))
    app.connect("doctree-read", lambda app, doctree: _unlink_foreign_names(doctree, reference.source.package))
    app.connect("source-read", lambda app, docname, source: _rewrite(docs, reference, docname, source))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _unlink_foreign_names(doctree: nodes.document, package: str) -> None:
    """Make foreign names in signatures plain text, which Sphinx would link to ours with the same last component."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node["refdomain"] == "py" and not node["reftarget"].startswith(f"{package}."):
            node.replace_self(addnodes.desc_sig_name("", node["reftarget"]))


def write_pages(docs: Path, reference: Reference) -> None:
    """Write the generated pages that changed, and remove obsolete ones."""
    root = docs.parent
    links = Links(root, PAGES)
    pages = {
        PAGES[README]: links.moved((root / README).read_text("utf-8"), "", "docs/project"),
        PAGES[CHANGES]: links.moved((root / CHANGES).read_text("utf-8"), "", "docs/project"),
        **reference.pages(),
    }
    files = {f"{name}.md": text.encode() for name, text in pages.items()}
    files |= notebook_page(root / NOTEBOOK, PAGES[NOTEBOOK])
    for name, content in files.items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:  # Sphinx skips unchanged files
            path.write_bytes(content)
    for folder in {Path(name).parent for name in files}:
        for path in (docs / folder).iterdir():
            if (folder / path.name).as_posix() not in files:
                path.unlink()


def _rewrite(docs: Path, reference: Reference, docname: str, source: list[str]) -> None:
    folder = Path("docs", docname).parent.as_posix()
    text = Links(docs.parent, PAGES).moved(source[0], folder, folder)
    source[0] = linked(text.splitlines(), reference.link) + "\n"
