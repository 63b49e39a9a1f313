"""Small pieces of HTML: escaped elements, tables whose rows can be linked to, and sections."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already; everything else is escaped."""


def text(value: object) -> Html:
    """Return a value as escaped text."""
    return Html(escape(str(value)))


def element(name: str, *inner: Html, **attributes: object) -> Html:
    """Return an element; attributes are escaped, those that are None are left out, and `_` stands for `-`."""
    shown = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>" if name == "img" else f"<{name}{shown}>{''.join(inner)}</{name}>")


def slug(words: str) -> str:
    """Return an identifier made of words."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


class Section:
    """A section of a page; its identifiers start with `prefix`, so that a page may have those of several runs."""

    def __init__(self, title: str, *, prefix: str = "") -> None:
        self.title = title
        self.id = slug(f"{prefix}-{title}")
        self._parts: list[Html] = []
        self._anchors: Counter[str] = Counter()

    def add(self, *parts: Html) -> Section:
        """Append parts, and return the section."""
        self._parts += parts
        return self

    def paragraph(self, words: str) -> Section:
        """Append a paragraph of plain text."""
        return self.add(element("p", text(words)))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> Section:
        """Append a table; the first cell of a row heads it and is a link to it. Numbers are aligned right.

        Args:
            header: headings of the columns.
            rows: cells of each row; `Html` is taken as it is.
            caption: what the table shows, for screen readers.
        """
        found = [[cell if isinstance(cell, str) else str(cell) for cell in row] for row in rows]
        numeric = [all(_is_number(row[i]) for row in found) for i in range(len(header))]
        head = (element("th", text(name), scope="col", class_="number" if is_number else None)
                for name, is_number in zip(header, numeric, strict=True))  # fmt: skip
        body = (self._row(row, numeric) for row in found)
        described = element("caption", text(caption or self.title))
        table = element("table", described, element("thead", element("tr", *head)), element("tbody", *body))
        return self.add(element("div", table, class_="table"))

    def _row(self, row: Sequence[str], numeric: Sequence[bool]) -> Html:
        anchor = f"{self.id}-{slug(re.sub('<[^>]*>', '', row[0]))}"
        self._anchors[anchor] += 1
        if (times := self._anchors[anchor]) > 1:  # a resumed run may save a step again
            anchor = f"{anchor}-again-{times}"
        first = element("th", element("a", _cell(row[0]), href=f"#{anchor}"), scope="row")
        cells = (element("td", _cell(cell), class_="number" if is_number else None)
                 for cell, is_number in zip(row[1:], numeric[1:], strict=True))  # fmt: skip
        return element("tr", first, *cells, id=anchor)

    def html(self) -> Html:
        """Return the section."""
        heading = element("h2", element("a", text(self.title), href=f"#{self.id}"))
        return element("section", heading, *self._parts, id=self.id)


def _cell(value: str) -> Html:
    return value if isinstance(value, Html) else text(value)


def _is_number(value: str) -> bool:
    return bool(re.match(r"[-+−–]?\d", value)) or value in ("", "–")
