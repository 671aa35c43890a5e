"""The methods of `Dataset`, one by one: what tf.data's documentation says. No MPI here.

Random chains of them are in test_data_chains.
"""

from __future__ import annotations

import collections
import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from launching import run_python

import mpidist
from mpidist import data
from mpidist.data import AUTOTUNE, ArraySpec, AutoShardPolicy, Dataset, Options
from mpidist.data._ahead import Ahead

Pair = collections.namedtuple("Pair", ["x", "y"])
INT = np.dtype(np.int64)


def lists(dataset):
    """Return the elements as nested lists."""
    return [np.asarray(element).tolist() for element in dataset]


def fails_at(number):
    def function(x):
        if x == number:
            raise KeyError(f"element {number}")
        return x

    return function


# --- sources ------------------------------------------------------------------------


def test_range():
    assert lists(Dataset.range(5)) == [0, 1, 2, 3, 4]
    assert lists(Dataset.range(2, 5)) == [2, 3, 4]
    assert lists(Dataset.range(1, 5, 2)) == [1, 3]
    assert lists(Dataset.range(1, 5, -2)) == []
    assert lists(Dataset.range(5, 1, -2)) == [5, 3]
    dataset = Dataset.range(3, output_type=np.float32)
    assert dataset.element_spec == ArraySpec((), np.dtype(np.float32))
    assert [x.dtype for x in dataset.batch(2)] == [np.float32] * 2
    assert [type(x) for x in dataset] == [np.float32] * 3
    wrapped = Dataset.range(-1, 2, output_type=np.uint8)  # as TensorFlow's
    assert lists(wrapped) == list(next(iter(wrapped.batch(3)))) == [255, 0, 1]
    large = Dataset.range(2**63, 2**63 + 2, output_type=np.uint64)
    assert lists(large) == [2**63, 2**63 + 1]
    assert len(Dataset.range(2**40)) == 2**40
    assert next(iter(Dataset.range(2**40).skip(2**39))) == 2**39


def test_from_tensors_is_one_element():
    (element,) = Dataset.from_tensors(([1, 2, 3], {"a": 4.0}))
    assert element[0].tolist() == [1, 2, 3]
    assert element[1]["a"] == 4.0
    with pytest.raises(ValueError, match="read-only"):
        element[0][0] = 5
    assert len(Dataset.from_tensors([1, 2, 3])) == 1
    assert lists(Dataset.from_tensors([1, 2]).repeat(2).batch(2)) == [[[1, 2], [1, 2]]]


def test_tuples_in_a_list():
    """An array in `from_tensor_slices` if there is one; elsewhere, tuples."""
    slices = Dataset.from_tensor_slices
    assert lists(slices([(7, 8), (9, 10)])) == [[7, 8], [9, 10]]
    assert lists(slices([(1, 0.5), (2, 0.75)])) == [[1.0, 0.5], [2.0, 0.75]]
    assert lists(slices([("a", "bc"), ("d", "e")])) == [["a", "bc"], ["d", "e"]]
    assert lists(slices([[(1, 2)], [(3, 4)]])) == [[[1, 2]], [[3, 4]]]
    labelled = slices(([(1, 2), (3, 4)], {"y": [5, 6]}))
    assert [(x.tolist(), y["y"]) for x, y in labelled] == [([1, 2], 5), ([3, 4], 6)]
    # Lists in a tuple are arrays, each with rows, and so are arrays.
    assert [*slices([([1, 2], [3, 4]), ([5, 6], [7, 8])])] == [
        [(1, 3), (5, 7)],
        [(2, 4), (6, 8)],
    ]
    assert [*slices([(np.arange(2), [3, 4])])] == [[(0, 3)], [(1, 4)]]
    for pairs in [("a", 1), ("b", 2)], [(1, 2), (3,)], [(True, 1)], [()], [(1, None)]:
        with pytest.raises((TypeError, ValueError), match="Dataset"):
            slices(pairs)
        (element,) = Dataset.from_generator(lambda pairs=pairs: iter([pairs]))
        assert element == pairs
    for pairs in [("a", 1), ("b", 2)], [(1, 2), (3,)], [(1, 2), (3, 4)]:
        assert list(Dataset.from_tensors(pairs)) == [pairs]
    (element,) = Dataset.from_generator(lambda: iter([[(1, 0.5), (2, 0.7)]]))
    assert element == [(1, 0.5), (2, 0.7)]
    assert [type(x) for x in element[0]] == [int, float]


