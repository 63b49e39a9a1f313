"""What is written as TOML is read as the same values."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from meshwright.settings.toml import values_to_toml


@dataclass(frozen=True)
class Pair:
    first: float
    second: str | None = None


def test_values_come_back() -> None:
    values = {
        "text": 'a "b" \\ \n\t \x7f é', "yes": True, "count": 3, "small": 1e-5, "large": 9.89e14, "odd": 1e9 + 1 / 3,
        "list": ["x", "y"], "layers.*.up": "column",
        "outer": {"inner": {"layers.*": 1, "empty": {}}}, "empty": {},
    }  # fmt: skip
    assert tomllib.loads(values_to_toml(values)) == values


def test_dataclasses_are_tables_and_what_is_none_is_left_out() -> None:
    found = tomllib.loads(values_to_toml({"none": None, "pair": Pair(1.5), "tuple": (1, 2)}))
    assert found == {"pair": {"first": 1.5}, "tuple": [1, 2]}
