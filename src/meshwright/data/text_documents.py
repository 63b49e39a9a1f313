"""Text files as a list of documents, and the hold-out rule for validation.

Hold-out rule: a file is held out if the SHA-256 of its name, as a number, is divisible by ten, provided this selects
at least 5 non-empty files; otherwise (few files) the last tenth of every file is held out. A name is the path relative
to the corpus root with forward slashes, so the choice is the same on every machine, and with many files, adding one
does not reassign others.

Compressed files are read as what they hold: `a.jsonl.gz` is JSON lines and `b.txt.xz` text. Zstandard isn't in Python's
library before 3.14: the optional `pyarrow` package, which comes with `datasets`, reads it.
"""

from __future__ import annotations

import bz2
import codecs
import difflib
import glob
import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import shlex
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, cast

from meshwright.errors import DataError
from meshwright.settings.import_object import OBJECT_NAME, download_fix

STDLIB = "stdlib"
DIGITS, DIGITS_VIDEO = "digits", "digits-video"
"""Sources of images that are no files."""
MIN_HELD_OUT_FILES = 5
MAX_FOLDERS_SEARCHED = 1000
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".json", ".jsonl", ".ndjson",
     ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".toml", ".yaml",
     ".yml", ".org", ".parquet")
)  # fmt: skip
"""Suffixes of files that are suggested as sources."""
OTHER_SOURCE = f"a pattern that matches text files, or data.source={STDLIB}"
HOLD_OUT_DIVISOR = 10
"""One in how many is held out for validation."""
DATASET_STATE, DATASET_INFO, DATASET_SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files by which a folder is known as a saved dataset, or as several."""
BOM = "\ufeff"
"""Byte order mark, which is no part of a text that starts with it."""
_OTHER_UNICODE = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
                  codecs.BOM_UTF16_BE: "UTF-16"}  # fmt: skip
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Document:
    """A text file: its path, name in the corpus, size in bytes and modification time."""

    path: str
    name: str
    num_bytes: int
    mtime_ns: int


class Extent(Enum):
    """The portion of a document in a split of the corpus."""

    FULL = "full"
    HEAD = "all but the last tenth"
    TAIL = "the last tenth"


@dataclass(frozen=True, slots=True)
class TextSlice:
    """A document or a portion of one."""

    document: Document
    extent: Extent


def is_own(source: str) -> bool:
    """Return True if a source names an object in the user's code, rather than files."""
    return OBJECT_NAME.fullmatch(source) is not None and not os.path.exists(source)


def is_saved_dataset(source: str) -> bool:
    """Return True if a source is a folder with a saved dataset, or with several in one folder each."""
    folder = Path(os.path.expanduser(source))
    is_one = (folder / DATASET_STATE).is_file() and (folder / DATASET_INFO).is_file()
    return is_one or (folder / DATASET_SPLITS).is_file()


def is_parquet(path: str) -> bool:
    """Return True if a file has the suffix of Parquet, or that of one compressed as a whole, which isn't read."""
    return contents_name(path).lower().endswith(".parquet")


def is_record_file(path: str) -> bool:
    """Return True if a file has the suffix of Parquet or of JSON lines, whether it is compressed or not."""
    return is_parquet(path) or contents_name(path).lower().endswith((".jsonl", ".ndjson"))