def test_from_generator_starts_anew_in_each_iteration():
    calls = []

    def count(stop):
        calls.append(stop)
        yield from range(stop)

    dataset = Dataset.from_generator(count, args=(3,))
    assert calls == []
    assert lists(dataset) == lists(dataset) == [0, 1, 2]
    assert lists(dataset.repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]
    assert calls == [3] * 4
    assert type(calls[0]) is np.int64
    assert dataset.cardinality() == data.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match="not known before the end"):
        len(dataset)
    assert dataset.element_spec == ArraySpec((), INT)


def test_from_generator_may_fill_one_buffer():
    def generate():
        buffer = np.zeros(2)
        for number in range(4):
            buffer[:] = number
            yield buffer

    dataset = Dataset.from_generator(generate)
    assert lists(dataset.batch(4))[0] == [[i, i] for i in range(4)]
    assert lists(dataset.prefetch(3)) == [[i, i] for i in range(4)]


def test_from_generator_closes_the_generator_on_break():
    closed = []

    def forever():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    for element in Dataset.from_generator(forever).map(lambda x: x):
        if element == 3:
            break
    gc.collect()
    assert closed == [True]


def test_from_generator_converts_to_its_signature():
    def pairs():
        yield [1, 2], {"a": 3}
        yield [4], {"a": np.float32(5)}

    signature = (ArraySpec((None,), np.float64), {"a": ArraySpec((), np.float32)})
    dataset = Dataset.from_generator(pairs, output_signature=signature)
    assert dataset.element_spec == signature
    first, second = dataset
    assert first[0].dtype == np.float64
    assert first[1]["a"].dtype == np.float32
    assert second[0].tolist() == [4.0]
    older = Dataset.from_generator(
        pairs, (np.float64, {"a": "float32"}), ([None], {"a": []})
    )
    assert older.element_spec == signature
    assert ArraySpec((), INT, name="x") == ArraySpec((), INT)
    text = Dataset.from_tensor_slices(["short"])
    same = Dataset.from_generator(
        lambda: iter(["longer"]), output_signature=text.element_spec
    )
    assert lists(same.padded_batch(1, (), "padding")) == [["longer"]]
    assert lists(text.concatenate(same).batch(2)) == [["short", "longer"]]
    words = Dataset.from_tensors(["a"]).padded_batch(1, [2], "padding")
    assert lists(words) == [[["a", "padding"]]]
    assert next(iter(older))[0].tolist() == [1.0, 2.0]
    only_types = Dataset.from_generator(pairs, (np.float64, {"a": "float32"}))
    assert next(iter(only_types))[0].dtype == np.float64


def test_from_generator_of_lines(tmp_path):
    (tmp_path / "text").write_text("one\ntwo\nthree\n")
    lines = Dataset.from_generator(open, args=(str(tmp_path / "text"),))
    assert [x.tolist() for x in lines.map(str.strip).map(np.array).batch(3)] == [
        ["one", "two", "three"]
    ]
    assert [x.tolist() for x in lines.batch(2)] == [["one\n", "two\n"], ["three\n"]]


def test_list_files(tmp_path):
    for name in "cab":
        np.save(tmp_path / f"{name}.npy", np.full(2, ord(name)))
    pattern = str(tmp_path / "*.npy")
    files = Dataset.list_files(pattern)
    assert [x[-5] for x in files] == ["a", "b", "c"]
    assert sorted(Dataset.list_files(pattern, seed=1)) == sorted(files)
    assert list(Dataset.list_files([tmp_path / "a.*", tmp_path / "*.npy"])) == list(
        files
    )
    rows = files.interleave(lambda f: Dataset.from_tensor_slices(np.load(f)))
    assert "".join(map(chr, rows)) == "abcabc"
    with pytest.raises(ValueError, match="no file matches"):
        Dataset.list_files(pattern + ".gz")
    assert sorted(Dataset.list_files(pattern, shuffle=True)) == sorted(files)


