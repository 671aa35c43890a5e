"""Objects that functions in merge_fn refer to: each rank uses its own, by name."""

import collections
import functools
import threading
import warnings

import numpy as np
import pytest
from replicas import (
    assert_mirrored,
    assert_usable,
    everywhere,
    make,
    merge,
    outcomes,
    raises_everywhere,
    this_replica,
)

import mpidist
from mpidist._merge import merge_call
from mpidist._runtime.registry import component
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core]

STEPS = 3
COUNTERS = {"global": 0}


class Optimizer:
    """A user's, with variables, arrays and numbers as state."""

    def __init__(self, variables):
        self.variables = variables
        self.momenta = [np.zeros(v.shape) for v in variables]
        self.rate = 0.5
        self.count = 0

    def step(self, v, gradient):
        self.count += 1
        (index,) = (i for i, one in enumerate(self.variables) if one is v)
        self.momenta[index] += gradient
        v.assign_sub(self.rate * self.momenta[index])

    def merge(self, strategy, *gradients):
        """A merge_fn that is a method."""
        pairs = list(zip(gradients, self.variables, strict=True))
        totals = strategy.extended.batch_reduce_to("SUM", pairs)
        for v, total in zip(self.variables, totals, strict=True):
            strategy.extended.update(v, lambda v, g: self.step(v, g), args=(total,))


class Slotted:
    __slots__ = ("count", "variable")

    def __init__(self, variable):
        self.variable, self.count = variable, 0

    def add(self, v):
        self.count += 1
        v.assign_add(np.ones(v.shape))


GLOBAL = Slotted(None)


@pytest.fixture(params=["SHARED", "DIRECT"])
def strategy(request, new_strategy):
    return new_strategy(implementation=request.param)


@pytest.fixture
def size():
    return len(everywhere(None))


def same_everywhere(x):
    found = everywhere(x)
    assert all(one == found[0] for one in found), found
    return found[0]


# --- the optimizer of issue 9 ---------------------------------------------------------


@pytest.mark.parametrize("how", ["method", "closure", "argument", "attribute", "bound"])
def test_an_optimizer_counts_on_all_ranks(strategy, how):
    variables = [make(strategy, np.zeros(5)) for _ in range(4)]
    optimizer = Optimizer(variables)
    trainer = collections.namedtuple("Trainer", "parts")({"optimizer": optimizer})
    n = strategy.num_replicas_in_sync

    def step(distribution, one, gradients):
        totals = distribution.extended.batch_reduce_to(
            "SUM", list(zip(gradients, variables, strict=True))
        )
        for v, total in zip(variables, totals, strict=True):
            fn = one.step if how == "bound" else (lambda v, g: one.step(v, g))
            distribution.extended.update(v, fn, args=(total,))

    def merge_fn(distribution, *gradients):
        found = trainer.parts["optimizer"] if how == "attribute" else optimizer
        step(distribution, found, gradients)

    def with_argument(distribution, given, *gradients):
        step(distribution, given, gradients)

    for _ in range(STEPS):
        gradients = [np.ones(5) for _ in variables]
        if how == "method":
            merge(strategy, optimizer.merge, *gradients)
        elif how == "argument":
            merge(strategy, with_argument, optimizer, *gradients)
        else:
            merge(strategy, merge_fn, *gradients)
    assert same_everywhere(optimizer.count) == STEPS * len(variables)
    assert same_everywhere([m.tolist() for m in optimizer.momenta])[0][0] == STEPS * n
    for v in variables:
        assert_mirrored(strategy, v, np.full(5, -0.5 * n * STEPS * (STEPS + 1) / 2))
    assert_usable(strategy)


