"""merge_call: what rank 0 sees, commands and returns, and what the others get."""

import collections
import copy
import dataclasses
import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from replicas import (
    ON_READ,
    SUM,
    Traffic,
    assert_mirrored,
    assert_usable,
    context,
    everywhere,
    make,
    outcomes,
    own,
    raises_everywhere,
    this_replica,
)

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist._values.variable import storage_of

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    rate: float


def merge(strategy, merge_fn, *args, **kwargs):
    """Run one merge_call in one run; return this replica's part of its result."""
    part = strategy.run(lambda: [Box(context().merge_call(merge_fn, args, kwargs))])
    return part[0].value


class Box:
    """Keeps run from wrapping what it holds."""

    def __init__(self, value):
        self.value = value


# --- arguments ------------------------------------------------------------------------


def test_what_can_be_read_once_is_no_argument(strategy):
    for name, make_one in {
        "zip": lambda: zip([1.0], [2.0], strict=True),
        "map": lambda: map(abs, [1.0]),
        "generator": lambda: (x for x in [1.0]),
    }.items():
        raises_everywhere(
            TypeError,
            lambda new=make_one: merge(strategy, lambda s, x: list(x), new()),
            f"write `list(...)` around the {name}",
        )
    assert_usable(strategy)


def test_args_must_be_a_tuple(strategy):
    def call(*arguments):
        strategy.run(lambda: context().merge_call(*arguments))

    for bad in (3, "ab", {"a": 1}, np.ones(2)):
        for do in (call, context().merge_call):  # of the default strategy, too
            raises_everywhere(
                ValueError,
                lambda do=do, bad=bad: do(lambda s, *args: None, bad),
                "positional args must be a list or tuple",
                "args=(value,)",
            )
    raises_everywhere(TypeError, lambda: call(None), "`merge_fn` to be a function")
    assert_usable(strategy)


def test_a_scope_that_merge_fn_leaves_open(strategy):
    def call():
        merge(strategy, lambda strategy: strategy.scope().__enter__() and None)

    raises_everywhere(RuntimeError, call, "was left while a later one is still open")
    assert merge(strategy, lambda strategy: "the next one") == "the next one"
    assert_usable(strategy)


# --- what merge_fn sees ---------------------------------------------------------------


COMPONENTS = {
    "arrays": [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.int8),
        np.array([True, False]),
        np.asfortranarray(np.arange(4.0).reshape(2, 2)) * 1j,
    ],
    "numbers": [1, 2.5, np.float16(3), 4j],
    "bfloat16": [np.full(20, i, ml_dtypes.bfloat16) for i in range(4)],
}


@pytest.mark.parametrize("kind", COMPONENTS)
def test_local_results_of_other_kinds_on_each_rank(strategy, rank, size, kind):
    components = [COMPONENTS[kind][i % 4] for i in range(size)]

    def merge_fn(distribution, x):
        results = [*distribution.experimental_local_results(x)]
        return [(type(result).__name__, result) for result in results]

    results = merge(strategy, merge_fn, components[rank])
    assert len(results) == size
    for (name, result), expected in zip(results, components, strict=True):
        assert name == type(expected).__name__
        np.testing.assert_array_equal(result, expected)
        assert np.asarray(result).dtype == np.asarray(expected).dtype


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn"])
def test_results_of_dtypes_that_are_not_communicated(strategy, name):
    made = np.full(20, 2, getattr(ml_dtypes, name))
    result = merge(strategy, lambda strategy: made.copy())
    assert result.dtype == made.dtype
    np.testing.assert_array_equal(result, made)


