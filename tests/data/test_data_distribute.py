"""experimental_distribute_dataset, distribute_datasets_from_function; any ranks."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import tracemalloc

import numpy as np
import posing
import pytest
from replicas import assert_usable, everywhere, own, raises_everywhere

import mpidist
from mpidist import data
from mpidist._base import shuffle_seeds
from mpidist._strategy.strategy import group_of
from mpidist.data import ArraySpec, AutoShardPolicy, Dataset, _sources
from mpidist.data._shards import split_as_it_comes, split_by_plan

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]
core = pytest.mark.core

OFF = mpidist.InputOptions(auto_shard_policy=AutoShardPolicy.OFF)
PER_REPLICA = mpidist.InputReplicationMode.PER_REPLICA
INTS = ArraySpec((None,), np.dtype(np.int64))


def mine(strategy, dataset):
    """Return this rank's rows of each step, as lists."""
    return [own(strategy, element).tolist() for element in dataset]


def gathered(strategy, iterator, steps=None):
    """Return the global batches that are still to come, or some of them."""
    found = []
    while steps is None or len(found) < steps:
        step = iterator.get_next_as_optional()
        if not step.has_value():
            break
        found.append(strategy.gather(step.get_value(), axis=0).tolist())
    return found


def flat(batches):
    return list(itertools.chain(*batches))


def as_list(rows, size):
    """Return a list of global batches of the numbers from 0."""
    return [np.arange(i, min(i + size, rows)) for i in range(0, rows, size)]


def as_dataset(rows, size):
    return Dataset.from_tensor_slices(np.arange(rows)).batch(size)


def pieces(strategy, rows, size, rule=split_as_it_comes):
    """Return what this rank should get of the numbers from 0."""
    n, r = strategy.num_replicas_in_sync, strategy.replica_id
    more = (size,) if rule is split_by_plan else ()
    return [
        batch[slice(*rule(len(batch), n, r, *more))].tolist()
        for batch in as_list(rows, size)
    ]


# --- the split ---------------------------------------------------------------------


def test_replicas_without_rows_learn_what_a_map_gives(strategy, distribute, rank):
    # Only rank 0 ever reads a row, and so only it knows what the function returns.
    calls = []

    def widen(x):
        calls.append(int(x))
        return np.full((2, 2), x, np.float16)

    distributed = distribute(Dataset.range(3).map(widen).batch(1))
    shapes = [own(strategy, element).shape for element in distributed]
    assert shapes == [(1 if rank == 0 else 0, 2, 2)] * 3
    assert calls == ([0, 1, 2] if rank == 0 else [])


def test_without_the_guard(new_strategy):
    strategy = new_strategy(guard=False)
    for make in (as_dataset, as_list):
        dataset = strategy.experimental_distribute_dataset(make(14, 4))
        assert mine(strategy, dataset) == pieces(strategy, 14, 4)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: as_list(context.input_pipeline_id + 1, 1)
    )
    assert len(list(dataset)) == strategy.num_replicas_in_sync


def arrays_of(*lengths):
    return Dataset.from_generator(lambda: map(np.ones, lengths))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [np.ones((n, 1)), np.ones((n, 2)), np.ones((1, 3))],
        lambda n: arrays_of(*[1] * n, *[2] * n, 3).batch(n),
    ],
)
def test_shapes_of_rows_may_change_between_batches(strategy, distribute, size, make):
    """A replica without rows gets the shape of the others' rows."""
    for _ in range(2):
        shapes = [strategy.gather(x, axis=0).shape for x in distribute(make(size))]
        assert shapes == [(size, 1), (size, 2), (1, 3)]


@pytest.mark.parametrize("make", [arrays_of, lambda *n: Dataset.range(6).map(np.ones)])
def test_rows_of_different_shapes_are_no_batch_on_any_number_of_ranks(distribute, make):
    """Although each rank could stack its own."""
    steps = iter(distribute(make(*range(6)).batch(2)))
    for _ in range(3):  # goes on after each
        for message in raises_everywhere(ValueError, lambda: next(steps)):
            assert "expected rows of one structure, dtype and shape" in message
            assert "write `padded_batch`" in message
    with pytest.raises(StopIteration):
        next(steps)


