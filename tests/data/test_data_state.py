"""state() and restore(): a run that is continued sees the rows it had not seen."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from replicas import own, split
from test_data_distribute import as_list, pieces

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist.data import Dataset

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]
core = pytest.mark.core

ROWS, BATCH = 22, 4


def shuffled(rows=ROWS, batch=BATCH, depth=2, seed=5):
    dataset = (
        Dataset.from_tensor_slices(np.arange(rows)).shuffle(seed=seed).batch(batch)
    )
    return dataset.prefetch(depth)


def gathered(strategy, iterator, steps=None):
    """Return the global batches that are still to come, or some of them."""
    found = []
    while steps is None or len(found) < steps:
        step = iterator.get_next_as_optional()
        if not step.has_value():
            break
        found.append(strategy.gather(step.get_value(), axis=0).tolist())
    return found


class Resumable:
    """An iterable whose iterators have a state, as grain's have."""

    def __init__(self):
        self.opened = []

    def __iter__(self):
        iterator = ResumableIterator()
        self.opened.append(iterator)
        return iterator


class ResumableIterator:
    def __init__(self):
        self.index = 0
        self.reads = 0

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
        return {"index": np.int64(self.index), "raw": b"\x00\xff", "list": [1, None]}

    def set_state(self, state):
        assert state["raw"] == b"\x00\xff"
        assert state["list"] == [1, None]
        self.index = state["index"]


def flat(batches):
    return list(itertools.chain(*batches))


def test_later_epochs_have_the_same_order_as_without_the_stop(strategy):
    dataset = strategy.experimental_distribute_dataset(shuffled())
    epochs = [gathered(strategy, iter(dataset)) for _ in range(3)]
    assert epochs[0] != epochs[1]

    dataset = strategy.experimental_distribute_dataset(shuffled())
    gathered(strategy, iter(dataset))
    iterator = iter(dataset)
    seen = gathered(strategy, iterator, 2)
    state = iterator.state()
    assert (state["iteration"], state["position"]) == (1, 2)

    dataset = strategy.experimental_distribute_dataset(shuffled())
    iterator = iter(dataset)
    iterator.restore(state)
    assert seen + gathered(strategy, iterator) == epochs[1]
    assert gathered(strategy, iter(dataset)) == epochs[2]


def test_a_dataset_goes_there_without_reading(strategy):
    read = []
    rows = Dataset.from_tensor_slices(np.arange(ROWS))
    dataset = rows.map(lambda x: read.append(int(x)) or x).batch(BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    iterator.restore({**iterator.state(), "position": 4})
    next(iterator)
    assert all(row >= 16 for row in read)


def test_a_source_with_a_state_is_not_read_again(strategy):
    source = Resumable()
    iterator = iter(strategy.experimental_distribute_dataset(source))
    gathered(strategy, iterator, 3)
    state = iterator.state()
    assert next(iter(state["sources"].values()))["index"] == 3
    iterator.restore(state)
    assert gathered(strategy, iterator, 1) == [[12, 13, 14, 15]]
    assert source.opened[-1].reads == 1


def test_a_generator_can_not_go_back(strategy):
    dataset = strategy.experimental_distribute_dataset(iter(as_list(ROWS, BATCH)))
    iterator = iter(dataset)
    start = iterator.state()
    gathered(strategy, iterator, 3)
    state = iterator.state()
    iterator.restore(state)  # it is there
    assert gathered(strategy, iterator, 1) == [[12, 13, 14, 15]]
    with pytest.raises(RuntimeError, match="cannot go back to 0"):
        iterator.restore(start)


@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_inputs_of_uneven_length_go_on(strategy, rank, size, kind):
    # Rank r has r + 2 batches. After two steps rank 0 has ended.
    def dataset_fn(context):
        batches = [np.array([10 * rank + i]) for i in range(rank + 2)]
        return batches if kind == "list" else Dataset.from_generator(lambda: batches)

    first = iter(strategy.distribute_datasets_from_function(dataset_fn))
    for _ in range(2):
        next(first)
    state = first.state()
    rest = [own(strategy, element).tolist() for element in first]
    second = iter(strategy.distribute_datasets_from_function(dataset_fn))
    second.restore(state)
    assert [own(strategy, element).tolist() for element in second] == rest
    assert rest == [[10 * rank + 2 + i] for i in range(rank)] + [[]] * (size - 1 - rank)


@core
def test_the_state_of_one_rank_is_enough(strategy, rank):
    # A checkpoint holds that of rank 0; sources with a state of their own included.
    def distribute():
        return strategy.distribute_datasets_from_function(lambda context: Resumable())

    first = iter(distribute())
    gathered(strategy, first, 2)
    comm = group_of(strategy).communicator
    states = comm.all_gather_objects(pickle.dumps(first.state()))
    state = pickle.loads(states[0])
    assert list(state["sources"]) == ["0"]
    rest = gathered(strategy, first)
    second = iter(distribute())
    second.restore(state)
    assert gathered(strategy, second) == rest


@pytest.mark.mpi(min_size=2)
@core
def test_a_mismatch_loses_no_batch(new_strategy, rank):
    strategy = new_strategy()
    iterator = iter(strategy.experimental_distribute_dataset(as_list(ROWS, BATCH)))
    gathered(strategy, iterator, 1)
    call = (lambda: strategy.run(lambda: 1)) if rank == 0 else (lambda: next(iterator))
    with pytest.raises(mpidist.CollectiveMismatchError):
        call()
    assert iterator.state()["position"] == 1
    found = own(strategy, next(iterator)).tolist()
    assert found == pieces(strategy, ROWS, BATCH)[1]


# --- what cannot be restored --------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: shuffled(batch=8),
            "of 6 batches of 4 rows, and this one has 3 batches of 8",
        ),
        (
            lambda: shuffled(rows=30),
            "of 6 batches of 4 rows, and this one has 8 batches of 4",
        ),
        (
            lambda: shuffled().repeat(),
            "6 batches of 4 rows, and this one has endlessly many batches of 4",
        ),
    ],
)
def test_the_state_of_another_dataset(strategy, make, message):
    state = iter(strategy.experimental_distribute_dataset(shuffled())).state()
    iterator = iter(strategy.experimental_distribute_dataset(make()))
    with pytest.raises(ValueError, match=message):
        iterator.restore(state)