def test_the_optimizer_is_not_copied(new_strategy):
    """Commands do not grow with the objects that the functions refer to."""
    strategy = new_strategy()
    v = make(strategy, np.zeros(5))
    sent = []

    class Large:
        def __init__(self):
            self.table = [np.zeros(1000) for _ in range(100)]
            self.names = [f"name {k}" for k in range(1000)]

        def touch(self, v):
            v.assign_add(np.ones(5))

        def __reduce__(self):
            raise AssertionError("copied")

    large = Large()
    messages = group_of(strategy).collectives.resources.messages
    send = messages.send

    def watched(data):
        sent.append(len(data))
        send(data)

    def merge_fn(distribution):
        for _ in range(5):
            distribution.extended.update(v, lambda v: large.touch(v))

    messages.send = watched
    try:
        merge(strategy, merge_fn)
        merge(strategy, merge_fn)
    finally:
        del messages.send
    assert_mirrored(strategy, v, np.full(5, 10.0))
    if sent:
        assert max(sent) < 800
    assert_usable(strategy)


# --- what closes over what ------------------------------------------------------------


def test_what_functions_close_over(strategy, rank):
    v = make(strategy, np.zeros(2), name="v")
    w = make(strategy, np.zeros(2), name="w")
    slotted = Slotted(v)
    bound = slotted.add
    partial = functools.partial(Slotted.add, slotted)
    variables = {"v": v, "w": w}
    loop = [v]
    loop.append(loop)
    first = second = [0]
    lock = threading.Lock()
    generator = iter(range(100))
    table = collections.defaultdict(int)

    class Local:
        count = 0

    def helper(x):
        Local.count += 1
        return x + len(table)

    def merge_fn(distribution):
        update = distribution.extended.update

        def use_variables(x):
            assert variables["v"] is x
            variables["w"].assign_add(np.ones(2))

        def use_loop(x):
            assert loop[1][1] is loop
            assert loop[0] is x
            loop.append(1)

        def use_both(x):
            first.append(1)
            second.append(2)
            assert first is second

        def use_lock(x):
            with lock:
                table["locked"] += next(generator)

        update(v, bound)
        update(v, partial)
        update(v, lambda v: bound(v))
        update(v, lambda v: partial(v))
        update(v, use_variables)
        update(v, use_loop)
        update(v, use_both)
        update(v, use_lock)
        update(v, lambda v: v.assign_add(np.full(2, helper(1.0))))
        update(v, lambda v, f=helper: v.assign_add(np.full(2, f(1.0))))
        update(v, helper_of(slotted))
        return "done"

    assert merge(strategy, merge_fn) == "done"
    assert same_everywhere(slotted.count) == 5
    assert same_everywhere(len(loop)) == 3
    assert same_everywhere(first) == [0, 1, 2]
    assert same_everywhere(dict(table)) == {"locked": 0}
    assert same_everywhere(Local.count) == 2
    assert_mirrored(strategy, v, [9.0, 9.0])
    assert_mirrored(strategy, w, [1.0, 1.0])
    assert_usable(strategy)


def helper_of(slotted):
    def add(v):
        slotted.add(v)

    return add


def test_globals_are_each_ranks_own(strategy):
    v = make(strategy, np.zeros(2))
    before = COUNTERS["global"], GLOBAL.count

    def merge_fn(distribution):
        found = GLOBAL

        def count(v):
            COUNTERS["global"] += 1
            eval("COUNTERS")["global"] += 1
            globals()["COUNTERS"]["global"] += int(eval("np.sum(v)"))

        distribution.extended.update(v, count)
        distribution.extended.update(v, lambda v: found.add(v))
        distribution.extended.update(v, GLOBAL.add)

    merge(strategy, merge_fn)
    assert same_everywhere(COUNTERS["global"] - before[0]) == 2
    assert same_everywhere(GLOBAL.count - before[1]) == 2
    assert_mirrored(strategy, v, [2.0, 2.0])
    assert_usable(strategy)


def test_numbers_are_those_of_rank_0(strategy, rank):
    """What has no identity is a value, and is sent."""
    v = make(strategy, np.zeros(2))
    number, text, pair = float(rank), f"rank {rank}", (rank, rank)

    def merge_fn(distribution):
        def use(v):
            assert (text, pair) == ("rank 0", (0, 0))
            v.assign_add(np.full(2, number + 1.0))

        distribution.extended.update(v, use)

    merge(strategy, merge_fn)
    assert_mirrored(strategy, v, [1.0, 1.0])


