"""What every rank has, by name: two ranks' graphs of objects, in one process."""

import collections
import enum
import functools
import threading
import types

import numpy as np
import pytest

from mpidist._merge.object_names import Names
from mpidist._merge.object_parts import MOST


class Two:
    """The names of rank 0 and of another rank."""

    def __init__(self, here, there, arguments=((), ())):
        self.here, self.there = (
            Names(fn, enumerate(given))
            for fn, given in zip((here, there), arguments, strict=True)
        )

    def other(self, x):
        """Return the other rank's object for this one; None where it has no name."""
        name = self.here.name_of(x)
        return None if name is None else self.there.object(*name)


class Thing:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def merge(self, strategy):
        raise AssertionError


class Slotted:
    __slots__ = ("a", "b", "never_set")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Both(Slotted):  # slots and a __dict__
    pass


class Colour(enum.Enum):
    RED = 1


GLOBAL = Thing()


def graph(fill=0.0):
    """Return a merge_fn, and what it can reach, of one rank."""

    class Local:
        pass

    arrays = {"m": [np.full(2, fill)], ("no", "atom"): Thing()}
    optimizer = Thing(arrays=arrays, slotted=Slotted(Thing(), [Thing()]))
    optimizer.both = Both(Thing(), 1)
    optimizer.both.more = Thing()
    optimizer.itself = optimizer
    pair = (Thing(), 1)
    shared = Thing()
    optimizer.first = optimizer.second = shared
    optimizer.lock = threading.Lock()
    optimizer.named = collections.OrderedDict(x=Thing())
    bound = optimizer.merge

    def helper():
        return shared

    def merge_fn(strategy, default=Thing(), *, keyword=Thing()):  # noqa: B008
        return optimizer, pair, bound, helper, Local, GLOBAL

    return merge_fn, types.SimpleNamespace(**locals())


WAYS = {
    "closure": lambda g: g.optimizer,
    "attribute": lambda g: g.optimizer.arrays,
    "item": lambda g: g.optimizer.arrays["m"],
    "array": lambda g: g.optimizer.arrays["m"][0],
    "slot": lambda g: g.optimizer.slotted.a,
    "item of a slot": lambda g: g.optimizer.slotted.b[0],
    "inherited slot": lambda g: g.optimizer.both.a,
    "attribute beside slots": lambda g: g.optimizer.both.more,
    "dict of another class": lambda g: g.optimizer.named["x"],
    "in a tuple": lambda g: g.pair[0],
    "method": lambda g: g.bound,
    "function": lambda g: g.helper,
    "closure of a closure": lambda g: g.shared,
    "class": lambda g: g.Local,
    "default": lambda g: g.merge_fn.__defaults__[0],
    "keyword default": lambda g: g.merge_fn.__kwdefaults__["keyword"],
    "lock": lambda g: g.optimizer.lock,
    "merge_fn": lambda g: g.merge_fn,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_other_ranks_object(way):
    (here, mine), (there, others) = graph(), graph(1.0)
    get = WAYS[way]
    assert get(mine) is not get(others)
    assert Two(here, there).other(get(mine)) is get(others)


def test_a_global_that_merge_fn_mentions():
    fn, _ = graph()
    assert Two(fn, fn).other(GLOBAL) is GLOBAL


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 2.5, "text", b"x", np.float32(1), (1, 2), frozenset((1,)), range(3),
     Colour.RED, np.dtype("f4"), np, np.add, len],
    ids=lambda x: getattr(x, "__name__", str(x)),
)  # fmt: skip
def test_values_have_no_name(value):
    def merge_fn(strategy):
        return value

    assert Two(merge_fn, merge_fn).other(value) is None


def test_names_are_those_of_the_beginning():
    """What merge_fn does to rank 0's objects does not move the names."""
    (here, mine), (there, others) = graph(), graph()
    two = Two(here, there)
    first, arrays = mine.optimizer.slotted.a, mine.optimizer.arrays
    mine.optimizer.slotted.a, mine.optimizer.arrays = arrays, first
    assert two.other(first) is others.optimizer.slotted.a
    others.optimizer.arrays = None
    assert two.other(arrays) is others.arrays


