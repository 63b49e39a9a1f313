"""Parts that pass, fail, hang or say nothing, for the tests of what runs parts."""

from __future__ import annotations

import time

from meshwright_bench.gpu.cases import Case, CaseError, Figures, NotRunError, Setting


def good(setting: Setting) -> list[Case]:
    return [Case("first", lambda: {"speed": 2.0}), Case("second", dict, needs=("no_such_package",))]


def failing(setting: Setting) -> list[Case]:
    def fail() -> Figures:
        raise CaseError(f"wrong in {setting.scratch}")

    return [Case("before", lambda: {"speed": 1.0}), Case("bad", fail), Case("after", lambda: {"speed": 3.0})]


def hanging(setting: Setting) -> list[Case]:
    def hang() -> Figures:
        time.sleep(600)
        return {}

    return [Case("hangs", hang)]


def silent(setting: Setting) -> list[Case]:
    return []


def broken(setting: Setting) -> list[Case]:
    raise RuntimeError("a part that can't start")


def absent(setting: Setting) -> list[Case]:
    def refuse() -> Figures:
        raise NotRunError("no such device")

    return [Case("only", refuse)]