def test_what_merge_fn_makes_is_sent(strategy, rank):
    v = make(strategy, np.zeros(2))
    trainer = Optimizer([v])
    trainer.plan = [0.0]

    def merge_fn(distribution):
        trainer.plan = [3.0]  # of rank 0 alone
        plan = trainer.plan
        distribution.extended.update(v, lambda v: v.assign(np.full(2, plan[0])))

    merge(strategy, merge_fn)
    assert_mirrored(strategy, v, [3.0, 3.0])


def test_arrays_in_arguments_are_those_of_rank_0(strategy, rank):
    v = make(strategy, np.zeros(20))
    mine = {"x": [np.full(20, float(rank))]}
    rows = mpidist.IndexedSlices(np.full(1, float(rank)), np.array([0]))
    others = collections.UserDict(mine), {"x": collections.deque([mine["x"][0]])}

    def merge_fn(distribution):
        add = distribution.extended.update
        add(v, lambda v, d: v.scatter_add(d), args=(rows,))
        again = mpidist.IndexedSlices(rows.values, rows.indices)
        add(v, lambda v, d: v.scatter_add(d), args=(again,))
        for x in others:
            add(v, lambda v, d: v.assign_add(d["x"][0]), args=(x,))
        add(v, lambda v, x: v.assign_add(x + 1), args=(mine["x"][0],))
        add(v, lambda v, d: v.assign_add(d["x"][0] + 1), args=(mine,))
        v.assign_add(mine["x"][0] + 1)
        v.assign_add(mine["x"][0])

    merge(strategy, merge_fn)
    assert_mirrored(strategy, v, np.full(20, 3.0))


def test_what_a_nested_run_closes_over(strategy, rank):
    mine = [rank]

    def merge_fn(distribution):
        return distribution.run(lambda: mine[0] + 10)

    assert everywhere(int(component(merge(strategy, merge_fn)))) == [
        10 + k for k in range(strategy.num_replicas_in_sync)
    ]


# --- ranks that differ ----------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_state_that_only_rank_0_has_changed_is_found(strategy, rank):
    v = make(strategy, np.zeros(2), name="v")
    state = {"scale": 1.0}

    def merge_fn(distribution):
        state["scale"] = 2.0
        distribution.extended.update(v, lambda v: v.assign(v + state["scale"]))

    raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: merge(strategy, merge_fn)
    )
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("how", ["missing", "type", "alias", "one for two"])
def test_other_graphs_are_an_error_on_all_ranks(strategy, rank, how, caught):
    v = make(strategy, np.zeros(2), name="v")
    last = rank == strategy.num_replicas_in_sync - 1
    one, two = Slotted(v), Slotted(v)
    parts = {"a": one, "b": two}
    if how == "missing" and last:
        parts = {"b": two}
    if how == "type" and last:
        parts = {"a": [one], "b": two}
    if how == "alias" and not last:
        parts = {"a": one, "b": one}
    if how == "one for two" and last:
        parts = {"a": one, "b": one}

    def merge_fn(distribution):
        a, b = parts["a"], parts["b"]

        def use(v):
            a.add(v)
            b.add(v)

        try:
            distribution.extended.update(v, use)
            mpidist.check_in_sync(v)
        except ValueError:
            if not caught:
                raise
            return "caught"
        return "not"

    message = {
        "missing": "this rank has no object under that name",
        "type": "and this rank a list",
        "alias": "are one object on rank 0, and two on this rank",
        "one for two": "on this rank, and another one on rank 0",
    }[how]
    if caught:
        assert merge(strategy, merge_fn) == "caught"
    else:
        for row in outcomes(lambda: merge(strategy, merge_fn)):
            assert row.name == "ValueError", row
            assert message in row.text
            assert "merge_fn.<closure parts>['" in row.text
    assert len({*everywhere(v.numpy().tobytes())}) == 1
    assert_usable(strategy)


