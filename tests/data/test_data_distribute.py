"""experimental_distribute_dataset, distribute_datasets_from_function; any ranks."""

from __future__ import annotations

import collections
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

Pair = collections.namedtuple("Pair", ["x", "y"])
OFF = mpidist.InputOptions(auto_shard_policy=AutoShardPolicy.OFF)


def batches(rows, size):
    """Return a list of global batches of the numbers from 0."""
    return [np.arange(i, min(i + size, rows)) for i in range(0, rows, size)]


def mine(strategy, dataset):
    """Return this rank's rows of each step, as lists."""
    return [own(strategy, element).tolist() for element in dataset]


def pieces(strategy, rows, size, rule=split_as_it_comes):
    """Return what this rank should get of the numbers from 0."""
    n, r = strategy.num_replicas_in_sync, strategy.replica_id
    more = (size,) if rule is split_by_plan else ()
    return [
        batch[slice(*rule(len(batch), n, r, *more))].tolist()
        for batch in batches(rows, size)
    ]


def as_dataset(rows, size):
    return Dataset.from_tensor_slices(np.arange(rows)).batch(size)


def as_list(rows, size):
    return batches(rows, size)


def as_generator(rows, size):
    return (batch for batch in batches(rows, size))


# --- the split ---------------------------------------------------------------------


def test_replicas_without_rows_learn_what_a_map_gives(strategy, rank):
    # Only rank 0 ever reads a row, and so only it knows what the function returns.
    calls = []

    def widen(x):
        calls.append(int(x))
        return np.full((2, 2), x, np.float16)

    dataset = Dataset.from_tensor_slices(np.arange(3)).map(widen).batch(1)
    distributed = strategy.experimental_distribute_dataset(dataset)
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


def test_row_shapes_may_change_from_step_to_step(strategy, rank, size):
    source = [np.zeros((size, width)) for width in (3, 5, 2)]
    dataset = strategy.experimental_distribute_dataset(source)
    assert [own(strategy, e).shape for e in dataset] == [(1, 3), (1, 5), (1, 2)]


def arrays_of(*lengths):
    return Dataset.from_generator(lambda: map(np.ones, lengths))


@pytest.mark.parametrize("make", [arrays_of, lambda *n: Dataset.range(6).map(np.ones)])
def test_rows_of_different_shapes_are_no_batch_on_any_number_of_ranks(strategy, make):
    """Although each rank could stack its own."""
    steps = iter(strategy.experimental_distribute_dataset(make(*range(6)).batch(2)))
    for _ in range(3):  # goes on after each
        for message in raises_everywhere(ValueError, lambda: next(steps)):
            assert "expected rows of one structure, dtype and shape" in message
            assert "write `padded_batch`" in message
    with pytest.raises(StopIteration):
        next(steps)


def test_shapes_of_rows_may_change_between_batches(strategy, size):
    """A replica without rows gets the shape of the others' rows."""
    lengths = [*[1] * size, *[2] * size, 3]
    for _ in range(2):
        batches = strategy.experimental_distribute_dataset(
            arrays_of(*lengths).batch(size)
        )
        found = [strategy.gather(batch, axis=0).shape for batch in batches]
        assert found == [(size, 1), (size, 2), (1, 3)]


def test_a_generator_can_be_gone_through_once(strategy):
    dataset = strategy.experimental_distribute_dataset(as_generator(9, 4))
    assert mine(strategy, dataset) == pieces(strategy, 9, 4)
    with pytest.raises(RuntimeError, match="can be read only once"):
        next(iter(dataset))


# --- who reads what ----------------------------------------------------------------


class CountingRows:
    """Rows that know who touched them."""

    def __init__(self, count):
        self.shape = (count, 2)
        self.dtype = np.dtype(np.float64)
        self.touched = []

    def __getitem__(self, index):
        rows = range(*index.indices(self.shape[0]))
        self.touched += rows
        return np.array([[r, -r] for r in rows], float).reshape(-1, 2)


