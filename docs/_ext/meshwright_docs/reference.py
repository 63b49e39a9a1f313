"""The API reference: public names, their pages and the text of the pages.

Each library package has a page with the names that it exports. A package without exports has a page for each of its
modules. Types in public signatures are public too and are on the page of their module or package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from meshwright_docs.describe import Scope, directive, references, same_as
from meshwright_docs.prose import as_markdown, first_sentence
from meshwright_docs.source import Module, Source, is_public

MORE_PARTS = ("dtensor_ops",)
FOR_MODELS = ("models.contract", "models.tasks", "nn")
SHARED = ("config", "settings", "errors", "cluster", "mesh")
FOLDER = "reference"


@dataclass
class Page:
    """Page of a module; `names` maps public names to their definitions."""

    module: Module
    names: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    """Further types of this package that appear in public signatures."""
    inner: list[Page] = field(default_factory=list)
    """Pages of the modules, if the package has no exports."""


@dataclass(frozen=True)
class Reference:
    """API reference of a package."""

    source: Source

    def pages(self) -> dict[str, str]:
        """Return the text of each page by docname."""
        pages = {f"{FOLDER}/index": self._index()}
        for page in chain(*self.groups.values()):
            pages[f"{FOLDER}/{page.module.name}"] = self._text(page)
            for inner in page.inner:
                # Not in the sidebar, which would be crowded and take Sphinx twice as long.
                above = f"---\norphan: true\n---\n\n[← {page.module.name}]({page.module.name}.md)\n\n"
                pages[f"{FOLDER}/{inner.module.name}"] = above + self._text(inner)
        return pages

    @cached_property
    def names(self) -> dict[str, str]:
        """Pages of all public names, by public name and by full name."""
        found = {}
        for page in self._all_pages():
            for name, full in {**page.names, **page.types}.items():
                found[name] = found[full] = page.module.name
        return found

    def link(self, name: str) -> str | None:
        """Return the documented name or module for a full name, or None."""
        top = self.source.modules[self.source.package]
        if not name.startswith(f"{top.name}."):
            return None
        modules = (page.module.name for page in self._all_pages())
        return Scope(self.source, self._shown, top).link(name) or next((one for one in modules if one == name), None)

    @cached_property
    def groups(self) -> dict[str, list[Page]]:
        """Pages by heading of the reference's index."""
        package = self.source.package
        top = self.source.modules[package]
        parts = [name for name in top.lazy if f"{package}.{name}" in self.source.modules]
        groups = {
            "The package": [self._page(package)],
            "Libraries": [self._page(f"{package}.{part}") for part in sorted({*parts, *MORE_PARTS})],
            "Custom models": [self._page(f"{package}.{part}") for part in FOR_MODELS],
            "Shared modules": [self._page(f"{package}.{part}") for part in SHARED],
        }
        others = self._add_types(groups)
        return groups | {"Types of other packages": others}

    @cached_property
    def _shown(self) -> dict[str, str]:
        """Public names to link to, by full name."""
        shown: dict[str, str] = {}
        for page in self._all_pages():
            for name, full in {**page.names, **page.types}.items():
                if full not in shown or name == full:
                    shown[full] = name
        return shown

    def _all_pages(self) -> Iterator[Page]:
        for page in chain(*self.groups.values()):
            yield page
            yield from page.inner

    def _page(self, name: str) -> Page:
        module = self.source.modules[name]
        if module.exports:
            return Page(module, self._exported(module))
        inner = [Page(one, self._exported(one) or self._defined(one)) for one in self.source.within(name)]
        return Page(module, self._defined(module), inner=inner)

    def _exported(self, module: Module) -> dict[str, str]:
        found = {}
        for name in module.exports:
            full = self.source.resolve(module, name)
            assert full is not None, f"{module.name} exports {name}, which is not defined or imported"
            # Modules have their own page, and PyTorch's names are documented by PyTorch.
            if full not in self.source.modules and full.startswith(f"{self.source.package}."):
                found[f"{module.name}.{name}"] = full
        return found

    def _defined(self, module: Module) -> dict[str, str]:
        found = {}
        for name, node in module.definitions.items():
            documented = isinstance(node, ast.ClassDef | ast.FunctionDef) or module.comment(name)
            if is_public(name) and documented:
                found[f"{module.name}.{name}"] = f"{module.name}.{name}"
        return found

    def _add_types(self, groups: Mapping[str, list[Page]]) -> list[Page]:
        """Add the types in public signatures to their pages, and return new pages for other packages."""
        pages = {page.module.name: page for top in chain(*groups.values()) for page in (top, *top.inner)}
        others: dict[str, Page] = {}
        done = {full for page in pages.values() for full in page.names.values()}
        waiting = sorted(done)
        while waiting:
            found = self.source.definition(waiting.pop())
            assert found is not None
            for full in sorted(references(Scope(self.source, {}, found[0]), found[2]) - done):
                done.add(full)
                waiting.append(full)
                module = full.rpartition(".")[0]
                part = ".".join(module.split(".")[:2])
                if not self.source.modules[part].is_package:  # a file at the top of the package
                    part = self.source.package
                home = pages.get(module) or pages.get(part) or others.get(part)
                if home is None:
                    home = others[part] = Page(self.source.modules[part])
                home.types[full] = full
        return sorted(others.values(), key=lambda page: page.module.name)

    def _index(self) -> str:
        lines = ["# Reference", "", "All public names, generated from the docstrings.", ""]
        for heading, pages in self.groups.items():
            if pages:
                lines += [f"## {heading}", "", *self._table(pages), "", *_toctree(pages), ""]
        return "\n".join(lines)

    def _table(self, pages: list[Page]) -> list[str]:
        rows = [f"| [`{page.module.name}`]({page.module.name}.md) | {self._summary(page)} |" for page in pages]
        return ["| module | content |", "|---|---|", *rows]

    def _summary(self, page: Page) -> str:
        scope = Scope(self.source, self._shown, page.module)
        return first_sentence(ast.get_docstring(page.module.tree) or "", scope.link)

    def _text(self, page: Page) -> str:
        name = page.module.name
        scope = Scope(self.source, self._shown, page.module)
        # If a package has the same name as a function, links mean the function.
        kind = "currentmodule" if name in self._shown.values() else "module"
        docstring = ast.get_docstring(page.module.tree) or ""
        parts = [f"# {name}", f":::{{py:{kind}}} {name}\n:::", as_markdown(docstring, scope.link)]
        if page.inner:
            parts.append("\n".join(self._table(page.inner)))
        parts += [self._entry(one, full, page) for one, full in page.names.items()]
        if page.types:
            parts.append("## Types" if page.names else "Types in the public signatures of other packages:")
            parts += [self._entry(one, full, page) for one, full in page.types.items()]
        return "\n\n".join(parts) + "\n"

    def _entry(self, name: str, full: str, page: Page) -> str:
        if self._shown[full] != name:
            return same_as(name, self._shown[full])
        found = self.source.definition(full)
        assert found is not None, full
        return directive(Scope(self.source, self._shown, found[0]), name, full)


def _toctree(pages: list[Page]) -> list[str]:
    return [":::{toctree}", ":hidden:", "", *(page.module.name for page in pages), ":::"]
