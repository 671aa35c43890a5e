"""mpidist.data.Dataset, the rules that split a batch, and the thread that reads ahead.

No MPI here.
"""

from __future__ import annotations

import itertools
import json
import time
import types

import numpy as np
import pytest
from random_examples import given, st
from test_data_methods import Pair, lists, map_threads, wait_for_no_thread

import mpidist
from mpidist._base import shuffle_seeds, threads
from mpidist.data import ArraySpec, Dataset, DistributedDataset
from mpidist.data._ahead import read_ahead
from mpidist.data._dataset import stage_of
from mpidist.data._shards import split_as_it_comes, split_by_plan

ROWS = 10


def arange(count=ROWS):
    return Dataset.from_tensor_slices(np.arange(count))


# --- the rules ---------------------------------------------------------------------


def sizes(rule, rows, replicas, *more):
    bounds = [rule(rows, replicas, r, *more) for r in range(replicas)]
    return [stop - start for start, stop in bounds]


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
    assert lists(Dataset.from_tensor_slices([1, 2, 3]).batch(2)) == [[1, 2], [3]]
    dataset = Dataset.from_tensor_slices({"a": [[1, 2], [3, 4]], "b": [5, 6]})
    assert [(e["a"].tolist(), int(e["b"])) for e in dataset] == [
        ([1, 2], 5),
        ([3, 4], 6),
    ]


def test_the_spec_and_the_batches_of_batches():
    assert arange(5).batch(2).element_spec.shape == (None,)
    assert arange(5).batch(2, drop_remainder=True).element_spec.shape == (2,)
    mapped = arange(5).map(lambda x: x + 1)
    assert mapped.batch(2, True).prefetch(1).element_spec.shape == (2,)
    assert mapped.batch(2, True).map(lambda x: x[:1]).element_spec.shape == (1,)
    assert mapped.batch(2).element_spec.shape == (None,)
    empty = arange(1).map(lambda x: x + 1).batch(2, True).map(abs)
    assert empty.element_spec.shape == (2,)
    assert lists(arange(5).batch(2).batch(2))[0] == [[0, 1], [2, 3]]


def test_datasets_without_end_and_without_elements():
    endless = arange(3).repeat()
    assert lists(endless.take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert lists(arange(3).repeat(-1).take(4)) == [0, 1, 2, 0]
    assert endless.cardinality() == mpidist.data.INFINITE_CARDINALITY
    assert endless.batch(2).cardinality() == -1
    with pytest.raises(TypeError, match="no len"):
        len(endless)
    assert lists(arange(0).repeat()) == []
    assert lists(arange(2).shard(3, 2)) == []
    assert len(arange(7).shard(3, 0)) == 3


def test_map_gets_rows_before_batch_and_batches_after_it():
    assert lists(arange(4).map(lambda x: x * 2).batch(3)) == [[0, 2, 4], [6]]
    assert lists(arange(4).batch(3).map(lambda x: x.sum())) == [3, 3]
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3) * 10))
    assert lists(pairs.map(lambda x, y: x + y)) == [0, 11, 22]
    named = Dataset.from_tensor_slices({"a": np.arange(3)})
    assert lists(named.map(lambda row: row["a"] + 1).batch(3)) == [[1, 2, 3]]
    # The second function brings rows of different lengths to one.
    ragged = arange(3).map(lambda n: np.ones(int(n)))
    padded = ragged.map(lambda x: np.pad(x, (0, 3 - len(x)))).batch(3)
    assert lists(padded) == [[[0, 0, 0], [1, 0, 0], [1, 1, 0]]]
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


def test_shuffle_takes_the_size_of_a_buffer_as_tensorflow_does():
    expected = list(arange().shuffle(seed=7))
    for size in (ROWS, 1000, np.array(1000), mpidist.data.UNKNOWN_CARDINALITY):
        assert list(arange().shuffle(size, seed=np.array(7))) == expected
    assert lists(arange().shuffle(1)) == list(range(ROWS))


def test_shuffles_without_a_seed_differ_and_are_the_same_in_the_next_run(monkeypatch):
    monkeypatch.setattr(shuffle_seeds, "_made", threads.ReplicaLocal(lambda: [0, 0]))

    def run(seed=0):
        shuffle_seeds.begin(seed)
        files = arange(2).interleave(lambda x: arange(9).shuffle(9), block_length=9)
        inner = Dataset.from_generator(lambda: (yield from arange(9).shuffle(9)))
        read = lists(files), lists(inner)  # what reading makes does not count
        return read, [lists(arange().shuffle(ROWS)) for _ in range(2)]

    (read, (one, two)), other = run(), run(1)
    assert run() == (read, [one, two])
    assert other[0] == read
    assert len({str(x) for x in (one, two, *other[1])}) == 4