@core
@pytest.mark.parametrize("options", [None, OFF], ids=["AUTO", "OFF"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_rank_reads_its_own_rows_only(strategy, size, options, shuffled):
    source = CountingRows(50)
    dataset = Dataset.from_tensor_slices(source)
    if shuffled:
        dataset = dataset.shuffle(seed=1)
    dataset = dataset.map(lambda row: row * 2).batch(8).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    kept = []
    for element in distributed:
        kept += (own(strategy, element)[:, 0] / 2).astype(int).tolist()
    assert sorted(source.touched) == sorted(kept)
    counts = strategy.gather(per_replica(strategy, [len(source.touched)]), axis=0)
    assert counts.sum() == 50
    everybody = strategy.gather(per_replica(strategy, source.touched), axis=0)
    assert sorted(everybody.tolist()) == list(range(50))


def per_replica(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda _: np.array(values, np.int64)
    )


def test_a_map_after_batch_makes_each_rank_read_whole_batches(strategy, size):
    source = CountingRows(16)
    dataset = Dataset.from_tensor_slices(source).batch(8).map(lambda x: x - x.mean())
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert "each rank reads whole batches" in distributed.shard_plan
    for element in distributed:
        assert own(strategy, element).shape == (8 // size + (8 % size > 0), 2) or size
    assert sorted(source.touched) == list(range(16))


# --- the cost ----------------------------------------------------------------------


@core
def test_a_step_costs_one_header_and_no_other_message(strategy, size, monkeypatch):
    dataset = strategy.experimental_distribute_dataset(as_dataset(40, 8))
    iterator = iter(dataset)
    guard = group_of(strategy).guard
    monkeypatch.setattr(
        group_of(strategy).communicator,
        "all_gather_objects",
        lambda data: pytest.fail("a message besides the header"),
    )
    before = guard.sequence
    for _ in range(5):
        next(iterator)
    assert guard.sequence - before == 5
    with pytest.raises(StopIteration):
        next(iterator)
    assert guard.sequence - before == 6


def test_no_thread_but_the_main_one_calls_mpi(new_strategy, monkeypatch):
    strategy = new_strategy()
    comm = group_of(strategy).communicator
    threads = set()

    def recorded(original):
        def record(*args, **kwargs):
            threads.add(threading.current_thread().name)
            return original(*args, **kwargs)

        return record

    for name in ("all_gather", "all_gather_objects", "all_gather_integers"):
        monkeypatch.setattr(comm, name, recorded(getattr(comm, name)))
    readers = set()

    def fn(x):
        readers.add(threading.current_thread().name)
        return x

    dataset = Dataset.from_tensor_slices(np.arange(40)).map(fn).batch(8).prefetch(2)
    for element in strategy.experimental_distribute_dataset(dataset):
        strategy.gather(element, axis=0)
    assert readers == {"mpidist-data"}
    assert threads == {threading.current_thread().name}


def test_the_order_of_keys_does_not_matter(strategy, rank):
    arrays = {"a": np.arange(4), "b": np.ones((4, 2))}
    if rank % 2:
        arrays = dict(reversed(arrays.items()))
    for batches in (Dataset.from_tensor_slices(arrays).batch(4), [arrays]):
        (element,) = strategy.experimental_distribute_dataset(batches)
        assert own(strategy, element)["b"].shape[1:] == (2,)


def test_what_elements_are_like_is_told_once(strategy, monkeypatch):
    calls = []
    comm = group_of(strategy).communicator
    original = comm.all_gather_objects

    def count(data):
        calls.append(1)
        return original(data)

    monkeypatch.setattr(comm, "all_gather_objects", count)
    dataset = strategy.experimental_distribute_dataset(as_list(9, 3))
    for _ in range(2):
        mine(strategy, dataset)
    assert len(calls) == 1


# --- inputs from functions ---------------------------------------------------------


@core
def test_ranks_shuffle_alike_without_a_seed(strategy, rank, size):
    before = shuffle_seeds.position()[1]

    def dataset_fn(context):
        rows = Dataset.range(8 * size).shuffle(8 * size)
        rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(8)

    if rank == 0:
        Dataset.range(9).shuffle(9)  # for itself, such as for a picture
    try:
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        other = strategy.distribute_datasets_from_function(dataset_fn)
        rows = everywhere(*mine(strategy, dataset))
        assert sorted(itertools.chain(*rows)) == list(range(8 * size))
        assert mine(strategy, other) != [rows[rank]]
        # Global batches must be the same on all ranks.
        batches = Dataset.range(8 * size).shuffle(8 * size).batch(2 * size)
        if size > 1:
            match = r"no seed: [\s\S]*give shuffle a seed"
            with pytest.raises(mpidist.CollectiveMismatchError, match=match):
                strategy.experimental_distribute_dataset(batches)
    finally:
        shuffle_seeds.position()[1] = before


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
@pytest.mark.parametrize("kind", ["list", "generator", "Dataset"])
def test_inputs_of_uneven_length(strategy, rank, size, kind):
    # Rank r has r + 1 batches of 2 rows; nothing is lost, and nobody waits.
    def dataset_fn(context):
        source = [np.full((2, 3), 10 * rank + i, np.int16) for i in range(rank + 1)]
        if kind == "Dataset":
            return Dataset.from_tensor_slices(np.concatenate(source)).batch(2)
        return source if kind == "list" else iter(source)

    found = list(strategy.distribute_datasets_from_function(dataset_fn))
    assert len(found) == size
    parts = [own(strategy, element) for element in found]
    assert [len(part) for part in parts] == [2] * (rank + 1) + [0] * (size - rank - 1)
    assert [int(p[0, 0]) for p in parts[: rank + 1]] == [
        10 * rank + i for i in range(rank + 1)
    ]
    for part in parts:
        assert part.shape[1:] == (3,)
        assert part.dtype == np.int16


def test_a_rank_without_any_input(strategy, rank, size):
    def dataset_fn(context):
        last = context.input_pipeline_id == context.num_input_pipelines - 1
        return [{"x": np.ones((2, 5), np.float32)}] if last else []

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    (element,) = dataset
    part = own(strategy, element)
    assert list(part) == ["x"]
    assert part["x"].shape == (2 if rank == size - 1 else 0, 5)
    assert part["x"].dtype == np.float32
    assert dataset.element_spec["x"].shape == (None, 5)
    assert list(strategy.distribute_datasets_from_function(lambda c: [])) == []


@core
@pytest.mark.parametrize("make", ["map", "function", "generator"])
def test_named_tuples_that_pickle_cannot_find(strategy, rank, size, make):
    """Of a class made in a function, or with another name than its variable."""
    other = collections.namedtuple("Other", ["x", "y"])

    def named(x):
        return other(x, {"inner": other(2 * x, x)})

    # The last rank has no rows, and learns from the others what elements are like.
    rows = Dataset.from_tensor_slices(np.arange(1.0))
    if make == "map":
        dataset = strategy.experimental_distribute_dataset(rows.map(named).batch(1))
    elif make == "generator":
        dataset = strategy.experimental_distribute_dataset(iter([named(np.zeros(1))]))
    else:
        dataset = strategy.distribute_datasets_from_function(
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
def test_elements_that_differ_between_ranks_are_an_error(strategy, rank, size):
    dtype = np.float32 if rank == 0 else np.float64
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [np.ones((2, 3), dtype)] * 2
    )
    iterator = iter(dataset)
    for _ in range(2):
        with pytest.raises(mpidist.CollectiveMismatchError) as caught:
            next(iterator)
    assert list(iterator) == []
    assert "rank 0: float32 (*, *)" in str(caught.value)
    assert "float64 (*, *)" in str(caught.value)

    def later(context):
        yield np.ones((2, 3))
        yield {"x": np.ones((2, 3))} if rank == size - 1 else np.ones((2, 3))

    iterator = iter(strategy.distribute_datasets_from_function(later))
    next(iterator)
    with pytest.raises(mpidist.CollectiveMismatchError) as caught:
        next(iterator)
    assert "{'x': float64 (*, *)}" in str(caught.value)


# --- errors ------------------------------------------------------------------------


@core
def test_a_generator_that_raises_in_the_middle(strategy, rank, size):
    def batches_of_rank(context):
        yield np.ones(2)
        if context.input_pipeline_id == size - 1:
            raise OSError("the disk is gone")
        yield np.ones(2)

    iterator = iter(strategy.distribute_datasets_from_function(batches_of_rank))
    next(iterator)
    error = OSError if rank == size - 1 else mpidist.ReplicaError
    with pytest.raises(error, match="the disk is gone"):
        next(iterator)
    # A rank's rows are not lost silently; and a loop that ignores errors has an end.
    with pytest.raises(RuntimeError, match="its input raised a OSError and cannot"):
        next(iterator)
    assert list(iterator) == []


def test_a_function_that_raises(strategy, rank, size):
    def dataset_fn(context):
        if context.input_pipeline_id == 0:
            raise FileNotFoundError("no shard 0")
        return []

    error = FileNotFoundError if rank == 0 else mpidist.ReplicaError
    with pytest.raises(error, match="no shard 0"):
        strategy.distribute_datasets_from_function(dataset_fn)


def test_stop_iteration_in_a_map_is_no_end(strategy):
    def stop(x):
        raise StopIteration

    for depth in (0, 1):
        dataset = Dataset.from_tensor_slices(np.arange(4)).map(stop).batch(4)
        distributed = strategy.experimental_distribute_dataset(dataset.prefetch(depth))
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(distributed)


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
    dataset = strategy.experimental_distribute_dataset(iter(make(rank, size)))
    iterator = iter(dataset)
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
    rng = np.random.default_rng(3)
    same = (rng.normal(size=(4, 2)) for _ in range(2))
    assert len(list(strategy.experimental_distribute_dataset(same))) == 2
    if size == 1:
        return
    rng = np.random.default_rng(rank)
    other = (rng.normal(size=(4, 2)) for _ in range(2))
    iterator = iter(strategy.experimental_distribute_dataset(other))
    for number in range(2):
        text = f"batch {number} is not the same on all ranks"
        with pytest.raises(ValueError, match=text) as got:
            next(iterator)
    assert list(iterator) == []
    assert "the same seed on all ranks" in str(got.value)
    assert f"  rank {size - 1}: checksum" in str(got.value)


@pytest.mark.one_size
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.ones((8, 2)), TypeError, r"ndarray of shape \(8, 2\), which is not"),
        ((np.ones(8), 1), TypeError, r"slices\(x\).batch\(batch_size\)"),
        ({"x": np.ones(8)}, TypeError, r"got \{'x': float64 \(8,\)\}"),
        ([1.0, 2.0], TypeError, "not a dataset of batches"),
        ("text", TypeError, "not a dataset of batches"),
        (3, TypeError, "an iterable of them, got 3 of type int"),
        (
            Dataset.range(8),
            ValueError,
            "Call the `batch` method on the input Dataset in order to be able to split",
        ),
    ],
)
def test_what_is_no_dataset_of_batches(strategy, given, error, message):
    with pytest.raises(error, match=message):
        strategy.experimental_distribute_dataset(given)


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
def test_elements_that_are_batches_already(strategy, rank, size, make):
    """As in TensorFlow, which splits what `batch` was not called for."""
    dataset = make(np.arange(7))
    assert (
        mine(strategy, strategy.experimental_distribute_dataset(dataset))
        == [np.arange(7)[slice(*split_as_it_comes(7, size, rank))].tolist()] * 2
    )
    for rows in (dataset.unbatch(), dataset.flat_map(Dataset.from_tensors)):
        with pytest.raises(ValueError, match="whose elements are single rows"):
            strategy.experimental_distribute_dataset(rows)


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
def test_elements_that_can_not_be_split(strategy, element, message):
    dataset = strategy.experimental_distribute_dataset(iter([element]))
    with pytest.raises((ValueError, TypeError), match=message):
        next(iter(dataset))


