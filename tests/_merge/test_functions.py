"""Functions that commands carry: what is sent, and what each rank has."""

import collections as module
import functools
import math
import pickle
import sys
import types

import numpy as np
import pytest

import mpidist
from mpidist._merge import commands, object_parts
from mpidist._merge.object_names import Names
from mpidist._strategy.strategy import group_of


class Wire:
    """Rank 0 and another rank, in one process."""

    def __init__(self, names=None, others=None):
        group = group_of(mpidist.get_strategy())
        self.writer = commands.Writer(group, self._no_values, names)
        self.reader = commands.Reader(group, others)
        self.content = None

    @staticmethod
    def _no_values(value):
        raise AssertionError(f"{value!r} is no value of these tests")

    def send(self, function):
        """Return what the other rank gets; keep what was sent."""
        self.content, arrays = self.writer.write((function,))
        message = pickle.dumps(("some operation", (), self.content))
        name, dropped, received = pickle.loads(message)
        assert (name, dropped) == ("some operation", ())
        (found,) = self.reader.read(received, arrays)
        return found

    def references(self, function):
        """Return the references that are sent for a function."""
        self.send(function)
        return self.content[1]


def travel(function):
    return Wire().send(function)


def made_by(text, **names):
    """Return ``f`` of a program, whose globals these are, and that is no module."""
    names["__name__"] = "a_program"
    exec(text, names)
    return names["f"]


HALF = 0.5
counter = 0


class Held:
    def __init__(self):
        self.value = 1

    def method(self):
        return self.value


held = Held()


def test_what_is_sent_of_a_function():
    """Of one of a module its name; of others the code, names and attributes."""

    def difference(v, o):
        """Subtract."""
        return v - np.float32(0.5) * o

    difference.calls = 3
    there = travel(difference)
    assert there is not difference
    assert (there(3.0, 2.0), there.calls, there.__doc__) == (2.0, 3, "Subtract.")
    assert there.__module__ == __name__
    assert there.__qualname__.endswith("<locals>.difference")

    @functools.wraps(difference)
    def wrapper(x):
        return difference(x, 2.0) + 1

    there = travel(wrapper)
    assert (there.__name__, there(3.0)) == ("difference", 3.0)
    assert there.__wrapped__(3.0, 2.0) == 2.0
    for function in (made_by, np.linalg.norm, math.sqrt, Wire.send):
        assert travel(function) is function
    assert Wire().references(made_by) == [("global", __name__, "made_by")]