def test_a_generator_can_be_gone_through_once(strategy, distribute):
    dataset = distribute(iter(as_list(9, 4)))
    assert mine(strategy, dataset) == pieces(strategy, 9, 4)
    with pytest.raises(RuntimeError, match="can be read only once"):
        next(iter(dataset))


def test_the_order_of_keys_does_not_matter(strategy, distribute, rank):
    arrays = {"a": np.arange(4), "b": np.ones((4, 2))}
    if rank % 2:
        arrays = dict(reversed(arrays.items()))
    for batches in (Dataset.from_tensor_slices(arrays).batch(4), [arrays]):
        (element,) = distribute(batches)
        assert own(strategy, element)["b"].shape[1:] == (2,)


@core
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Dataset.from_tensors(x).repeat(2),
        lambda x: Dataset.from_generator(lambda: iter([x, x])),
        lambda x: Dataset.from_tensors(x - 1).map(lambda x: x + 1).shuffle(3).repeat(2),
        lambda x: Dataset.from_tensors(x).concatenate(Dataset.from_tensors(x).cache()),
    ],
    ids=["from_tensors", "from_generator", "map", "concatenate"],
)
def test_elements_that_are_batches_already(strategy, distribute, make):
    """As in TensorFlow, which splits what `batch` was not called for."""
    dataset = make(np.arange(7))
    assert mine(strategy, distribute(dataset)) == pieces(strategy, 7, 7) * 2
    for rows in (dataset.unbatch(), dataset.flat_map(Dataset.from_tensors)):
        with pytest.raises(ValueError, match="whose elements are single rows"):
            distribute(rows)


# --- who reads what, and what it costs ------------------------------------------------


class Rows:
    """Rows that tell which of them are read."""

    def __init__(self, record):
        self.shape, self.dtype, self.record = (50,), np.dtype(int), record

    def __getitem__(self, index):
        rows = range(*index.indices(50))
        return np.array([self.record(row) for row in rows], int)


READ_IN_PART = {
    "rows": lambda record: Dataset.from_tensor_slices(Rows(record)).batch(8),
    "shuffled rows": lambda record: (
        Dataset.from_tensor_slices(Rows(record)).shuffle(seed=1).batch(8).prefetch(2)
    ),
    "map after filter": lambda record: (
        Dataset.range(50).filter(lambda x: x % 2 == 0).map(record).batch(6)
    ),
    "cache": lambda record: Dataset.range(50).map(record).cache().batch(8),
}


@core
@pytest.mark.parametrize("options", [None, OFF], ids=["AUTO", "OFF"])
@pytest.mark.parametrize("kind", READ_IN_PART)
def test_a_rank_reads_its_own_rows_only(strategy, distribute, kind, options):
    touched = []
    dataset = READ_IN_PART[kind](lambda x: touched.append(int(x)) or x)
    distributed = distribute(dataset, options)
    epochs = [flat(mine(strategy, distributed)) for _ in range(2)]
    assert sorted(touched) == sorted(epochs[0] if kind == "cache" else flat(epochs))
    expected = flat(batch.tolist() for batch in READ_IN_PART[kind](lambda x: x))
    assert sorted(flat(everywhere(epochs[0]))) == sorted(expected)


def test_a_map_after_batch_makes_each_rank_read_whole_batches(distribute):
    touched = []
    rows = Dataset.range(16).map(lambda x: touched.append(int(x)) or x)
    distributed = distribute(rows.batch(8).map(lambda x: x - x.mean()))
    assert "each rank reads whole batches" in distributed.shard_plan
    assert len(list(distributed)) == 2
    assert touched == list(range(16))