@core
@pytest.mark.one_size
@pytest.mark.parametrize("policy", ["FILE", "HINT"])
def test_policies_for_files_are_refused(strategy, policy):
    options = mpidist.InputOptions(auto_shard_policy=policy)
    with pytest.raises(ValueError, match=r"distribute_datasets_from_function\(fn\)"):
        strategy.experimental_distribute_dataset(as_list(4, 2), options)
    with pytest.raises(ValueError, match="nothing is sharded here"):
        strategy.distribute_datasets_from_function(lambda c: [], options)


def test_options(strategy):
    def batches_of_rank(options):
        return strategy.distribute_datasets_from_function(
            lambda context: [np.ones(3)], options
        )

    mode = mpidist.InputReplicationMode.PER_REPLICA
    per_replica = mpidist.InputOptions(experimental_replication_mode=mode)
    with pytest.raises(NotImplementedError, match="PER_REPLICA is only supported in"):
        strategy.experimental_distribute_dataset(as_list(4, 2), per_replica)
    for good in (per_replica, mpidist.InputOptions(False, mode, True)):
        assert mine(strategy, batches_of_rank(good)) == [[1.0, 1.0, 1.0]]
    placed = mpidist.InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(ValueError, match=r"needs InputReplicationMode\.PER"):
        batches_of_rank(placed)
    with pytest.raises(ValueError, match="contradicts `experimental_fetch_to_device`"):
        batches_of_rank(mpidist.InputOptions(None, mode, True))
    with pytest.raises(TypeError, match=r"`mpidist.InputOptions`, got {} of"):
        strategy.experimental_distribute_dataset(as_list(4, 2), {})