def test_zip_keeps_the_structure_of_its_argument():
    a, b = Dataset.range(1, 4), Dataset.range(4, 8)
    assert [tuple(map(int, x)) for x in Dataset.zip(a, b)] == [(1, 4), (2, 5), (3, 6)]
    assert list(Dataset.zip((a, b))) == list(Dataset.zip(a, b))
    assert list(Dataset.zip(datasets=(a, b))) == list(Dataset.zip(a, b))
    (first, *_) = Dataset.zip({"p": Pair(a, b.batch(2)), "q": b})
    assert first["p"].x == 1
    assert first["p"].y.tolist() == [4, 5]
    assert Dataset.zip(a, b).element_spec == (ArraySpec((), INT), ArraySpec((), INT))
    (batch,) = Dataset.zip({"a": a, "b": b}).batch(3)
    assert batch["b"].tolist() == [4, 5, 6]
    assert len(Dataset.zip(a, b.repeat())) == 3
    assert Dataset.zip(a.repeat(), b.repeat()).cardinality() == -1
    assert Dataset.zip(a, b.filter(bool)).cardinality() == -2
    # Of a tuple from nests: map gets the parts as arguments.
    assert lists(Dataset.zip(a, b).map(lambda x, y: x * y)) == [4, 10, 18]


# --- order --------------------------------------------------------------------------


def test_skip_and_negative_counts():
    assert lists(Dataset.range(10).skip(7)) == [7, 8, 9]
    assert lists(Dataset.range(3).skip(7)) == []
    assert lists(Dataset.range(3).skip(-1)) == []
    assert len(Dataset.range(10).skip(7)) == 3
    assert Dataset.range(3).repeat().skip(5).cardinality() == -1
    assert lists(Dataset.range(9).filter(lambda x: x > 4).skip(-1)) == []
    assert lists(Dataset.range(9).filter(lambda x: x > 4).take(-1)) == [5, 6, 7, 8]


def test_concatenate_and_enumerate():
    assert lists(Dataset.range(1, 4).concatenate(Dataset.range(4, 8))) == [*range(1, 8)]
    found = list(Dataset.range(7, 9).enumerate(start=5))
    assert found == [(5, 7), (6, 8)]
    assert found[0][0].dtype == np.int64
    both = Dataset.range(3).concatenate(Dataset.range(2, output_type=np.int64))
    assert len(both) == 5
    assert both.concatenate(both.repeat()).cardinality() == -1
    some = both.filter(lambda x: x < 2)
    assert some.concatenate(both.repeat()).cardinality() == -1
    assert some.concatenate(both).cardinality() == -2
    one = Dataset.from_tensor_slices(np.zeros((2, 3)))
    two = Dataset.from_tensor_slices(np.zeros((2, 4)))
    assert one.concatenate(two).element_spec == ArraySpec((None,), np.dtype(float))
    for other in (Dataset.range(3), Dataset.zip(one, two)):
        with pytest.raises(TypeError, match="expected a dataset with elements like"):
            one.concatenate(other)


def test_shuffle_in_a_buffer_of_a_dataset_without_end():
    dataset = Dataset.range(100).repeat().shuffle(10, 3)
    found = lists(dataset.take(200))
    assert all(x % 100 in range(100) for x in found)
    # An element comes at most the size of the buffer early.
    assert all(x < place + 10 for place, x in enumerate(found[:100]))
    assert found != lists(Dataset.range(100).repeat().take(200))
    assert dataset.cardinality() == -1


# --- cache --------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["rows", "generator"])
@pytest.mark.parametrize("threads", [None, 2])
def test_cache_loads_each_element_once(source, threads):
    mapped = []
    rows = Dataset.range(10)
    if source == "generator":
        rows = Dataset.from_generator(lambda: iter(range(10)))
    dataset = rows.map(lambda x: mapped.append(int(x)) or x, threads).cache()
    assert mapped == []
    first = iter(dataset)
    assert [int(next(first)) for _ in range(4)] == [0, 1, 2, 3]  # and break
    assert lists(dataset.batch(3).repeat(2)) == 2 * [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]
    assert sorted(lists(dataset.shuffle(9, seed=1))) == list(range(10))
    assert sorted(mapped) == list(range(10))


def test_cache_keeps_the_order_and_its_elements():
    dataset = Dataset.range(20).shuffle(seed=3).cache()
    assert lists(dataset) == lists(dataset) == lists(Dataset.range(20).shuffle(seed=3))
    (element,) = Dataset.range(3).batch(3).cache()
    with pytest.raises(ValueError, match="read-only"):
        element += 1
    with pytest.raises(TypeError, match="kept in memory, not in a file"):
        dataset.cache("file")


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