@core
@pytest.mark.parametrize(("make", "messages"), [(as_dataset, 0), (as_list, 1)])
def test_a_step_costs_one_header(strategy, distribute, monkeypatch, make, messages):
    """What elements of a list are like is told once."""
    calls = []
    group = group_of(strategy)
    original = group.communicator.all_gather_objects
    monkeypatch.setattr(
        group.communicator,
        "all_gather_objects",
        lambda data: calls.append(1) or original(data),
    )
    dataset = distribute(make(40, 8))
    for _ in range(2):
        before = group.guard.sequence
        assert len(list(dataset)) == 5
        assert group.guard.sequence - before == 6  # with the end
        assert len(calls) == messages


def test_no_thread_but_the_main_one_calls_mpi(new_strategy, monkeypatch):
    strategy = new_strategy()
    comm = group_of(strategy).communicator
    callers, readers = set(), set()

    def recorded(original, names):
        def record(*args, **kwargs):
            names.add(threading.current_thread().name)
            return original(*args, **kwargs)

        return record

    for name in ("all_gather", "all_gather_objects", "all_gather_integers"):
        monkeypatch.setattr(comm, name, recorded(getattr(comm, name), callers))
    dataset = Dataset.range(40).map(recorded(np.abs, readers)).batch(8).prefetch(2)
    for element in strategy.experimental_distribute_dataset(dataset):
        strategy.gather(element, axis=0)
    assert readers == {"mpidist data"}
    assert callers == {threading.current_thread().name}


# --- inputs from functions ---------------------------------------------------------


@core
def test_ranks_shuffle_alike_without_a_seed(
    strategy, distribute, from_function, rank, size
):
    before = shuffle_seeds.position()[1]

    def dataset_fn(context):
        rows = Dataset.range(8 * size).shuffle(8 * size)
        rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(8)

    if rank == 0:
        Dataset.range(9).shuffle(9)  # for itself, such as for a picture
    try:
        dataset, other = from_function(dataset_fn), from_function(dataset_fn)
        rows = everywhere(*mine(strategy, dataset))
        assert sorted(flat(rows)) == list(range(8 * size))
        assert mine(strategy, other) != [rows[rank]]
        # Global batches must be the same on all ranks.
        batches = Dataset.range(8 * size).shuffle(8 * size).batch(2 * size)
        if size > 1:
            match = r"no seed: [\s\S]*give shuffle a seed"
            with pytest.raises(mpidist.CollectiveMismatchError, match=match):
                distribute(batches)
    finally:
        shuffle_seeds.position()[1] = before


INPUTS = {
    "list": list,
    "iterator": iter,
    "function": lambda batches: functools.partial(next, iter(batches)),
    "rows": lambda batches: (
        Dataset.from_tensor_slices(np.concatenate([np.zeros((0, 3), "h"), *batches]))
        .map(lambda x: x)
        .batch(2)
    ),
    "batches": lambda batches: Dataset.from_generator(lambda: batches),
}


