"""One computation a key from many threads, no waiting for ever, bounded."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.reshard.cache import OnceCache


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

    def fail() -> int:
        inside.set()
        waits.wait(10)
        raise error

    def first() -> None:
        with pytest.raises(error):
            cache.get("key", fail)

    def second() -> int:
        inside.wait(10)
        threading.Timer(0.01, waits.set).start()
        return cache.get("key", lambda: 7)

    with ThreadPoolExecutor(2) as pool:
        a, b = pool.submit(first), pool.submit(second)
        assert b.result(10) == 7
        a.result(10)


def test_a_computation_may_ask_for_others_and_for_itself() -> None:
    cache = OnceCache[int](4)
    assert cache.get("a", lambda: cache.get("b", lambda: 1) + cache.get("a", lambda: 2)) == 3
    assert cache.get("a", lambda: 0) == 3


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    cache, inside, go = OnceCache[int](4), threading.Event(), threading.Event()

    def slow() -> int:
        inside.set()
        go.wait(10)
        return 1

    thread = threading.Thread(target=cache.get, args=("key", slow))
    thread.start()
    inside.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(cache.get("key", lambda: 5))
    go.set()
    thread.join(10)
    for _ in range(500):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert found and os.waitstatus_to_exitcode(status) == 5