# --- functions ----------------------------------------------------------------------


def test_filter_and_take_while():
    assert lists(Dataset.range(6).filter(lambda x: x < 3)) == [0, 1, 2]
    assert lists(Dataset.range(9).take_while(lambda x: x != 4)) == [0, 1, 2, 3]
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4, 8))
    assert [int(x) for x, _ in pairs.filter(lambda x, y: x + y > 6)] == [2, 3]
    dataset = Dataset.range(6).batch(2).filter(lambda x: np.array(x.sum() > 1))
    assert lists(dataset) == [[2, 3], [4, 5]]
    assert dataset.cardinality() == -2
    assert dataset.element_spec == ArraySpec((None,), INT)
    for wrong in (lambda x: x > 0, lambda x: 1, lambda x: None, lambda x: x[:1] > 0):
        with pytest.raises(TypeError, match="expected a bool from the predicate, got"):
            list(Dataset.range(6).batch(2).filter(wrong))


def test_interleave_is_in_the_order_of_tensorflow():
    # The example of its documentation.
    dataset = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    expected = [
        1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4,
        5, 5, 5, 5, 5, 5,
    ]  # fmt: skip
    assert lists(dataset) == expected
    for calls in (1, 2, AUTOTUNE):
        parallel = Dataset.range(1, 6).interleave(
            lambda x: Dataset.from_tensors(x).repeat(6), 2, 4, calls, False
        )
        assert lists(parallel) == expected
    rows = Dataset.from_tensor_slices(np.arange(9).reshape(3, 3))
    assert lists(rows.flat_map(Dataset.from_tensor_slices)) == list(range(9))
    with pytest.raises(TypeError, match="expected `map_func` to return a Dataset"):
        list(rows.interleave(lambda x: x))


def test_interleave_of_files_that_differ():
    parts = [np.zeros(2), np.zeros(2, np.float32)]
    dataset = Dataset.range(2).interleave(
        lambda i: Dataset.from_tensor_slices(parts[i])
    )
    with pytest.raises(ValueError, match="one structure, dtype and shape, got float64"):
        list(dataset.batch(4))


def test_apply_and_reduce():
    assert lists(Dataset.range(3).apply(lambda d: d.batch(3))) == [[0, 1, 2]]
    with pytest.raises(TypeError, match=r"apply: expected a Dataset, got \[0, 1"):
        Dataset.range(2).apply(lists)
    assert Dataset.range(5).reduce(np.int64(0), lambda state, x: state + x) == 10


# --- batches ------------------------------------------------------------------------


def test_unbatch():
    ragged = Dataset.from_generator(lambda: (np.arange(n) for n in (3, 0, 2)))
    assert lists(ragged.unbatch()) == [0, 1, 2, 0, 1]
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4)).batch(3).unbatch()
    assert list(pairs) == [(n, n) for n in range(4)]
    assert pairs.element_spec == (ArraySpec((), INT), ArraySpec((), INT))
    assert pairs.cardinality() == -2  # the last batch may have fewer rows
    assert len(Dataset.range(11).batch(3, drop_remainder=True).unbatch()) == 9
    assert len(Dataset.from_tensor_slices(np.ones((2, 5))).unbatch().batch(4)) == 3
    for wrong in (Dataset.range(3), Dataset.from_tensors((np.ones(2), np.ones(3)))):
        with pytest.raises(ValueError, match="arrays have the same first dimension"):
            list(wrong.unbatch())