def list_documents(source: str) -> list[Document]:
    """List the files of a source, `stdlib` or a glob (`**` and `~` are expanded), sorted by name.

    Raises:
        DataError: nothing matches, or a file cannot be read.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in _NOT_STDLIB]
            paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    else:
        root, paths = find_files(source)
    if not paths:
        raise _nothing_found(source, root)
    documents = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable_file(path, source, error) from None
        documents.append(Document(path, relative_name(path, root), status.st_size, status.st_mtime_ns))
    return sorted(documents, key=lambda document: document.name)


def find_files(source: str) -> tuple[Path, list[str]]:
    """Return the root of a glob (`**` and `~` are expanded), to which names are relative, and its files, unordered.

    A file that several links or nested `**` lead to is listed once, by its own path if that matches.

    Raises:
        DataError: a link leads nowhere, or to a folder that it is in.
    """
    pattern = os.path.expanduser(source)
    # An existing path is taken literally: it may contain brackets.
    matches = [pattern] if os.path.isfile(pattern) else glob.iglob(pattern, recursive=True)
    return _fixed_root(pattern), _without_repeats(matches, source)


def _without_repeats(paths: Iterable[str], source: str) -> list[str]:
    """Return the files among paths, one path for each: its own, else the first by name."""
    folders: dict[Path, str] = {}
    found: dict[str, tuple[bool, str]] = {}
    for path in paths:
        folder = Path(path).parent
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
            if "**" in source and folders[folder] in map(os.path.realpath, folder.parents):
                for link in filter(Path.is_symlink, (folder, *folder.parents)):
                    raise _bad_link(link, source, "a folder that it is in")
        is_link = os.path.islink(path)
        if is_link and not os.path.exists(path):
            raise _bad_link(path, source, "no file")
        if os.path.isfile(path):
            file = os.path.realpath(path) if is_link else os.path.join(folders[folder], os.path.basename(path))
            rank = os.path.abspath(path) != file, path
            found[file] = min(rank, found.get(file, rank))
    return [path for _, path in found.values()]


def split(documents: list[Document]) -> tuple[list[TextSlice], list[TextSlice]]:
    """Split documents into training and held-out slices, by the rule at the top of this file."""
    kept = [document for document in documents if not is_held_out(document.name)]
    held_out = [document for document in documents if is_held_out(document.name)]
    if sum(document.num_bytes > 0 for document in held_out) >= MIN_HELD_OUT_FILES:
        return [TextSlice(item, Extent.FULL) for item in kept], [TextSlice(item, Extent.FULL) for item in held_out]
    return [TextSlice(item, Extent.HEAD) for item in documents], [TextSlice(item, Extent.TAIL) for item in documents]


@contextmanager
def opened(path: str, source: str) -> Iterator[BufferedReader]:
    """Open a file of a source to read the text that it holds, decompressed and without a byte order mark.

    Raises:
        DataError: it can't be read, here or in the body, or has another Unicode encoding than UTF-8.
    """
    try:
        with open_contents(path) as file:
            start = file.peek(4)
            if name := next((name for mark, name in _OTHER_UNICODE.items() if start.startswith(mark)), None):
                raise DataError(
                    f"{path} is in {name}, by its first bytes",
                    where=f"data.source, {path}",
                    rule="text is in UTF-8",
                    fix=recode(path, name),
                )
            if start.startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield file
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or not suffix_of_compression(path)):
            raise unreadable_file(path, source, error) from None
        raise DataError(
            f"{path} can't be decompressed to its end: {error}",
            where=f"data.source, {source}",
            rule="compressed files are whole, and compressed as their suffix says",
            fix="fetch the file again, or a data.source without it",
        ) from None


def damage(text: str) -> str:
    """Return what a text has that no document may have; empty if it has nothing of the kind."""
    if "\0" in text:
        return "a zero character, which separates documents"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "half a surrogate pair, which no UTF-8 has"
    return ""


def name_hash(name: str) -> int:
    """Return the first 64 bits of the SHA-256 of a file's name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little")


def relative_name(path: str, root: Path) -> str:
    """Return a file's path relative to the corpus root, with forward slashes."""
    return Path(os.path.relpath(path, root)).as_posix()


def is_held_out(name: str) -> bool:
    """Return True if the file of this name is held out when the rule selects whole files."""
    return name_hash(name) % HOLD_OUT_DIVISOR == 0


def unreadable_file(path: str | Path, source: str, error: OSError) -> DataError:
    """Return the error for a file that exists but cannot be read."""
    return DataError(
        f"{path} cannot be read: {error.strerror or error}",
        where=f"data.source, {source}",
        rule="every file of the source is readable",
        fix=f"chmod u+r {shlex.quote(str(path))}, or a data.source without it",
    )


def nearest_existing_directory(path: str | Path) -> Path:
    """Return the deepest existing ancestor directory of `path`."""
    directory = Path(os.path.abspath(path))
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    return directory


def similar_file(path: str | Path) -> Path | None:
    """Return the file with the most similar name in the directory of the missing `path`, or None."""
    parent = Path(os.path.abspath(path)).parent
    names = sorted(entry.name for entry in os.scandir(parent) if entry.is_file()) if parent.is_dir() else []
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    return parent / near[0] if near else None


def _fixed_root(pattern: str) -> Path:
    """Return the common root of a glob's matches: its path up to the first component with a wildcard."""
    if os.path.isfile(pattern) or not glob.has_magic(pattern):
        return Path(pattern).parent
    parts = Path(pattern).parts
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first])


