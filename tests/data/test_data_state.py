"""state() and restore(): a run that is continued sees the rows it had not seen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from replicas import everywhere, split
from test_data_distribute import as_list, flat, gathered

import mpidist
from mpidist.data import Dataset

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]
core = pytest.mark.core

ROWS, BATCH = 22, 4


def shuffled(rows=ROWS, batch=BATCH):
    return Dataset.range(rows).shuffle(seed=5).batch(batch).prefetch(2)


class Resumable:
    """An iterable whose iterators have a state, as grain's have."""

    def __init__(self):
        self.opened = []

    def __iter__(self):
        self.opened.append(ResumableIterator())
        return self.opened[-1]


class ResumableIterator:
    def __init__(self):
        self.index = self.reads = 0

    def __iter__(self):
        return self

    def __next__(self):
        batches = as_list(ROWS, BATCH)
        if self.index >= len(batches):
            raise StopIteration
        self.index += 1
        self.reads += 1
        return batches[self.index - 1]

    def get_state(self):
        parts = {"raw": b"\x00\xff", "list": [1, None], "pair": (1, (2, b"x"))}
        return {"index": np.int64(self.index), **parts}

    def set_state(self, state):
        assert state["raw"] == b"\x00\xff"
        assert state["list"] == [1, None]
        assert state["pair"] == (1, (2, b"x"))  # as those of `random.Random`
        self.index = state["index"]


def once():
    """A source that can be read only once."""
    return iter(as_list(ROWS, BATCH))


KINDS = {
    "Dataset": shuffled,
    "list": lambda: as_list(ROWS, BATCH),
    "resumable": Resumable,
    "once": once,
}


def test_later_epochs_have_the_same_order_as_without_the_stop(strategy, distribute):
    dataset = distribute(shuffled())
    epochs = [gathered(strategy, iter(dataset)) for _ in range(3)]
    assert epochs[0] != epochs[1]

    dataset = distribute(shuffled())
    gathered(strategy, iter(dataset))
    iterator = iter(dataset)
    seen = gathered(strategy, iterator, 2)
    state = iterator.state()
    assert (state["iteration"], state["position"]) == (1, 2)

    dataset = distribute(shuffled())
    iterator = iter(dataset)
    iterator.restore(state)
    assert seen + gathered(strategy, iterator) == epochs[1]
    assert gathered(strategy, iter(dataset)) == epochs[2]


def test_a_dataset_goes_there_without_reading(distribute):
    read = []
    rows = Dataset.range(ROWS).map(lambda x: read.append(int(x)) or x)
    iterator = iter(distribute(rows.batch(BATCH)))
    iterator.restore({**iterator.state(), "position": 4})
    next(iterator)
    assert all(row >= 16 for row in read)


def test_a_source_with_a_state_is_not_read_again(strategy, distribute):
    source = Resumable()
    iterator = iter(distribute(source))
    gathered(strategy, iterator, 3)
    state = iterator.state()
    text = json.dumps(state)  # which has no tuples
    iterator.restore(json.loads(text))
    assert gathered(strategy, iterator, 1) == [[12, 13, 14, 15]]
    assert source.opened[-1].reads == 1
    old = {"index": 3, "raw": {"__bytes__": "AP8="}, "list": [1, None]}
    old["pair"] = (1, (2, {"__bytes__": "eA=="}))
    old_sources = dict.fromkeys(state["sources"], old)
    iterator.restore(state | {"sources": old_sources})  # as older versions wrote it
    assert gathered(strategy, iterator, 1) == [[12, 13, 14, 15]]
    source.opened[-1].get_state = object
    with pytest.raises(TypeError, match="of type object, which cannot be saved"):
        iterator.state()
    source.opened[-1].get_state = lambda: np.zeros(4096)
    with pytest.raises(TypeError, match="without tensors"):
        iterator.state()


def test_a_generator_can_not_go_back(strategy, distribute):
    iterator = iter(distribute(once()))
    start = iterator.state()
    gathered(strategy, iterator, 3)
    iterator.restore(iterator.state())  # it is there
    assert gathered(strategy, iterator, 1) == [[12, 13, 14, 15]]
    with pytest.raises(RuntimeError, match="cannot go back to 0"):
        iterator.restore(start)


@core
@pytest.mark.parametrize("kind", ["resumable", "own shuffle", "global shuffle"])
def test_the_state_of_one_rank_is_enough(strategy, distribute, from_function, kind):
    """For a checkpoint: with states of sources, and seeds that nobody gave."""

    def dataset_fn(context):
        rows = Dataset.range(ROWS).shuffle(ROWS)
        rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(BATCH)

    def make():
        if kind == "global shuffle":
            return distribute(dataset_fn(mpidist.InputContext()))
        fn = (lambda _: Resumable()) if kind == "resumable" else dataset_fn
        return from_function(fn)

    dataset, other = make(), make()
    first = iter(dataset)
    gathered(strategy, first, 1)
    state = everywhere(first.state())[0]
    assert list(state["sources"]) == (["0"] if kind == "resumable" else [])
    second = iter(other)
    second.restore(state)
    assert gathered(strategy, second) == (rest := gathered(strategy, first))
    again = gathered(strategy, iter(other))  # the next epoch
    assert again == gathered(strategy, iter(dataset))
    assert kind == "resumable" or again != rest