@core
def test_an_argument_that_is_wrong_on_one_rank(strategy, rank, size):
    bad = rank == size - 1
    dataset = np.ones(4) if bad else as_list(4, 2)
    with pytest.raises(TypeError, match="not a dataset of batches"):
        strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(TypeError, match="expected a function of an InputContext"):
        strategy.distribute_datasets_from_function(None if bad else lambda c: [])


# --- where it may be called --------------------------------------------------------


def test_next_on_one_rank_only(strategy, rank):
    iterator = iter(strategy.experimental_distribute_dataset(as_list(8, 4)))

    def fn():
        if rank == 0:
            next(iterator)
        return 1

    with pytest.raises(
        (ValueError, mpidist.ReplicaError), match="called from outside of replica_fn"
    ):
        strategy.run(fn)


@core
def test_next_inside_merge_fn_says_where_to_call_it(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(as_list(8, 4)))

    def merge_fn(strategy):
        return next(iterator)

    def fn():
        return mpidist.get_replica_context().merge_call(merge_fn)

    with pytest.raises(RuntimeError, match=r"by every rank;.*one rank acts for all"):
        strategy.run(fn)


def test_on_another_strategy(strategy, new_strategy):
    other = new_strategy()
    iterator = iter(strategy.experimental_distribute_dataset(as_list(8, 4)))
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        next(iterator)