def test_merge_fns_of_other_code_have_no_names(strategy, rank):
    """A dummy on the other ranks: then objects are copied."""
    v = make(strategy, np.zeros(2))
    slotted = Slotted(v)

    def merge_fn(distribution, x):
        distribution.extended.update(v, lambda v: slotted.add(v))

    def dummy(distribution, x):
        raise AssertionError

    merge(strategy, dummy if rank else merge_fn, "text")
    merge(strategy, dummy if rank else merge_fn, 1.0)
    assert_mirrored(strategy, v, [2.0, 2.0])
    assert slotted.count == (0 if rank else 2)
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_what_an_update_refers_to_that_a_rank_has_dropped(strategy, rank, size):
    """The next update refers to it again."""
    v = make(strategy, np.zeros(2), name="v")
    slotted = Slotted(v)

    def fail(v):
        if this_replica() == size - 1:
            raise ArithmeticError("on purpose")

    def merge_fn(distribution):
        number = 1

        def use(v):
            for _ in range(number):
                slotted.add(v)

        try:
            distribution.extended.update(v, fail)
            distribution.extended.update(v, use)
            mpidist.check_in_sync(v)
        except mpidist.ReplicaError:
            v.assign(np.zeros(2))
            distribution.extended.update(v, use)
            distribution.extended.update(v, lambda v: slotted.add(v))
            return "caught"
        return "not"

    assert merge(strategy, merge_fn) == "caught"
    assert_mirrored(strategy, v, [2.0, 2.0])
    assert_usable(strategy)


# --- what cannot be sent, and not be compared ----------------------------------------


class Refuses:
    def __reduce__(self):
        raise LookupError("refuses to be copied")


UNSENDABLE = {
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(3)),
    "refuses": Refuses,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("verb", ["update", "run"])
@pytest.mark.parametrize("what", UNSENDABLE)
@pytest.mark.parametrize("where", ["closure", "default", "argument", "object"])
def test_what_can_not_be_sent_is_named(strategy, verb, what, where):
    v = make(strategy, np.zeros(2))

    def merge_fn(distribution):
        broken = UNSENDABLE[what]()

        def use(*args, more=None):
            return broken and None

        args = ()
        if where == "default":

            def use(*args, taken=broken):
                return None

        elif where == "argument":

            def use(*args):
                return None

            args = (broken,)
        elif where == "object":
            use = functools.partial(use, broken)
        if verb == "run":
            distribution.run(use, args)
        else:
            distribution.extended.update(v, use, args)

    kinds = {"lock": "_thread.lock", "generator": "generator", "refuses": "Refuses"}
    named = {
        "closure": "closes over `broken`",
        "default": "has the default `taken`",
        "argument": "it gets args[0]",
        "object": "closes over `broken`",
    }[where]
    parts = f"{verb}: ", named, kinds[what], "before `merge_call`"
    raises_everywhere(TypeError, lambda: merge(strategy, merge_fn), *parts)
    assert_usable(strategy)


@pytest.mark.parametrize("kind", ["lock", "file", "refuses", "nested"])
@pytest.mark.parametrize("ranks", ["all", "last"])
def test_arguments_that_can_not_be_compared(strategy, rank, kind, ranks, tmp_path):
    (tmp_path / "file").write_text("text")
    with open(tmp_path / "file") as file:
        bad = {
            "lock": threading.Lock(),
            "file": file,
            "refuses": Refuses(),
            "nested": {"a": 1, "b": Refuses()},
        }[kind]
        odd = ranks == "all" or rank == strategy.num_replicas_in_sync - 1
        good = {"a": 1, "b": "text"} if kind == "nested" else "text"
        raises_everywhere(
            TypeError,
            lambda: merge(strategy, lambda s, *args: 1, 1.0, bad if odd else good),
            "merge_call: argument args[1]",
            "cannot be compared",
        )
    assert_usable(strategy)