@core
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_uneven_length(strategy, from_function, rank, size, kind):
    """Nothing is lost, and nobody waits; nor after a position is restored."""
    # Rank r has r batches of 2 rows: the first one none, and learns what they are like.
    batches = [np.full((2, 3), 10 * rank + i, np.int16) for i in range(rank)]
    make = strategy.make_input_fn_iterator if kind == "function" else from_function
    first = iter(make(lambda context: INPUTS[kind](batches)))
    parts, states = [], [first.state()]
    for element in first:
        parts.append(own(strategy, element))
        states.append(first.state())
    assert [len(part) for part in parts] == [2] * rank + [0] * (size - 1 - rank)
    assert [int(part[0, 0]) for part in parts[:rank]] == [
        10 * rank + i for i in range(rank)
    ]
    assert {(part.shape[1:], part.dtype.name) for part in parts} <= {((3,), "int16")}
    if parts:
        assert first.element_spec == ArraySpec((None, 3), np.dtype(np.int16))
    for position in (size // 2, len(parts)):  # after the end of some, and of all
        second = iter(make(lambda context: INPUTS[kind](batches)))
        second.restore(states[position])
        rest = [own(strategy, element).tolist() for element in second]
        assert rest == [part.tolist() for part in parts[position:]]


@core
@pytest.mark.parametrize("make", ["map", "function", "generator"])
def test_named_tuples_that_pickle_cannot_find(
    strategy, distribute, from_function, rank, make
):
    """Of a class made in a function, or with another name than its variable."""
    other = collections.namedtuple("Other", ["x", "y"])

    def named(x):
        return other(x, {"inner": other(2 * x, x)})

    # The last rank has no rows, and learns from the others what elements are like.
    if make == "map":
        dataset = distribute(Dataset.from_tensor_slices([0.0]).map(named).batch(1))
    elif make == "generator":
        dataset = distribute(iter([named(np.zeros(1))]))
    else:
        dataset = from_function(
            lambda c: [named(np.zeros(1))] if c.input_pipeline_id == 0 else []
        )
    (element,) = dataset
    assert type(element).__name__ == "Other"
    assert (type(element) is other) == (rank == 0 or make == "generator")
    assert dataset.element_spec.x == ArraySpec((None,), np.dtype(float))
    sums = strategy.run(lambda e: len(e.x) + len(e.y["inner"].y), args=(element,))
    assert own(strategy, sums) == (2 if rank == 0 else 0)
    assert strategy.reduce("SUM", sums, axis=None) == 2


@pytest.mark.mpi(min_size=2)
def test_elements_that_differ_between_ranks_are_an_error(from_function, rank, size):
    dtype = np.float32 if rank == 0 else np.float64
    iterator = iter(from_function(lambda context: [np.ones((2, 3), dtype)] * 2))
    mismatch = mpidist.CollectiveMismatchError
    for _ in range(2):
        with pytest.raises(mismatch, match=r"rank 0: float32 \(\*, \*\)") as caught:
            next(iterator)
    assert "float64 (*, *)" in str(caught.value)
    assert list(iterator) == []

    def later(context):
        yield np.ones((2, 3))
        yield {"x": np.ones((2, 3))} if rank == size - 1 else np.ones((2, 3))

    iterator = iter(from_function(later))
    next(iterator)
    with pytest.raises(mismatch, match=r"{'x': float64 \(\*, \*\)}"):
        next(iterator)


@pytest.mark.mpi(min_size=2)
def test_an_input_function_that_one_rank_does_not_call(strategy, from_function, rank):
    """All raise, and the strategy is usable: none has counted the call."""

    def call():
        strategy.run(lambda: 1) if rank else from_function(lambda context: [])

    raises_everywhere(mpidist.CollectiveMismatchError, call)
    assert_usable(strategy)


# --- errors ------------------------------------------------------------------------


@core
def test_a_generator_that_raises_in_the_middle(from_function, rank, size):
    def batches_of_rank(context):
        yield np.ones(2)
        if context.input_pipeline_id == size - 1:
            raise OSError("the disk is gone")
        yield np.ones(2)

    iterator = iter(from_function(batches_of_rank))
    next(iterator)
    error = OSError if rank == size - 1 else mpidist.ReplicaError
    with pytest.raises(error, match="the disk is gone"):
        next(iterator)
    # A rank's rows are not lost silently; and a loop that ignores errors has an end.
    with pytest.raises(RuntimeError, match="its input raised a OSError and cannot"):
        next(iterator)
    assert list(iterator) == []


def test_a_function_that_raises(from_function, rank):
    def dataset_fn(context):
        if context.input_pipeline_id == 0:
            raise FileNotFoundError("no shard 0")
        return []

    error = FileNotFoundError if rank == 0 else mpidist.ReplicaError
    with pytest.raises(error, match="no shard 0"):
        from_function(dataset_fn)


def test_a_function_of_reduce_that_raises(new_strategy, rank, size):
    strategy = new_strategy()
    batches = strategy.experimental_distribute_dataset(Dataset.range(8).batch(4))

    def count(state, element):
        if rank == 0 and state == 1:
            raise FileNotFoundError("no weights")
        return state + strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) / size

    error = FileNotFoundError if rank == 0 else mpidist.ReplicaError
    with pytest.raises(error, match="no weights"):
        batches.reduce(0, count)
    assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == size


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize(
    ("make", "steps", "message"),
    [
        (lambda rank, n: [np.arange(n)] * (3 - (rank > 0)), 2, "the input has ended"),
        (lambda rank, n: [np.arange(8 if rank else 6)] * 3, 0, r"rank 0: 6 rows\n"),
    ],
    ids=["longer", "larger"],
)
def test_an_input_with_more_on_one_rank(new_strategy, rank, size, make, steps, message):
    strategy = new_strategy()
    iterator = iter(strategy.experimental_distribute_dataset(iter(make(rank, size))))
    for _ in range(steps):
        next(iterator)
    match = rf"batch {steps} is not the same on all ranks:\n[^`]*{message}"
    with pytest.raises(ValueError, match=match):
        next(iterator)
    # The strategy goes on.
    assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == size


