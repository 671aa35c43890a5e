"""Random chains of methods of `Dataset` against a model; the rules that split batches.

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
from mpidist.data._shards import split_as_it_comes, split_by_plan

MOST = 120  # elements


@dataclasses.dataclass
class Pair:
    """A dataset, and its model. Elements are ints, or lists of them if batched."""

    dataset: Dataset
    model: Callable[[tuple[int, ...]], list]
    batched: bool = False


SOURCES = [
    (Dataset.range, range),
    (
        lambda count: Dataset.from_tensor_slices(np.arange(count) * 7 % 11),
        lambda count: [x * 7 % 11 for x in range(count)],
    ),
    (
        lambda count: Dataset.from_generator(lambda: (x * x for x in range(count))),
        lambda count: [x * x for x in range(count)],
    ),
]


def random_of(seed, in_pass):
    words = np.random.SeedSequence([seed, len(in_pass), *in_pass])
    return np.random.RandomState(np.random.MT19937(words))


def mixed(elements, seed, in_pass):
    return [elements[i] for i in random_of(seed, in_pass).permutation(len(elements))]


def mixed_in_a_buffer(elements, size, in_pass):
    random, found, held = random_of(5, in_pass), [], elements[:size]
    for element in elements[size:]:
        place = random.randint(len(held))
        found.append(held[place])
        held[place] = element
    return found + [held[i] for i in random.permutation(len(held))]


def add(number, x):
    return [y + number for y in x] if isinstance(x, list) else x + number


def in_batches(rows, size, drop):
    found = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [x for x in found if len(x) == size or not drop]


# Each method with a number, and what it makes of the model `m` in the pass `p`.
ANY = {
    "take": (lambda d, k: d.take(k), lambda m, p, k: m(p)[:k]),
    "skip": (lambda d, k: d.skip(k), lambda m, p, k: m(p)[k:]),
    "shard": (
        lambda d, k: d.shard(k + 1, k // 2),
        lambda m, p, k: m(p)[k // 2 :: k + 1],
    ),
    "repeat": (
        lambda d, k: d.repeat(k % 3),
        lambda m, p, k: [x for n in range(k % 3) for x in m((*p, n))],
    ),
    # A buffer for all, where elements are not found by number.
    "shuffle": (lambda d, k: d.shuffle(MOST, k), lambda m, p, k: mixed(m(p), k, p)),
    "shuffle in a buffer": (
        lambda d, k: d.shuffle(k + 1, seed=5),
        lambda m, p, k: mixed_in_a_buffer(m(p), k + 1, p),
    ),
    "shuffle once": (
        lambda d, k: d.shuffle(MOST, k, False),
        lambda m, p, k: mixed(m(p), k, ()),
    ),
    "cache": (lambda d, k: d.cache(), lambda m, p, k: m((0,))),
    "prefetch": (lambda d, k: d.prefetch(k), lambda m, p, k: m(p)),
    "map": (
        lambda d, k: d.map(lambda x: x + 1, num_parallel_calls=k % 3 or None),
        lambda m, p, k: [add(1, x) for x in m(p)],
    ),
    "filter": (
        lambda d, k: d.filter(lambda x: np.sum(x) % 3 != k % 3),
        lambda m, p, k: [x for x in m(p) if np.sum(x) % 3 != k % 3],
    ),
    "take_while": (
        lambda d, k: d.take_while(lambda x: np.sum(x) < 5 * k),
        lambda m, p, k: [*itertools.takewhile(lambda x: np.sum(x) < 5 * k, m(p))],
    ),
    "enumerate": (
        lambda d, k: d.enumerate(k).map(lambda i, x: x + i),
        lambda m, p, k: [add(i, x) for i, x in enumerate(m(p), k)],
    ),
    # One part only, since batches may differ in size.
    "zip with itself": (
        lambda d, k: Dataset.zip(d.skip(k), d).map(lambda x, y: y),
        lambda m, p, k: m(p)[: max(0, len(m(p)) - k)],
    ),
    # To itself: each part has a pass of its own.
    "concatenate": (
        lambda d, k: d.concatenate(d.take(k)),
        lambda m, p, k: m((*p, 0)) + m((*p, 1))[:k],
    ),
}
BATCH = (
    lambda d, k: d.batch(k + 1, k % 2 == 1),
    lambda m, p, k: in_batches(m(p), k + 1, k % 2 == 1),
)
UNBATCH = (lambda d, k: d.unbatch(), lambda m, p, k: [*itertools.chain(*m(p))])


def interleaved(dataset, number):
    """Datasets of 0 to 3 elements, which are shuffled."""
    return dataset.interleave(
        lambda x: Dataset.range(int(x) % 4).map(lambda y: y + x).shuffle(seed=1),
        number % 3 + 1,
        number // 3 + 1,
        None if number % 2 else 2,
    )


def interleaved_model(model, in_pass, number):
    cycle, block = number % 3 + 1, number // 3 + 1
    inputs = iter(enumerate(model(in_pass)))
    slots, turn, found, left = [None] * cycle, 0, [], True
    while left or any(slot is not None for slot in slots):
        if slots[turn] is None and left:
            number, x = next(inputs, (0, None))
            if x is None:
                left = False
                continue
            slots[turn] = mixed([x + y for y in range(x % 4)], 1, (*in_pass, number))
        if slots[turn] is not None:
            found += slots[turn][:block]
            ended = len(slots[turn]) < block
            slots[turn] = None if ended else slots[turn][block:]
        turn = (turn + 1) % cycle
    return found


OF_ROWS = [*ANY.values(), BATCH, BATCH, (interleaved, interleaved_model)]
OF_BATCHES = [*ANY.values(), UNBATCH, UNBATCH]


def applied(pair, step, number):
    call, model = step
    batched = step is BATCH or (pair.batched and step is not UNBATCH)
    return Pair(
        call(pair.dataset, number), lambda p: model(pair.model, p, number), batched
    )


@st.composite
def pairs(draw, batched=None):
    make, model = draw(st.sampled_from(SOURCES))
    count = draw(st.integers(0, 11))
    pair = Pair(make(count), lambda p: [*model(count)])
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(OF_BATCHES if pair.batched else OF_ROWS))
        longer = applied(pair, step, draw(st.integers(0, 5)))
        pair = longer if len(longer.model((0,))) <= MOST else pair
    if batched and not pair.batched:
        pair = applied(pair, BATCH, draw(st.integers(0, 4)))
    return pair


def as_lists(elements):
    return [np.asarray(x).tolist() for x in elements]


quick = settings(
    max_examples=180, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@quick
@given(pairs())
def test_elements_are_those_of_the_model_from_every_position(pair):
    for iteration in range(2):
        expected = as_lists(pair.model((iteration,)))
        assert as_lists(pair.dataset) == expected, pair.dataset
        count = pair.dataset.cardinality()
        assert count in (UNKNOWN_CARDINALITY, len(expected)), pair.dataset
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
    every = as_lists(pair.model((0,)))
    start = min(start, len(every))
    expected = every[start:]
    stage = stage_of(pair.dataset)
    found = [[] for _ in expected]
    for replica in range(replicas):
        opened = stage.opened(stage.tokens((0,), start))
        for rows, batch, block in zip(found, expected, opened, strict=True):
            assert block.rows == len(batch)
            part = block.part(*split_as_it_comes(block.rows, replicas, replica))
            if part is not None:
                rows += part.leaves[0].tolist()
    assert found == expected


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 200))
def test_both_rules_give_every_row_once_and_in_order(rows, replicas, batch):
    def bounds(rule, rows, *more):
        return [rule(rows, replicas, r, *more) for r in range(replicas)]

    for found in (bounds(split_as_it_comes, rows), bounds(split_by_plan, rows, batch)):
        assert found[0][0] == 0
        assert found[-1][1] == rows
        for (start, stop), (following, _) in itertools.pairwise(found):
            assert start <= stop == following
    full = bounds(split_by_plan, max(rows, batch), batch)
    plan = [stop - start for start, stop in full]
    assert max(plan) - min(plan) <= 1
    assert plan == sorted(plan, reverse=True)