def test_methods_partials_and_callable_objects():
    class Step:
        def __init__(self):
            self.state = Thing()

        def __call__(self, strategy):
            raise AssertionError

        @classmethod
        def make(cls, strategy):
            raise AssertionError

    one, other = Step(), Step()
    assert Two(one, other).other(one.state) is other.state
    assert Two(one.__call__, other.__call__).other(one) is other
    parts = [functools.partial(x.__call__, x.state, key=[x]) for x in (one, other)]
    assert Two(*parts).other(one.state) is other.state
    assert Two(Step.make, Step.make).other(Step) is Step


def test_arguments():
    fn, _ = graph()
    one, other = Thing(x=Thing()), Thing(x=Thing())
    assert Two(fn, fn, ([one], [other])).other(one.x) is other.x


def of(**attributes):
    """Return a merge_fn that closes over one thing."""
    thing = Thing(**attributes)

    def merge_fn(strategy):
        return thing

    return merge_fn, thing


# More: test_other_graphs_are_an_error_on_all_ranks, in test_merge_objects.
DIFFERENT = {
    "None there": ({"x": Thing()}, {"x": None}, "no object under that name"),
    "another function": (
        {"x": lambda: 1},
        {"x": graph()[1].helper},
        "rank 0 has a function .*lambda.*this rank a function .*helper",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_graphs(case):
    mine, others, message = DIFFERENT[case]
    (here, thing), (there, _) = of(**mine), of(**others)
    with pytest.raises(ValueError, match=message):
        Two(here, there).other(thing.x)


def test_two_names_for_what_holds_an_object():
    """The object has one name, but what it is in has two."""
    inner = Thing(z=Thing())
    (here, _), (there, _) = (
        of(x=inner, y=inner),
        of(x=Thing(z=Thing()), y=Thing(z=Thing())),
    )
    with pytest.raises(ValueError, match="one object on rank 0, and two on this rank"):
        Two(here, there).other(inner.z)


def test_a_second_name_that_only_rank_0_has():
    """Such as `best`, of the one that is kept there."""
    same, other = Thing(), Thing()
    (here, _), (there, _) = of(x=same, best=same), of(x=other)
    assert Two(here, there).other(same) is other


def test_what_only_one_rank_has_does_no_harm():
    (here, thing), (there, others) = (
        of(log=[Thing()], x=Thing(), writer=Thing()),
        of(more=Thing(), x=Thing(), log=[]),
    )
    assert Two(here, there).other(thing.x) is others.x


def test_no_code_of_the_user_runs():
    class Careful:
        def __getattr__(self, name):
            raise AssertionError(name)

        def __getattribute__(self, name):
            raise AssertionError(name)

        @property
        def x(self):
            raise AssertionError

        __hash__ = None

        def __eq__(self, other):
            raise AssertionError

        def __len__(self):
            raise AssertionError

        __iter__ = __bool__ = __len__

    class Hidden:
        @property
        def __dict__(self):
            raise AssertionError

    class List(list):
        __iter__ = __len__ = __getitem__ = None

    class Dict(dict):
        __iter__ = __len__ = __getitem__ = items = None

    for kind in (Careful, Hidden, List, Dict):
        (here, mine), (there, others) = of(x=kind()), of(x=kind())
        assert Two(here, there).other(mine.x) is others.x


def test_the_nearest_objects_have_names():
    def make():
        far = [[Thing() for _ in range(10)] for _ in range(MOST)]
        near = Thing()

        def merge_fn(strategy):
            return far, near

        return merge_fn, far, near

    (here, far, near), (there, others, other) = make(), make()
    two = Two(here, there)
    assert two.other(near) is other
    assert two.other(far[5]) is others[5]
    assert two.other(far[-1][-1]) is None
    assert len(two.here.reached) < 2 * MOST