# --- the datasets themselves -------------------------------------------------------


def test_length_cardinality_and_spec(strategy):
    distribute = strategy.experimental_distribute_dataset
    dataset = distribute(as_dataset(14, 8))
    assert len(dataset) == dataset.cardinality() == 2
    assert dataset.element_spec == ArraySpec((None,), np.dtype(np.int64))
    assert iter(dataset).element_spec == dataset.element_spec
    growing = as_list(14, 8)
    dataset = distribute(growing)
    growing.append(np.arange(8))  # as of a DataLoader that changes with the epoch
    assert len(dataset) == len(list(dataset)) == 3
    endless = distribute(Dataset.from_tensor_slices(np.arange(3)).repeat().batch(2))
    assert endless.cardinality() == data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="an infinite dataset"):
        len(endless)
    generator = distribute(as_generator(14, 8))
    assert generator.cardinality() == data.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match="not known"):
        len(generator)
    with pytest.raises(ValueError, match="not known before the first was read"):
        generator.element_spec  # noqa: B018
    next(iter(generator))
    assert generator.element_spec == ArraySpec((None,), np.dtype(np.int64))


@pytest.mark.processes  # what the process has printed
def test_describe(strategy, rank, size, capsys):
    rows = Dataset.from_tensor_slices({"x": np.ones((14, 3)), "y": np.arange(14)})
    dataset = rows.shuffle(seed=1).batch(8).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    text = distributed.shard_plan
    distributed.describe()
    assert capsys.readouterr().out == (f"{text}\n" if rank == 0 else "")
    lines = text.splitlines()
    assert f"on {size} replica" in lines[0]
    assert "Dataset of 14 rows.shuffle(seed=1).batch(8).prefetch(2)" in text
    assert "{'x': float64 (None, 3), 'y': int64 (None,)}" in text
    assert "of 8 rows, 2 an epoch" in text
    assert "each rank reads the rows of its replica, and no others" in text
    assert max(map(len, lines)) <= 100
    pieces = {1: "8 on 1", 2: "4 on 2", 3: "3 on 2, 2 on 1", 4: "2 on 4"}
    assert f"of a full batch on how many replicas: {pieces[size]}" in text

    text = strategy.experimental_distribute_dataset(as_generator(9, 3)).shard_plan
    assert "each rank reads whole batches, and keeps" in text
    assert "their number is not known" in text
    text = strategy.distribute_datasets_from_function(
        lambda c: as_list(9, 3)
    ).shard_plan
    assert "each rank reads its own input" in text
    assert "3 on this rank" in text


