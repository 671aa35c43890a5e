"""Random chains of the methods of `Dataset` against a model, at every position.

The model of a dataset is a function of the pass that returns the list of its elements.
No MPI here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from random_examples import HealthCheck, given, settings, st

from mpidist.data import UNKNOWN_CARDINALITY, Dataset
from mpidist.data._dataset import stage_of
from mpidist.data._shards import split_as_it_comes

MOST = 120  # elements


@dataclasses.dataclass
class Pair:
    """A dataset, and its model. Elements are ints, or lists of them if batched."""

    dataset: Dataset
    model: Callable[[tuple[int, ...]], list]
    batched: bool = False


def random_of(seed, in_pass):
    words = np.random.SeedSequence([seed, len(in_pass), *in_pass])
    return np.random.RandomState(np.random.MT19937(words))


def from_range(count):
    return Pair(Dataset.range(count), lambda p: list(range(count)))


def from_slices(count):
    values = np.arange(count) * 7 % 11
    return Pair(Dataset.from_tensor_slices(values), lambda p: values.tolist())


def from_generator(count):
    def squares():
        for number in range(count):
            yield number * number

    return Pair(
        Dataset.from_generator(squares), lambda p: [n * n for n in range(count)]
    )


def take(pair, count):
    return pair.dataset.take(count), lambda p: pair.model(p)[:count]


def skip(pair, count):
    return pair.dataset.skip(count), lambda p: pair.model(p)[count:]


def shard(pair, count):
    index = count // 2
    return pair.dataset.shard(count + 1, index), lambda p: pair.model(p)[
        index :: count + 1
    ]


def repeat(pair, count):
    count = count % 3
    return pair.dataset.repeat(count), lambda p: [
        x for n in range(count) for x in pair.model((*p, n))
    ]


def shuffle(pair, seed):
    def model(p):
        elements = pair.model(p)
        order = random_of(seed, p).permutation(len(elements))
        return [elements[i] for i in order]

    # A buffer for all, where elements are not found by number.
    return pair.dataset.shuffle(MOST, seed), model


def shuffle_in_a_buffer(pair, size):
    def model(p):
        random, elements, found = random_of(5, p), pair.model(p), []
        held = elements[: size + 1]
        for element in elements[size + 1 :]:
            place = random.randint(len(held))
            found.append(held[place])
            held[place] = element
        return found + [held[i] for i in random.permutation(len(held))]

    return pair.dataset.shuffle(size + 1, seed=5), model


def shuffle_once(pair, seed):
    def model(p):
        elements = pair.model(p)
        order = random_of(seed, ()).permutation(len(elements))
        return [elements[i] for i in order]

    return pair.dataset.shuffle(MOST, seed, False), model


def cache(pair, _):
    return pair.dataset.cache(), lambda p: pair.model((0,))


def prefetch(pair, count):
    return pair.dataset.prefetch(count), pair.model


def add_one(x):
    return [y + 1 for y in x] if isinstance(x, list) else x + 1


def map_it(pair, threads):
    calls = threads % 3 or None
    dataset = pair.dataset.map(lambda x: x + 1, num_parallel_calls=calls)
    return dataset, lambda p: [add_one(x) for x in pair.model(p)]


def filter_it(pair, rest):
    dataset = pair.dataset.filter(lambda x: np.sum(x) % 3 != rest % 3)
    return dataset, lambda p: [x for x in pair.model(p) if np.sum(x) % 3 != rest % 3]


def take_while(pair, most):
    dataset = pair.dataset.take_while(lambda x: np.sum(x) < 5 * most)
    return dataset, lambda p: list(
        itertools.takewhile(lambda x: np.sum(x) < 5 * most, pair.model(p))
    )


def enumerate_it(pair, start):
    dataset = pair.dataset.enumerate(start).map(lambda i, x: x + i)
    return dataset, lambda p: [
        (np.array(x) + i).tolist() for i, x in enumerate(pair.model(p), start)
    ]


def zip_with_itself(pair, count):
    dataset = Dataset.zip(pair.dataset.skip(count), pair.dataset)
    # One part only, since batches may differ in size.
    return dataset.map(lambda x, y: y), lambda p: [
        y for _, y in zip(pair.model(p)[count:], pair.model(p), strict=False)
    ]


def concatenate(pair, count):
    # To itself: each part has a pass of its own.
    return pair.dataset.concatenate(
        pair.dataset.take(count)
    ), lambda p: pair.model((*p, 0)) + pair.model((*p, 1))[:count]


def batch(pair, size):
    size, drop = size + 1, size % 2 == 1

    def model(p):
        rows = pair.model(p)
        found = [rows[i : i + size] for i in range(0, len(rows), size)]
        return [x for x in found if len(x) == size or not drop]

    return pair.dataset.batch(size, drop), model


def unbatch(pair, _):
    return pair.dataset.unbatch(), lambda p: list(itertools.chain(*pair.model(p)))


def interleave(pair, number):
    """Datasets of 0 to 3 elements, which are shuffled."""
    cycle, block = number % 3 + 1, number // 3 + 1

    def open_one(x):
        return Dataset.range(int(x) % 4).map(lambda y: y + x).shuffle(seed=1)

    def model(p):
        inputs = iter(enumerate(pair.model(p)))
        slots, turn, found, left = [None] * cycle, 0, [], True
        while left or any(slot is not None for slot in slots):
            if slots[turn] is None and left:
                number, x = next(inputs, (0, None))
                if x is None:
                    left = False
                    continue
                order = random_of(1, (*p, number)).permutation(x % 4)
                slots[turn] = [y + x for y in order]
            if slots[turn] is not None:
                found += slots[turn][:block]
                ended = len(slots[turn]) < block
                slots[turn] = None if ended else slots[turn][block:]
            turn = (turn + 1) % cycle
        return found

    calls = None if number % 2 else 2
    return pair.dataset.interleave(open_one, cycle, block, calls), model


ANY = [
    take, skip, shard, repeat, shuffle, shuffle_in_a_buffer, shuffle_once, cache,
    prefetch, map_it, filter_it, take_while, enumerate_it, zip_with_itself, concatenate,
]  # fmt: skip
OF_ROWS = [*ANY, batch, batch, interleave]
OF_BATCHES = [*ANY, unbatch, unbatch]


@st.composite
def pairs(draw, batched=None):
    source = draw(st.sampled_from([from_range, from_slices, from_generator]))
    pair = source(draw(st.integers(0, 11)))
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(OF_BATCHES if pair.batched else OF_ROWS))
        dataset, model = step(pair, draw(st.integers(0, 5)))
        now = step is batch or (pair.batched and step is not unbatch)
        if len(model((0,))) <= MOST:
            pair = Pair(dataset, model, now)
    if batched and not pair.batched:
        pair = Pair(*batch(pair, draw(st.integers(0, 4))), True)
    return pair


def as_lists(elements):
    return [np.asarray(x).tolist() for x in elements]


def agrees(pair, expected):
    count = pair.dataset.cardinality()
    return count in (UNKNOWN_CARDINALITY, len(expected))


def opened_from(stage, start):
    return stage.opened(stage.tokens((0,), start))


quick = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@quick
@given(pairs())
def test_elements_are_those_of_the_model(pair):
    for iteration in range(2):
        expected = as_lists(pair.model((iteration,)))
        assert as_lists(pair.dataset) == expected, pair.dataset
        assert agrees(pair, expected), pair.dataset


@quick
@given(pairs(), st.data())
def test_every_position_is_restored(pair, data):
    expected = as_lists(pair.model((1,)))
    first = iter(pair.dataset)
    first.restore({"format": 1, "input": "dataset", "iteration": 1, "position": 0})
    for position in range(min(len(expected), 12) + 1):
        second = iter(pair.dataset)
        second.restore(first.state())
        assert as_lists(second) == expected[position:], (pair.dataset, position)
        if position < len(expected):
            assert np.asarray(next(first)).tolist() == expected[position]


@quick
@given(pairs(batched=True), st.integers(0, 3), st.integers(1, 4))
def test_parts_of_batches_are_those_of_the_model(pair, start, replicas):
    """Each replica goes through the elements on its own, as in a job."""
    expected = as_lists(pair.model((0,)))[start:]
    stage = stage_of(pair.dataset)
    found = [[] for _ in expected]
    for replica in range(replicas):
        steps = zip(found, expected, opened_from(stage, start), strict=True)
        for rows, batch_of_all, opened in steps:
            assert opened.rows == len(batch_of_all)
            part = split_as_it_comes(opened.rows, replicas, replica)
            block = opened.part(*part)
            if block is not None:
                rows += block.leaves[0].tolist()
    assert found == expected
