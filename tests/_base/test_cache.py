"""A dict that forgets its oldest entries, also where threads share it."""

import sys
import threading

from mpidist._base.cache import Cache


def test_the_oldest_is_dropped():
    cache = Cache(3)
    for k in range(5):
        cache[k] = -k
        cache[k] = k  # in its place
    assert dict(cache) == {2: 2, 3: 3, 4: 4}
    cache[2] = 7
    cache[5] = 5
    assert list(cache) == [3, 4, 5]


def test_threads_may_share_one():
    cache, errors = Cache(8), []

    def fill(first):
        try:
            for k in range(first, first + 5000):
                cache[k] = k
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fill, args=(n * 10**6,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert len(cache) <= 8 + len(threads)