def test_nests_arrive_as_nests_of_per_replica(strategy, rank, size):
    v = make(strategy, 5.0)

    def merge_fn(distribution, args, point, *, z, a):
        assert type(args) is list
        assert [type(x) for x in args] == [mpidist.PerReplica, dict]
        assert type(args[1]["x"]) is type(point.x) is mpidist.PerReplica
        assert type(point) is Point
        assert point.y is None
        assert z is v
        assert a == "text"
        mixed = {"args": args, "point": point, "v": v, "c": "c"}
        return [
            (
                float(x["args"][0]),
                x["args"][1]["x"],
                x["point"].x,
                float(x["v"]),
                x["c"],
            )
            for x in distribution.experimental_local_results(mixed)
        ]

    args = [np.float32(rank), {"x": rank + 10}], Point(x=rank + 20.0, y=None)
    rows = merge(strategy, merge_fn, *args, z=v, a="text")
    assert rows == [(i, i + 10, i + 20, 5.0, "c") for i in range(size)]


def local_class(rank):
    """Its class is pickled whole, numbered anew in each process."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        name: str

    return Config("adam")


def shared_parts(rank):
    """The same value, but on rank 0 both names are one string object."""
    name = "".join(["ad", "am"])
    return slice(name, name if rank == 0 else "".join(["ad", "am"]))


EQUAL_OBJECTS = {
    "None": lambda rank: None,
    "a string": lambda rank: "text",
    "a long string": lambda rank: "text" * 1000,
    "bytes": lambda rank: b"bytes",
    "a bool": lambda rank: True,
    "a range": lambda rank: range(3),
    "a class": lambda rank: Setting,
    "a function": lambda rank: len,
    "an object": lambda rank: Setting("adam", 0.1),
    "an enumeration": lambda rank: mpidist.ReduceOp.SUM,
    "a dtype": lambda rank: np.dtype("f4"),
    "a slice": lambda rank: slice(1, 2),
    # Python orders the strings of a set in another way in each process.
    "a set": lambda rank: {f"name{i}" for i in range(20)},
    "a frozenset": lambda rank: frozenset(f"name{i}" for i in range(20)),
    "with a dict": lambda rank: Setting(
        "adam", {"a": 1, "b": [2]} if rank else {"b": [2], "a": 1}
    ),
    "of a local class": local_class,
    "with shared parts": shared_parts,
}


def test_equal_objects_arrive_as_they_are(strategy, rank):
    given = {kind: make(rank) for kind, make in EQUAL_OBJECTS.items()}

    def merge_fn(distribution, **objects):
        return [kind for kind, x in objects.items() if x is not given[kind]]

    assert merge(strategy, merge_fn, **given) == []


@pytest.mark.mpi(min_size=2)
def test_different_objects_arrive_as_per_replica(strategy, rank, size):
    def merge_fn(distribution, text, flag, setting, same):
        for x in (text, flag, setting):
            assert isinstance(x, mpidist.PerReplica)
        assert same == "same"
        assert setting.values == tuple(Setting("adam", i) for i in range(size))
        assert flag.values == tuple(i == 0 for i in range(size))
        return [*distribution.experimental_local_results(text)], [text, setting]

    args = (f"text{rank}", rank == 0, Setting("adam", rank), "same")
    texts, (text, setting) = merge(strategy, merge_fn, *args)
    assert texts == [f"text{i}" for i in range(size)]
    assert text == f"text{rank}"  # this replica's part
    assert setting == Setting("adam", rank)


def test_a_program_level_per_replica(strategy, rank, size):
    """Captured it is one in merge_fn too, as an argument this replica's component."""
    value = strategy.run(lambda: {"x": np.full(2, rank)})
    mirrored = strategy.extended.reduce_to("MAX", value["x"], value["x"])

    def look(distribution, given):
        captured, passed = (
            [int(row["x"][0]) for row in distribution.experimental_local_results(x)]
            for x in (value, given)
        )
        assert captured == passed
        return captured

    def use(distribution):
        total = distribution.reduce("SUM", value["x"], axis=None)
        np.testing.assert_array_equal(mirrored, [size - 1] * 2)
        added = distribution.run(lambda x, m: x + m, args=(value["x"], mirrored))
        return total, added, value["x"]

    def add(x):
        x += 10

    assert merge(strategy, look, value) == [*range(size)]
    total, added, back = merge(strategy, use)
    np.testing.assert_array_equal(total, [size * (size - 1) // 2] * 2)
    np.testing.assert_array_equal(added, [rank + size - 1] * 2)
    np.testing.assert_array_equal(back, [rank] * 2)
    assert strategy.experimental_local_results(value["x"])[0] is back  # one of one
    strategy.run(add, args=(value["x"],))
    assert merge(strategy, look, value) == [10 + i for i in range(size)]  # as it is now


# --- verbs, and what they move --------------------------------------------------------


def test_reduce_to_moves_what_one_allreduce_moves(strategy, rank, size):
    """One Allreduce or Reduce of the megabytes, and nothing is gathered."""
    x = np.full(300_000, 1.0 + rank)
    v = make(strategy, np.zeros(1))

    for destinations in ("value", "variable", "device"):

        def merge_fn(distribution, x, to=destinations):
            target = {"value": x, "variable": v, "device": "/rank:0/device:CPU:0"}[to]
            reduced = distribution.extended.reduce_to("SUM", x, target)
            assert isinstance(reduced, mpidist.Mirrored) == (to != "device")
            return reduced if to != "device" else reduced[:: len(reduced) - 1]

        def step():
            traffic = Traffic(strategy)
            result = context().merge_call(merge_fn, args=(x,))
            return [traffic.bytes, traffic.calls], result

        (moved, calls), result = own(strategy, strategy.run(step))
        kind = "Allreduce" if destinations != "device" else "Reduce"
        assert moved.pop(kind) == x.nbytes
        assert calls[kind] == 1
        assert not {"Allreduce", "Reduce"} & moved.keys()
        # The commands of a few hundred bytes, and nothing that grows with the array.
        assert sum(moved.values()) < 10_000
        assert not {"Gatherv", "Allgatherv", "Scatterv"} & moved.keys()
        assert result[0] == result[-1] == size * (size + 1) / 2


def test_update_with_a_reduced_value_moves_nothing_more(strategy, rank, size):
    v = make(strategy, np.zeros(100_000))
    x = np.full(v.shape, rank + 1.0)

    def merge_fn(distribution, x):
        reduced = distribution.extended.reduce_to("SUM", x, v)
        distribution.extended.update(v, lambda v, g: v.assign_sub(g), args=(reduced,))
        v.assign_add(reduced)
        distribution.extended.update(v, lambda v: v.assign_sub(reduced))  # captured

    traffic = Traffic(strategy)
    merge(strategy, merge_fn, x)
    moved = traffic.bytes
    assert moved.pop("Allreduce") == x.nbytes
    assert sum(moved.values()) < 50_000
    assert_mirrored(strategy, v, np.full(v.shape, -size * (size + 1) / 2))


@pytest.mark.mpi(min_size=2)
def test_local_results_gathers_once(strategy, rank, size):
    x = np.full(100_000, float(rank))

    def merge_fn(distribution, x, y):
        traffic = Traffic(distribution)
        first = distribution.experimental_local_results(x)
        calls = traffic.calls
        again = x.values
        assert [a is b for a, b in zip(first, again, strict=True)] == [True] * size
        assert traffic.calls == calls  # known by now
        first[0][...] += first[1]  # not the array of rank 0's replica
        return calls["Gatherv"]

    assert merge(strategy, merge_fn, x, x) == 1
    np.testing.assert_array_equal(x, float(rank))


@pytest.mark.parametrize("verb", ["update", "assign", "reduce", "reduce_to", "return"])
def test_a_mirrored_made_by_hand_in_merge_fn(new_strategy, size, verb):
    """It acts like one that a verb gave."""
    strategy = new_strategy()
    v = make(strategy, np.zeros(20))

    def merge_fn(distribution):
        made = mpidist.Mirrored([np.arange(20.0)] * size)
        if verb == "update":
            distribution.extended.update(v, lambda v, x: v.assign(x), args=(made,))
        elif verb == "assign":
            v.assign(made)
        elif verb == "reduce":
            return distribution.reduce("MEAN", made, axis=None)
        elif verb == "reduce_to":
            return distribution.extended.reduce_to("MEAN", made, v)
        elif verb == "return":
            return made
        return v

    result = merge(strategy, merge_fn)
    np.testing.assert_array_equal(result, np.arange(20.0))
    if result is v:
        assert_mirrored(strategy, v, np.arange(20.0))
    assert_usable(strategy)


def test_broadcast_to_gives_every_replica_a_copy_of_its_own(strategy, rank):
    """What rank 0 does to its array afterwards does not show on rank 0 alone."""
    v = make(strategy, np.zeros(3))
    x = np.zeros(3)
    with strategy.scope():
        from_array = strategy.extended.broadcast_to(x, v)
        from_variable = strategy.extended.broadcast_to(v, v)
        x += 5.0
        v.assign([5.0, 5.0, 5.0])
    for mirrored in (from_array, from_variable):
        copies = everywhere(np.array(mirrored).tolist())
        assert copies == [copies[-1]] * len(copies)


# --- results --------------------------------------------------------------------------


def test_an_argument_comes_back_as_the_very_array(strategy):
    x = np.ones(3)
    assert merge(strategy, lambda s, x: x, x) is x


def test_values_made_for_each_replica_are_scattered(strategy, rank, size):
    def merge_fn(distribution):
        arrays = mpidist.PerReplica(
            [np.full(i + 1, i, np.float32) for i in range(size)]
        )
        texts = mpidist.PerReplica([f"for {i}" for i in range(size)])
        mixed = distribution.experimental_distribute_values_from_function(
            lambda c: {
                "id": c.replica_id_in_sync_group * 10,
                "n": (c.num_replicas_in_sync, Setting("x", c.replica_id_in_sync_group)),
            }
        )
        assert isinstance(mixed["id"], mpidist.PerReplica)
        total = distribution.reduce("SUM", mixed["id"], axis=None)
        return [arrays, texts], mixed, total

    (array, text), mixed, total = merge(strategy, merge_fn)
    np.testing.assert_array_equal(array, np.full(rank + 1, rank))
    assert array.dtype == np.float32
    assert text == f"for {rank}"
    assert mixed == {"id": 10 * rank, "n": (size, Setting("x", rank))}
    assert total == 10 * size * (size - 1) // 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [mpidist.PerReplica, mpidist.Mirrored])
def test_rank_0_keeps_what_was_sent(strategy, size, kind):
    """merge_fn may change its array later; and what it has gathered does not change."""
    v = make(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)

    def merge_fn(distribution):
        array = np.zeros((2, 3), ">f4", order="F")
        made, before = kind([array] * size), v.values
        distribution.run(lambda x: v.assign(1.0).shape, args=(made,))
        array[...] = 1.0
        found = distribution.run(lambda x: [x.sum(), *x.strides], args=(made,))
        return found, [*map(float, before)]

    assert everywhere(merge(strategy, merge_fn)) == [([0, 12, 4], [0.0] * size)] * size


@pytest.mark.mpi(min_size=2)
def test_scattering_sends_each_rank_its_part_only(strategy, rank, size):
    n = 100_000

    def merge_fn(distribution):
        return mpidist.PerReplica([np.full(n, float(i)) for i in range(size)])

    traffic = Traffic(strategy)
    result = merge(strategy, merge_fn)
    moved = traffic.bytes
    assert 0 <= moved.pop("Scatterv") - 8 * n < 1000
    assert sum(moved.values()) < 20_000
    np.testing.assert_array_equal(result, np.full(n, float(rank)))


RESULTS = [
    *(None, 3, 2.5, "text", (), {}, [1, (2, None)], b"x" * 5000, {1, 2}),
    *(Point(1, "y"), Setting("adam", 0.1), {"nested": [Point({"a": 1}, ())]}),
    np.arange(10_000.0).reshape(100, 100),
    np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
    np.arange(10_000.0)[::3],
    np.arange(1000) % 2 == 0,
    np.arange(1000, dtype=">i4"),
    np.zeros((0, 5)),
    np.arange(3.0).reshape(1, 3),
    np.arange(1000).astype("S5"),
    np.array([{"a": 1}, None] * 10, dtype=object),
    np.arange(100.0) * 1j,
]


def test_results_are_the_same_on_all(strategy):
    results = [*RESULTS, *(x[..., :2] for x in RESULTS if isinstance(x, np.ndarray))]
    expected = copy.deepcopy(results)

    def merge_fn(distribution):
        return results, {"again": results}

    first, again = merge(strategy, merge_fn)
    for found in (first, again["again"]):
        for got, want in zip(found, expected, strict=True):
            assert type(got) is type(want)
            np.testing.assert_equal(got, want)
            if isinstance(want, np.ndarray):
                assert (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.mark.mpi(min_size=2)
def test_a_result_that_can_not_be_sent(strategy):
    """A lock has no copy: an error on every rank, and not only on the others."""

    def merge_fn(distribution):
        return {"lock": threading.Lock()}

    raises_everywhere(TypeError, lambda: merge(strategy, merge_fn), "lock")
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_large_results_go_from_their_buffers(strategy, rank):
    n = 1_000_000

    def merge_fn(distribution):
        return {"table": np.arange(float(n))}

    traffic = Traffic(strategy)
    result = merge(strategy, merge_fn)
    moved = traffic.bytes
    assert 8 * n <= moved["Bcast"] < 8 * n + 20_000
    assert sum(moved.values()) < 8 * n + 20_000
    assert result["table"][-1] == n - 1


@pytest.mark.parametrize("n", [2, 1000])
def test_a_replica_may_change_its_result(strategy, rank, size, n):
    """merge_fn's own array stays as it is, on rank 0 too; no rank sees another's."""
    table = np.zeros(n)

    def merge_fn(distribution):
        return table, mpidist.PerReplica([table] * size), table

    def step():
        result, second, third = context().merge_call(merge_fn)
        result += 1.0 + rank
        second += 1.0
        again = context().merge_call(merge_fn)[1]
        np.testing.assert_array_equal(third, again)
        return result, again.copy()

    result, again = own(strategy, strategy.run(step))
    np.testing.assert_array_equal(result, np.full(n, 1.0 + rank))
    np.testing.assert_array_equal(again, np.zeros(n))
    np.testing.assert_array_equal(table, np.zeros(n))


# --- functions that travel ------------------------------------------------------------


def test_a_function_that_closes_over_an_argument_of_merge_fn(strategy, rank, size):
    """A handle in a closure is PerReplica on each rank, with that rank's component."""

    def merge_fn(distribution, x, y):
        def replica_fn():
            assert isinstance(x, mpidist.PerReplica)
            return np.asarray(x) + np.asarray(y["z"][0])

        return distribution.run(replica_fn)

    result = merge(strategy, merge_fn, np.full(3, rank), {"z": [np.full(3, 10 * rank)]})
    np.testing.assert_array_equal(result, np.full(3, 11 * rank))


@pytest.mark.mpi(min_size=2)
def test_a_function_that_closes_over_the_replica_context(strategy, rank, size):
    """It is the context of the replica that runs the function, or an error."""

    def step():
        replica_context = mpidist.get_replica_context()

        def merge_fn(distribution):
            def replica_fn():
                return replica_context.replica_id_in_sync_group

            return distribution.run(replica_fn)

        return replica_context.merge_call(merge_fn)

    assert own(strategy, strategy.run(step)) == rank


# --- variables in merge_fn ------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_variable_made_in_merge_fn_and_kept_on_rank_0_only(strategy, rank):
    """An optimizer's slot: all ranks keep it until rank 0 has dropped it."""
    kept = []

    def make_one(distribution):
        kept.append(mpidist.Variable(1.0))

    def use(distribution):
        kept[0].assign(2.0)
        distribution.extended.update(kept[0], lambda v: v.assign_add(3.0))
        return kept[0]

    merge(strategy, make_one)
    gc.collect()
    slot = merge(strategy, use)
    assert_mirrored(strategy, slot, 5.0)
    key = storage_of(slot).key
    del slot
    alive = group_of(strategy).registry.kept
    before = everywhere(key in alive)
    kept.clear()
    merge(strategy, lambda s, x: s.reduce("SUM", x, axis=None), 1.0)
    after = everywhere(key in alive)
    assert before == [False] + [True] * (len(before) - 1)
    assert after == [False] * len(after)


# --- memory ---------------------------------------------------------------------------


@pytest.fixture
def few_objects():
    """Leave out what is there before the test: to go through it takes 0.1 s a time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_values():
    """Return how many distributed values this process holds."""
    gc.collect()
    # By its type alone: isinstance also asks the object, which may be half made, or a
    # proxy of one that is gone.
    kinds = (type(x) for x in gc.get_objects())
    return sum(issubclass(kind, mpidist.DistributedValues) for kind in kinds)


def make_by_hand(distribution, x):
    made = mpidist.PerReplica([np.ones(10)] * distribution.num_replicas_in_sync)
    distribution.reduce("SUM", made, axis=None)
    return made


def make_by_function(distribution, x):
    made = distribution.experimental_distribute_values_from_function(
        lambda c: np.ones(10)
    )
    distribution.run(lambda x: None, args=(made,))
    return made


MAKERS = {
    "reduce_to": lambda d, x: d.extended.reduce_to("SUM", x, x),
    "broadcast_to": lambda d, x: d.extended.broadcast_to(np.ones(10), x),
    "run": lambda d, x: d.run(lambda: np.ones(10)),
    "by hand": make_by_hand,
    "by a function": make_by_function,
}


@pytest.mark.processes  # counts objects of the process, as the two after it
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("how", MAKERS)
def test_results_that_rank_0_drops_are_dropped_on_all(strategy, size, how):
    v = make(strategy, 0.0)

    def merge_fn(distribution, x):
        counts = []
        for _ in range(5):
            kept = MAKERS[how](distribution, x)
            del kept
            here = distribution.extended.update(v, lambda v: live_values(), group=False)
            counts.append(here)
        return [[*row] for row in counts]

    counts = merge(strategy, merge_fn, np.ones(10))
    # What rank 0 has dropped goes at the next command; it does not pile up.
    for replica in range(size):
        column = [row[replica] for row in counts]
        assert max(column) - min(column) <= 2, counts


@pytest.mark.processes
@pytest.mark.usefixtures("few_objects")
def test_arguments_that_rank_0_drops_are_dropped_on_all(strategy, size):
    """merge_fn takes its handles out of the list that it got, one after the other."""
    v = make(strategy, 0.0)

    def merge_fn(distribution, handles):
        def count():
            here = distribution.extended.update(v, lambda v: live_values(), group=False)
            return [*here]

        count()  # whose result is dropped with the next command
        before = count()
        while handles:
            distribution.reduce("SUM", handles.pop(), axis=None)
        count()  # a command, with which the news travels
        return before, count()

    before, after = merge(strategy, merge_fn, [np.full(3, float(i)) for i in range(4)])
    assert [a - b for a, b in zip(before, after, strict=True)] == [4] * size


@pytest.mark.processes
@pytest.mark.usefixtures("few_objects")
def test_everything_is_dropped_after_the_merge_call(strategy, rank):
    refs = []

    def merge_fn(distribution, x, nest):
        results = [distribution.extended.reduce_to("SUM", x, x) for _ in range(3)]
        distribution.run(lambda x: x + 1, args=(x,))
        distribution.experimental_local_results(nest)
        refs.append(weakref.ref(results[0]))

    before = live_values()
    for _ in range(3):
        merge(strategy, merge_fn, np.ones(3), {"a": [np.ones(2)]})
    assert live_values() == before
    assert all(ref() is None for ref in refs)


# --- handles of another merge_call ----------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["argument", "result", "reduced"])
@pytest.mark.parametrize(
    "use",
    ["reduce_to", "closure of run", "closure of update", "local_results", "return"],
)
def test_a_handle_after_its_merge_call(new_strategy, rank, kind, use):
    strategy = new_strategy()
    v = make(strategy, np.zeros(3))
    if (kind, use) in (("reduced", "local_results"), ("reduced", "return")):
        pytest.skip("rank 0's copy of a Mirrored is all that is needed")
    kept = []

    def keep(distribution, x):
        kept.append(
            {
                "argument": lambda: x,
                "result": lambda: distribution.run(lambda: np.ones(3)),
                "reduced": lambda: distribution.extended.reduce_to("SUM", x, x),
            }[kind]()
        )

    def use_it(distribution, y):
        (handle,) = kept
        if use == "reduce_to":
            distribution.extended.batch_reduce_to("MEAN", [(y, y), (handle, y)])
        elif use == "closure of run":
            distribution.run(lambda: np.asarray(handle))
        elif use == "closure of update":
            distribution.extended.update(
                v, lambda v: v.assign_add(len(repr(handle)) * v)
            )
        elif use == "local_results":
            distribution.experimental_local_results(handle)
        return handle

    merge(strategy, keep, np.ones(3))
    rows = outcomes(lambda: merge(strategy, use_it, 1.0))
    names = {name for name, _, _ in rows}
    # Of a value that it only returns, rank 0 learns when the function ends.
    assert names == (
        {"ReplicaError", "ValueError"} if use == "return" else {"ValueError"}
    )
    for _, message, _ in rows:
        assert "merge_call` as an argument" in message  # what to do
    assert_mirrored(strategy, v, np.zeros(3))
    assert_usable(strategy)


# --- merge_fn raises ------------------------------------------------------------------


def raising(error):
    def merge_fn(distribution, x):
        raise error

    return merge_fn


def test_an_exception_that_can_not_be_pickled(strategy):
    class LocalError(Exception):
        pass

    merge_fn = raising(LocalError("on purpose", threading.Lock()))
    first, *others = outcomes(lambda: merge(strategy, merge_fn, 1.0))
    assert first.name == "LocalError"
    for row in others:
        assert row.name == "CollectiveError"
        for part in ("LocalError", "on purpose", "Traceback"):
            assert part in row.message
    assert_usable(strategy)


def test_merge_fn_catches_what_fails_and_goes_on(strategy, rank, size):
    v = make(strategy, 1.0)

    def merge_fn(distribution, x, y):
        log = []
        for attempt in (
            lambda: distribution.reduce("SUM", y, axis=None),  # shapes differ
            lambda: distribution.reduce("MAXIMUM", x, axis=None),
            lambda: distribution.gather(x, axis=5),
            lambda: distribution.extended.reduce_to("SUM", x, "nowhere"),
            lambda: distribution.extended.update(v, lambda v: 1 // 0),
            lambda: distribution.run(lambda: 1 // 0),
            lambda: v.assign([1.0, 2.0]),
            lambda: v.assign(x),
            lambda: distribution.extended.update(v, threading.Lock().acquire),
        ):
            try:
                attempt()
            except Exception as error:
                log.append(type(error).__name__)
            else:
                log.append("nothing")
            log.append(distribution.reduce("SUM", x, axis=None))
        return log

    log = merge(strategy, merge_fn, rank + 1, np.ones(rank + 1))
    assert log[1::2] == [size * (size + 1) // 2] * 9
    expected = [
        "CollectiveMismatchError",
        "ValueError",
        "ValueError",
        "ValueError",
        "ZeroDivisionError",
        "ZeroDivisionError",
        "ValueError",
        "TypeError",
        "TypeError",
    ]
    if size > 1:
        assert log[::2] == expected
    assert_mirrored(strategy, v, 1.0)
    assert_usable(strategy)


# --- update raises on one rank --------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["args", "kwargs", "fn", "value"])
def test_bad_arguments_of_update_on_one_rank(new_strategy, rank, size, what):
    """The others have run the function already: their copies are made equal too."""
    strategy = new_strategy()
    v = make(strategy, np.zeros(20), name="v")
    value = strategy.run(lambda: np.ones(20))
    odd = rank == size - 1

    def call():
        args = (np.ones(20),)
        kwargs = {}
        if odd and what == "args":
            args = 3
        if odd and what == "kwargs":
            kwargs = {3: 3}
        if odd and what == "value":
            args = (value,)
        fn = 3 if odd and what == "fn" else (lambda v, x: v.assign(x))
        with strategy.scope():
            strategy.extended.update(v, fn, args, kwargs)

    rows = outcomes(call)
    kinds = {"args": "ValueError", "value": "CollectiveMismatchError"}
    kind = kinds.get(what, "TypeError")
    assert {name for name, _, _ in rows} == {kind}, rows
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


def rebuild_on_rank_0_only():
    if this_replica():
        raise LookupError("not here")
    return OnRank0Only()


class OnRank0Only:
    """Travels, but does not arrive: as a class that only rank 0 has imported."""

    def __reduce__(self):
        return (rebuild_on_rank_0_only, ())

    def __call__(self, v):
        if mpidist.in_cross_replica_context():
            v.assign_add(np.ones(20))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("verb", ["update", "run", "update with it as argument"])
def test_a_function_that_does_not_arrive(new_strategy, verb):
    strategy = new_strategy()
    v = make(strategy, np.zeros(20), name="v")

    def merge_fn(distribution):
        if verb == "update":
            distribution.extended.update(v, OnRank0Only())
        elif verb == "run":
            distribution.run(OnRank0Only(), args=(v,))
        else:
            distribution.extended.update(
                v, lambda v, x: v.assign_add(np.ones(20)), args=([OnRank0Only()],)
            )

    rows = outcomes(lambda: merge(strategy, merge_fn))
    assert rows[1][0] == "LookupError", rows
    assert rows[0][0] in ("LookupError", "ReplicaError", "ValueError"), rows
    for _, message, notes in rows:
        assert "not here" in message + notes
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


# --- without the guard ----------------------------------------------------------------


def test_without_the_guard(new_strategy, rank, size):
    """The same results, with nothing checked."""
    strategy = new_strategy(guard=False)
    v, w = make(strategy, np.zeros(20)), make(strategy, np.zeros(3))
    counter = Box(0)  # each rank's own

    def count(v):
        counter.value += 1
        v.assign_add(np.ones(3))

    def merge_fn(distribution, x, text):
        update = distribution.extended.update
        reduced = distribution.extended.reduce_to("SUM", x, v)
        for k in range(60):
            update(v, lambda v, g, b: v.assign_add(g), args=(reduced, bytes(10 * k)))
        update(w, count)
        lock = threading.Lock()
        if size > 1:
            with pytest.raises(TypeError, match="update"):
                update(w, lambda w: lock and count(w))
        made = mpidist.PerReplica([np.full(10, i) for i in range(size)])
        total = distribution.run(lambda x: context().all_reduce("SUM", x), args=(made,))
        return [*distribution.experimental_local_results(text)], made, total

    def fail_on_last(v):
        if this_replica() == size - 1:
            raise ArithmeticError

    def failing(distribution):
        distribution.extended.update(w, fail_on_last)
        for _ in range(60):
            distribution.extended.update(w, count)

    texts, made, total = merge(strategy, merge_fn, np.full(20, rank + 1), f"t{rank}")
    assert texts == [f"t{i}" for i in range(size)]
    np.testing.assert_array_equal(made, np.full(10, rank))
    np.testing.assert_array_equal(total, np.full(10, size * (size - 1) // 2))
    assert_mirrored(strategy, v, np.full(20, 60.0 * (size * (size + 1) // 2)))
    assert_mirrored(strategy, w, np.ones(3))
    assert everywhere(counter.value) == [1] * size
    raises_everywhere(
        KeyError, lambda: merge(strategy, raising(KeyError("on purpose")), 1.0)
    )
    assert_usable(strategy)
    rows = outcomes(lambda: merge(strategy, failing))
    assert [row.name for row in rows] == ["NoneType"] * (size - 1) + ["ArithmeticError"]