@core
def test_debug_mode_compares_the_global_batches(new_strategy, rank, size, monkeypatch):
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    strategy = new_strategy()

    def random(seed):
        rng = np.random.default_rng(seed)
        batches = (rng.normal(size=(4, 2)) for _ in range(2))
        return strategy.experimental_distribute_dataset(batches)

    assert len(list(random(3))) == 2
    if size == 1:
        return
    iterator = iter(random(rank))
    for number in range(2):
        text = f"batch {number} is not the same on all ranks"
        with pytest.raises(ValueError, match=text) as got:
            next(iterator)
    assert list(iterator) == []
    assert "the same seed on all ranks" in str(got.value)
    assert f"  rank {size - 1}: checksum" in str(got.value)


def options(*args, **kwargs):
    return mpidist.InputOptions(*args, **kwargs)


def of_batches(dataset, *args):
    return lambda strategy: strategy.experimental_distribute_dataset(dataset, *args)


def of_function(*args):
    return lambda s: s.distribute_datasets_from_function(lambda c: [], *args)


@core
@pytest.mark.one_size
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (of_batches(np.ones((8, 2))), TypeError, r"of shape \(8, 2\), which is not"),
        (of_batches((np.ones(8), 1)), TypeError, r"slices\(x\).batch\(batch_size\)"),
        (of_batches({"x": np.ones(8)}), TypeError, r"got \{'x': float64 \(8,\)\}"),
        (of_batches([1.0, 2.0]), TypeError, "not a dataset of batches"),
        (of_batches("text"), TypeError, "not a dataset of batches"),
        (of_batches(3), TypeError, "an iterable of them, got 3 of type int"),
        (of_batches(Dataset.range(8)), ValueError, "Call the `batch` method on the"),
        (of_batches([], {}), TypeError, r"`mpidist.InputOptions`, got {} of"),
        *(
            (
                of_batches([], options(auto_shard_policy=x)),
                ValueError,
                r"function\(fn\)",
            )
            for x in ("FILE", "HINT")
        ),
        (of_function(options(auto_shard_policy="FILE")), ValueError, "nothing is sha"),
        (
            of_batches([], options(experimental_replication_mode=PER_REPLICA)),
            NotImplementedError,
            "PER_REPLICA is only supported in",
        ),
        (
            of_function(options(experimental_place_dataset_on_device=True)),
            ValueError,
            r"needs InputReplicationMode\.PER",
        ),
        (
            of_function(options(None, PER_REPLICA, True)),
            ValueError,
            "contradicts `experimental_fetch_to_device`",
        ),
        (
            lambda s: s.make_input_fn_iterator(lambda c: [], PER_REPLICA),
            ValueError,
            "Input replication mode not supported",
        ),
        (
            lambda s: s.run(lambda: s.experimental_make_numpy_dataset(np.ones(3))),
            RuntimeError,
            "cross-replica context",
        ),
    ],
)
def test_what_is_refused(strategy, call, error, message):
    with pytest.raises(error, match=message):
        call(strategy)


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (3.0, "Call the `batch` method on the input Dataset in order to be able to"),
        ({"x": np.ones(3), "y": 1}, "got an element with a scalar"),
        ((np.ones(3), np.ones(4)), "the same number of rows"),
        ([], "element without arrays"),
        (None, "got None"),
        ("text", "got an element with a scalar"),
    ],
)
def test_elements_that_can_not_be_split(distribute, element, message):
    dataset = distribute(iter([element]))
    with pytest.raises((ValueError, TypeError), match=message):
        next(iter(dataset))


