"""Functions that commands carry: which travel as their code, and which do not."""

import functools
import math
import pickle
import types

import numpy as np
import pytest

from mpidist import _functions


def travel(function, values=(np.ndarray, np.generic)):
    """Return what another rank makes of a function; None if it is not simple."""
    reduced = _functions.reduce_simple(function, values)
    if reduced is None:
        return None
    rebuild, arguments = reduced
    return rebuild(*pickle.loads(pickle.dumps(arguments)))


def made_by(text, **names):
    """Return ``f`` of a program, whose globals these are."""
    names["__name__"] = "a_program"
    exec(text, names)
    return names["f"]


HALF = 0.5


def test_what_closes_over_nothing():
    here = travel(lambda v, o: v - np.float32(0.5) * o)
    assert here(3.0, 2.0) == 2.0
    assert here.__module__ == __name__
    assert here.__qualname__.endswith("<lambda>")


def test_builtins_nested_functions_and_generators():
    def outer(values):
        def inner(x):
            return math.sqrt(x) + len(values)

        yield from sorted(inner(x) for x in values)

    assert list(travel(outer)([4.0, 1.0])) == [3.0, 4.0]


def test_numbers_strings_and_arrays_that_it_closes_over():
    rate, name, weights = 0.25, "w", np.arange(3.0)

    def scale(x, times=2, *, plus=None):
        return {name: x * rate * times + weights}

    assert travel(scale) is None  # keyword defaults

    def plain(x, times=2):
        return {name: x * rate * times + weights}

    (key, value), *_ = travel(plain)(np.ones(3)).items()
    assert key == "w"
    np.testing.assert_array_equal(value, [0.5, 1.5, 2.5])


def test_each_time_with_what_it_closes_over_now():
    results = []
    for rate in (1.0, 2.0, 3.0):
        results.append(travel(lambda x, rate=rate: x * rate)(10.0))

        def closure(x):
            return x * rate  # noqa: B023 - that is the point

        results.append(travel(closure)(10.0))
    assert results == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]


def test_a_closure_that_counts_starts_anew():
    count = 0

    def counting():
        nonlocal count
        count += 1
        return count

    assert counting() == 1
    assert [travel(counting)() for _ in range(2)] == [2, 2]


class Held:
    def __init__(self):
        self.value = 1

    def method(self):
        return self.value


RECURSIVE = "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\n"
WRITES = "def f():\n    global counter\n    counter = 1\n"
SHADOWED = "def f(x):\n    return len(x)\n"
held = Held()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * HALF,  # a global that is no module
        lambda: held.value,
        lambda: travel,
        made_by(RECURSIVE),
        made_by(WRITES),
        made_by(SHADOWED, len=lambda x: 42),
        made_by("def f():\n    return m.x\n", m=types.ModuleType("not_there")),
    ],
)
def test_others_are_pickled(function):
    assert travel(function) is None


def test_a_function_with_attributes_is_pickled():
    def function():
        return function.calls

    function.calls = 3
    assert travel(function) is None
    assert travel(functools.wraps(function)(lambda: 1)) is None


def test_a_closure_over_an_object_is_pickled():
    mine = Held()
    assert travel(lambda: mine.value) is None
    assert travel(lambda f=mine.method: f()) is None


def test_modules_by_any_name():
    import os.path as paths

    assert made_by("def f(): return p.sep", p=paths)() == "/"
    assert travel(made_by("def f(): return p.sep", p=paths))() == "/"


def test_many_functions_do_not_fill_the_memory():
    for number in range(600):
        function = made_by(f"def f(x): return x + {number}")
        assert travel(function)(1) == number + 1
    assert len(_functions._known) <= 256
    assert len(_functions._received) <= 256
