"""mpidist.data.Dataset, the rules that split a batch, and the thread that reads ahead.

No MPI here.
"""

from __future__ import annotations

import collections
import gc
import itertools
import threading
import time
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.data import ArraySpec, Dataset
from mpidist.data._ahead import read_ahead
from mpidist.data._distribute import describe_feed
from mpidist.data._elements import stage_of
from mpidist.data._feed import Feed
from mpidist.data._inputs import DatasetSource
from mpidist.data._rows import split_as_it_comes, split_by_plan
from mpidist.data._stage import open_tokens

Pair = collections.namedtuple("Pair", ["x", "y"])
ROWS = 10


def numbers(dataset):
    """Return the elements as nested lists."""
    return [np.asarray(element).tolist() for element in dataset]


def open_at(stage, index):
    """Open an element of the first iteration."""
    return next(open_tokens(stage, stage.tokens((0,), index)))


def arange(count=ROWS):
    return Dataset.from_tensor_slices(np.arange(count))


# --- the rules ---------------------------------------------------------------------


def sizes(rule, rows, replicas, *more):
    bounds = [rule(rows, replicas, r, *more) for r in range(replicas)]
    return [stop - start for start, stop in bounds]


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"),
    [
        (5, 2, [3, 2]),
        (5, 3, [2, 2, 1]),
        (5, 4, [2, 2, 1, 0]),
        (6, 2, [3, 3]),
        (6, 3, [2, 2, 2]),
        (6, 4, [2, 2, 2, 0]),
        (8, 4, [2, 2, 2, 2]),
    ],
)
def test_as_it_comes_gives_the_pieces_of_tensorflow(rows, replicas, expected):
    assert sizes(split_as_it_comes, rows, replicas) == expected