def test_padded_batch_is_that_of_tensorflow():
    # The examples of its documentation.
    rows = Dataset.range(1, 5).map(lambda x: np.full(x, x))
    assert lists(rows.padded_batch(2)) == [
        [[1, 0], [2, 2]],
        [[3, 3, 3, 0], [4, 4, 4, 4]],
    ]
    assert lists(rows.padded_batch(2, [5]))[0] == [[1, 0, 0, 0, 0], [2, 2, 0, 0, 0]]
    assert lists(rows.padded_batch(2, [5], -1))[0] == [
        [1, -1, -1, -1, -1],
        [2, 2, -1, -1, -1],
    ]
    assert lists(rows.padded_batch(2, 5, -1)) == lists(rows.padded_batch(2, [5], -1))
    assert lists(rows.padded_batch(3, [-1], drop_remainder=True)) == [
        [[1, 0, 0], [2, 2, 0], [3, 3, 3]]
    ]
    both = Dataset.zip(rows, rows)
    first, second = next(iter(both.padded_batch(2, ([-1], [3]), (-1, 100))))
    assert first.tolist() == [[1, -1], [2, 2]]
    assert second.tolist() == [[1, 100, 100], [2, 2, 100]]
    grids = Dataset.from_tensor_slices(np.ones((0, 2, 3))).padded_batch(4).map(abs)
    assert grids.element_spec == ArraySpec((None, 2, 3), np.dtype(float))
    assert next(iter(both.padded_batch(2, padding_values=7)))[1].tolist() == [
        [1, 7],
        [2, 2],
    ]
    grid = Dataset.range(1, 3).map(
        lambda n: {"g": np.ones((n, n)), "s": np.str_("a" * n)}
    )
    (batch,) = grid.padded_batch(2)
    assert batch["g"].tolist() == [[[1, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert batch["s"].tolist() == ["a", "aa"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ([3],),
            ValueError,
            r"into `padded_shapes` \(3,\), got one of shape \(4,\)",
        ),
        (([5, 5],), ValueError, "arrays of 2 dimensions"),
        ((([5], [5]),), TypeError, "`padded_shapes` to have a tuple of sizes"),
        (({"x": [5]},), TypeError, "`padded_shapes` to have a tuple of sizes"),
        (([-2],), TypeError, "`padded_shapes` to have a tuple of sizes"),
        # Meant as `drop_remainder`; True is an int.
        ((True,), TypeError, "`padded_shapes` to have a tuple of sizes.*got True"),
        (([False],), TypeError, "`padded_shapes` to have a tuple of sizes"),
        (([5], 0.5), TypeError, "`padding_values` of one int64, got 0.5"),
        (([5], {"x": 1}), TypeError, "expected `padding_values` like an element"),
    ],
)
def test_what_padded_batch_refuses(arguments, error, message):
    rows = Dataset.range(1, 5).map(lambda x: np.full(x, x))
    with pytest.raises(error, match=message):
        list(rows.padded_batch(4, *arguments))
    small = rows.map(lambda x: x.astype(np.int8))  # int8 would make 44 of 300
    with pytest.raises(TypeError, match="`padding_values` of one int8, got 300"):
        list(small.padded_batch(4, padding_values=300))


# --- properties ---------------------------------------------------------------------


def test_options():
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    options.deterministic = False
    options.threading.private_threadpool_size = 4
    options.autotune.enabled = True
    options.experimental_optimization.map_parallelization = True
    options.experimental_service.pinned = False
    assert options.threading.max_intra_op_parallelism is None
    dataset = Dataset.range(5).with_options(options).map(lambda x: x).batch(2)
    assert dataset.options() == options
    later = Options(deterministic=True)
    assert dataset.with_options(later).options() == options.merge(later)
    assert options.merge(later).deterministic is True
    assert options.merge(later).threading.private_threadpool_size == 4
    assert Dataset.zip(dataset, Dataset.range(4)).options() == options
    assert Dataset.range(3).options() == Options()
    dataset.options().deterministic = None  # a copy
    assert dataset.options() == options
    with pytest.raises(AttributeError, match="shard_policy"):
        options.experimental_distribute.shard_policy = AutoShardPolicy.OFF
    with pytest.raises(TypeError, match=r"expected a `mpidist\.data\.Options`"):
        Dataset.range(3).with_options(mpidist.InputOptions())


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


def test_assert_cardinality():
    dataset = Dataset.range(9).filter(lambda x: x > 4)
    assert len(dataset.assert_cardinality(4).batch(3)) == 2
    assert lists(dataset.assert_cardinality(4)) == [5, 6, 7, 8]
    for count, message in ((3, "has more than the 3"), (5, "ended after 4")):
        with pytest.raises(ValueError, match=message):
            list(dataset.assert_cardinality(count))
    assert dataset.assert_cardinality(-1).cardinality() == -1
    known = Dataset.range(10)  # whose elements are found by number
    assert lists(known.assert_cardinality(10)) == list(range(10))
    for count, message in ((5, "has more than the 5"), (12, "ended after 10")):
        with pytest.raises(ValueError, match=message):
            list(known.assert_cardinality(count))


def test_iterator():
    iterator = iter(Dataset.range(3).prefetch(1))
    assert iterator.get_next() == 0
    assert iterator.get_next_as_optional().get_value() == 1
    state = iterator.state()
    assert next(iterator) == 2
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(data.OutOfRangeError, match="ended, after 3 elements"):
        iterator.get_next()
    iterator.restore(state)
    assert lists(iterator) == [2]
    with pytest.raises(ValueError, match="expected the result of an iterator's `state"):
        iterator.restore({"position": 3})
    numbers = list(Dataset.range(2).as_numpy_iterator())
    assert numbers == [0, 1]
    assert bool(Dataset.range(0)) is True


def test_an_iterator_goes_on_after_an_exception_by_restore():
    iterator = iter(Dataset.range(5).map(fails_at(2)))
    assert lists(itertools.islice(iterator, 2)) == [0, 1]
    with pytest.raises(KeyError, match="element 2"):
        next(iterator)
    state = iterator.state()
    assert lists(iterator) == [3, 4]
    iterator.restore(state)
    with pytest.raises(KeyError, match="element 2"):
        next(iterator)


def bad_row(x):
    if x == 2:
        raise KeyError(f"row {x}")
    return x


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(5).filter(lambda x: bad_row(x) >= 0),
        Dataset.from_generator(lambda: map(bad_row, range(5))),
        Dataset.range(5).flat_map(lambda x: Dataset.from_tensors(bad_row(x))),
    ],
    ids=["filter", "generator", "flat_map"],
)
def test_after_an_exception_of_its_source_an_iterator_does_not_end_silently(
    dataset, depth
):
    iterator = iter(dataset.prefetch(depth))
    assert lists(itertools.islice(iterator, 2)) == [0, 1]
    with pytest.raises(KeyError, match="row 2"):
        next(iterator)
    with pytest.raises(RuntimeError, match="raised a KeyError and cannot continue"):
        next(iterator)
    assert lists(iterator) == []  # a loop that ignores errors has an end