@pytest.mark.parametrize("distributed", [False, True])
def test_a_state_has_the_seeds_of_shuffles_without_one(distributed):
    def make():
        rows = Dataset.zip(arange(9).shuffle(9), arange(9).shuffle(9, seed=3))
        rows = rows.concatenate(rows.take(4)).cache().shuffle(5).repeat(2).batch(2)
        if distributed:
            rows = mpidist.get_strategy().experimental_distribute_dataset(rows)
        return rows

    def read(iterator):
        return [[x.tolist() for x in element] for element in iterator]

    first, dataset = make(), make()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.state()))
    before, other = iter(dataset), iter(make())
    expected = read(other)
    restored = iter(dataset)
    restored.restore(state)
    assert restored.state() == state
    assert read(restored) == (rest := read(iterator))
    assert read(iter(dataset)) == read(iter(first))  # the next epoch, too
    assert read(before) != read(iter(first))  # has its own order
    assert rest != expected[3:]
    with pytest.raises(
        ValueError, match=r"2 shuffles.*has 3.*write `shuffle\(n, seed="
    ):
        other.restore({**state, "shuffle_seeds": state["shuffle_seeds"][:2]})
    # An older version used 0 for all, and its states have no seeds.
    del state["shuffle_seeds"]
    restored.restore(state)
    assert restored.state()["shuffle_seeds"] == [0] * 3


def test_shuffles_made_by_functions_that_run_while_reading_do_not_count():
    def one(x):
        arange(3).shuffle(3)
        return x

    def batches():
        arange(3).shuffle(3)
        yield np.ones(3)

    class Batches:
        def __iter__(self):
            arange(3).shuffle(3)
            return batches()

    before = list(shuffle_seeds.position())
    rows = arange(4).map(one).filter(lambda x: one(x) >= 0)
    assert lists(rows.take_while(lambda x: one(x) < 9)) == [0, 1, 2, 3]
    strategy = mpidist.get_strategy()
    list(strategy.experimental_distribute_dataset(Batches()))
    source = batches()
    calls = strategy.make_input_fn_iterator(lambda context: lambda: next(source))
    assert len(list(calls)) == 1
    assert shuffle_seeds.position() == before


def test_the_order_of_a_shuffle_does_not_change_with_versions():
    # A run that is continued from a checkpoint depends on it.
    dataset = arange(8).shuffle(seed=7)
    assert lists(dataset) == [7, 4, 3, 0, 1, 5, 2, 6]
    assert lists(dataset) == [3, 7, 1, 4, 5, 2, 6, 0]


def test_elements_are_copies(tmp_path):
    np.arange(6).tofile(tmp_path / "rows")
    for x in (np.arange(6), np.memmap(tmp_path / "rows", np.int64, "r")):
        for element in Dataset.from_tensor_slices(x).batch(3):
            assert type(element) is np.ndarray
            element += 100
        assert x.tolist() == list(range(6))


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
    assert lists(dataset) == [[0, 1], [2, 3]]


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
    text = DistributedDataset(group, stage_of(rows), policy).shard_plan
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert ("note" in text) == bool(note)
    assert note in " ".join(lines)
    assert f"rows of a full batch on how many replicas: {pieces}" in lines


# --- the thread --------------------------------------------------------------------


def test_prefetch_reads_ahead_but_not_farther():
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


def test_close_waits_for_the_thread():
    prefetcher = read_ahead(iter(range(100)), 2)
    assert next(prefetcher) == 0
    assert map_threads()
    prefetcher.close()
    assert map_threads() == []
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
    assert mpidist.InputOptions().experimental_fetch_to_device is True
    assert mpidist.InputOptions().auto_shard_policy is mpidist.data.AutoShardPolicy.AUTO
    older = mpidist.InputOptions(experimental_prefetch_to_device=False)
    assert older == mpidist.InputOptions(False)
    assert mpidist.InputOptions(auto_shard_policy="off").auto_shard_policy.value == -1
    with pytest.raises(ValueError, match="one of OFF, AUTO, FILE, DATA, HINT"):
        mpidist.InputOptions(auto_shard_policy="NONE")
    with pytest.raises(TypeError, match="older name"):
        mpidist.InputOptions(True, experimental_prefetch_to_device=True)
    with pytest.raises(TypeError, match="InputReplicationMode"):
        mpidist.InputOptions(experimental_replication_mode="PER_WORKER")