def _bad_link(path: str | Path, source: str, target: str) -> DataError:
    return DataError(
        f"{path} is a link to {target}",
        where=f"data.source, {source}",
        rule="every link that the source matches leads to a file or a folder, and no folder is in itself",
        fix=f"rm {shlex.quote(str(path))}, or a data.source without it",
    )


def _glob_of_texts(folder: str | Path) -> str | None:
    """Return a glob of the text files in a folder: those with the suffix that most of them have; None without any."""
    found: Counter[str] = Counter()
    for _, folders, names in islice(os.walk(folder), MAX_FOLDERS_SEARCHED):
        # As `**`, which doesn't search hidden folders.
        folders[:] = [name for name in folders if not name.startswith(".")]
        kinds = ((name, os.path.splitext(contents_name(name))[1]) for name in names if not name.startswith("."))
        found.update(kind + suffix_of_compression(name) for name, kind in kinds if kind.lower() in TEXT_SUFFIXES)
    for suffix, _ in found.most_common(1):
        pattern = os.path.join(glob.escape(str(folder)), "**", f"*{suffix}")
        if any(os.path.isfile(path) for path in glob.iglob(pattern, recursive=True)):
            return pattern
    return None


def _nothing_found(source: str, root: Path) -> DataError:
    if source == STDLIB:
        return DataError(
            f"no Python source files in {root}",
            where="data.source, stdlib",
            rule="stdlib reads the .py files of the running Python's standard library",
            fix="data.source='<directory>/**/*.txt'",
        )
    pattern = os.path.expanduser(source)
    near = similar_file(pattern)
    if os.path.isdir(pattern):
        found = _glob_of_texts(pattern)
        what, fix = f"{source} is a directory", f"data.source={shlex.quote(found)}" if found else OTHER_SOURCE
    elif "[" in pattern and any(glob.iglob(literal := pattern.replace("[", "[[]"), recursive=True)):
        what = f"no file matches {source}, in which [ starts a list of characters"
        fix = f"data.source={shlex.quote(literal)}"
    elif glob.has_magic(pattern):
        found = _glob_of_texts(root) if root.is_dir() else None
        fix = f"data.source={shlex.quote(found)}, or data.source={STDLIB}" if found else OTHER_SOURCE
        what = f"no file matches {source}"
    else:
        download = download_fix(source, "data.source={}", kind="--repo-type dataset")
        what, fix = f"file not found: {source}", download or f"data.source={shlex.quote(str(near or STDLIB))}"
    return DataError(
        f"{what} (the nearest existing directory is {nearest_existing_directory(pattern)})",
        where=f"data.source, {source}",
        rule="a source is stdlib, a glob of files of text, JSON lines or Parquet, a .npy or .bin token file, the "
        "folder of a saved dataset, or your own package.module:Source",
        fix=fix,
    )


UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}
"""Commands that decompress files of these suffixes."""
DAMAGE = (EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises, besides an OSError without a number."""


def suffix_of_compression(path: str) -> str:
    """Return the suffix by which a file is compressed; empty if it isn't."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix if suffix in UNPACK else ""


def contents_name(path: str) -> str:
    """Return the path of a file without the suffix by which it is compressed."""
    return path[: len(path) - len(suffix_of_compression(path))]


def recode(path: str, encoding: str = "<its encoding>") -> str:
    """Return the commands that write a file of text in UTF-8 to another, which unpack it first if it is compressed."""
    suffix = suffix_of_compression(path)
    first = f"{UNPACK[suffix]} {shlex.quote(path)}, then " if suffix else ""
    return f"{first}iconv -f {encoding} -t UTF-8 {shlex.quote(contents_name(path))} > <another file>"


def open_contents(path: str) -> io.BufferedReader:
    """Open a file to read what it holds, decompressed as it is read.

    Raises:
        DataError: it is compressed by Zstandard, and `pyarrow` isn't installed.
    """
    suffix = suffix_of_compression(path)
    if suffix == ".zst":
        require_datasets(path, package="pyarrow", purpose="a .zst file")
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(path, compression="zstd"))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(io.BufferedReader, openers.get(suffix, open)(path, "rb"))  # all of them can peek


def require_datasets(source: str, *, package: str, purpose: str) -> None:
    """Raise a DataError if a package that comes with the extra `datasets` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise DataError(
            f"the {package} package is not installed",
            where=f"data.source, {source}",
            rule=f"reading {purpose} requires the {package} package",
            fix=f"pip install {package}",
        )
