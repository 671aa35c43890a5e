"""The warning for reductions outside of every scope."""

import asyncio
import concurrent.futures
import inspect
import warnings

import numpy as np
import pytest
from replicas import local, merge, raises_everywhere

import mpidist
from mpidist._merge.commands import NotThereError

pytestmark = pytest.mark.mpi


def outside():
    return mpidist.get_replica_context().all_reduce("SUM", 2.0)


def found_in(call):
    """Return the warnings of a call, as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (outside, "all_reduce"),
        (lambda: mpidist.get_replica_context().all_reduce(np.add, 2.0), "all_reduce"),
        (lambda: mpidist.get_replica_context().all_gather(np.ones(3), 0), "all_gather"),
        (lambda: mpidist.global_batch_size(np.ones(3)), "global_batch_size"),
        (lambda: mpidist.compute_average_loss(np.ones(3)), "global_batch_size"),
        (lambda: mpidist.get_strategy().run(lambda: 1), "Strategy.run"),
        (lambda: mpidist.get_strategy().reduce("SUM", 2.0, None), "Strategy.reduce"),
        (lambda: mpidist.get_strategy().gather(np.ones(3), 0), "Strategy.gather"),
    ],
)
def test_it_is_given_once_and_only_on_several_ranks(
    new_strategy, call, name, rank, size
):
    found_in(outside)  # those of earlier strategies
    new_strategy()
    texts = found_in(call)
    assert len(texts) == (size > 1)
    for text in texts:
        assert text.startswith(f"[rank {rank}] {name}: ")
        assert f"one of all {size} replicas" in text
        assert ("scope" if "." in name else "run(fn)") in text.split("call it ")[1]
    assert not found_in(call)


def test_none_where_the_call_is_refused(new_strategy, size):
    kept, strategy = mpidist.get_strategy(), new_strategy()
    mixing = pytest.raises(RuntimeError, match="Mixing different Strategy")
    with strategy.scope(), mixing:
        assert not found_in(lambda: kept.run(lambda: 1))
    assert len(found_in(outside)) == (size > 1)


def test_help_shows_the_arguments():
    assert "axis" in inspect.signature(mpidist.get_strategy().reduce).parameters


def test_none_where_it_is_meant(new_strategy, size):
    found_in(outside)
    new = new_strategy()

    def calls():
        assert local(new, outside) == 2.0 * size
        v = mpidist.Variable(1.0, aggregation="SUM")
        v.assign(2.0)
        mpidist.optimizers.SGD(0.1).apply_gradients([(1.0, v)])
        mpidist.compute_average_loss(np.ones(2), global_batch_size=4)

    assert not found_in(calls)
    new.close()
    assert not found_in(outside)


# --- variables of a forgotten scope ---------------------------------------------------


def test_a_variable_made_outside_warns_once(new_strategy, rank, size):
    new = new_strategy()
    forgotten, other = mpidist.Variable(0.0, name="forgotten"), mpidist.Variable(0.0)
    own = mpidist.Variable(0.0, synchronization="ON_READ")
    with new.scope():
        metric = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def write(*variables):
        for v in variables:
            v.assign_add(float(rank))

    def calls():
        forgotten.assign(1.0)  # of the program
        new.run(write, args=(own, metric))
        new.run(lambda: forgotten + 1.0)

    assert not found_in(calls)
    texts = found_in(lambda: new.run(write, args=(forgotten, other)))
    assert len(texts) == (size > 1)
    for text in texts:
        assert text.startswith(f"[rank {rank}] Variable 'forgotten'.assign_add: ")
        assert f"each of the {size} replicas writes one of its own" in text
        assert "`with strategy.scope():`" in text
        assert 'synchronization="ON_READ"' in text
    assert not found_in(lambda: new.run(write, args=(forgotten, other)))
    if size > 1:
        for kind, merge_fn, text in (
            (RuntimeError, lambda s: write(forgotten), "of rank 0 only"),
            (RuntimeError, lambda s: s.extended.update(forgotten, write), "0 only"),
            (NotThereError, lambda s: s.run(write, (other,)), "is of <mpidist default"),
        ):
            raises_everywhere(kind, lambda f=merge_fn: merge(new, f), text)
    assert float(forgotten) == 1.0 + 2 * rank


# --- a thread that a function in a scope starts ---------------------------------------


def in_asyncio(call):
    return asyncio.run(asyncio.to_thread(call))


def in_an_executor(call):
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


CALLS = {
    "all_reduce": lambda ctx: ctx.all_reduce("SUM", 2.0),
    "all_reduce by a function": lambda ctx: ctx.all_reduce(np.add, 2.0),
    "all_gather": lambda ctx: ctx.all_gather(np.full(1, 2.0), axis=0).sum(),
    "merge_call": lambda ctx: ctx.merge_call(
        lambda strategy, x: strategy.reduce("SUM", x, axis=None), args=(2.0,)
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.replicas(2)
@pytest.mark.parametrize("start", [in_asyncio, in_an_executor])
@pytest.mark.parametrize("name", CALLS)
def test_a_thread_in_no_scope_raises_and_one_that_enters_it_gets_the_sum(
    new_strategy, size, start, name
):
    strategy, call = new_strategy(), CALLS[name]

    def without():
        return call(mpidist.get_replica_context())

    def step():
        ctx = mpidist.get_replica_context()

        def within():
            with ctx:
                return call(mpidist.get_replica_context())

        with pytest.raises(RuntimeError, match="is in no scope, so each rank") as found:
            start(without)
        assert name.split()[0] in str(found.value)
        assert "`with ctx:`" in str(found.value)
        with pytest.raises(RuntimeError, match=r"in no scope.*`with ctx:`") as found:
            start(lambda: call(ctx))
        assert name.split()[0] in str(found.value)
        return start(within)

    assert local(strategy, step) == 2.0 * size
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="is in no scope, so each rank"),
    ):
        start(without)
    assert start(lambda: local(strategy, step)) == 2.0 * size