def test_arguments_of_the_program_arrive_as_they_are(strategy, rank):
    """Each rank's own: what holds variables, and what refuses to be copied of ours."""
    v = make(strategy, np.zeros(2))
    mine = Optimizer([v])
    mine.log = [rank]
    mine.lock = threading.Lock()
    ours = mpidist.optimizers.SGD(0.1)
    tree = collections.OrderedDict(b=[Slotted(v)], a=Slotted(v))
    node = type("Node", (), {})()
    node.parent = node
    node.table = {"nodes": [node]}
    node.table["table"] = node.table

    class Trainer(mpidist.optimizers.SGD):
        pass

    theirs = Trainer(0.1)
    theirs.build([make(strategy, np.zeros(2))])

    def merge_fn(distribution, a, b, c, d, function, e):
        assert (a is mine, b is ours, d is theirs, e is node) == (True,) * 4
        assert c["a"] is tree["a"]
        distribution.extended.update(v, lambda v: a.step(v, np.ones(2)))
        distribution.extended.update(v, c["b"][0].add)
        distribution.extended.update(v, function)
        return [a.count]

    def function(v):
        v.assign_add(mine.count * np.ones(2))

    for _ in range(2):
        merge(strategy, merge_fn, mine, ours, tree, theirs, function, node)
    assert same_everywhere(mine.count) == 2
    assert same_everywhere(tree["b"][0].count) == 2
    assert_usable(strategy)


def test_functions_as_arguments(strategy, rank):
    def local(x):
        return x + 1

    number = rank

    def differs(x):
        return x + number

    def merge_fn(distribution, one, other, third):
        assert one is local
        assert third is np.sum
        alike = distribution.num_replicas_in_sync == 1
        assert isinstance(other, mpidist.PerReplica) is not alike
        return "done"

    assert merge(strategy, merge_fn, local, differs, np.sum) == "done"


@pytest.mark.parametrize("kind", ["dataset", "checkpoint", "context"])
def test_objects_that_hold_the_strategy_are_returned(strategy, kind):
    v = make(strategy, np.zeros(2))
    whole = mpidist.data.Dataset.from_tensor_slices(np.arange(12.0)).batch(4)
    held = {
        "dataset": lambda: strategy.experimental_distribute_dataset(whole),
        "checkpoint": lambda: mpidist.Checkpoint(v=v),
        "context": lambda: mpidist.ReplicaContext(strategy, None),
    }[kind]()
    found = merge(strategy, lambda s: held)
    assert {*everywhere(type(found).__name__)} == {type(held).__name__}
    if kind == "dataset":
        rows = [strategy.gather(x, axis=0) for x in found]
        np.testing.assert_array_equal(np.concatenate(rows), np.arange(12.0))
    elif kind == "context":
        assert found.strategy is strategy
    assert_usable(strategy)


def test_debugging_names_what_merge_fn_changes_on_rank_0_alone(
    strategy, rank, size, monkeypatch
):
    monkeypatch.setattr(merge_call, "DEBUGGING", True)
    user = Optimizer([make(strategy, np.zeros(2))])
    log, changed = [], 0

    def record(strategy, gradient):
        nonlocal changed
        changed += 1
        user.momenta[0] *= 1.0  # the same values
        log.append(np.ones(2))
        user.merge(strategy, gradient)  # whose changes are made on every rank
        user.rate = 0.25

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merge(strategy, record, np.ones(2))
    texts = everywhere([str(warning.message) for warning in caught])
    if size == 1:
        assert texts == [[]]
        return
    (text,) = texts[0]
    for name in ("<closure changed>", "<closure log>[0]", "<closure user>.rate"):
        assert f"`merge_fn.{name}`" in text
    assert "momenta" not in text
    assert "count" not in text
    assert texts[1:] == [[]] * (size - 1)
