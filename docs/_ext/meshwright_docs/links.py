"""Translation of links between Markdown files of the repository to links on the site.

On GitHub, every file and folder has a page. On the site, links to pages stay links, other files become downloads (by
MyST), and folders become plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")
FENCE = re.compile(r"^ *(```+|~~~+)")


@dataclass(frozen=True)
class Links:
    """Rewriter of relative links; `pages` maps repository files to docnames under `docs/`."""

    root: Path
    pages: Mapping[str, str]

    def moved(self, text: str, folder: str, to: str) -> str:
        """Return the text of a file in `folder` with links for a page in `to`; both are relative to the repository."""
        lines, fence = [], None
        for line in text.splitlines(keepends=True):
            mark = FENCE.match(line)
            if mark and fence is None:
                fence = mark[1]
            elif mark and line.strip() == fence:
                fence = None
            elif fence is None:
                line = LINK.sub(lambda link: self._moved(link, folder, to), line)
            lines.append(line)
        return "".join(lines)

    def _moved(self, link: re.Match[str], folder: str, to: str) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["target"]))
        if (self.root / path).is_dir():
            return f"{link['text']} (`{path}`)"
        if path in self.pages:
            path = f"docs/{self.pages[path]}.md"
        target = os.path.relpath(path, to or ".").replace(os.sep, "/")
        return f"{link['image']}[{link['text']}]({target}{link['anchor'] or ''})"
