"""The reference has every public name, links work on the site, and the build fails where one does not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from meshwright_docs import PAGES
from meshwright_docs.links import Links
from meshwright_docs.notebook import notebook_page
from meshwright_docs.prose import as_markdown, first_sentence, split_attributes
from meshwright_docs.reference import FOR_MODELS, MORE_PARTS, SHARED, Reference
from meshwright_docs.source import Source
from tests.docs.notebook import QUICKSTART

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "meshwright"
PARTS = (
    "checkpoint", "cluster", "comm", "config", "dtensor_ops", "errors", "mesh", "models.contract", "models.tasks", "nn",
    "pipeline", "plan", "prove", "reshard", "settings",
)  # fmt: skip
"""Parts that users import from."""

DIRECTIVE = re.compile(
    r'^(?P<colons>:{3,})\{py:(?P<kind>\w+)\} (?P<name>\w+)[^\n]*(?:\n:module: "(?P<module>[\w.]+)")?', re.M
)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return Reference(Source.read(PACKAGE)).pages()


def documented(pages: dict[str, str]) -> set[str]:
    """Full names, those of members with their classes', that the pages have directives for."""
    found, owner = set(), ""
    for text in pages.values():
        for one in DIRECTIVE.finditer(text):
            if one["module"]:
                owner = f"{one['module']}.{one['name']}"
                found.add(owner)
            elif one["kind"] in ("method", "property", "attribute"):
                found.add(f"{owner}.{one['name']}")
        found |= set(re.findall(r'^:canonical: "([\w.]+)"', text, re.M))
    return found


def exported(name: str) -> set[str]:
    """Return what a package gives for each name that its `__init__` has as a string."""
    package = import_module(name)
    assert package.__file__ is not None
    strings = {
        one.value
        for one in ast.walk(ast.parse(Path(package.__file__).read_text("utf-8")))
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.isidentifier()
    }
    public = {one for one in strings if not one.startswith("_") and hasattr(package, one)}
    assert set(getattr(package, "__all__", ())) <= public
    return {f"{name}.{one}" for one in public if f"{name}.{one}" not in sys.modules or callable(getattr(package, one))}


def defined(path: Path) -> set[str]:
    """Public classes and functions of a file, and public methods of the classes; what `__all__` lists, where it is."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__init__")
    body = ast.parse(path.read_text("utf-8")).body
    listed = [ast.literal_eval(one.value) for one in body if isinstance(one, ast.Assign) and is_all(one.targets[0])]
    if listed:
        return {f"{module}.{name}" for name in listed[0]}
    found = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            found.add(f"{module}.{node.name}")
            inner = node.body if isinstance(node, ast.ClassDef) else []
            methods = [one.name for one in inner if isinstance(one, ast.FunctionDef)]
            found |= {f"{module}.{node.name}.{one}" for one in methods if not one.startswith("_")}
    return found


def is_all(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"


@cache
def public_names() -> set[str]:
    """Every name that a user may rely on: what parts export, and all that is public of parts that export nothing."""
    names = exported("meshwright") - {f"meshwright.{part}" for part in PARTS if part not in ("plan", "prove")}
    for part in PARTS:
        folder = PACKAGE / part.replace(".", "/")
        of_part = exported(f"meshwright.{part}") if folder.is_dir() else set()
        if not of_part:
            files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
            of_part = set().union(*(defined(one) for one in files if not is_private(one)))
        names |= of_part
    return names


def is_private(path: Path) -> bool:
    """A private file, or an adapter to private names of PyTorch."""
    parts = path.relative_to(PACKAGE).parts
    return path.name == "private.py" or any(part.startswith("_") and part != "__init__.py" for part in parts)


def test_every_public_name_is_on_a_page(pages):
    names = public_names()
    assert len(names) > 300
    assert sorted(names - documented(pages)) == []


def test_no_private_name_is_on_a_page(pages):
    private = [name for name in documented(pages) if re.search(r"\._(?!_)", name)]
    assert private == []


@pytest.mark.parametrize(
    "name",
    [
        "meshwright.load_config",
        "meshwright.plan",
        "meshwright.pipeline.generate",
        "meshwright.reshard.plan",
        "meshwright.reshard.redistribute",
        "meshwright.comm.compress",
        "meshwright.errors.MeshwrightError",
        "meshwright.models.contract.family.Family",
        "meshwright.models.contract.family.Family.describe",
    ],
)
def test_a_missing_name_is_found(pages, name):
    assert name in public_names()
    module, _, short = name.rpartition(".")
    without = {
        docname: re.sub(rf"^(:+)\{{py:\w+\}} {short}\b(?!_)", r"\1{py:data} other", text, flags=re.M)
        for docname, text in pages.items()
    }
    assert name in public_names() - documented(without)


def test_a_page_that_is_missing_is_found(pages):
    without = {docname: text for docname, text in pages.items() if not docname.endswith(".models.contract.task")}
    assert public_names() - documented(without) == {
        name for name in public_names() if name.startswith("meshwright.models.contract.task.")
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[a](planning.md), [b](reshard.svg)", "[a](planning.md), [b](reshard.svg)"),
        ("[a](planning.md#two-words)", "[a](planning.md#two-words)"),
        ("[a](../README.md#run) ![c](x.png)", "[a](project/readme.md#run) ![c](x.png)"),
        ("[a](examples/quickstart.ipynb)", "[a](project/quickstart.md)"),
        ("[a](../src/meshwright/api.py)", "[a](../src/meshwright/api.py)"),
        ("[a](../src/meshwright/config/presets)", "a (`src/meshwright/config/presets`)"),
        ("[a](https://example.org/x) [b](#here)", "[a](https://example.org/x) [b](#here)"),
    ],
)
def test_links_are_those_of_the_site(line, expected):
    links = Links(ROOT, PAGES)
    assert links.moved(line, "docs", "docs") == expected
    fenced = f"```text\n{line}\n```\n"
    assert links.moved(fenced, "docs", "docs") == fenced


def test_links_of_a_file_elsewhere_are_those_of_its_page():
    text = "[a](docs/planning.md) ![b](docs/digits.png) [c](CHANGELOG.md) [d](LICENSE)"
    moved = "[a](../planning.md) ![b](../digits.png) [c](changes.md) [d](../../LICENSE)"
    assert Links(ROOT, PAGES).moved(text, "", "docs/project") == moved


def test_the_notebook_is_a_page_with_its_outputs():
    files = notebook_page(QUICKSTART, "project/quickstart")
    page = files["project/quickstart.md"].decode()
    assert page.startswith("# Quickstart")
    assert "{download}`quickstart.ipynb <../examples/quickstart.ipynb>`" in page
    assert "````python\nproof = meshwright.prove(config)" in page
    assert page.endswith("PROVED\n````\n")
    (image,) = set(files) - {"project/quickstart.md"}
    assert f"]({Path(image).name})" in page
    assert files[image].startswith(b"\x89PNG")


DOCSTRING = """Give `x`, as `Thing.y` does. More of it.

    ```python
    `Thing`  # no link here
    ```

    Args:
        x: first, of a `Thing`,
            and on.
        **more: others.

    Raises:
        Error, Thing: when not.

    Returns:
        all of it.
    """
MARKDOWN = """Give `x`, as {py:obj}`Thing.y <a.Thing.y>` does. More of it.