@pytest.mark.parametrize(
    ("rows", "batch", "replicas", "expected"),
    [
        (5, 5, 4, [2, 1, 1, 1]),
        (6, 8, 2, [4, 2]),
        (6, 8, 3, [3, 3, 0]),
        (6, 8, 4, [2, 2, 2, 0]),
        (8, 8, 3, [3, 3, 2]),
    ],
)
def test_the_plan_gives_the_pieces_of_tensorflow(rows, batch, replicas, expected):
    assert sizes(split_by_plan, rows, replicas, batch) == expected


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 200))
def test_both_rules_give_every_row_once_and_in_order(rows, replicas, batch):
    for rule, more in ((split_as_it_comes, ()), (split_by_plan, (batch,))):
        bounds = [rule(rows, replicas, r, *more) for r in range(replicas)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == rows
        for (_, stop), (start, _) in itertools.pairwise(bounds):
            assert stop == start
        assert all(start <= stop for start, stop in bounds)
    plan = sizes(split_by_plan, max(rows, batch), replicas, batch)
    assert max(plan) - min(plan) <= 1
    assert plan == sorted(plan, reverse=True)


# --- stages ------------------------------------------------------------------------


def test_slices_of_nests_keep_their_structure():
    x, y = np.arange(6.0).reshape(3, 2), np.array([7, 8, 9], np.int8)
    dataset = Dataset.from_tensor_slices({"p": Pair(x, y), "l": [x, (y,)]})
    assert dataset.element_spec == {
        "p": Pair(ArraySpec((2,), np.dtype(float)), ArraySpec((), np.dtype(np.int8))),
        "l": [
            ArraySpec((2,), np.dtype(float)),
            (ArraySpec((), np.dtype(np.int8)),),
        ],
    }
    second = list(dataset)[1]
    assert second["p"].x.tolist() == [2.0, 3.0]
    assert second["p"].y == 8
    assert second["l"][1][0] == 8
    (batch,) = list(dataset.batch(3))
    assert batch["p"].x.tolist() == x.tolist()
    assert batch["l"][1][0].dtype == np.int8


def test_lists_of_numbers_are_arrays():
    assert numbers(Dataset.from_tensor_slices([1, 2, 3]).batch(2)) == [[1, 2], [3]]
    dataset = Dataset.from_tensor_slices({"a": [[1, 2], [3, 4]], "b": [5, 6]})
    assert [(e["a"].tolist(), int(e["b"])) for e in dataset] == [
        ([1, 2], 5),
        ([3, 4], 6),
    ]


def test_batch_and_drop_remainder():
    assert numbers(arange(5).batch(2)) == [[0, 1], [2, 3], [4]]
    assert numbers(arange(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert arange(5).batch(2).element_spec.shape == (None,)
    assert arange(5).batch(2, drop_remainder=True).element_spec.shape == (2,)
    assert numbers(arange(5).batch(2).batch(2))[0] == [[0, 1], [2, 3]]


def test_take_repeat_shard_and_their_lengths():
    assert numbers(arange(3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert numbers(arange(3).repeat().take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert numbers(arange(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]
    assert numbers(arange(7).shard(3, 1)) == [1, 4]
    assert numbers(arange(2).shard(3, 2)) == []
    assert len(arange(7).shard(3, 0)) == 3
    assert len(arange(3).repeat(2).batch(4)) == 2
    assert arange(3).repeat().cardinality() == mpidist.data.INFINITE_CARDINALITY
    assert arange(3).repeat().batch(2).cardinality() == -1
    assert numbers(arange(3).repeat(0)) == []
    assert numbers(arange(3).repeat(-1).take(4)) == [0, 1, 2, 0]
    assert numbers(arange(3).take(-1)) == [0, 1, 2]
    assert numbers(arange(0).repeat()) == []
    with pytest.raises(TypeError, match="no len"):
        len(arange(3).repeat())


def test_map_gets_rows_before_batch_and_batches_after_it():
    assert numbers(arange(4).map(lambda x: x * 2).batch(3)) == [[0, 2, 4], [6]]
    assert numbers(arange(4).batch(3).map(lambda x: x.sum())) == [3, 3]
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3) * 10))
    assert numbers(pairs.map(lambda x, y: x + y)) == [0, 11, 22]
    named = Dataset.from_tensor_slices({"a": np.arange(3)})
    assert numbers(named.map(lambda row: row["a"] + 1).batch(3)) == [[1, 2, 3]]
    # The second function brings rows of different lengths to one.
    ragged = arange(3).map(lambda n: np.ones(int(n)))
    padded = ragged.map(lambda x: np.pad(x, (0, 3 - len(x)))).batch(3)
    assert numbers(padded) == [[[0, 0, 0], [1, 0, 0], [1, 1, 0]]]
    with pytest.raises(ValueError, match=r"dtype and shape, got float64 \(0,\) and"):
        list(ragged.batch(3))


def test_map_is_lazy_and_tells_its_spec():
    calls = []
    dataset = arange(4).map(lambda x: calls.append(int(x)) or np.float32(x)).batch(2)
    assert calls == []
    assert dataset.element_spec == ArraySpec((None,), np.dtype(np.float32))
    assert calls == [0]
    next(iter(dataset))
    assert calls == [0, 0, 1]


def test_shuffle_is_a_permutation_which_the_seed_decides():
    dataset = arange(50).shuffle(seed=3)
    first, second = numbers(dataset), numbers(dataset)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))
    again = arange(50).shuffle(seed=3)
    assert [numbers(again), numbers(again)] == [first, second]
    assert numbers(arange(50).shuffle(seed=4)) != first


def test_shuffle_takes_the_size_of_a_buffer_as_tensorflow_does():
    expected = list(arange().shuffle(seed=7))
    for size in (ROWS, 1000, np.array(1000), mpidist.data.UNKNOWN_CARDINALITY):
        assert list(arange().shuffle(size, seed=np.array(7))) == expected
    assert numbers(arange().shuffle(1)) == list(range(ROWS))
    # Without a seed: 0, the same on all ranks and in all runs.
    assert numbers(arange(50).shuffle(9)) == numbers(arange(50).shuffle(9, 0))


@pytest.mark.parametrize("size", [1, 2, 7, 39, 40, 41])
def test_shuffle_in_a_buffer_is_one_order_however_the_rows_are_found(size):
    by_number = arange(40).shuffle(size, 3)
    in_order = Dataset.from_generator(lambda: iter(range(40))).shuffle(size, 3)
    assert stage_of(by_number).indexed
    assert not stage_of(in_order).indexed
    found = numbers(by_number)
    assert found == numbers(in_order)
    assert sorted(found) == list(range(40))
    # An element comes at most the size of the buffer early.
    assert all(x < place + size for place, x in enumerate(found))
    assert numbers(by_number.skip(13)) == found[13:]


def test_shuffle_may_keep_its_order():
    dataset = arange(20).shuffle(3, reshuffle_each_iteration=False).repeat(2)
    found = numbers(dataset)
    assert found[:20] == found[20:] == numbers(dataset)[:20]


def test_shuffle_and_repeat_in_both_orders():
    # Before repeat: each round has all rows, in an order of its own.
    found = numbers(arange(20).shuffle(seed=1).repeat(2))
    assert sorted(found[:20]) == sorted(found[20:]) == list(range(20))
    assert found[:20] != found[20:]
    # After it: the rounds mix.
    found = numbers(arange(20).repeat(2).shuffle(seed=1))
    assert sorted(found) == sorted(2 * list(range(20)))
    assert sorted(found[:20]) != list(range(20))
    # A batch may span two rounds.
    batches = numbers(arange(5).shuffle(seed=1).repeat(2).batch(3))
    assert sorted(list(itertools.chain(*batches))[:5]) == list(range(5))
    # Batches in another order.
    batches = numbers(arange(6).batch(2).shuffle(seed=5))
    assert sorted(batches) == [[0, 1], [2, 3], [4, 5]]


def test_the_order_of_a_shuffle_does_not_change_with_versions():
    # A run that is continued from a checkpoint depends on it.
    dataset = arange(8).shuffle(seed=7)
    assert numbers(dataset) == [7, 4, 3, 0, 1, 5, 2, 6]
    assert numbers(dataset) == [3, 7, 1, 4, 5, 2, 6, 0]


@given(
    rows=st.integers(1, 30),
    seed=st.integers(0, 5),
    batch=st.integers(1, 8),
    repeat=st.integers(1, 3),
    parts=st.integers(1, 5),
)
def test_parts_of_batches_are_those_of_the_whole(rows, seed, batch, repeat, parts):
    dataset = arange(rows).shuffle(seed=seed).repeat(repeat).batch(batch)
    stage = stage_of(dataset)
    for index, whole in enumerate(dataset):
        opened = open_at(stage, index)
        assert opened.rows == len(whole)
        found = []
        for part in range(parts):
            block = opened.read(*split_as_it_comes(opened.rows, parts, part))
            found += block.leaves[0].tolist()
        assert found == whole.tolist()


def test_elements_are_copies():
    x = np.arange(6)
    for element in Dataset.from_tensor_slices(x).batch(3):
        element += 100
    assert x.tolist() == list(range(6))


class CountingRows:
    """An array of rows that says which of them were read."""

    def __init__(self, count, width=2):
        self.shape = (count, width)
        self.dtype = np.dtype(np.float64)
        self.touched = []

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        assert isinstance(index, slice), "slices of rows only, as of many formats"
        rows = range(*index.indices(self.shape[0]))
        self.touched += rows
        columns = range(self.shape[1])
        return np.array([[r * 10.0 + c for c in columns] for r in rows]).reshape(
            len(rows), self.shape[1]
        )


def test_of_an_array_like_only_the_rows_asked_for_are_read():
    source = CountingRows(100)
    dataset = Dataset.from_tensor_slices(source).shuffle(seed=1).batch(10)
    assert source.touched == []
    opened = open_at(stage_of(dataset), 3)
    block = opened.read(2, 5)
    assert len(source.touched) == 3
    assert sorted(block.leaves[0][:, 0] / 10) == sorted(source.touched)
    assert [int(v / 10) for v in block.leaves[0][:, 0]] == [
        int(v / 10) for v in next(iter(dataset.take(4).shard(4, 3)))[2:5, 0]
    ]


def test_rows_of_a_sequence_of_nests():
    class Squares:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return {"n": index, "square": np.float32(index**2)}

    dataset = Dataset.from_tensor_slices(Squares()).batch(2)
    assert [b["square"].tolist() for b in dataset] == [[0, 1], [4, 9], [16]]
    assert dataset.element_spec["square"] == ArraySpec((None,), np.dtype(np.float32))


def test_arrays_in_the_other_byte_order_are_turned():
    swapped = np.arange(4).astype(np.dtype(np.int64).newbyteorder())
    dataset = Dataset.from_tensor_slices(swapped).batch(2)
    assert dataset.element_spec.dtype.isnative
    assert next(iter(dataset)).dtype.isnative
    assert numbers(dataset) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Dataset.from_tensor_slices(np.float32(3)), ValueError, "at least one"),
        (lambda: Dataset.from_tensor_slices({}), ValueError, "at least one dimension"),
        (
            lambda: Dataset.from_tensor_slices((np.ones(3), np.ones(4))),
            ValueError,
            r"same first dimension, got shapes \(\(3,\), \(4,\)\)",
        ),
        (lambda: Dataset.from_tensor_slices("text"), TypeError, "expected"),
        (lambda: Dataset.from_tensor_slices(None), TypeError, "got None"),
        (
            lambda: Dataset.from_tensor_slices(np.ma.masked_array([1, 2])),
            TypeError,
            "masked",
        ),
        (lambda: Dataset([1, 2]), TypeError, "from_tensor_slices"),
        (lambda: arange().batch(0), ValueError, "`batch_size` to be 1 or more"),
        (lambda: arange().batch(2.0), TypeError, "`batch_size` to be an int"),
        (lambda: arange().batch(True), TypeError, "`batch_size` to be an int"),
        (lambda: arange().shuffle(None), TypeError, "expected a size or a seed"),
        (lambda: arange().shuffle(seed="a"), TypeError, "`seed` to be an int"),
        (lambda: arange().shuffle(seed=-1), ValueError, "`seed` to be 0 or more"),
        (lambda: arange().shuffle(), TypeError, "expected a size or a seed"),
        (lambda: arange().repeat().shuffle(-2), ValueError, "before `repeat`"),
        (lambda: arange().shuffle(1, 2, seed=3), TypeError, "multiple values"),
        (lambda: arange().repeat().shuffle(seed=1), ValueError, "before `repeat`"),
        (lambda: arange().repeat(-2), ValueError, "`count` to be -1 or more"),
        (lambda: arange().take("3"), TypeError, "`count` to be an int"),
        (lambda: arange().shard(2, 2), ValueError, "0 <= index < 2"),
        (lambda: arange().map(3), TypeError, "expected a function"),
        (lambda: arange().prefetch(-3), ValueError, "`buffer_size` to be 0"),
        (
            lambda: Dataset.from_generator(lambda: iter(())).element_spec,
            ValueError,
            "the dataset is empty, so its elements are unknown$",
        ),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_repr_tells_the_pipeline():
    dataset = arange(9).shuffle(seed=4).repeat(2).batch(3, drop_remainder=True)
    assert repr(dataset.prefetch(2)) == (
        "<mpidist.data.Dataset of 9 rows.shuffle(seed=4).repeat(2).batch(3, "
        "drop_remainder=True).prefetch(2)>"
    )
    dataset = arange(9).shuffle(5, 4, False).map(abs, 3).interleave(Dataset.range, 2)
    assert repr(dataset) == (
        "<mpidist.data.Dataset of 9 rows.shuffle(5, seed=4, always in "
        "one order).map(abs).interleave(Dataset.range, 2, 1)>"
    )


# --- the plan ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "batch", "policy", "note", "pieces"),
    [
        (
            64,
            1000,
            "AUTO",
            "1 of 64 replicas never get a row; take a multiple of 64 rows, or",
            "16 on 62, 8 on 1, 0 on 1",
        ),
        (64, 1000, "OFF", "", "16 on 40, 15 on 24"),
        (
            3,
            2,
            "AUTO",
            "1 of 3 replicas never get a row; take batches of 3 rows",
            "1 on 2, 0 on 1",
        ),
        (2, 40000, "AUTO", "", "20000 on 2"),
    ],
)
def test_the_plan_for_many_replicas(replicas, batch, policy, note, pieces):
    rows = Dataset.from_tensor_slices(np.arange(60000)).batch(batch)
    group = types.SimpleNamespace(num_replicas=replicas)
    policy = mpidist.data.AutoShardPolicy[policy]
    text = describe_feed(Feed(group, DatasetSource(rows), 1, policy, True))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert ("note" in text) == bool(note)
    assert note in " ".join(lines)
    assert f"rows of a full batch on how many replicas: {pieces}" in lines


