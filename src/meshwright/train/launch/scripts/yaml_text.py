"""Kubernetes manifests as YAML text, with scripts as readable blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Dumper that writes strings of several lines as literal blocks, and every value where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return mappings of plain values as YAML documents."""
    text: str = yaml.dump_all(map(dict, documents), Dumper=_Dumper, sort_keys=False, width=1000)
    return text
