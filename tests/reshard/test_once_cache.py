"""One computation a key from many threads, no waiting for ever, bounded."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.reshard.planner.plan import OnceCache

LIMIT_S = 60
"""For what is over in milliseconds, on a loaded machine too."""


def test_one_computation_from_sixteen_threads() -> None:
    cache, counts, start = OnceCache[int](100), Counter(), threading.Barrier(16)

    def compute(key: int) -> int:
        counts[key] += 1
        time.sleep(0.002)
        return key * key

    def work(_: int) -> list[int]:
        start.wait()
        return [cache.get(key, lambda key=key: compute(key)) for key in range(10)]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [[key * key for key in range(10)]] * 16
    assert counts == dict.fromkeys(range(10), 1)


def test_the_least_recently_used_goes_first() -> None:
    cache = OnceCache[str](2)
    for key in "aba":
        cache.get(key, lambda key=key: key)
    cache.get("c", lambda: "c")
    assert len(cache) == 2
    assert cache.get("a", lambda: "new") == "a" and cache.get("b", lambda: "new") == "new"
    cache.clear()
    assert len(cache) == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_lets_those_go_on_who_wait(error: type[BaseException]) -> None:
    cache, inside, waits = OnceCache[int](4), threading.Event(), threading.Event()

    class Noted(threading.Event):
        """Says when somebody is about to wait for it."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def fail() -> int:
        cache._pending["key"].done = Noted()
        inside.set()
        assert waits.wait(LIMIT_S)
        raise error

    def first() -> None:
        with pytest.raises(error):
            cache.get("key", fail)

    def second() -> int:
        assert inside.wait(LIMIT_S)
        return cache.get("key", lambda: 7)

    failed, found = [], []
    threads = [
        threading.Thread(target=lambda: failed.append(first()), daemon=True),
        threading.Thread(target=lambda: found.append(second()), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == [7] and failed == [None]


def test_a_computation_may_ask_for_others_and_for_itself() -> None:
    cache = OnceCache[int](4)
    assert cache.get("a", lambda: cache.get("b", lambda: 1) + cache.get("a", lambda: 2)) == 3
    assert cache.get("a", lambda: 0) == 3


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    cache, inside, go = OnceCache[int](4), threading.Event(), threading.Event()

    def slow() -> int:
        inside.set()
        go.wait(LIMIT_S)
        return 1

    thread = threading.Thread(target=cache.get, args=("key", slow))
    thread.start()
    assert inside.wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = cache.get("key", lambda: 5)
        finally:  # whatever happens, no second pytest goes on from here
            os._exit(code)
    go.set()
    thread.join(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    found, status = os.waitpid(child, os.WNOHANG)
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found, status = os.waitpid(child, os.WNOHANG)
    if not found:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found and os.waitstatus_to_exitcode(status) == 5