@core
def test_an_argument_that_is_wrong_on_one_rank(distribute, from_function, rank, size):
    bad = rank == size - 1
    with pytest.raises(TypeError, match="not a dataset of batches"):
        distribute(np.ones(4) if bad else as_list(4, 2))
    with pytest.raises(TypeError, match="expected a function of an InputContext"):
        from_function(None if bad else lambda c: [])


@core
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("buffer_size", Dataset.shuffle),
        ("buffer_size", Dataset.prefetch),
        ("num_parallel_calls", lambda rows, x: rows.map(abs, num_parallel_calls=x)),
        ("cycle_length", lambda rows, x: rows.interleave(abs, cycle_length=x)),
    ],
)
def test_a_value_of_each_replica_is_no_number(strategy, name, call):
    value = strategy.experimental_distribute_values_from_function(lambda _: 3)
    with pytest.raises(TypeError, match=f"expected `{name}` to be an int"):
        call(Dataset.range(3), value)


@core
def test_next_where_it_cannot_be_called(strategy, new_strategy, distribute, rank):
    iterator = iter(distribute(as_list(8, 4)))
    errors = (ValueError, mpidist.ReplicaError)
    with pytest.raises(errors, match="called from outside of replica_fn"):
        strategy.run(lambda: next(iterator) if rank == 0 else 1)

    def fn():
        merge_fn = lambda strategy: next(iterator)  # noqa: E731
        return mpidist.get_replica_context().merge_call(merge_fn)

    with pytest.raises(RuntimeError, match=r"by every rank;.*one rank acts for all"):
        strategy.run(fn)
    with (
        new_strategy().scope(),
        pytest.raises(RuntimeError, match="Mixing different"),
    ):
        next(iterator)


# --- the datasets themselves -------------------------------------------------------


def test_length_cardinality_and_spec(distribute):
    dataset = distribute(as_dataset(14, 8))
    assert len(dataset) == dataset.cardinality() == 2
    assert dataset.element_spec == iter(dataset).element_spec == INTS
    growing = as_list(14, 8)
    dataset = distribute(growing)
    growing.append(np.arange(8))  # as of a DataLoader that changes with the epoch
    assert len(dataset) == len(list(dataset)) == 3
    endless = distribute(as_dataset(3, 2).repeat())
    assert endless.cardinality() == data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="an infinite dataset"):
        len(endless)
    assert bool(endless) is True  # in `if dataset:`, as in TensorFlow
    generator = distribute(iter(as_list(14, 8)))
    assert generator.cardinality() == data.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match="not known"):
        len(generator)
    with pytest.raises(ValueError, match="not known before the first was read"):
        generator.element_spec  # noqa: B018
    next(iter(generator))
    assert generator.element_spec == INTS