def test_stop_iteration_in_a_predicate_is_no_end():
    for method in (Dataset.range(3).filter, Dataset.range(3).take_while):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(method(lambda x: next(iter(()))))


def test_a_row_that_fails_is_left_out_though_the_source_fails_later():
    rows = Dataset.from_generator(lambda: map(bad_row, (0, 1, 2))).map(fails_at(0))
    iterator = iter(rows.prefetch(4))
    with pytest.raises(KeyError, match="element 0"):
        next(iterator)
    assert next(iterator) == 1
    with pytest.raises(KeyError, match="row 2"):
        next(iterator)


@pytest.mark.parametrize("depth", [0, 4])
def test_a_source_is_not_read_again_after_a_row_that_failed(depth):
    rows = iter(range(7))
    dataset = Dataset.from_generator(lambda: rows).map(fails_at(2)).prefetch(depth)
    iterator = iter(dataset)
    assert lists(itertools.islice(iterator, 2)) == [0, 1]
    with pytest.raises(KeyError, match="element 2"):
        next(iterator)
    assert lists(iterator) == [3, 4, 5, 6]


def test_rows_before_one_that_fails_come_out_of_a_cache():
    rows = Dataset.range(5).map(fails_at(2), num_parallel_calls=4)
    iterator = iter(rows.cache())
    assert lists(itertools.islice(iterator, 2)) == [0, 1]
    with pytest.raises(KeyError, match="element 2"):
        next(iterator)
    assert lists(iterator) == [3, 4]


def test_an_empty_list_is_an_array_without_rows():
    assert lists(Dataset.from_tensor_slices([])) == []
    assert lists(Dataset.from_tensor_slices({"a": [], "b": ([], [])})) == []
    assert Dataset.from_tensor_slices([]).element_spec.shape == ()
    words = Dataset.from_generator(
        lambda: iter([[1, 2], [], [3]]), output_types=np.int64
    )
    (batch,) = words.padded_batch(3)
    assert batch.dtype == np.int64
    assert batch.tolist() == [[1, 2], [0, 0], [3, 0]]


