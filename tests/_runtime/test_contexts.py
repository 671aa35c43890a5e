"""Which strategy is in force, and which calls are legal, at each level."""

import threading
import traceback

import numpy as np
import pytest
from replicas import assert_usable, context, own

import mpidist
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

IN_CROSS_REPLICA = "Method requires being in cross-replica context"
MISMATCHING = "Mismatching .*Strategy objects"
MIXING = "Mixing different .*Strategy objects"


def facts():
    """Return what the four functions of the module say here."""
    replica_context = mpidist.get_replica_context()
    return (
        mpidist.get_strategy(),
        mpidist.has_strategy(),
        None if replica_context is None else replica_context.strategy,
        mpidist.in_cross_replica_context(),
    )


# --- scopes ---------------------------------------------------------------------------


def test_a_context_is_left_when_functions_raise(strategy):
    def merge_fn(distribution):
        raise KeyError("on purpose")

    def step(merge):
        if merge:
            context().merge_call(merge_fn)
        raise KeyError("on purpose")

    with strategy.scope():
        v = mpidist.Variable(0.0)
        for merge in (False, True):
            with pytest.raises(KeyError, match="on purpose"):
                strategy.run(step, args=(merge,))
            assert facts() == (strategy, True, None, True)
        with pytest.raises(ZeroDivisionError):
            strategy.extended.update(v, lambda v: 1 // 0)
        assert facts() == (strategy, True, None, True)
    assert_usable(strategy)


def test_coordinator_verbs_inside_a_scope_inside_merge_fn(strategy, size):
    """A scope that is entered again on the coordinator still commands the others."""

    def merge_fn(distribution, x):
        with distribution.scope():
            return distribution.reduce("SUM", x, axis=None)

    result = strategy.run(lambda: context().merge_call(merge_fn, args=(np.ones(2),)))
    np.testing.assert_array_equal(own(strategy, result), [size, size])


def test_scope_in_the_function_of_update(strategy, size):
    with strategy.scope():
        v = mpidist.Variable(np.zeros(2))
        w = mpidist.Variable(1.0)

    def merge_fn(distribution):
        def fn(v):
            with mpidist.get_strategy().scope():
                v.assign(v + 1.0)
                assert mpidist.get_strategy().num_replicas_in_sync == size
            v.assign_add(np.ones(2))

        distribution.extended.update(v, fn)
        w.assign(2.0)

    strategy.run(lambda: context().merge_call(merge_fn))
    np.testing.assert_array_equal(v, [2.0, 2.0])
    assert float(w) == 2.0


def test_a_scope_object_is_entered_again_and_nested(strategy):
    scope = strategy.scope()
    for _ in range(2):
        with scope as first, scope as second:
            assert first is second is mpidist.get_strategy() is strategy
        assert not mpidist.has_strategy()

    @scope
    def decorated():
        return mpidist.get_strategy()

    assert decorated() is strategy
    with scope, pytest.raises(KeyError), scope:
        raise KeyError
    assert not mpidist.has_strategy()
    assert_usable(strategy)


@pytest.mark.parametrize("what", ["scope", "context"])
def test_threads_that_enter_one_object_leave_their_own(strategy, what):
    one = strategy.scope()
    if what == "context":
        one = mpidist.get_replica_context()  # of the default strategy
    before = facts()
    entered, left, seen = threading.Event(), threading.Event(), []

    def other():
        with one:
            seen.append(facts())
            entered.set()
            left.wait(60)
            seen.append(facts())
        seen.append(facts())

    thread = threading.Thread(target=other)
    with one:
        inside = facts()
        thread.start()
        assert entered.wait(60)
    assert facts() == before
    left.set()
    thread.join()
    assert seen == [inside, inside, before]


def test_a_scope_is_not_left_inside_a_creator_scope(strategy):
    def creator(next_creator, **kwargs):
        return next_creator(**kwargs)

    scope = strategy.scope()
    scope.__enter__()
    with mpidist.variable_creator_scope(creator):
        with pytest.raises(RuntimeError, match="Variable creator scope nesting error"):
            scope.__exit__(None, None, None)
        assert mpidist.get_strategy() is strategy
    scope.__exit__(None, None, None)
    assert not mpidist.has_strategy()
    with mpidist.variable_creator_scope(creator), scope:
        assert mpidist.get_strategy() is strategy
    with (
        pytest.raises(KeyError),
        scope,
        mpidist.variable_creator_scope(creator),
    ):
        raise KeyError
    assert not mpidist.has_strategy()


def test_scopes_left_in_the_wrong_order(strategy, new_strategy):
    """In a thread, whose stack ends with it."""
    errors = []

    def body():
        outer, inner = strategy.scope(), strategy.scope()
        outer.__enter__()
        inner.__enter__()
        try:
            outer.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    (message,) = errors
    assert "reverse order" in message
    assert_usable(strategy)


@pytest.mark.parametrize("first", [0, 1])
def test_scopes_in_generators_that_are_closed_in_any_order(strategy, first):
    def inside():
        with strategy.scope():
            yield
            yield mpidist.get_strategy()

    generators = [inside(), inside()]
    for generator in generators:
        next(generator)
    generators[first].close()
    assert next(generators[1 - first]) is strategy
    generators[1 - first].close()
    assert_usable(strategy)


def test_a_scope_in_a_generator_that_another_thread_closes(strategy):
    def inside():
        with strategy.scope():
            yield

    generator = inside()
    entered, closed = threading.Event(), threading.Event()
    found = []

    def enter():
        next(generator)
        entered.set()
        closed.wait()
        found.append(mpidist.has_strategy())

    thread = threading.Thread(target=enter)
    thread.start()
    entered.wait()
    try:
        generator.close()
    finally:
        closed.set()
        thread.join()
    assert found == [False]
    assert_usable(strategy)


@pytest.mark.parametrize("what", ["scope", "context"])
@pytest.mark.parametrize("ends", [False, True])
def test_what_one_thread_enters_another_leaves(strategy, what, ends):
    """As an asynchronous server does, whose steps run in any thread of a pool."""
    one = strategy.scope()
    if what == "context":
        one = mpidist.ReplicaContext(strategy, None)
    entered, left, found = threading.Event(), threading.Event(), []

    def enter():
        one.__enter__()
        entered.set()
        if not ends:
            left.wait(60)
            found.append(mpidist.has_strategy())

    thread = threading.Thread(target=enter)
    thread.start()
    assert entered.wait(60)
    if ends:
        thread.join()
    try:
        one.__exit__(None, None, None)
    finally:
        left.set()
        thread.join()
    assert found == ([] if ends else [False])
    assert not mpidist.has_strategy()
    assert_usable(strategy)


# --- calls in the wrong context -------------------------------------------------------


X = np.ones(2)
CROSS_REPLICA_CALLS = {
    "run": lambda s: s.run(lambda: None),
    "experimental_run_v2": lambda s: s.experimental_run_v2(lambda: None),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(lambda: None),
    "scope": lambda s: s.scope().__enter__(),
    "reduce": lambda s: s.reduce("SUM", X, axis=None),
    "gather": lambda s: s.gather(X, axis=0),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", X, X),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to("SUM", [(X, X)]),
    "broadcast_to": lambda s: s.extended.broadcast_to(X, X),
    "update": lambda s: s.extended.update(None, lambda v: v),
    "experimental_distribute_values_from_function": (
        lambda s: s.experimental_distribute_values_from_function(
            lambda c: c.replica_id_in_sync_group
        )
    ),
}


INSTEAD = {
    "reduce": "get_replica_context().all_reduce(op, value)",
    "reduce_to": "get_replica_context().all_reduce(op, value)",
    "batch_reduce_to": "get_replica_context().all_reduce(op, value)",
    "gather": "use get_replica_context().all_gather() instead",
}


def test_cross_replica_calls_in_a_replica_function(strategy):
    def step(call):
        with pytest.raises(RuntimeError, match=IN_CROSS_REPLICA) as caught:
            call(strategy)
        return [str(caught.value)]

    for name, call in CROSS_REPLICA_CALLS.items():
        (message,) = own(strategy, strategy.run(step, args=(call,)))
        assert "use get_replica_context().merge_call()" in message
        assert "inside `strategy.run`" in message  # which context this is
        called = name.replace("experimental_run_v2", "run")  # which calls it
        assert message.partition(":")[0].rpartition(".")[2] == called
        assert INSTEAD.get(name, "outside `strategy.run`") in message
    assert_usable(strategy)


REPLICA_CALLS = {
    "all_reduce": (("SUM", 1.0), "strategy.reduce(op, value, axis=None)"),
    "all_gather": ((np.ones(1), 0), "strategy.gather(value, axis)"),
    "merge_call": ((lambda strategy: None,), "merge_fn(strategy, ...)"),
}


@pytest.mark.parametrize("where", ["scope", "merge_fn", "update"])
def test_replica_calls_in_cross_replica_context(strategy, where):
    captured = group_of(strategy).replica_frame.replica_context

    def attempt(_=None):
        messages = []
        for name, (args, _) in REPLICA_CALLS.items():
            with pytest.raises(RuntimeError) as caught:
                getattr(captured, name)(*args)
            messages.append(str(caught.value))
        return messages

    instead = [text for _, text in REPLICA_CALLS.values()]
    if where == "merge_fn":
        messages = strategy.run(lambda: context().merge_call(attempt))
    else:
        with strategy.scope():
            messages = attempt()
            if where == "update":
                v, messages = mpidist.Variable(0.0), []
                strategy.extended.update(v, lambda v: messages.extend(attempt()))
                instead = ["make the call before `update`, and pass the result in its"]
                instead *= len(REPLICA_CALLS)
    for message, text in zip(messages, instead, strict=True):
        assert "Need to be inside `call_for_each_replica()`" in message
        assert text in message
    assert_usable(strategy)


def test_another_context_of_the_same_strategy(strategy):
    other = mpidist.ReplicaContext(strategy, None)

    def step():
        with pytest.raises(RuntimeError, match="Mismatching ReplicaContext") as caught:
            other.all_reduce("SUM", 1.0)
        return str(caught.value)

    message = strategy.run(step)
    assert "mpidist.get_replica_context().all_reduce(" in message
    assert_usable(strategy)


# --- two strategies -------------------------------------------------------------------


def test_mixing_two_strategies_in_a_scope(strategy, new_strategy):
    other = new_strategy()
    with strategy.scope():
        for call in CROSS_REPLICA_CALLS.values():
            with pytest.raises(RuntimeError, match=MIXING) as caught:
                call(other)
            # Both, by name, and what to do.
            assert repr(strategy) in str(caught.value)
            assert repr(other) in str(caught.value)
            assert "get_strategy()" in str(caught.value)
            assert mpidist.get_strategy() is strategy
    assert_usable(strategy)
    assert_usable(other)


@pytest.mark.parametrize("where", ["replica", "merge_fn"])
def test_mixing_two_strategies_inside_run(strategy, new_strategy, where):
    other = new_strategy()
    replica_context = group_of(other).replica_frame.replica_context

    def refused(_=None):
        for call in (
            lambda: other.reduce("SUM", 1.0, axis=None),
            lambda: other.scope().__enter__(),
            lambda: other.run(lambda: None),
        ):
            with pytest.raises(RuntimeError, match=MIXING):
                call()
        if where == "replica":
            with pytest.raises(RuntimeError, match=MISMATCHING):
                replica_context.all_reduce("SUM", 1.0)
        return "all raised"

    merges = lambda: context().merge_call(refused)  # noqa: E731
    found = strategy.run(refused if where == "replica" else merges)
    assert found == "all raised"
    assert_usable(strategy)
    assert_usable(other)


def test_mixing_variables_of_two_strategies(strategy, new_strategy):
    other = new_strategy()
    with other.scope():
        v = mpidist.Variable(1.0, name="theirs")
    with strategy.scope():
        for call in (
            lambda: v.assign(2.0),
            lambda: strategy.extended.update(v, lambda v: None),
        ):
            with pytest.raises(RuntimeError, match=MIXING) as caught:
                call()
            assert "theirs" in str(caught.value)
        value = strategy.run(lambda: 1.0)
        with pytest.raises(RuntimeError, match=MIXING):
            strategy.extended.reduce_to("SUM", value, v)
        assert float(v) == 1.0
    v.assign(3.0)  # outside every scope it is its own strategy's business
    assert float(v) == 3.0


# --- experimental_set_strategy --------------------------------------------------------


@pytest.fixture
def unset():
    """Leave the global scope, whatever the test did."""
    yield
    mpidist.experimental_set_strategy(None)


@pytest.mark.usefixtures("unset")
def test_experimental_set_strategy_inside_a_scope(strategy):
    message = "Must not be called inside a .*Strategy` scope"

    def refused(value):
        with pytest.raises(RuntimeError, match=message) as caught:
            mpidist.experimental_set_strategy(value)
        assert "leave the `with strategy.scope():` block" in str(caught.value)

    with strategy.scope():
        refused(strategy)
        refused(None)
        assert mpidist.get_strategy() is strategy
    strategy.run(lambda: refused(strategy))
    mpidist.experimental_set_strategy(strategy)
    with strategy.scope():
        refused(None)
    strategy.run(lambda: refused(None))
    mpidist.experimental_set_strategy(None)
    assert_usable(strategy)


@pytest.mark.one_size
@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("what", ["mirrored", mpidist.MPIStrategy])
def test_another_object_than_a_strategy(strategy, what):
    for call in (
        lambda: mpidist.experimental_set_strategy(what),
        lambda: mpidist.seed_all(1, strategy=what),
        lambda: mpidist.ReplicaContext(what, None),
    ):
        with pytest.raises(TypeError, match=r"expected a `mpidist\.Strategy`, got"):
            call()
    assert not mpidist.has_strategy()


# --- threads --------------------------------------------------------------------------


def test_a_caught_traceback_has_the_frames_of_the_program(strategy):
    def merge_fn(_):
        raise KeyError("raised by merge_fn")

    def step():
        context = mpidist.get_replica_context()
        context.merge_call(merge_fn)

    def wrong():
        mpidist.get_replica_context().all_reduce("NO", 1.0)

    for fn, error in ((step, KeyError), (wrong, ValueError)):
        with pytest.raises(error) as caught:
            strategy.run(fn)
        found = [entry.name for entry in traceback.extract_tb(caught.tb)][1:]
        assert found[:2] == ["run", fn.__name__]
        # On other ranks merge_fn is not called; its text is in the message.
        assert found[2:] in ([], ["merge_fn"])