def test_string_arrays_stay_on_the_host(strategy, rank, size):
    names = np.array([f"row {i}" for i in range(size)])
    dataset = Dataset.from_tensor_slices((names, np.arange(size))).batch(size)
    (element,) = strategy.experimental_distribute_dataset(dataset)
    assert own(strategy, element)[0].tolist() == [f"row {rank}"]


@pytest.mark.processes  # CuPy's stand-in is one for the process
def test_arrays_come_on_the_device(new_strategy, monkeypatch, rank, size):
    cupy = posing.install(monkeypatch)
    strategy = new_strategy(device="gpu")
    dataset = as_dataset(size + 1, size)
    device = [
        own(strategy, e) for e in strategy.experimental_distribute_dataset(dataset)
    ]
    assert all(isinstance(part, cupy.ndarray) for part in device)
    assert device[0].get().tolist() == [rank]
    assert device[1].shape == (1 if rank == 0 else 0,)
    keep = mpidist.InputOptions(experimental_fetch_to_device=False)
    host = [
        own(strategy, e)
        for e in strategy.experimental_distribute_dataset(dataset, keep)
    ]
    assert all(type(part) is np.ndarray for part in host)
    # What is on the device already is split there.
    rows = Dataset.from_tensor_slices(cupy.asarray(np.arange(size))).shuffle(seed=3)
    seen = []
    for element in strategy.experimental_distribute_dataset(rows.batch(size)):
        assert isinstance(own(strategy, element), cupy.ndarray)
        seen += strategy.gather(element, axis=0).get().tolist()
    assert sorted(seen) == list(range(size))


# --- the names of TensorFlow 1 -----------------------------------------------------


@core
def test_an_iterator_starts_again_at_its_end(strategy):
    iterator = strategy.make_dataset_iterator(as_dataset(8, 4))
    assert iterator.initialize() == []
    assert mine(strategy, iterator) == pieces(strategy, 8, 4)
    with pytest.raises(data.OutOfRangeError, match="ended, after 2 steps"):
        iterator.get_next()
    assert iterator.initializer() == []
    assert mine(strategy, iterator) == pieces(strategy, 8, 4)
    assert own(strategy, strategy.experimental_run(lambda: 7)) == 7


@core
def test_one_rank_may_look_at_all_attributes_of_an_iterator(strategy, rank, size):
    """As a debugger or a completion does: no attribute communicates."""
    dataset = strategy.experimental_distribute_dataset(as_dataset(4 * size, 2 * size))
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


def test_make_input_fn_iterator(strategy, rank, size):
    def input_fn(context):
        values = iter(range(rank + 1))
        return lambda: np.array([next(values)])

    iterator = strategy.make_input_fn_iterator(input_fn)
    lengths = [len(own(strategy, element)) for element in iterator]
    assert lengths == [1] * (rank + 1) + [0] * (size - rank - 1)
    with pytest.raises(ValueError, match="Input replication mode not supported"):
        strategy.make_input_fn_iterator(
            input_fn, mpidist.InputReplicationMode.PER_REPLICA
        )