def test_text_and_bytes():
    names = Dataset.from_tensor_slices(["a", "bcd"]).map(lambda x: x.upper())
    (batch,) = names.batch(2)
    assert batch.tolist() == ["A", "BCD"]
    assert lists(Dataset.from_tensors({"name": "abc"})) == [{"name": "abc"}]
    assert lists(Dataset.from_tensor_slices([b"a", b"bcd"]).batch(2)) == [
        [b"a", b"bcd"]
    ]
    words = Dataset.from_generator(lambda: iter([["a"], ["b", "cde"]]))
    (batch,) = words.padded_batch(2, padding_values="end")
    assert batch.tolist() == [["a", "end"], ["b", "cde"]]
    for pairs in [("a", "b"), ("c", "d")], [np.array(["a", "b"]), ["c", "d"]]:
        declared = Dataset.from_generator(lambda pairs=pairs: [pairs], str)
        assert lists(declared) == [[["a", "b"], ["c", "d"]]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.from_generator(lambda: iter([b"ab\0"])),
        lambda: Dataset.from_generator(lambda: iter([b"ab\0"]), output_types="S3"),
        lambda: Dataset.from_tensor_slices([b"ab\0", b"c"]),
        lambda: Dataset.range(1).map(lambda x: b"ab\0").batch(1),
        lambda: Dataset.from_tensors([1, "a"]),
    ],
)
def test_text_that_numpy_would_change_is_refused(make):
    with pytest.raises((TypeError, ValueError), match="NumPy would change"):
        list(make())


D, TEN, ENDLESS = Dataset, Dataset.range(10), Dataset.range(3).repeat()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: D.range(), TypeError, "range expected at least 1"),
        (lambda: D.range(1, 2, 0), ValueError, "must not be zero"),
        (lambda: D.range(2.5), TypeError, "expected `args` to be an int"),
        (lambda: D.range(2, output_type="no"), TypeError, "expected a dtype"),
        (lambda: D.from_generator([1, 2]), TypeError, "expected a function"),
        (lambda: list(D.from_generator(int)), TypeError, "returns an iterable"),
        (lambda: D.from_generator(list, output_shapes=[]), TypeError, "without `out"),
        (
            lambda: D.from_generator(list, int, output_signature=int),
            TypeError,
            "together with",
        ),
        (
            lambda: D.from_generator(list, output_signature=int),
            TypeError,
            "expected `output_signature` to be a nest",
        ),
        (
            lambda: D.from_generator(lambda: iter(())).element_spec,
            ValueError,
            "the dataset is empty, so its elements are unknown$",
        ),
        (lambda: D.from_tensor_slices(np.float32(3)), ValueError, "at least one"),
        (lambda: D.from_tensor_slices({}), ValueError, "at least one dimension"),
        (lambda: D.from_tensor_slices("x.npy"), ValueError, r"numpy.load\(path, "),
        (lambda: D.from_tensor_slices(Path("x")), ValueError, r"numpy.load\(path, "),
        (
            lambda: D.from_tensor_slices((np.ones(3), np.ones(4))),
            ValueError,
            r"same first dimension, got shapes \(\(3,\), \(4,\)\)",
        ),
        (
            lambda: D.from_tensor_slices(np.ones(3), np.ones(3)),
            TypeError,
            r"`name` to be a str, got .* write `from_tensor_slices\(\(x, y\)\)`",
        ),
        (lambda: D.from_tensor_slices("text"), ValueError, "at least one"),
        (lambda: D.from_tensor_slices(None), TypeError, "got None"),
        (lambda: D.from_tensor_slices(np.ma.masked_array([1])), TypeError, "masked"),
        (lambda: D([1, 2]), TypeError, "from_tensor_slices"),
        (lambda: D.zip(), TypeError, "expected datasets"),
        (lambda: D.zip(TEN, [1]), TypeError, "expected datasets"),
        (lambda: TEN.concatenate([1]), TypeError, "expected a Dataset"),
        (lambda: TEN.filter(None), TypeError, "expected a function"),
        (lambda: TEN.map(3), TypeError, "expected a function"),
        (lambda: TEN.map(abs, 0), ValueError, "`num_parallel_calls` to"),
        (lambda: TEN.interleave(abs, 0), ValueError, "`cycle_length` to"),
        (lambda: TEN.interleave(abs, 1, 0), ValueError, "`block_length` to"),
        (lambda: TEN.skip(-2), ValueError, "`count` to be -1 or more"),
        (lambda: TEN.repeat(-2), ValueError, "`count` to be -1 or more"),
        (lambda: TEN.take("3"), TypeError, "`count` to be an int"),
        (lambda: TEN.shard(2, 2), ValueError, "0 <= index < 2"),
        (lambda: TEN.enumerate("a"), TypeError, "`start` to be an int"),
        (lambda: TEN.batch(0), ValueError, "`batch_size` to be 1 or more"),
        (lambda: TEN.batch(2.0), TypeError, "`batch_size` to be an int"),
        (lambda: TEN.batch(True), TypeError, "`batch_size` to be an int"),
        (lambda: TEN.prefetch(-3), ValueError, "`buffer_size` to be 0"),
        (lambda: TEN.shuffle(0, 1), ValueError, "`buffer_size` to be 1"),
        (lambda: TEN.shuffle(), TypeError, "expected a size or a seed"),
        (lambda: TEN.shuffle(seed="a"), TypeError, "`seed` to be an int"),
        (lambda: TEN.shuffle(seed=-1), ValueError, "`seed` to be 0 or more"),
        (lambda: TEN.shuffle(1, 2, seed=3), TypeError, "multiple values"),
        (lambda: ENDLESS.shuffle(-2), ValueError, "before `repeat`"),
        (lambda: ENDLESS.shuffle(seed=1), ValueError, "before `repeat`"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("element", "error", "message"),
    [
        (1.5, TypeError, "expected elements of dtype int64.*yielded float64: 1.5"),
        ([1, 2], ValueError, r"of shape \(\), .* yielded one of shape \(2,\)"),
        ([[1], [2, 3]], TypeError, "which is not an array of int64"),
    ],
)
def test_elements_that_do_not_fit_the_signature(element, error, message):
    dataset = Dataset.from_generator(
        lambda: iter([element]), output_signature=ArraySpec((), INT)
    )
    with pytest.raises(error, match=message):
        list(dataset)
    nested = Dataset.from_generator(
        lambda: iter([element]), output_signature={"a": ArraySpec((), INT)}
    )
    with pytest.raises(TypeError, match=r"expected elements like \{'a'"):
        list(nested)


