"""Functions that travel put together by hand, and the memory of results."""

import importlib
import math
import pickle
import sys
import types

import numpy as np
import pytest

from mpidist import _functions, _pool


def travel(function):
    """Return the function as another rank gets it; None if it is not simple."""
    found = _functions.reduce_simple(function, (np.ndarray, np.generic))
    if found is None:
        return None
    rebuild, arguments = found
    return rebuild(*pickle.loads(pickle.dumps(arguments)))


def define(source, **names):
    """Return the globals of a module of this source."""
    names["__name__"] = "made_here"
    exec(compile(source, "made_here.py", "exec"), names)
    return names


def test_a_module_that_a_global_names_anew():
    """The code is the same, but what it reads is not."""
    module = define("def root(x):\n    return lib.sqrt(x)\n", lib=math)
    assert isinstance(travel(module["root"])(4.0), float)
    module["lib"] = np
    assert isinstance(travel(module["root"])(4.0), np.floating)
    module["lib"] = math
    assert isinstance(travel(module["root"])(4.0), float)


def test_a_builtin_that_becomes_a_module():
    module = define("def size(x):\n    return len.prod(x)\n", len=np)
    assert travel(module["size"])([2, 3]) == 6
    del module["len"]
    with pytest.raises(AttributeError):
        travel(module["size"])([2, 3])


def test_a_module_of_any_name(monkeypatch):
    """As that of a script with a hyphen has."""
    module = types.ModuleType("a-script.py")
    module.number = 5
    monkeypatch.setitem(sys.modules, "a-script.py", module)
    assert travel(define("def f():\n    return m.number\n", m=module)["f"])() == 5


def test_functions_that_go_the_long_way():
    def imports():
        return importlib.import_module("math"), pickle

    def imports_here():
        import math as found

        return found

    def writes():
        global _written
        _written = 1

    def has_attributes():
        return 1

    has_attributes.number = 2

    def keyword(x, *, y=1):
        return x + y

    numbers = []

    def closes_over_a_list():
        return numbers

    def recursive(n):
        return recursive(n - 1) if n else 0

    assert travel(imports)()[0] is math
    for function in (
        imports_here,
        writes,
        has_attributes,
        keyword,
        closes_over_a_list,
        recursive,
        lambda: travel,
    ):
        assert travel(function) is None, function


def test_what_is_closed_over_is_that_of_the_moment():
    number, array = 1, np.zeros(3)

    def count(step=array):
        nonlocal number
        number += 1
        return number, step[0]

    copy = travel(count)
    assert (copy(), copy(), number) == ((2, 0.0), (3, 0.0), 1)
    array[:] = 5
    assert count() == (2, 5.0)
    assert travel(count)() == (3, 5.0)


def test_memory_in_use_is_not_given_away():
    """By whatever it is in use."""
    pool = _pool.Pool(2**20)
    shape, dtype = (2**15,), np.dtype(float)

    def address(x):
        return x.__array_interface__["data"][0]

    first = address(pool.empty(shape, dtype))
    assert address(pool.empty(shape, dtype)) == first  # nobody has it
    users = [
        lambda x: x,
        lambda x: x[5:6],
        lambda x: x.T,
        lambda x: x.view(np.uint8),
        memoryview,
        lambda x: np.frombuffer(x, np.int64),
        lambda x: x.base,
        lambda x: lambda: x,
        lambda x: iter(x),
        lambda x: np.broadcast_to(x, (2, *shape)),
        lambda x: x.flat,
        lambda x: x.data,
    ]
    for user in users:
        using = user(pool.empty(shape, dtype))
        assert address(pool.empty(shape, dtype)) != first, user
        del using
        assert address(pool.empty(shape, dtype)) == first, user


def test_what_a_pool_keeps_is_limited():
    pool = _pool.Pool(2**20)
    kept = [pool.empty((2**14,), np.dtype(float)) for _ in range(20)]
    assert pool.nbytes <= 2**20
    assert len({x.__array_interface__["data"][0] for x in kept}) == 20
    del kept
    whole = pool.empty((2**17,), np.dtype(float))
    assert whole.nbytes == pool.nbytes == 2**20
    assert pool.empty((2**18,), np.dtype(float)).base is None
    assert _pool.Pool(0).empty((2**17,), np.dtype(float)).base is None