def test_make_numpy_dataset_of_nested_lists(strategy):
    x = np.arange(6.0).reshape(3, 2)
    nested = strategy.experimental_make_numpy_dataset({"a": [x, x], "b": [1, 2]})
    assert nested.element_spec["a"].shape == (3, 2)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.experimental_make_numpy_dataset(x))


@pytest.mark.mpi(min_size=2)
def test_arrays_that_differ_between_ranks_warn(strategy, rank, size):
    rows = np.arange(24.0).reshape(12, 2)

    def distribute(rows):
        dataset = Dataset.from_tensor_slices({"x": rows}).map(dict).batch(4)
        return strategy.experimental_distribute_dataset(dataset)

    assert len(distribute(rows)) == 3  # a warning is an error here
    permuted = np.random.default_rng(rank).permutation(rows)
    for other in (rows + (rank == size - 1), permuted):
        for message in raises_everywhere(
            RuntimeWarning, lambda other=other: distribute(other)
        ):
            assert "not the same on all ranks" in message
            assert "`strategy.distribute_datasets_from_function(fn)`" in message
    dataset = Dataset.from_tensor_slices(permuted).batch(4)
    strategy.distribute_datasets_from_function(lambda _: dataset)


class Plain:
    """Its repr contains its address."""


def check_sample(distribute, rows):
    """Distribute them, where a warning is an error; return their sample."""
    dataset = Dataset.from_tensor_slices(rows)
    distribute(dataset.batch(2))
    return dataset._stage.sample()


def test_structured_arrays_and_objects_are_not_compared(strategy, rank):
    distribute = strategy.experimental_distribute_dataset
    for dtype in ("i4,f8", "f8,f8", "u1,i8,f8", "V12"):
        assert check_sample(distribute, np.zeros(6, dtype)) == 0
    objects = np.array([Plain() for _ in range(6)], object)
    assert check_sample(distribute, objects) == 0
    for rows in (np.array(["a", "bc"]), np.zeros(4, "M8[s]"), np.ones(4, "c8")):
        assert check_sample(distribute, rows) > 0


def test_zeros_of_either_sign_and_byte_orders_are_the_same(strategy, rank):
    zeros = np.zeros((4, 2)) * (-1 if rank else 1)
    rows = {"a": zeros.astype("<f4" if rank else ">f4"), "b": zeros * (1 + 1j)}
    assert check_sample(strategy.experimental_distribute_dataset, rows) > 0


@pytest.mark.processes
def test_a_sample_of_large_rows_copies_little(strategy):
    rows = np.zeros((2**20, 32), np.uint8).T  # not in C order
    dataset = Dataset.from_tensor_slices({"a": rows, "b": rows[:, None]})
    tracemalloc.start()
    try:
        assert dataset._stage.sample() > 0
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()
    other = rows.copy()
    other[31, 0] = 1
    assert Dataset.from_tensor_slices(other)._stage.sample() != (
        Dataset.from_tensor_slices(rows)._stage.sample()
    )


@pytest.mark.processes
def test_a_sample_that_fails_on_one_rank_is_no_alarm(strategy, rank, size, monkeypatch):
    def fail(*args):
        raise MemoryError("no room")

    if rank == size - 1:
        monkeypatch.setattr(_sources, "_starts", fail)
    rows = np.arange(8.0) + rank
    sample = check_sample(strategy.experimental_distribute_dataset, rows)
    assert (sample == 0) == (rank == size - 1)


def test_the_end_of_an_iterator_is_no_value(strategy):
    def read(iterator):
        return (yield from iterator)

    dataset = Dataset.range(2).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for one in (dataset, distributed):
        reader = read(iter(one))
        next(reader)
        with pytest.raises(StopIteration) as end:
            next(reader)
        assert end.value.value is None


@pytest.mark.mpi(min_size=2)
def test_an_input_function_that_one_rank_does_not_call(strategy, rank):
    """All raise, and the strategy is usable: none has counted the call."""

    def call():
        if rank:
            strategy.run(lambda: 1)
        else:
            strategy.distribute_datasets_from_function(lambda context: [])

    raises_everywhere(mpidist.CollectiveMismatchError, call)
    assert_usable(strategy)