# --- names that are not here --------------------------------------------------------


def test_names_that_are_not_here_say_what_to_write_of_the_class_too():
    with pytest.raises(AttributeError, match=r"'Dataset' .*; write `Dataset\.from_"):
        Dataset.window  # noqa: B018
    with pytest.raises(AttributeError, match=r"'Dataset' has no attribute 'bacth'$"):
        Dataset.bacth  # noqa: B018


# --- threads of map -----------------------------------------------------------------


def map_threads():
    return [t for t in threading.enumerate() if t.name == "mpidist-data"]


def wait_for_no_thread():
    deadline = time.monotonic() + 30
    while map_threads() and time.monotonic() < deadline:
        gc.collect()  # an iterator of another test may not be collected yet
        time.sleep(0.01)
    assert map_threads() == []


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


def test_map_runs_ahead_by_its_threads_and_not_farther():
    started, go_on = [], threading.Event()

    def wait(x):
        started.append(int(x))
        if x > 0:
            assert go_on.wait(60)
        return x

    taken = []
    source = (taken.append(x) or x for x in range(100))
    results = Ahead(wait, source, 4)
    assert next(results) == 0
    assert taken == [0, 1, 2, 3]
    go_on.set()
    assert next(results) == 1
    assert taken == [0, 1, 2, 3, 4]
    results.close()
    wait_for_no_thread()
    assert len(started) == len(set(started))
    # close() drops what no thread has begun, in any order.
    assert set(started) <= set(taken)


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(9).map(fails_at(3)).prefetch(8),
        Dataset.range(9).map(fails_at(3), num_parallel_calls=4),
        # Of the source, which is read ahead of the results.
        Dataset.range(9).map(fails_at(3)).map(lambda x: x, num_parallel_calls=4),
    ],
    ids=["prefetch", "map", "source"],
)
def test_an_exception_in_a_thread_comes_at_its_place(dataset):
    iterator = iter(dataset)
    assert lists(itertools.islice(iterator, 3)) == [0, 1, 2]
    with pytest.raises(KeyError, match="element 3"):
        next(iterator)
    assert lists(iterator) == [4, 5, 6, 7, 8]
    wait_for_no_thread()


def test_the_threads_end_with_a_break():
    for element in Dataset.range(1000).map(lambda x: x, AUTOTUNE).prefetch(2):
        if element == 5:
            break
    del element
    gc.collect()
    wait_for_no_thread()
    for _ in Dataset.range(9).interleave(Dataset.range, 4, 1, AUTOTUNE):
        break
    gc.collect()
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