@core
@pytest.mark.parametrize("kind", ["Dataset", "list", "resumable"])
def test_a_checkpoint_of_global_batches_has_one_state(
    strategy, distribute, new_strategy, rank, same_folder, kind
):
    # So it is restored on any number of ranks: here on one of them alone.
    iterator = iter(distribute(KINDS[kind]()))
    gathered(strategy, iterator, 2)
    whole, again = iter(shuffled()), iter(shuffled())
    next(whole)
    path = f"{same_folder}/a"
    with strategy.scope():
        mpidist.Checkpoint(iterator=iterator, whole=whole).save(path)
    assert len(mpidist.load_checkpoint(path).states["iterator"]) == 1
    rest = gathered(strategy, iterator)
    alone = new_strategy(comm=split(rank))
    other = iter(alone.experimental_distribute_dataset(KINDS[kind]()))
    with alone.scope():
        mpidist.Checkpoint(iterator=other, whole=again).restore(path)
    assert gathered(alone, other) == rest
    assert [x.tolist() for x in again] == [x.tolist() for x in whole]


# --- interrupts ---------------------------------------------------------------------


@core
@pytest.mark.parametrize("depth", [0, 2])
def test_an_interrupt_that_is_caught_loses_no_rows(strategy, distribute, rank, depth):
    interrupted = []

    def fn(x):
        if x >= BATCH and rank == 0 and not interrupted:
            interrupted.append(x)
            raise KeyboardInterrupt
        return x

    def steps():
        while True:
            try:
                element = next(iterator)
            except KeyboardInterrupt:
                continue
            except StopIteration:
                return
            yield strategy.gather(element, axis=0).tolist()

    dataset = Dataset.range(ROWS).map(fn).batch(BATCH).prefetch(depth)
    iterator = iter(distribute(dataset))
    assert flat(steps()) == list(range(ROWS))
    assert len(interrupted) == (rank == 0)


def test_an_interrupt_on_the_way_to_a_position_loses_no_rows(
    strategy, distribute, rank
):
    left = [0, 4] if rank == 0 else []

    def generate():
        for number in range(6):
            if left and number == left[-1]:
                left.pop()
                raise KeyboardInterrupt
            yield number

    iterator = iter(distribute(Dataset.from_generator(generate).batch(2)))
    gathered(strategy, iterator, 2)
    for _ in range(len(left)):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert gathered(strategy, iterator) == [[4, 5]]
    assert not left


# --- what cannot be restored --------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: shuffled(batch=8), "'batch_size' 8, as of this one, got 4"),
        (lambda: shuffled(rows=30), "'cardinality' 8, as of this one, got 6"),
        (lambda: shuffled().repeat(), "'cardinality' -1, as of this one, got 6"),
    ],
)
def test_the_state_of_another_dataset(distribute, make, match):
    state = iter(distribute(shuffled())).state()
    with pytest.raises(ValueError, match=match):
        iter(distribute(make())).restore(state)


@core
def test_inputs_from_functions_need_the_same_number_of_ranks(
    distribute, from_function, size
):
    iterator = iter(from_function(lambda c: as_list(8, 4)))
    state = iterator.state()
    with pytest.raises(ValueError, match=f"'replicas' {size}, .*, got {size + 1}"):
        iterator.restore(state | {"replicas": size + 1})
    with pytest.raises(ValueError, match="got inputs from a function"):
        iter(distribute(as_list(8, 4))).restore(state)


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize(
    ("position", "error"),
    [("three", ValueError), (3, mpidist.CollectiveMismatchError)],
    ids=["raises", "differs"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_that_fails_on_one_rank_moves_no_rank(
    strategy, distribute, rank, size, kind, position, error
):
    iterator = iter(distribute(KINDS[kind]()))
    gathered(strategy, iterator, 1)
    state = iterator.state() | {"sources": {}}
    before = gathered(strategy, iterator, 1)
    with pytest.raises(error):
        iterator.restore(state | {"position": position if rank == size - 1 else 2})
    assert iterator.state()["position"] == 2
    if kind == "once":  # whose elements are gone: all say so, rather than go on
        with pytest.raises(RuntimeError, match="its `restore` failed"):
            next(iterator)
        return
    expected = gathered(strategy, iter(distribute(KINDS[kind]())))
    assert before + gathered(strategy, iterator) == expected[1:]


class Batches:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@core
@pytest.mark.parametrize(
    "kind", ["list", "iterable", "Dataset", "own", "own list", "own numbers"]
)
def test_an_input_that_has_become_shorter_is_refused(
    strategy, distribute, from_function, kind
):
    def steps_of(batches):
        rows = Dataset.from_generator(lambda: batches).unbatch().batch(BATCH)
        numbers = Dataset.range(BATCH * len(batches)).batch(BATCH)
        own = {"own": rows, "own list": list(batches), "own numbers": numbers}
        if kind in own:
            return iter(from_function(lambda _: own[kind]))
        return iter(
            distribute(
                {"list": list, "iterable": Batches}.get(kind, lambda _: rows)(batches)
            )
        )

    batches = as_list(ROWS, BATCH)
    iterator = steps_of(batches)
    gathered(strategy, iterator, 3)
    shorter = steps_of(batches[:2])
    match = r"'cardinality' 2, |ends after 2|3 or more.*before"
    with pytest.raises(ValueError, match=match):
        shorter.restore(iterator.state())
    assert len(gathered(strategy, shorter)) == 2
    gathered(strategy, iterator)
    ended = steps_of(batches)
    ended.restore(iterator.state())
    assert gathered(strategy, ended) == []