@pytest.mark.processes  # what the process has printed
def test_describe(distribute, from_function, rank, size, capsys):
    rows = Dataset.from_tensor_slices({"x": np.ones((14, 3)), "y": np.arange(14)})
    distributed = distribute(rows.shuffle(seed=1).batch(8).prefetch(2))
    text = distributed.shard_plan
    distributed.describe()
    assert capsys.readouterr().out == (f"{text}\n" if rank == 0 else "")
    lines = text.splitlines()
    assert f"on {size} replica" in lines[0]
    assert max(map(len, lines)) <= 100
    shares = {1: "8 on 1", 2: "4 on 2", 3: "3 on 2, 2 on 1", 4: "2 on 4"}
    for part in (
        "Dataset of 14 rows.shuffle(seed=1).batch(8).prefetch(2)",
        "{'x': float64 (None, 3), 'y': int64 (None,)}",
        "of 8 rows, 2 an epoch",
        "each rank reads the rows of its replica, and no others",
        f"of a full batch on how many replicas: {shares[size]}",
    ):
        assert part in text
    text = distribute(iter(as_list(9, 3))).shard_plan
    assert "each rank reads whole batches, and keeps" in text
    assert "their number is not known" in text
    text = from_function(lambda c: as_list(9, 3)).shard_plan
    assert "each rank reads its own input" in text
    assert "3 on this rank" in text


@pytest.mark.processes  # CuPy's stand-in is one for the process
def test_arrays_come_on_the_device(new_strategy, monkeypatch, rank, size):
    cupy = posing.install(monkeypatch)
    strategy = new_strategy(device="gpu")
    distribute = strategy.experimental_distribute_dataset

    def parts(*args):
        return [own(strategy, element) for element in distribute(*args)]

    device = parts(as_dataset(size + 1, size))
    assert all(isinstance(part, cupy.ndarray) for part in device)
    assert device[0].get().tolist() == [rank]
    assert device[1].shape == (1 if rank == 0 else 0,)
    keep = mpidist.InputOptions(experimental_fetch_to_device=False)
    host = parts(as_dataset(size + 1, size), keep)
    # A GPU cannot hold text.
    host += parts(Dataset.from_tensor_slices(["a"] * size).batch(size))
    assert all(type(part) is np.ndarray for part in host)
    # What is on the device already is split there.
    rows = Dataset.from_tensor_slices(cupy.asarray(np.arange(size))).shuffle(seed=3)
    seen = []
    for element in distribute(rows.batch(size)):
        assert isinstance(own(strategy, element), cupy.ndarray)
        seen += strategy.gather(element, axis=0).get().tolist()
    assert sorted(seen) == list(range(size))
    # A cache gives copies of them, which may be written to.
    cached, seen = distribute(rows.batch(size).cache()), []
    for (element,) in (cached, cached):
        seen.append(own(strategy, element).get().tolist())
        own(strategy, element)[:] = -1
    assert seen[0] == seen[1]


@core
def test_text_of_other_lengths_on_other_ranks(strategy, distribute):
    words = ["a", "longest of all", "two", "bc"]
    dataset = distribute(Dataset.range(4).map(lambda i: words[i]).batch(4))
    (rows,) = mine(strategy, dataset)
    assert flat(everywhere(rows)) == words


# --- the names of TensorFlow 1 -----------------------------------------------------


@core
def test_an_iterator_starts_again_at_its_end(strategy):
    iterator = strategy.make_dataset_iterator(as_dataset(8, 4))
    for start in (iterator.initialize, iterator.initializer):
        assert start() == []
        assert mine(strategy, iterator) == pieces(strategy, 8, 4)
        with pytest.raises(data.OutOfRangeError, match="ended, after 2 steps"):
            iterator.get_next()
    assert own(strategy, strategy.experimental_run(lambda: 7)) == 7


@core
def test_one_rank_may_look_at_all_attributes_of_an_iterator(
    strategy, distribute, rank, size
):
    """As a debugger or a completion does: no attribute communicates."""
    dataset = distribute(as_dataset(4 * size, 2 * size))
    iterator = iter(dataset)
    first = own(strategy, next(iterator)).tolist()
    before = group_of(strategy).guard.sequence
    if rank == size - 1:
        for one in (iterator, dataset):
            for name in dir(one):
                getattr(one, name)
            assert repr(one)
        assert "initialize" in repr(iterator.initializer)
    assert group_of(strategy).guard.sequence == before
    assert own(strategy, next(iterator)).tolist() != first  # it has not started again
    iterator.initializer()
    assert own(strategy, next(iterator)).tolist() == first