@core
def test_inputs_from_functions_need_the_same_number_of_ranks(strategy, size):
    dataset = strategy.distribute_datasets_from_function(lambda c: as_list(8, 4))
    iterator = iter(dataset)
    state = {**iterator.state(), "replicas": size + 1}
    with pytest.raises(ValueError, match=f"taken on {size + 1} ranks, each with an"):
        iterator.restore(state)
    other = iter(strategy.experimental_distribute_dataset(as_list(8, 4)))
    with pytest.raises(ValueError, match="over inputs from a function"):
        other.restore(iterator.state())


def test_a_state_that_json_can_not_hold(strategy):
    class Bad(Resumable):
        def __iter__(self):
            iterator = ResumableIterator()
            iterator.get_state = object
            return iterator

    iterator = iter(strategy.experimental_distribute_dataset(Bad()))
    next(iterator)
    with pytest.raises(TypeError, match="has a object, which is not bytes"):
        iterator.state()


class Once:
    """A source that can be read only once."""

    def __init__(self):
        self.batches = iter(as_list(ROWS, BATCH))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


KINDS = {
    "Dataset": shuffled,
    "list": lambda: as_list(ROWS, BATCH),
    "resumable": Resumable,
    "once": Once,
}


@pytest.mark.mpi(min_size=2)
@core
@pytest.mark.parametrize("fault", ["raises", "differs"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_that_fails_on_one_rank_moves_no_rank(
    strategy, rank, size, kind, fault
):
    iterator = iter(strategy.experimental_distribute_dataset(KINDS[kind]()))
    gathered(strategy, iterator, 1)
    state = iterator.state()
    before = gathered(strategy, iterator, 1)
    position = {"raises": "three", "differs": 3}[fault]
    other = state | {"position": position, "sources": {}}
    bad = other if rank == size - 1 else state | {"position": 2, "sources": {}}
    error = {"raises": ValueError, "differs": mpidist.CollectiveMismatchError}[fault]
    with pytest.raises(error):
        iterator.restore(bad)
    assert iterator.state()["position"] == 2
    if kind == "once":  # whose elements are gone: all say so, rather than go on
        with pytest.raises(RuntimeError, match="its `restore` failed"):
            next(iterator)
        return
    reference = iter(strategy.experimental_distribute_dataset(KINDS[kind]()))
    expected = gathered(strategy, reference)
    assert before == expected[1:2]
    assert gathered(strategy, iterator) == expected[2:]


@core
@pytest.mark.parametrize("kind", ["Dataset", "list", "resumable"])
def test_a_checkpoint_of_global_batches_has_one_state(
    strategy, new_strategy, rank, same_folder, kind
):
    # So it is restored on any number of ranks: here on one of them alone.
    folder = same_folder
    iterator = iter(strategy.experimental_distribute_dataset(KINDS[kind]()))
    gathered(strategy, iterator, 2)
    whole, again = iter(shuffled()), iter(shuffled())
    next(whole)
    with strategy.scope():
        mpidist.Checkpoint(iterator=iterator, whole=whole).save(f"{folder}/a")
    assert len(mpidist.load_checkpoint(f"{folder}/a").states["iterator"]) == 1
    rest = gathered(strategy, iterator)
    alone = new_strategy(comm=split(rank))
    other = iter(alone.experimental_distribute_dataset(KINDS[kind]()))
    with alone.scope():
        mpidist.Checkpoint(iterator=other, whole=again).restore(f"{folder}/a")
    assert gathered(alone, other) == rest
    assert [x.tolist() for x in again] == [x.tolist() for x in whole]


@core
@pytest.mark.parametrize("depth", [0, 2])
def test_an_interrupt_that_is_caught_loses_no_rows(strategy, rank, depth):
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

    rows = Dataset.from_tensor_slices(np.arange(ROWS)).map(fn)
    dataset = rows.batch(BATCH).prefetch(depth)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    assert list(itertools.chain(*steps())) == list(range(ROWS))
    assert len(interrupted) == (rank == 0)


def test_an_interrupt_on_the_way_to_a_position_loses_no_rows(strategy, rank):
    left = [0, 4] if rank == 0 else []

    def generate():
        for number in range(6):
            if left and number == left[-1]:
                left.pop()
                raise KeyboardInterrupt
            yield number

    dataset = Dataset.from_generator(generate).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    gathered(strategy, iterator, 2)
    for _ in range(len(left)):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert gathered(strategy, iterator) == [[4, 5]]
    assert not left


@core
def test_own_inputs_restore_a_position_after_the_end_of_the_shortest(strategy, rank):
    def iterator(numbers):
        make = lambda _: Dataset.from_generator(lambda: iter(numbers))  # noqa: E731
        return iter(strategy.distribute_datasets_from_function(make))

    longer = iterator(range(2 if rank else 4))
    for _ in range(3):
        next(longer)
    state = longer.state()
    again = iterator(range(2 if rank else 4))
    again.restore(state)
    assert [own(strategy, x).tolist() for x in again] == [[] if rank else 3]
    shorter = iterator(range(2))
    with pytest.raises(ValueError, match="expected an input of 3 or more elements"):
        shorter.restore(state)
    assert len(list(shorter)) == 2


@core
@pytest.mark.parametrize("kind", ["list", "iterable", "Dataset"])
def test_an_input_that_has_become_shorter_is_refused(strategy, kind):
    class Batches:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    def rows(batches):
        return Dataset.from_generator(lambda: batches).unbatch().batch(BATCH)

    make = {"list": list, "iterable": Batches, "Dataset": rows}[kind]
    batches = as_list(ROWS, BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(make(batches)))
    gathered(strategy, iterator, 3)
    shorter = iter(strategy.experimental_distribute_dataset(make(batches[:2])))
    with pytest.raises(
        ValueError, match=r"this one has 2|ends after 2|3 or more.*before"
    ):
        shorter.restore(iterator.state())
    assert len(gathered(strategy, shorter)) == 2
    gathered(strategy, iterator)
    ended = iter(strategy.experimental_distribute_dataset(make(batches)))
    ended.restore(iterator.state())
    assert gathered(strategy, ended) == []


@core
@pytest.mark.parametrize("own_input", [False, True])
def test_shuffles_without_a_seed_have_the_order_of_the_state(strategy, rank, own_input):
    def dataset_fn(context):
        rows = Dataset.range(ROWS).shuffle(ROWS)
        if own_input:
            rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(BATCH)

    def distribute():
        if own_input:
            return strategy.distribute_datasets_from_function(dataset_fn)
        return strategy.experimental_distribute_dataset(dataset_fn(None))

    dataset, other = distribute(), distribute()
    first = iter(dataset)
    gathered(strategy, first, 1)
    state = group_of(strategy).communicator.all_gather_objects(
        pickle.dumps(first.state())
    )[0]
    second = iter(other)
    second.restore(pickle.loads(state))
    assert gathered(strategy, second) == (rest := gathered(strategy, first))
    assert gathered(strategy, iter(other)) == gathered(strategy, iter(dataset)) != rest