# --- the thread --------------------------------------------------------------------


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "mpidist-data"]


def wait_for_no_thread():
    deadline = time.monotonic() + 30
    while prefetch_threads() and time.monotonic() < deadline:
        gc.collect()  # an iterator of another test may not be collected yet
        time.sleep(0.01)
    assert prefetch_threads() == []


def test_prefetch_reads_ahead_but_not_farther():
    wait_for_no_thread()
    read = []
    dataset = arange(20).map(lambda x: read.append(int(x)) or x).prefetch(3)
    iterator = iter(dataset)
    assert read == []
    assert next(iterator) == 0
    deadline = time.monotonic() + 30
    while len(read) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    # One given out, and three ready.
    time.sleep(0.05)
    assert read == [0, 1, 2, 3]
    assert [int(x) for x in iterator] == list(range(1, 20))
    wait_for_no_thread()


def test_the_thread_ends_with_its_iterator():
    wait_for_no_thread()
    iterator = iter(arange(1000).prefetch(2))
    next(iterator)
    assert len(prefetch_threads()) == 1
    del iterator
    gc.collect()
    wait_for_no_thread()


def test_an_error_comes_out_at_its_place():
    def fail_at_3(x):
        if x == 3:
            raise KeyError("no such row")
        return x

    iterator = iter(arange(9).map(fail_at_3).prefetch(8))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="no such row"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    wait_for_no_thread()


