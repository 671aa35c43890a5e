"""Iterators of a `Dataset`: positions, failures, caches and threads. No MPI here."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import threading
import time

import pytest
from launching import run_python
from test_data_methods import INT, generated, lists

import mpidist
from mpidist import data
from mpidist.data import AUTOTUNE, ArraySpec, Dataset
from mpidist.data._ahead import read_ahead


def fails_at(number, what="element"):
    def function(x):
        if x == number:
            raise KeyError(f"{what} {number}")
        return x

    return function


def generator_of(elements):
    return Dataset.from_generator(lambda: iter(elements))


def fails(iterator, message, error=KeyError):
    with pytest.raises(error, match=message):
        next(iterator)


def first(iterator, count):
    return lists(itertools.islice(iterator, count))


def test_an_iterator_and_its_optionals():
    iterator = iter(Dataset.range(3).prefetch(1))
    assert iterator.get_next() == 0
    optional = iterator.get_next_as_optional()
    assert optional.get_value() == 1
    state = iterator.state()
    assert next(iterator) == 2
    end = iterator.get_next_as_optional()
    assert not end.has_value()
    with pytest.raises(ValueError, match=r"ask `has_value\(\)` first"):
        end.get_value()
    with pytest.raises(data.OutOfRangeError, match="ended, after 3 elements"):
        iterator.get_next()
    iterator.restore(state)
    assert lists(iterator) == [2]
    assert list(Dataset.range(2).as_numpy_iterator()) == [0, 1]
    strategy = mpidist.get_strategy()
    batches = strategy.experimental_distribute_dataset(Dataset.range(3).batch(2))
    spec = ArraySpec((), INT)
    for one in (iterator, optional, end, data.Optional.from_value(3)):
        assert one.element_spec == spec
    assert data.Optional.empty(spec).element_spec == spec
    of_batches = iter(batches).get_next_as_optional()
    assert of_batches.element_spec == ArraySpec((None,), INT)
    assert repr(of_batches).startswith("Optional(")
    assert repr(end) == "Optional()"


def test_a_state_has_the_seeds_of_shuffles_without_one():
    nine = Dataset.range(9)

    def make():
        rows = Dataset.zip(nine.shuffle(9), nine.shuffle(9, seed=3))
        return rows.concatenate(rows.take(4)).cache().shuffle(5).repeat(2)

    one, dataset = make(), make()
    iterator = iter(one)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.state()))
    before, other = iter(dataset), iter(make())
    expected = list(other)
    restored = iter(dataset)
    restored.restore(state)
    assert restored.state() == state
    assert list(restored) == (rest := list(iterator))
    assert list(dataset) == list(one)  # the next epoch, too
    assert list(before) != list(one)  # has its own order
    assert rest != expected[3:]
    seeds = state.pop("shuffle_seeds")
    match = r"'shuffle_seeds' 3, .*got 2; .*write `shuffle\(n, seed="
    with pytest.raises(ValueError, match=match):
        other.restore({**state, "shuffle_seeds": seeds[:2]})
    # An older version used 0 for all, and its states have no seeds.
    restored.restore(state)
    assert restored.state()["shuffle_seeds"] == [0] * 3


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("rows", [Dataset.range, lambda n: generator_of(range(n))])
def test_an_input_that_has_become_shorter_is_refused(rows, ahead):
    longer = iter(rows(3))
    list(longer)
    iterator = iter(rows(2).prefetch(ahead))
    iterator.restore(longer.state())
    fails(iterator, "3 or more elements, got one that ends before", ValueError)
    fails(iterator, "cannot continue", RuntimeError)
    assert list(iterator) == []


# --- failures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(6).map(fails_at(2)),
        Dataset.range(6).map(fails_at(2)).prefetch(8),
        Dataset.range(6).map(fails_at(2), num_parallel_calls=4),
        # Of the source, which is read ahead of the results.
        Dataset.range(6).map(fails_at(2)).map(lambda x: x, num_parallel_calls=4),
        # Rows before it come out of a cache.
        Dataset.range(6).map(fails_at(2), num_parallel_calls=4).cache(),
    ],
    ids=["map", "prefetch", "threads", "source", "cache"],
)
def test_an_element_that_fails_is_left_out_or_tried_again_by_restore(dataset):
    iterator = iter(dataset)
    assert first(iterator, 2) == [0, 1]
    fails(iterator, "element 2")
    state = iterator.state()
    assert lists(iterator) == [3, 4, 5]
    iterator.restore(state)
    fails(iterator, "element 2")
    assert lists(iterator) == [3, 4, 5]
    wait_for_no_thread()


@pytest.mark.parametrize("depth", [0, 4])
def test_a_source_is_not_read_again_after_an_element_that_failed(depth):
    rows = map(fails_at(5, "row"), range(7))
    dataset = Dataset.from_generator(lambda: rows).map(fails_at(2)).prefetch(depth)
    iterator = iter(dataset)
    assert first(iterator, 2) == [0, 1]
    fails(iterator, "element 2")  # whether or not the thread knows of row 5
    assert first(iterator, 2) == [3, 4]
    fails(iterator, "row 5")


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(5).filter(lambda x: fails_at(2)(x) >= 0),
        Dataset.from_generator(lambda: map(fails_at(2), range(5))),
        Dataset.range(5).flat_map(lambda x: Dataset.from_tensors(fails_at(2)(x))),
    ],
    ids=["filter", "generator", "flat_map"],
)
def test_after_an_exception_of_its_source_an_iterator_does_not_end_silently(
    dataset, depth
):
    iterator = iter(dataset.prefetch(depth))
    assert first(iterator, 2) == [0, 1]
    fails(iterator, "element 2")
    fails(iterator, "raised a KeyError and cannot continue", RuntimeError)
    assert lists(iterator) == []  # a loop that ignores errors has an end


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("method", ["filter", "take_while", "map"])
def test_stop_iteration_in_a_function_is_no_end(method, depth):
    dataset = getattr(Dataset.range(3), method)(lambda x: next(iter(())))
    dataset = dataset.batch(2).prefetch(depth)
    distribute = mpidist.get_strategy().experimental_distribute_dataset
    for rows in (dataset, distribute(dataset)):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(rows)


# --- cache --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [Dataset.range(10), generated(*range(10))])
@pytest.mark.parametrize("threads", [None, 2])
def test_cache_loads_each_element_once(rows, threads):
    mapped = []
    dataset = rows.map(lambda x: mapped.append(int(x)) or x, threads).cache()
    assert mapped == []
    assert first(iter(dataset), 4) == [0, 1, 2, 3]  # and break
    batches = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert lists(dataset.batch(3).repeat(2)) == 2 * batches
    assert sorted(lists(dataset.shuffle(9, seed=1))) == list(range(10))
    assert sorted(mapped) == list(range(10))


def test_the_elements_of_a_cache_are_read_only():
    (element,) = Dataset.range(3).batch(3).cache()
    with pytest.raises(ValueError, match="read-only"):
        element += 1


def test_a_function_may_change_what_a_cache_keeps():
    def add(row):
        row["x"] += 1
        return row

    rows = generated({"x": [0]}, {"x": [0]})
    dataset = rows.map(add).batch(2).cache()
    assert dataset.element_spec["x"].shape == (None, 1)  # reads a row
    assert [batch["x"].tolist() for batch in dataset] == [[[1], [1]]]


def test_cache_reads_on_after_an_exception():
    left = [1]

    def generate():
        for number in range(6):
            if number == 3 and left:
                left.pop()
                raise OSError("try again")
            yield number

    dataset = Dataset.from_generator(generate).cache()
    with pytest.raises(OSError, match="try again"):
        lists(dataset)
    assert lists(dataset) == lists(dataset) == list(range(6))


def test_a_forked_child_reads_a_cache_that_a_thread_was_reading():
    inside, go_on = threading.Event(), threading.Event()

    def wait(x):
        inside.set()
        go_on.wait()
        return x

    dataset = Dataset.range(2).map(wait).cache()
    thread = threading.Thread(target=list, args=(dataset,))
    thread.start()
    inside.wait()  # and it holds the lock of the cache
    child = os.fork()
    if child == 0:
        go_on.set()
        os._exit(list(dataset) != [0, 1])
    go_on.set()
    thread.join()
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended == (child, 0)


# --- threads ------------------------------------------------------------------------


def reading_threads():
    return [t for t in threading.enumerate() if t.name == "mpidist data"]


def wait_for_no_thread():
    deadline = time.monotonic() + 30
    while reading_threads() and time.monotonic() < deadline:
        gc.collect()  # an iterator of another test may not be collected yet
        time.sleep(0.01)
    assert reading_threads() == []


def test_map_calls_its_function_in_parallel_and_keeps_the_order():
    together = threading.Barrier(3, timeout=60)  # broken if they are called one by one

    def meet(x):
        together.wait()
        return x * 10

    dataset = Dataset.range(9).map(meet, num_parallel_calls=3, deterministic=False)
    assert lists(dataset) == [n * 10 for n in range(9)]
    assert lists(dataset.batch(3)) == [[0, 10, 20], [30, 40, 50], [60, 70, 80]]
    assert lists(Dataset.range(9).batch(3).map(meet, 3))[2] == [60, 70, 80]
    wait_for_no_thread()


@pytest.mark.parametrize(
    "ahead",
    [
        lambda rows: rows.prefetch(3),
        # This one's items are read by the loop's thread, one for each of its own.
        lambda rows: rows.map(lambda x: x, num_parallel_calls=4),
    ],
    ids=["prefetch", "map"],
)
def test_threads_run_ahead_but_not_farther(ahead):
    read = []
    iterator = iter(ahead(Dataset.range(20).map(lambda x: read.append(int(x)) or x)))
    assert read == []
    for number in range(2):
        assert next(iterator) == number
        deadline = time.monotonic() + 30
        while len(read) < number + 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        # What was given out, and three that are ready.
        time.sleep(0.05)
        assert read == list(range(number + 4))
    assert lists(iterator) == list(range(2, 20))
    wait_for_no_thread()


def test_a_buffer_may_be_far_larger_than_the_input():
    assert lists(Dataset.range(3).prefetch(2**62)) == [0, 1, 2]
    wait_for_no_thread()


def test_close_waits_for_the_thread():
    reader = read_ahead(iter(range(100)), 2)
    assert next(reader) == 0
    assert reading_threads()
    reader.close()
    assert reading_threads() == []
    with pytest.raises(StopIteration):
        next(reader)
    read_ahead(iter(range(3)), 1).close()  # one that was never started


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(1000).map(lambda x: x, AUTOTUNE).prefetch(2),
        Dataset.range(9).interleave(Dataset.range, 4, 1, AUTOTUNE),
    ],
    ids=["map", "interleave"],
)
def test_threads_and_generators_end_with_a_break(dataset):
    closed = []

    def forever():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    for rows in (dataset, Dataset.from_generator(forever).map(lambda x: x)):
        for element in rows:
            if element == 3:
                break
    gc.collect()
    assert closed == [True]
    wait_for_no_thread()


BLOCKED = """
import threading
from mpidist.data import Dataset

def block(x):
    if x > 1:
        threading.Event().wait()
    return x

for element in Dataset.range(9).map(block, num_parallel_calls=4).prefetch(2):
    print(element, flush=True)
    if element == 1:
        break
iterator = iter(Dataset.range(9).map(block, num_parallel_calls=4))
print(next(iterator), flush=True)
"""


def test_a_program_ends_while_threads_are_in_their_function():
    assert run_python("-c", BLOCKED) == "0\n1\n0\n"