```python
`Thing`  # no link here
```


**Parameters**

- ``x``: first, of a {py:obj}`Thing <a.Thing>`,
  and on.
- ``**more``: others.


**Raises**

- `Error`, {py:obj}`Thing <a.Thing>`: when not.


**Returns**

all of it."""


def test_docstrings_become_markdown():
    def link(name: str) -> str | None:
        return f"a.{name}" if name.startswith("Thing") else None

    assert as_markdown(DOCSTRING, link) == MARKDOWN
    assert first_sentence(DOCSTRING, link) == "Give `x`, as {py:obj}`Thing.y <a.Thing.y>` does"


def test_attributes_go_to_where_they_are_listed():
    docstring = "A.\n\nAttributes:\n    x, y: sizes\n        of it.\n    z: more.\n\nRaises:\n    Error: no."
    rest, said = split_attributes(docstring)
    assert rest == "A.\n\nRaises:\n    Error: no."
    assert said == {"x": "sizes\nof it.", "y": "sizes\nof it.", "z": "more."}


FAULTS = {
    "file": ("[a](no-such-page.md)", "no-such-page.md"),
    "anchor": ("[a](planning.md#no-such-heading)", "no-such-heading"),
    "own-anchor": ("[a](#no-such-place)", "no-such-place"),
    "image": ("![a](no-such-image.svg)", "no-such-image.svg"),
    "repository": ("[a](../src/no_such_file.py)", "no_such_file.py"),
    "name": ("{py:obj}`meshwright.no_such_name`", "meshwright.no_such_name"),
    "alone": ("on no list", "alone.md"),
}


def test_the_build_fails_where_a_link_is_broken(tmp_path):
    """A small site: `make docs` builds the project's own, where every warning is an error too."""
    docs, package = tmp_path / "docs", tmp_path / "src" / "meshwright"
    for part in (".", *(one.replace(".", "/") for one in ("models", *MORE_PARTS, *FOR_MODELS, *SHARED))):
        (package / part).mkdir(parents=True, exist_ok=True)
        (package / part / "__init__.py").write_text(f'"""The part {part}."""\n')
    (package / "__init__.py").write_text('"""A package."""\n\n\nclass Thing:\n    """A thing."""\n')
    for name in ("conf.py", "_ext", "digits.png", "examples/quickstart.ipynb"):
        copy = shutil.copytree if (ROOT / "docs" / name).is_dir() else shutil.copy
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / "docs" / name, docs / name)
    (tmp_path / "README.md").write_text("# Small\n\n[a](docs/planning.md)\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n")
    right = "[a](#a-heading) ![b](digits.png) [c](../README.md) [d](../src/meshwright/__init__.py)"
    for name in (own := ("planning", "running", "proving")):  # the notebook has links to the last two
        (docs / f"{name}.md").write_text(f"# A page\n\n## A heading\n\n{right} {{py:obj}}`meshwright.Thing`\n")
    for name, (text, _) in FAULTS.items():
        (docs / f"fault-{name}.md").write_text(f"# {name}\n\n{text}\n")
    pages = [f"fault-{name}" for name in FAULTS if name != "alone"]
    pages += [*own, *PAGES.values(), "reference/index"]
    (docs / "index.md").write_text("\n".join(["# Small", "", "```{toctree}", *pages, "```", ""]))
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "dummy", "docs", "build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    for name, (_, words) in FAULTS.items():
        assert any(f"fault-{name}.md" in line and words in line for line in warnings), (name, done.stderr)
    assert len(warnings) == len(FAULTS), done.stderr