def test_close_waits_for_the_thread():
    prefetcher = read_ahead(iter(range(100)), 2)
    assert next(prefetcher) == 0
    assert prefetch_threads()
    prefetcher.close()
    assert prefetch_threads() == []
    with pytest.raises(StopIteration):
        next(prefetcher)
    read_ahead(iter(range(3)), 1).close()  # one that was never started


# --- records -----------------------------------------------------------------------


def test_input_context():
    context = mpidist.InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 1
    context = mpidist.InputContext(3, 1, 4)
    assert str(context) == "mpidist.InputContext(input pipeline id 1, total: 3)"
    assert context.get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match="10 is not divisible by"):
        context.get_per_replica_batch_size(10)
    with pytest.raises(AttributeError):
        context.input_pipeline_id = 2


def test_input_options():
    options = mpidist.InputOptions()
    assert options.experimental_fetch_to_device is True
    assert (
        options.experimental_replication_mode is mpidist.InputReplicationMode.PER_WORKER
    )
    assert options.experimental_place_dataset_on_device is False
    assert options.experimental_per_replica_buffer_size == 1
    assert options.auto_shard_policy is mpidist.data.AutoShardPolicy.AUTO
    older = mpidist.InputOptions(experimental_prefetch_to_device=False)
    assert older == mpidist.InputOptions(False)
    assert mpidist.InputOptions(auto_shard_policy="off").auto_shard_policy.value == -1
    with pytest.raises(ValueError, match="one of OFF, AUTO, FILE, DATA, HINT"):
        mpidist.InputOptions(auto_shard_policy="NONE")
    with pytest.raises(TypeError, match="older name"):
        mpidist.InputOptions(True, experimental_prefetch_to_device=True)
    with pytest.raises(TypeError, match="InputReplicationMode"):
        mpidist.InputOptions(experimental_replication_mode="PER_WORKER")


def test_optional():
    empty, full = mpidist.data.Optional(), mpidist.data.Optional(3, has_value=True)
    assert (empty.has_value(), full.has_value()) == (False, True)
    assert full.get_value() == 3
    with pytest.raises(ValueError, match="holds no element"):
        empty.get_value()
