"""Stages of a `Dataset` that is distributed: parts, positions, failures."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from replicas import assert_usable, everywhere, own, raises_everywhere, split
from test_data_distribute import as_list, flat, gathered, mine
from test_data_state import BATCH, ROWS, Resumable, shuffled

import mpidist
from mpidist._base import nest
from mpidist.data import AutoShardPolicy, Dataset, Options
from mpidist.data._shards import split_as_it_comes, split_by_plan

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]
core = pytest.mark.core

FILES = ["a", "b", "c", "d", "e"]
BY_FILE = mpidist.InputOptions(auto_shard_policy="FILE")


def squares(count=23):
    for number in range(count):
        yield number * number


def rows_of_file(name):
    """Return a dataset of 3 to 7 rows, in which the first digit is the file."""
    number = FILES.index(name)
    return Dataset.range(10 * number, 10 * number + 3 + number)


def ragged():
    return Dataset.from_generator(lambda: (np.full(n % 5, n) for n in range(11)))


PIPELINES = {
    "generator": lambda: Dataset.from_generator(squares).batch(4),
    "filter after batch": lambda: (
        Dataset.range(30).batch(4).filter(lambda x: x[0] % 3 > 0)
    ),
    "interleave": lambda: (
        Dataset.from_tensor_slices(FILES)
        .interleave(rows_of_file, cycle_length=2, num_parallel_calls=2)
        .batch(4)
    ),
    "shuffled generator": lambda: (
        Dataset.from_generator(squares).shuffle(5, seed=1).repeat(2).batch(5)
    ),
    "zip of batches": lambda: Dataset.zip(
        Dataset.range(16).batch(4), Dataset.from_generator(squares).batch(4)
    ).map(lambda x, y: x + y),
    "zip": lambda: Dataset.zip(Dataset.range(12).batch(4), Dataset.range(20).batch(4)),
    "concatenate": lambda: (
        Dataset.range(7).batch(4).concatenate(Dataset.range(50, 59).batch(3))
    ),
    "cache of batches": lambda: (
        Dataset.range(14).shuffle(seed=1).batch(4).cache().repeat(2)
    ),
    "cache of a generator": lambda: (
        Dataset.from_generator(squares).cache().shuffle(9, seed=1).batch(4).prefetch(2)
    ),
    "threads after batch": lambda: (
        Dataset.range(23).batch(5).map(lambda x: x * 2, num_parallel_calls=3)
    ),
    "padded": lambda: ragged().padded_batch(4),
    "padded to a shape": lambda: ragged().padded_batch(4, [6], -1),
    "skip": lambda: Dataset.from_generator(squares).skip(3).batch(4).skip(1).take(3),
}


@core
@pytest.mark.parametrize("rule", [split_as_it_comes, split_by_plan])
@pytest.mark.parametrize("kind", PIPELINES)
def test_each_replica_gets_its_rows(strategy, distribute, rank, size, kind, rule):
    expected = [nest.flatten(x)[0] for x in PIPELINES[kind]()]
    more = (len(expected[0][0]),) if rule is split_by_plan else ()
    options = mpidist.InputOptions(auto_shard_policy="OFF" if more else "AUTO")
    steps = list(distribute(PIPELINES[kind](), options))
    assert len(steps) == len(expected)
    for step, arrays in zip(steps, expected, strict=True):
        for part, rows in zip(nest.flatten(step)[0], arrays, strict=True):
            bounds = rule(len(rows), size, rank, *more)
            assert own(strategy, part).tolist() == rows[slice(*bounds)].tolist()


SOURCES = PIPELINES | {
    "Dataset": shuffled,
    "list": lambda: as_list(ROWS, BATCH),
    "iterator": lambda: iter(as_list(ROWS, BATCH)),
    "resumable": Resumable,
}


@core
@pytest.mark.parametrize("kind", sorted(set(SOURCES) - {"zip"}))
def test_a_position_is_restored_on_any_number_of_ranks(
    strategy, new_strategy, rank, kind
):
    make = SOURCES[kind]
    alone = new_strategy(comm=split(rank))
    for before, after in ((strategy, strategy), (alone, strategy), (strategy, alone)):
        first = iter(before.experimental_distribute_dataset(make()))
        states = [json.dumps(first.state())]
        batches = []
        for batch in first:
            batches.append(before.gather(batch, axis=0).tolist())
            states.append(json.dumps(first.state()))
        assert len(batches) >= 3
        # Not all, which would take longer: test_data_chains restores every position.
        for position in (0, 2, len(batches)):
            second = iter(after.experimental_distribute_dataset(make()))
            second.restore(json.loads(states[position]))
            assert second.state()["position"] == position
            assert gathered(after, second) == batches[position:]
            with pytest.raises(StopIteration):
                next(second)


# --- failures -------------------------------------------------------------------------


class FailsOnce:
    """A function that raises once, on one rank, for one element."""

    def __init__(self, here, element):
        self.left, self.element = int(here), element

    def __call__(self, x):
        if x == self.element and self.left:
            self.left -= 1
            raise OSError(f"element {x} cannot be read")
        return x

    def generate(self):
        for number in range(12):
            yield self(number)


FAILING = {
    "map": lambda f: Dataset.range(12).batch(1).unbatch().map(f).batch(4),
    "threads": lambda f: Dataset.range(12).map(f, num_parallel_calls=3).batch(4),
    "threads and prefetch": lambda f: (
        Dataset.range(12).map(f, num_parallel_calls=3).batch(4).prefetch(2)
    ),
    "filter": lambda f: Dataset.range(12).filter(lambda x: f(x) >= 0).batch(4),
    "generator": lambda f: Dataset.from_generator(f.generate).batch(4),
    "cache": lambda f: Dataset.from_generator(f.generate).cache().batch(4),
    "interleave": lambda f: (
        Dataset.range(12)
        .interleave(lambda x: Dataset.from_tensors(f(x)), 1, 1, 1)
        .batch(4)
    ),
}


@core
@pytest.mark.parametrize("kind", FAILING)
def test_a_failure_on_one_rank_is_told_on_all(strategy, distribute, rank, size, kind):
    # Of the second batch, a row of the last replica that has one.
    last = max(r for r in range(size) if split_as_it_comes(4, size, r)[0] < 4)
    iterator = iter(distribute(FAILING[kind](FailsOnce(rank == last, 7))))
    assert strategy.gather(next(iterator), axis=0).tolist() == [0, 1, 2, 3]
    error = OSError if rank == last else mpidist.ReplicaError
    with pytest.raises(error, match="element 7 cannot be read"):
        next(iterator)
    # All ranks go on after it.
    state = iterator.state()
    assert gathered(strategy, iterator) == [[8, 9, 10, 11]]
    iterator.restore(state)
    assert gathered(strategy, iterator) == [[8, 9, 10, 11]]
    assert_usable(strategy)


class Items(list):
    """A sequence of batches; what raises is one that cannot be read."""

    def __getitem__(self, index):
        item = list.__getitem__(self, index)
        return item() if callable(item) else item


def divides(x):
    if x in (5, 13):
        raise ZeroDivisionError
    return x


FIRST, THIRD = np.arange(4), np.arange(8, 12)
ALWAYS = {
    "map": lambda bad: Dataset.range(16).map(divides).batch(4),
    "ahead": lambda bad: Dataset.range(16).map(divides, 2).batch(4).prefetch(3),
    "whole": lambda bad: Dataset.range(16).batch(4).map(np.vectorize(divides)),
    "items": lambda bad: Items([FIRST, bad, None, THIRD, bad]),
}


@core
@pytest.mark.parametrize("kind", ALWAYS)
def test_a_loop_goes_on_after_elements_that_always_fail(
    strategy, distribute, rank, size, kind
):
    source = ALWAYS[kind](lambda: divides(5) if rank == size - 1 else FIRST)
    iterator = iter(distribute(source))
    found, failed = [], 0
    while True:
        try:
            element = next(iterator)
        except StopIteration:
            break
        except (ZeroDivisionError, mpidist.ReplicaError):
            failed += 1
        else:
            found.append(strategy.gather(element, axis=0).reshape(-1).tolist())
    assert found == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert failed == 2


@core
def test_own_inputs_leave_out_the_same_step(strategy, from_function, rank, size):
    here = rank == size - 1
    rows = Dataset.range(4, 8).map(divides if here else abs).batch(1)
    iterator = iter(from_function(lambda context: rows))
    next(iterator)
    with pytest.raises(ZeroDivisionError if here else mpidist.ReplicaError):
        next(iterator)
    assert own(strategy, next(iterator)).tolist() == [6]
    assert iterator.state()["position"] == 3


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.reduce("SUM", object(), axis=None), ValueError),
        (lambda s: s.run(lambda: 1), mpidist.CollectiveMismatchError),
    ],
)
def test_an_error_elsewhere_leaves_out_nothing(new_strategy, rank, call, error):
    strategy = new_strategy()
    iterator = iter(strategy.experimental_distribute_dataset(as_list(8, 4)))
    with pytest.raises(error):
        call(strategy) if rank == 0 else next(iterator)
    assert iterator.state()["position"] == 0
    assert gathered(strategy, iterator) == [[0, 1, 2, 3], [4, 5, 6, 7]]


class FailsFirst(list):
    """Batches, one of which cannot be read the first time, on one rank."""

    def __init__(self, batches, here, element):
        super().__init__(batches)
        self.here, self.element = here, element

    def __getitem__(self, index):
        if self.here and index == self.element:
            self.here = False
            raise OSError("cannot be read")
        return super().__getitem__(index)


@pytest.mark.mpi(min_size=2)
@core
def test_a_batch_that_fails_while_others_do_not_read_is_read_again(new_strategy, rank):
    strategy = new_strategy()
    batches = FailsFirst(as_list(12, 4), rank == 0, 1)
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    first = gathered(strategy, iterator, 1)
    with pytest.raises((OSError, mpidist.ReplicaError)):
        next(iterator) if rank == 0 else strategy.run(lambda: 1)
    expected = [x.tolist() for x in as_list(12, 4)]
    assert first + gathered(strategy, iterator) == expected


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("depth", [None, 0, 3])
def test_ranks_split_alike_after_a_first_batch_that_one_could_not_read(
    strategy, distribute, rank, size, depth
):
    sizes = [4 * size, 3 * size - 1, 4 * size, 3]
    batches = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    fails = FailsFirst(batches, rank == size - 1, 0)
    dataset = fails
    if depth is not None:

        def generate():
            for number in range(len(batches)):
                yield fails[number]

        dataset = Dataset.from_generator(generate).prefetch(depth)
    iterator = iter(distribute(dataset, mpidist.InputOptions(auto_shard_policy="OFF")))
    with pytest.raises((OSError, mpidist.ReplicaError)):
        next(iterator)
    assert gathered(strategy, iterator) == [x.tolist() for x in batches[1:]]


@core
def test_a_sequence_whose_items_go_to_the_replicas_in_turn(size):
    class Batches:  # whose length is its only end
        def __len__(self):
            return 3 * size + 1

        def __getitem__(self, index):
            return None if index == size else np.full(1, index)

    def numbers(iterator):
        steps = itertools.islice(iterator, 5)
        return [int(x[0]) for step in steps for x in results(step)]

    strategy = mpidist.MirroredStrategy()
    results = strategy.experimental_local_results  # of all replicas
    dataset = strategy.distribute_datasets_from_function(lambda context: Batches())
    expected = [n for n in range(3 * size + 1) if n != size]
    iterator = iter(dataset)
    next(iterator)
    state = iterator.state()
    assert numbers(iterator) == expected[size:]
    iterator.restore(state)
    assert numbers(iterator) == expected[size:]
    assert numbers(dataset) == expected
    strategy.close()


@core
def test_stop_iteration_of_one_element_does_not_end_the_input(strategy, distribute):
    class Batches(list):
        def __getitem__(self, index):
            return next(iter([])) if index == 1 else super().__getitem__(index)

    iterator = iter(distribute(Batches(as_list(12, 4))))
    first = gathered(strategy, iterator, 1)
    raises_everywhere(RuntimeError, lambda: next(iterator), "StopIteration inside")
    assert first + gathered(strategy, iterator) == [[0, 1, 2, 3], [8, 9, 10, 11]]


@core
def test_a_generator_that_always_fails_ends_with_an_error(strategy, distribute):
    def generate():
        yield from range(5)
        raise OSError("no more")

    dataset = Dataset.from_generator(generate).batch(2)
    iterator = iter(distribute(dataset))
    gathered(strategy, iterator, 2)
    raises_everywhere(OSError, lambda: next(iterator))
    raises_everywhere(OSError, lambda: next(iterator))
    texts = raises_everywhere(RuntimeError, lambda: next(iterator))
    assert "make a new iterator" in texts[0]
    assert gathered(strategy, iterator) == []


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize(
    "make",
    [
        lambda rank: Dataset.range(9 + (rank == 0)).batch(4),
        lambda rank: Dataset.range(9).shuffle(seed=rank).batch(4),
        lambda rank: [np.arange(3)] * (4 + rank),
        lambda rank: Dataset.range(9).skip((rank == 0 and 1) or 2).batch(4),
        lambda rank: (
            Dataset.range(9).interleave(Dataset.range, 1 + (rank == 0)).batch(4)
        ),
        lambda rank: (
            Dataset.from_generator(squares).shuffle(4 + (rank == 0), seed=1).batch(4)
        ),
        lambda rank: (
            Dataset.range(9).batch(4).with_options(policy("OFF" if rank else "DATA"))
        ),
    ],
)
def test_datasets_that_differ_between_ranks(distribute, rank, make):
    mismatch = mpidist.CollectiveMismatchError
    raises_everywhere(mismatch, lambda: distribute(make(rank)))


# --- by files -------------------------------------------------------------------------


def policy(name):
    options = Options()
    options.experimental_distribute.auto_shard_policy = name
    return options


def by_files(batch=6):
    files = Dataset.from_tensor_slices(FILES).shuffle(seed=3)
    return files.interleave(rows_of_file, cycle_length=2).batch(batch)


@core
@pytest.mark.parametrize("how", ["input options", "options"])
def test_each_replica_opens_files_of_its_own(strategy, distribute, rank, size, how):
    dataset, options = by_files(), BY_FILE
    if how == "options":
        dataset, options = dataset.with_options(policy(AutoShardPolicy.FILE)), None
    dataset = distribute(dataset, options)
    assert "FILE: each replica opens" in dataset.shard_plan
    steps = mine(strategy, dataset)
    files = [row // 10 for row in flat(steps)]
    names = Dataset.from_tensor_slices(FILES).shuffle(seed=3)
    assert list(dict.fromkeys(files)) == [FILES.index(x) for x in names][rank::size]
    plan = [split_by_plan(6, size, k, 6) for k in range(size)]
    turns = itertools.cycle(plan[rank:] + plan[:rank])
    *filled, last = zip(filter(None, steps), turns, strict=False)
    assert all(len(batch) == stop - start for batch, (start, stop) in filled)
    assert len(last[0]) <= last[1][1] - last[1][0]
    rows = sorted(flat(flat(everywhere(steps))))
    assert rows == [10 * f + i for f in range(5) for i in range(3 + f)]


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: Dataset.range(9).batch(4), "is for a dataset that opens files"),
        (lambda n: [np.arange(4)], "is for a `mpidist.data.Dataset`"),
        (lambda n: by_files().unbatch().take(9).batch(4), "with the `take` after"),
        (lambda n: Dataset.zip(by_files(), by_files()), "is for a dataset that opens"),
        (lambda n: by_files().assert_cardinality(5), "`assert_cardinality` after"),
        (lambda n: numbers(n - 1).batch(8), "needs a file for each of"),
        (lambda n: numbers(9).batch(n - 1), "needs global batches of a row for each"),
    ],
)
def test_what_cannot_be_split_by_files(distribute, size, make, message):
    for text in raises_everywhere(ValueError, lambda: distribute(make(size), BY_FILE)):
        assert message in text


@pytest.mark.mpi(min_size=2)
@core
def test_files_that_differ_between_ranks_warn(distribute, rank):
    files = Dataset.from_tensor_slices(FILES if rank else FILES[::-1])
    dataset = files.interleave(rows_of_file).batch(6)
    text = "not the same on all ranks"
    raises_everywhere(RuntimeWarning, lambda: distribute(dataset, BY_FILE), text)


def numbers(files):
    return Dataset.range(files).interleave(Dataset.range)


# What TensorFlow gives 2 and 3 workers, by its `_AutoShardDataset`.
BY_TENSORFLOW = {
    "the larger pieces in turn": (
        lambda rows: rows.batch(7),
        [
            [[0, 20, 1, 21], [2, 22, 23], [40, 24, 41, 42], [43, 44, 45], [46]],
            [[10, 30, 11], [31, 12, 32, 13], [33, 34, 35]],
        ],
        [
            [[0, 30, 1], [31, 2], [32, 33], [34, 35]],
            [[10, 40], [11, 41], [12, 42, 13], [43, 44], [45, 46]],
            [[20, 21], [22, 23, 24]],
        ],
    ),
    "batches are dropped and counted": (
        lambda rows: rows.batch(7, drop_remainder=True).prefetch(2).take(1),
        [[[0, 20, 1, 21], [2, 22, 23]], [[10, 30, 11], [31, 12, 32, 13]]],
        [[[0, 30, 1], [31, 2], [32, 33]], [[10, 40], [11, 41], [12, 42, 13]], []],
    ),
    "pieces of two batches": (
        lambda rows: rows.batch(7).repeat(2).take(3),
        [
            [[0, 20, 1, 21], [2, 22, 23], [40, 24, 41, 42], [43, 44, 45], [46]],
            [
                *([10, 30, 11], [31, 12, 32, 13], [33, 34, 35]),
                *([10, 30, 11, 31], [12, 32, 13]),
            ],
        ],
        [
            [[0, 30, 1], [31, 2], [32, 33], [34, 35, 0], [30, 1], [31, 2], [32, 33]],
            [
                *([10, 40], [11, 41], [12, 42, 13], [43, 44], [45, 46]),
                *([10, 40, 11], [41, 12], [42, 13]),
            ],
            [[20, 21], [22, 23, 24], [20, 21], [22, 23], [24]],
        ],
    ),
    "a map of batches": (
        lambda rows: rows.batch(7).map(lambda batch: batch - batch[:1]),
        [
            [[0, 20, 1, 21], [2, 22, 23], [0, -16, 1, 2], [3, 4, 5], [0]],
            [[0, 20, 1, 21], [2, 22, 3], [0, 1], [2]],
        ],
        [
            [[0, 30, 1], [31, 2, 32], [33], [0], [1]],
            [[0, 30, 1], [31, 2, 32], [3], [0, 1], [2, 3]],
            [[0, 1], [2, 3], [4]],
        ],
    ),
    "a map of full batches": (
        lambda rows: rows.batch(5, True).map(lambda batch: batch - batch[:1]),
        [
            [[0, 20, 1], [21, 2], [0, 1, 18], [2, 19], [0, 1, 2], [3, 4]],
            [[0, 20], [1, 21, 2], [0, -19], [1, 2, 3]],
        ],
        [
            [[0, 30], [1, 31], [2]],
            [[0, 30], [1], [31, 2], [0, -29], [1], [2, 3]],
            [[0], [1, 2], [3, 4]],
        ],
    ),
}


@core
@pytest.mark.parametrize("name", BY_TENSORFLOW)
def test_pieces_by_files_are_those_of_tensorflow(strategy, distribute, size, name):
    make, *found = BY_TENSORFLOW[name]
    files = Dataset.from_tensor_slices(FILES)
    dataset = distribute(make(files.interleave(rows_of_file, 2)), BY_FILE)
    steps = everywhere(mine(strategy, dataset))
    assert len(set(map(len, steps))) == 1  # all make as many
    if size in (2, 3):
        filled = [[batch for batch in one if batch] for one in steps]
        assert filled == found[size - 2]
    iterator = iter(dataset)
    for position in range(len(steps[0]) + 1):
        state = json.loads(json.dumps(iterator.state()))
        iterator.restore(state | {"position": position})
        rest = everywhere(mine(strategy, iterator))
        assert rest == [one[position:] for one in steps]