def test_inputs_by_their_older_names(strategy, from_function):
    x = np.arange(6.0).reshape(3, 2)
    nested = strategy.experimental_make_numpy_dataset({"a": [x, x], "b": [1, 2]})
    assert nested.element_spec["a"].shape == (3, 2)
    placed = mpidist.InputOptions(False, PER_REPLICA, True)
    for good in (mpidist.InputOptions(None, PER_REPLICA), placed):
        dataset = from_function(lambda context: [np.ones(3)], good)
        assert mine(strategy, dataset) == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("distributed", [False, True])
def test_the_end_of_an_iterator_is_both_errors_and_no_value(distribute, distributed):
    def read(iterator):
        return (yield from iterator)

    dataset = Dataset.range(4).batch(2)
    iterator = iter(distribute(dataset) if distributed else dataset)
    reader = read(iterator)
    assert len([next(reader), next(reader)]) == 2
    with pytest.raises(StopIteration) as end:
        next(reader)
    assert end.value.value is None
    for error in (StopIteration, data.OutOfRangeError):
        with pytest.raises(error, match=r"next\(iterator\): the .* ended, after 2"):
            next(iterator)
    assert list(read(iterator)) == []


# --- samples of arrays -------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_arrays_that_differ_between_ranks_warn(distribute, from_function, rank, size):
    rows = np.arange(24.0).reshape(12, 2)

    def of(rows):
        dataset = Dataset.from_tensor_slices({"x": rows}).map(dict).enumerate()
        return distribute(dataset.batch(4))

    assert len(of(rows)) == 3  # a warning is an error here
    permuted = np.random.default_rng(rank).permutation(rows)
    for other in (rows + (rank == size - 1), permuted):
        for message in raises_everywhere(RuntimeWarning, lambda x=other: of(x)):
            assert "not the same on all ranks" in message
            assert "`strategy.distribute_datasets_from_function(fn)`" in message
    dataset = Dataset.from_tensor_slices(permuted).batch(4)
    from_function(lambda _: dataset)


def sample_of(rows, distribute=lambda dataset: None):
    """Distribute them, where a warning is an error; return their sample."""
    dataset = Dataset.from_tensor_slices(rows)
    distribute(dataset.batch(2))
    return dataset._stage.sample()


def test_what_is_compared(distribute, rank):
    for dtype in ("i4,f8", "f8,f8", "u1,i8,f8", "V12"):
        assert sample_of(np.zeros(6, dtype), distribute) == 0
    objects = np.array([object() for _ in range(6)])  # their reprs have addresses
    assert sample_of(objects, distribute) == 0
    zeros = np.zeros((4, 2)) * (-1 if rank else 1)
    for rows in (
        np.array(["a", "bc"]),
        np.zeros(4, "M8[s]"),
        np.ones(4, "c8"),
        # Zeros of either sign, and byte orders, are the same.
        {"a": zeros.astype("<f4" if rank else ">f4"), "b": zeros * (1 + 1j)},
    ):
        assert sample_of(rows, distribute) > 0


@pytest.mark.processes
def test_a_sample_of_large_rows_copies_little(strategy):
    rows = np.zeros((2**20, 32), np.uint8).T  # not in C order
    tracemalloc.start()
    try:
        assert sample_of({"a": rows, "b": rows[:, None]}) > 0
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()
    other = rows.copy()
    other[31, 0] = 1
    assert sample_of(other) != sample_of(rows)


@pytest.mark.processes
def test_a_sample_that_fails_on_one_rank_is_no_alarm(
    distribute, rank, size, monkeypatch
):
    def fail(*args):
        raise MemoryError("no room")

    if rank == size - 1:
        monkeypatch.setattr(_sources, "_starts", fail)
    sample = sample_of(np.arange(8.0) + rank, distribute)
    assert (sample == 0) == (rank == size - 1)
