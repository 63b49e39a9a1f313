"""Read documents from the user's own code, `data.source=package.module:Source`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from meshwright.data.sources.source_text import EmptyTexts
from meshwright.data.text_documents import BOM, damage
from meshwright.errors import DataError, MeshwrightError
from meshwright.settings.import_object import import_object, raised

RULE = "package.module:Source is a class or function that takes no argument and gives documents by index"


@runtime_checkable
class Documents(Protocol):
    """Give texts by index. Each process makes an object of its own, and one reads all texts once, into the cache.

    Args:
        identity: names the texts in the cache: another one wherever a text differs, such as a version, or a file's size
            and time.
    """

    identity: str

    def __len__(self) -> int:
        """Return the number of documents."""

    def __getitem__(self, index: int) -> str:
        """Return the text of a document, given its index from zero."""


def open_documents(source: str) -> Documents:
    """Make the documents that a source names.

    Raises:
        ConfigError: the module can't be imported, or has no such object.
        DataError: the object raises, or gives no documents.
    """
    make = import_object(source, key="data.source", rule=RULE, format_setting=lambda path: f"data.source={path}")
    try:
        found = make()
        lacks = [name for name in ("identity", "__len__", "__getitem__") if not hasattr(found, name)]
        if lacks:
            raise _bad(source, f"what {source} gives has no {' and no '.join(lacks)}")
        identity, number = found.identity, len(found)
    except MeshwrightError:
        raise
    except Exception as error:
        raise _bad(source, f"{source} raises {raised(error)}") from error
    if not isinstance(identity, str) or not identity:
        raise _bad(source, f"identity is {identity!r}, and names nothing in the cache")
    if not number:
        raise _bad(source, f"{source} has no documents")
    documents: Documents = found
    return documents


def read_texts(documents: Documents, indices: Iterable[int], empty: EmptyTexts, *, source: str) -> Iterator[str]:
    """Yield the non-empty texts of documents, and count the empty ones.

    Raises:
        DataError: a document can't be read or isn't a text; the message has its index.
    """
    for index in indices:
        place = f"{source}[{index}]"
        try:
            text: Any = documents[index]
        except Exception as error:
            raise _bad(source, f"{place} raises {raised(error)}") from error
        if not isinstance(text, str):
            raise _bad(source, f"{place} is of type {type(text).__name__}, not str")
        if found_damage := damage(text):
            raise _bad(source, f"{place} has {found_damage}")
        if empty.keeps(text := text.removeprefix(BOM), place):
            yield text


def _bad(source: str, what: str) -> DataError:
    fix = "correct it, as in docs/examples/own_data.py: identity, __len__() and __getitem__(index)"
    return DataError(what, where=f"data.source, {source}", rule=RULE, fix=fix)