def test_globals_are_those_of_the_module(monkeypatch):
    """Whatever the code does with them."""

    def evaluates(x):
        return eval("np.sum(x)") + globals()["HALF"]

    def imports(x):
        from math import sqrt

        return sqrt(x) * HALF

    def writes():
        global counter
        counter += 1
        return counter

    class Base:
        def value(self):
            return HALF

    class Derived(Base):
        def __init__(self):
            super().__init__()

        def value(self):
            return super().value() + 1

    assert travel(evaluates)([1, 2]) == 3.5
    assert travel(imports)(16.0) == 2.0
    before = counter
    assert travel(writes)() == before + 1 == counter
    assert travel(lambda: Derived().value() + held.value)() == 2.5
    for function in (evaluates, imports, writes):
        assert travel(function).__globals__ is globals()
        assert [kind for kind, *_ in Wire().references(function)] == ["function"]
    module = types.ModuleType("a-script.py")  # of any name
    exec("number = 5\ndef make(): return lambda: number\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "a-script.py", module)
    assert travel(module.make()).__globals__ is module.__dict__
    assert travel(module.make())() == 5


def test_globals_that_are_no_module():
    """Copied with each call, as far as the code mentions them; merge_fn's are not.

    Of a program that `exec` runs each rank has globals of its own.
    """
    function = made_by("def f(x): return m.sqrt(x) * k", m=math, k=2.0)
    wire = Wire()
    assert wire.send(function)(4.0) == 4.0
    function.__globals__["k"] = 3.0
    assert wire.send(function)(4.0) == 6.0
    assert travel(made_by("def f(n): return 1 if n < 2 else n * f(n - 1)"))(4) == 24
    text = "def f():\n    return lambda: eval('number')\n"
    here, there = made_by(text, number=1), made_by(text, number=2)
    names = [Names(f) for f in (here, there)]
    assert Wire(*names).send(here())() == 2


def test_a_module_that_is_not_there():
    with pytest.raises(AttributeError, match="not defined in the program"):
        object_parts.lookup("__main__", "nothing_there")
    with pytest.raises(ModuleNotFoundError):
        object_parts.lookup("no_such_module_at_all", "x")


def test_each_time_as_it_is_now():
    wire = Wire()
    for rate in (1.0, 2.0, 3.0):
        assert wire.send(lambda x, rate=rate: x * rate)(10.0) == 10.0 * rate

        def closure(x):
            return x * rate  # noqa: B023 - that is the point

        assert wire.send(closure)(10.0) == 10.0 * rate

    def function(x, plus=1):
        return x + plus

    assert wire.send(function)(1) == 2
    function.__defaults__ = (10,)
    assert wire.send(function)(1) == 11
    function.__code__ = (lambda x, plus: x - plus).__code__
    assert wire.send(function)(1) == -9
    function.__kwdefaults__ = {}
    function.mark = 5
    assert wire.send(function).mark == 5


# --- what it closes over --------------------------------------------------------------


def test_numbers_strings_and_arrays():
    rate, name, weights, small = 0.25, "w", np.arange(30.0), np.float32(0.1)

    def scale(x, times=2, *, plus=1):
        return {name: x * rate * times + plus + weights[:3] + small - small}

    (key, value), *_ = travel(scale)(np.ones(3)).items()
    assert key == "w"
    np.testing.assert_array_equal(value, [1.5, 2.5, 3.5])
    got = travel(lambda: small)()
    assert type(got) is np.float32
    assert got == small


def test_functions():
    """Nested ones, generators, itself, and two that refer to each other."""

    def outer(values):
        def inner(x):
            return math.sqrt(x) + len(values)

        yield from sorted(inner(x) for x in values)

    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert list(travel(outer)([4.0, 1.0])) == [3.0, 4.0]
    assert travel(factorial)(5) == 120
    assert travel(even)(4)
    assert not travel(even)(5)


def test_what_is_there_twice_stays_one():
    log, count = [], 0
    function, x = (lambda: 3), np.ones(3)

    def add(x):
        log.append(x)

    def both(x):
        add(x)
        return log

    def counting():
        nonlocal count
        count += 1
        return count

    one, other, a, b = Wire().send((function, function, x, x))
    assert one is other
    assert a is b
    assert (one(), a.tolist()) == (3, [1.0] * 3)
    assert travel(both)(3) == [3]
    assert log == []
    assert counting() == 1
    assert [travel(counting)() for _ in range(2)] == [2, 2]  # each time anew
    count_one, read = Wire().send((counting, lambda: [count, counting]))
    assert [count_one(), count_one(), read(), count] == [2, 3, [3, count_one], 1]


def test_an_empty_cell():
    def make():
        def function():
            return later

        if False:
            later = 1
        return function

    with pytest.raises(NameError, match="later"):
        travel(make())()


def test_objects_methods_partials_modules_and_classes():
    mine = Held()
    assert travel(lambda: mine.value)() == 1
    assert travel(lambda f=mine.method: f())() == 1
    assert travel(mine.method)() == 1
    assert travel(functools.partial(lambda a, b: a - b, 5))(b=3) == 2

    def function(x, kind=Held):
        return module.Counter(x), kind

    made = functools.partial(function, "aab", kind=int)
    for one in (function, made, functools.partial(made)):
        assert travel(one)(*(["aab"] if one is function else []))[0]["a"] == 2
    assert travel(made)()[1] is int
    made.mark = 5
    assert travel(made).mark == 5
    assert travel(lambda: module)() is module


def test_arrays():
    """Short ones are in the command, in any layout; the others are sent after it."""
    arrays = [
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
        np.array(3, ">i2"),
        np.zeros((0, 5), np.complex64),
        np.arange(100_000) % 7 == 0,
        np.array([{}, None], object),
    ]
    wire = Wire()
    for array in arrays:
        got = wire.send(lambda array=array: array)()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got, array)
        assert got.flags.writeable
        assert wire.content[2] == (array.nbytes > commands.MOST_INLINE_BYTES)
