"""The methods of `Dataset`, one by one: what tf.data's documentation says. No MPI here.

Random chains of them are in test_data_chains; iterators in test_data_iterators.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist import data
from mpidist._base import shuffle_seeds, threads
from mpidist.data import AUTOTUNE, ArraySpec, AutoShardPolicy, Dataset, Options
from mpidist.data._input import Input

Pair = collections.namedtuple("Pair", ["x", "y"])
INT, FLOAT = np.dtype(np.int64), np.dtype(float)
slices = Dataset.from_tensor_slices


def lists(dataset):
    """Return the elements as nested lists."""
    return [np.asarray(element).tolist() for element in dataset]


def generated(*elements, **options):
    return Dataset.from_generator(lambda: iter(elements), **options)


def zero_d(x):
    return np.array(x, np.int64)


# --- sources ------------------------------------------------------------------------


def test_range():
    for arguments in [(5,), (2, 5), (1, 5, 2), (1, 5, -2), (5, 1, -2), (zero_d(4),)]:
        assert lists(Dataset.range(*arguments)) == list(range(*arguments))
    dataset = Dataset.range(3, output_type=np.float32)
    assert dataset.element_spec == ArraySpec((), np.dtype(np.float32))
    assert [x.dtype for x in dataset.batch(2)] == [np.float32] * 2
    assert [type(x) for x in dataset] == [np.float32] * 3
    wrapped = Dataset.range(-1, 2, output_type=np.uint8)  # as TensorFlow's
    assert lists(wrapped) == list(next(iter(wrapped.batch(3)))) == [255, 0, 1]
    for first, last in ((2**63 - 1, 2**63), (2**63, 2**63 + 1)):
        large = Dataset.range(first, last + 1, output_type=np.uint64)
        assert lists(large) == lists(large.batch(2))[0] == [first, last]
    assert lists(Dataset.range(2**64).take(2).batch(2)) == [[0, 1]]
    assert len(Dataset.range(2**40)) == 2**40
    assert next(iter(Dataset.range(2**40).skip(2**39))) == 2**39


def test_as_many_threads_and_open_datasets_as_there_are_elements():
    """Each had a place from the start, and each thread a sign to end."""
    one_of_each = Dataset.range(3).interleave(Dataset.range, 2**40)
    assert lists(one_of_each) == [0, 0, 1]
    assert lists(Dataset.range(3).map(abs, 2**40)) == [0, 1, 2]


def test_from_tensors_is_one_element():
    (element,) = Dataset.from_tensors(([1, 2, 3], {"a": 4.0}))
    assert element[0].tolist() == [1, 2, 3]
    assert element[1]["a"] == 4.0
    with pytest.raises(ValueError, match="read-only"):
        element[0][0] = 5
    assert len(Dataset.from_tensors([1, 2, 3])) == 1
    assert lists(Dataset.from_tensors([1, 2]).repeat(2).batch(2)) == [[[1, 2], [1, 2]]]


def test_slices_of_nests_keep_their_structure():
    x, y = np.arange(6.0).reshape(3, 2), np.array([7, 8, 9], np.int8)
    dataset = slices({"p": Pair(x, y), "l": [x, ([7, 8, 9],)]})
    two, byte, number = (
        ArraySpec((2,), FLOAT),
        ArraySpec((), np.dtype(np.int8)),
        ArraySpec((), INT),
    )
    assert dataset.element_spec == {"p": Pair(two, byte), "l": [two, (number,)]}
    second = list(dataset)[1]
    assert second["p"].x.tolist() == [2.0, 3.0]
    assert second["p"].y == second["l"][1][0] == 8
    (batch,) = dataset.batch(3)
    assert batch["p"].x.tolist() == x.tolist()
    assert batch["p"].y.dtype == np.int8


def test_lists_of_numbers_and_of_tuples():
    """Arrays in `from_tensor_slices` if there is one; elsewhere, tuples stay."""
    for rows in [
        [1, 2, 3],
        [(7, 8), (9, 10)],
        [(1, 0.5), (2, 0.75)],
        [("a", "bc"), ("d", "e")],
        [[(1, 2)], [(3, 4)]],
        [],
    ]:
        assert lists(slices(rows)) == np.array(rows).tolist()
    assert slices([]).element_spec.shape == ()
    assert lists(slices({"a": [], "b": ([], [])})) == []
    labelled = slices(([(1, 2), (3, 4)], {"y": [5, 6]}))
    assert [(x.tolist(), y["y"]) for x, y in labelled] == [([1, 2], 5), ([3, 4], 6)]
    # Lists in a tuple are arrays, each with rows, and so are arrays.
    nested = slices([([1, 2], [3, 4]), ([5, 6], [7, 8])])
    assert list(nested) == [[(1, 3), (5, 7)], [(2, 4), (6, 8)]]
    assert list(slices([(np.arange(2), [3, 4])])) == [[(0, 3)], [(1, 4)]]
    for pairs in [("a", 1), ("b", 2)], [(1, 2), (3,)], [(True, 1)], [()], [(1, None)]:
        with pytest.raises((TypeError, ValueError), match="Dataset"):
            slices(pairs)
        assert list(generated(pairs)) == [pairs]
    for pairs in [("a", 1), ("b", 2)], [(1, 2), (3,)], [(1, 2), (3, 4)]:
        assert list(Dataset.from_tensors(pairs)) == [pairs]
    (element,) = generated([(1, 0.5), (2, 0.7)])
    assert element == [(1, 0.5), (2, 0.7)]
    assert [type(x) for x in element[0]] == [int, float]


def test_rows_of_a_sequence_of_nests():
    class Squares:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return {"n": index, "square": np.float32(index**2)}

    dataset = slices(Squares()).batch(2)
    assert [b["square"].tolist() for b in dataset] == [[0, 1], [4, 9], [16]]
    assert dataset.element_spec["square"] == ArraySpec((None,), np.dtype(np.float32))


@pytest.mark.parametrize(
    "make", [Dataset.from_tensors, lambda x: slices(collections.UserList([x]))]
)
def test_a_function_that_changes_a_dict_does_not_change_the_source(make):
    kinds = dict, functools.partial(collections.defaultdict, int), collections.UserDict
    dataset = make(tuple(kind(x=np.ones(1)) for kind in kinds))
    dataset = dataset.map(lambda *parts: sum(x.pop("x") for x in parts)).repeat(3)
    assert lists(dataset) == [[3], [3], [3]]


@pytest.mark.parametrize("kind", [dict, collections.UserDict, types.MappingProxyType])
def test_lists_in_mappings_are_arrays(kind):
    element, spec = kind({"x": [1, 2]}), kind({"x": ArraySpec((2,), INT)})
    for dataset in (
        Dataset.from_tensors(element),
        generated(element),
        generated(element, output_signature=spec),
        generated(element).padded_batch(1, kind({"x": [2]})).unbatch(),
        slices(kind({"x": [[1, 2]]})),
    ):
        (found,) = dataset
        assert type(found) is kind
        assert found["x"].tolist() == [1, 2]
        assert dataset.element_spec["x"].shape == (2,)


def test_a_function_that_changes_an_array_does_not_change_a_sequence():
    rows = [{"x": np.ones(1)}, {"x": np.full(1, 2.0)}]
    dataset = slices(collections.UserList(rows))
    dataset = dataset.map(lambda row: np.multiply(row["x"], 2, out=row["x"])).repeat(2)
    assert lists(dataset) == [[2], [4], [2], [4]]


def test_elements_are_copies_in_the_byte_order_of_this_machine(tmp_path):
    np.arange(6).tofile(tmp_path / "rows")
    swapped = np.arange(6).astype(np.dtype(np.int64).newbyteorder())
    for x in (np.arange(6), np.memmap(tmp_path / "rows", np.int64, "r"), swapped):
        dataset = slices(x).batch(3)
        assert dataset.element_spec.dtype.isnative
        assert lists(dataset) == [[0, 1, 2], [3, 4, 5]]
        for element in dataset:
            assert type(element) is np.ndarray
            assert element.dtype.isnative
            element += 100
        assert x.tolist() == list(range(6))


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
    assert lists(Dataset.from_generator(count, args=np.zeros(1, int))) == []
    assert lists(Dataset.from_generator(range, args=np.array([1, 3]))) == [1, 2]
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


def test_from_generator_converts_to_its_signature():
    pairs = ([1, 2], {"a": 3}), ([4], {"a": np.float32(5)})
    signature = (ArraySpec((None,), FLOAT), {"a": ArraySpec((), np.float32)})
    dtypes, shapes = (np.float64, {"a": "float32"}), ([None], {"a": []})
    for options, spec in (
        ({"output_signature": signature}, signature),
        ({"output_types": dtypes, "output_shapes": shapes}, signature),
        ({"output_types": dtypes}, (ArraySpec((2,), FLOAT), signature[1])),
    ):
        dataset = generated(*pairs, **options)
        assert dataset.element_spec == spec
        first, second = dataset
        assert first[0].dtype == np.float64
        assert first[1]["a"].dtype == np.float32
        assert second[0].tolist() == [4.0]
    assert ArraySpec((), INT, name="x") == ArraySpec((), INT)
    bytes_of_ints = generated([1, 255], output_types=np.uint8)
    assert [(x.dtype.name, x.tolist()) for x in bytes_of_ints] == [("uint8", [1, 255])]
    for dtype, wrong in (("u1", 256), ("u1", -1), ("u1", 1.5), ("i1", 300)):
        name = np.dtype(dtype).name
        with pytest.raises(TypeError, match=f"expected elements of dtype {name}"):
            list(generated([wrong], output_types=dtype))


@pytest.mark.parametrize(
    ("element", "error", "message"),
    [
        (1.5, TypeError, "expected elements of dtype int64.*yielded float64: 1.5"),
        ([1, 2], ValueError, r"of shape \(\), .* yielded one of shape \(2,\)"),
        ([[1], [2, 3]], TypeError, "which is not an array of int64"),
    ],
)
def test_elements_that_do_not_fit_the_signature(element, error, message):
    spec = ArraySpec((), INT)
    with pytest.raises(error, match=message):
        list(generated(element, output_signature=spec))
    with pytest.raises(TypeError, match=r"expected elements like \{'a'"):
        list(generated(element, output_signature={"a": spec}))
    with pytest.raises(TypeError, match=r"expected elements like \{0"):  # no place
        list(generated((1,), output_signature={0: spec}))


def test_text_and_bytes(tmp_path):
    names = slices(["a", "bcd"]).map(lambda x: x.upper())
    assert lists(names.batch(2)) == [["A", "BCD"]]
    assert lists(Dataset.from_tensors({"name": "abc"})) == [{"name": "abc"}]
    assert lists(slices([b"a", b"bcd"]).batch(2)) == [[b"a", b"bcd"]]
    words = generated(["a"], ["b", "cde"]).padded_batch(2, padding_values="end")
    assert lists(words) == [[["a", "end"], ["b", "cde"]]]
    for pairs in [("a", "b"), ("c", "d")], [np.array(["a", "b"]), ["c", "d"]]:
        declared = generated(pairs, output_types=str)
        assert lists(declared) == [[["a", "b"], ["c", "d"]]]
    # Of other lengths than those that are declared.
    short = slices(["short"])
    longer = generated("longer", output_signature=short.element_spec)
    assert lists(longer.padded_batch(1, (), "padding")) == [["longer"]]
    assert lists(short.concatenate(longer).batch(2)) == [["short", "longer"]]
    padded = Dataset.from_tensors(["a"]).padded_batch(1, [2], "padding")
    assert lists(padded) == [[["a", "padding"]]]
    (tmp_path / "text").write_text("one\ntwo\nthree\n")
    lines = Dataset.from_generator(open, args=(str(tmp_path / "text"),))
    assert lists(lines.map(str.strip).batch(3)) == [["one", "two", "three"]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: generated(b"ab\0"),
        lambda: generated(b"ab\0", output_types="S3"),
        lambda: slices([b"ab\0", b"c"]),
        lambda: Dataset.range(1).map(lambda x: b"ab\0").batch(1),
        lambda: Dataset.from_tensors([1, "a"]),
    ],
)
def test_text_that_numpy_would_change_is_refused(make):
    with pytest.raises((TypeError, ValueError), match="NumPy would change"):
        list(make())


@pytest.mark.parametrize("rows", [(1, "a"), ("a", 1), ("a", b"b")])
def test_a_batch_makes_no_text_of_what_is_none(rows):
    with pytest.raises(ValueError, match="expected rows of one structure, dtype"):
        list(generated(*rows).batch(2))
    with pytest.raises(ValueError, match=r"padded_batch: expected rows of .*, got "):
        list(generated(*rows).padded_batch(2))
    with pytest.raises(TypeError, match="expected elements of dtype"):
        list(generated(1, output_types=str))
    with pytest.raises(TypeError, match="`padding_values` of one <U1, got 1"):
        list(slices(["a"]).padded_batch(1, padding_values=1))


def test_list_files(tmp_path):
    for name in "cab":
        np.save(tmp_path / f"{name}.npy", np.full(2, ord(name)))
    pattern = str(tmp_path / "*.npy")
    files = Dataset.list_files(pattern)
    assert [x[-5] for x in files] == ["a", "b", "c"]
    assert list(Dataset.list_files([tmp_path / "a.*", pattern])) == list(files)
    for shuffled in ({"seed": 1}, {"shuffle": True}):
        assert sorted(Dataset.list_files(pattern, **shuffled)) == sorted(files)
    rows = files.interleave(lambda f: slices(np.load(f)))
    assert "".join(map(chr, rows)) == "abcabc"
    with pytest.raises(ValueError, match="no file matches"):
        Dataset.list_files(pattern + ".gz")
    with pytest.raises(TypeError, match="list_files: expected a pattern or several"):
        Dataset.list_files(None)
    (tmp_path / "b.npy").write_bytes(b"")
    with pytest.raises(EOFError, match=r"in `map_func.*b.npy'"):
        list(rows)


def test_zip_keeps_the_structure_of_its_argument():
    a, b = Dataset.range(1, 4), Dataset.range(4, 8)
    assert [tuple(map(int, x)) for x in Dataset.zip(a, b)] == [(1, 4), (2, 5), (3, 6)]
    for same in (Dataset.zip((a, b)), Dataset.zip(datasets=(a, b))):
        assert list(same) == list(Dataset.zip(a, b))
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


def test_numbers_of_elements():
    three, endless = Dataset.range(3), Dataset.range(3).repeat()
    some = three.filter(bool)
    assert lists(three.repeat(zero_d(-1)).take(4)) == [0, 1, 2, 0]
    assert lists(three.skip(-1)) == lists(some.skip(zero_d(-1))) == []
    assert lists(three.take(-1)) == [0, *lists(some.take(-1))] == [0, 1, 2]
    assert lists(Dataset.range(0).repeat()) == []
    for infinite in (
        endless.skip(5),
        endless.batch(2),
        endless.shuffle(2),
        three.concatenate(endless),
        some.concatenate(endless),
    ):
        assert infinite.cardinality() == data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="no len"):
        len(endless)
    assert some.concatenate(three).cardinality() == data.UNKNOWN_CARDINALITY
    assert len(three.concatenate(Dataset.range(2))) == 5
    assert len(Dataset.range(10).skip(7)) == len(Dataset.range(7).shard(3, 0)) == 3
    assert lists(Dataset.range(2).shard(zero_d(3), zero_d(2))) == []
    assert bool(Dataset.range(0)) is True


def test_a_round_of_a_repeat_without_elements_is_not_the_last():
    """As in TensorFlow, unless the repeat has no end."""
    one = Dataset.range(10).shuffle(10, seed=1).take(1)
    some = one.filter(lambda x: bool(x >= 5))
    for size in (1, 4):
        batches = some.batch(size).repeat(20).unbatch()
        expected = [x for x in lists(one.repeat(20)) if x >= 5]
        assert lists(some.repeat(20)) == lists(batches) == expected
        assert 0 < len(expected) < 20
    assert lists(generated().repeat()) == lists(generated().repeat(9)) == []


def test_assert_cardinality():
    dataset = Dataset.range(9).filter(lambda x: x > 4)
    assert len(dataset.assert_cardinality(4).batch(3)) == 2
    assert dataset.assert_cardinality(-1).cardinality() == -1
    known = Dataset.range(10)  # whose elements are found by number
    for of, right, less, more in ((dataset, 4, 3, 5), (known, 10, 5, 12)):
        assert lists(of.assert_cardinality(right)) == lists(of)
        for count, message in (
            (less, f"has more than the {less}"),
            (more, f"expected {more} elements, but .* ended after {right}"),
            (-1, f"expected endlessly many elements, but .* ended after {right}"),
        ):
            with pytest.raises(ValueError, match=message):
                list(of.assert_cardinality(count))


def test_concatenate_and_enumerate():
    found = list(Dataset.range(7, 9).enumerate(start=zero_d(5)))
    assert found == [(5, 7), (6, 8)]
    assert found[0][0].dtype == np.int64
    one, two = slices(np.zeros((2, 3))), slices(np.zeros((2, 4)))
    assert one.concatenate(two).element_spec == ArraySpec((None,), FLOAT)
    for other in (Dataset.range(3), Dataset.zip(one, two)):
        with pytest.raises(TypeError, match="expected a dataset with elements like"):
            one.concatenate(other)
    parts = [Dataset.range(i, i + 1) for i in range(2000)]
    assert lists(functools.reduce(Dataset.concatenate, parts)) == [*range(2000)]


def test_the_order_of_a_shuffle_does_not_change_with_versions():
    # A run that is continued from a checkpoint depends on it.
    dataset = Dataset.range(8).shuffle(seed=7)
    assert lists(dataset) == [7, 4, 3, 0, 1, 5, 2, 6]
    assert lists(dataset) == [3, 7, 1, 4, 5, 2, 6, 0]


def test_shuffle_takes_the_size_of_a_buffer_as_tensorflow_does():
    ten = Dataset.range(10)
    expected = list(ten.shuffle(seed=7))
    for size in (10, 1000, np.array(1000), data.UNKNOWN_CARDINALITY):
        assert list(ten.shuffle(size, seed=np.array(7))) == expected
    assert lists(ten.shuffle(1)) == list(range(10))
    # An element comes at most the size of the buffer early, also without an end.
    found = lists(Dataset.range(100).repeat().shuffle(10, 3).take(200))
    assert all(x < place + 10 for place, x in enumerate(found[:100]))
    assert found != lists(Dataset.range(100).repeat().take(200))


def test_shuffles_without_a_seed_differ_and_are_the_same_in_the_next_run(monkeypatch):
    monkeypatch.setattr(shuffle_seeds, "_made", threads.ReplicaLocal(lambda: [0, 0]))
    nine = Dataset.range(9)

    def run(seed=0):
        shuffle_seeds.begin(seed)
        files = Dataset.range(2).interleave(lambda x: nine.shuffle(9), block_length=9)
        inner = Dataset.from_generator(lambda: (yield from nine.shuffle(9)))
        read = lists(files), lists(inner)  # what reading makes does not count
        return read, [lists(nine.shuffle(9)) for _ in range(2)]

    (read, (one, two)), other = run(), run(1)
    assert run() == (read, [one, two])
    assert other[0] == read
    assert len({str(x) for x in (one, two, *other[1])}) == 4


def test_shuffles_made_by_functions_that_run_while_reading_do_not_count():
    def one(x):
        Dataset.range(3).shuffle(3)
        return x

    def batches():
        yield one(np.ones(3))

    class Batches:
        def __iter__(self):
            return one(batches())

    before = list(shuffle_seeds.position())
    rows = Dataset.range(4).map(one).filter(lambda x: one(x) >= 0)
    assert lists(rows.take_while(lambda x: one(x) < 9)) == [0, 1, 2, 3]
    strategy = mpidist.get_strategy()
    list(strategy.experimental_distribute_dataset(Batches()))
    source = batches()
    calls = strategy.make_input_fn_iterator(lambda context: lambda: next(source))
    assert len(list(calls)) == 1
    assert shuffle_seeds.position() == before


# --- functions ----------------------------------------------------------------------


def test_map_gets_rows_before_batch_and_batches_after_it():
    four = Dataset.range(4)
    assert lists(four.map(lambda x: x * 2).batch(3)) == [[0, 2, 4], [6]]
    assert lists(four.batch(3).map(lambda x: x.sum())) == [3, 3]
    named = slices({"a": np.arange(3)})
    assert lists(named.map(lambda row: row["a"] + 1).batch(3)) == [[1, 2, 3]]
    # The second function brings rows of different lengths to one.
    ragged = Dataset.range(3).map(lambda n: np.ones(int(n)))
    padded = ragged.map(lambda x: np.pad(x, (0, 3 - len(x)))).batch(3)
    assert lists(padded) == [[[0, 0, 0], [1, 0, 0], [1, 1, 0]]]
    files = Dataset.range(2).interleave(lambda i: slices(np.zeros(2, "df"[i])))
    for rows, got in ((ragged, r"float64 \(0,\) and"), (files, "float64")):
        with pytest.raises(ValueError, match=f"one structure, .* shape, got {got}"):
            list(rows.batch(4))


def test_map_is_lazy_and_tells_its_spec():
    calls = []
    dataset = Dataset.range(4).map(lambda x: calls.append(int(x)) or np.float32(x))
    dataset = dataset.batch(2)
    assert calls == []
    assert dataset.element_spec == ArraySpec((None,), np.dtype(np.float32))
    assert calls == [0]
    next(iter(dataset))
    assert calls == [0, 0, 1]


def test_filter_and_take_while():
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4, 8))
    assert [int(x) for x, _ in pairs.filter(lambda x, y: x + y > 6)] == [2, 3]
    dataset = Dataset.range(6).batch(2).filter(lambda x: np.array(x.sum() > 1))
    assert lists(dataset) == [[2, 3], [4, 5]]
    assert dataset.element_spec == ArraySpec((None,), INT)
    for wrong in (lambda x: x > 0, lambda x: 1, lambda x: None, lambda x: x[:1] > 0):
        with pytest.raises(TypeError, match="expected a bool from the predicate, got"):
            list(Dataset.range(6).batch(2).filter(wrong))


@pytest.mark.parametrize("calls", [None, 4])
def test_a_cache_gives_what_it_found_before_an_error(calls):
    def generate():
        yield from range(6)
        raise OSError("no more")

    found = []
    dataset = Dataset.from_generator(generate).map(abs, calls).cache()
    for _ in range(2):
        with pytest.raises(OSError, match="no more"):
            found.extend(dataset)
    assert found == [*range(6)] * 2


@pytest.mark.parametrize("calls", [None, 1, 2, AUTOTUNE])
def test_interleave_is_in_the_order_of_tensorflow(calls):
    # The example of its documentation.
    dataset = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), 2, 4, calls, False
    )
    assert lists(dataset) == [
        1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4,
        5, 5, 5, 5, 5, 5,
    ]  # fmt: skip


def test_flat_map_apply_and_reduce():
    rows = slices(np.arange(9).reshape(3, 3))
    assert lists(rows.flat_map(slices)) == list(range(9))
    with pytest.raises(TypeError, match="expected `map_func` to return a Dataset"):
        list(rows.interleave(lambda x: x))
    assert lists(Dataset.range(3).apply(lambda d: d.batch(3))) == [[0, 1, 2]]
    with pytest.raises(TypeError, match=r"apply: expected a Dataset, got \[0, 1"):
        Dataset.range(2).apply(lists)
    assert Dataset.range(5).reduce(np.int64(0), lambda state, x: state + x) == 10


# --- batches, specs -----------------------------------------------------------------


def test_unbatch():
    ragged = generated(*(np.arange(n) for n in (3, 0, 2)))
    assert lists(ragged.unbatch()) == [0, 1, 2, 0, 1]
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4)).batch(3).unbatch()
    assert list(pairs) == [(n, n) for n in range(4)]
    assert pairs.element_spec == (ArraySpec((), INT), ArraySpec((), INT))
    assert pairs.cardinality() == -2  # the last batch may have fewer rows
    assert len(Dataset.range(11).batch(3, drop_remainder=True).unbatch()) == 9
    assert len(slices(np.ones((2, 5))).unbatch().batch(4)) == 3
    for wrong in (Dataset.range(3), Dataset.from_tensors((np.ones(2), np.ones(3)))):
        unknown = wrong.map(lambda *rows: rows).unbatch()
        for call in (wrong.unbatch, lambda unknown=unknown: list(unknown)):
            with pytest.raises(ValueError, match="have the same first dimension"):
                call()


def test_padded_batch_is_that_of_tensorflow():
    # The examples of its documentation.
    rows = Dataset.range(1, 5).map(lambda x: np.full(x, x))
    assert lists(rows.padded_batch(2)) == [
        [[1, 0], [2, 2]],
        [[3, 3, 3, 0], [4, 4, 4, 4]],
    ]
    assert lists(rows.padded_batch(2, [5]))[0] == [[1, 0, 0, 0, 0], [2, 2, 0, 0, 0]]
    for shape in ([5], 5, np.array([5]), zero_d(5)):
        (first, _) = lists(rows.padded_batch(2, shape, -1))
        assert first == [[1, -1, -1, -1, -1], [2, 2, -1, -1, -1]]
    (first,) = lists(rows.padded_batch(3, [-1], drop_remainder=True))
    assert first == [[1, 0, 0], [2, 2, 0], [3, 3, 3]]
    both = Dataset.zip(rows, rows)
    first, second = next(iter(both.padded_batch(2, ([-1], [3]), (-1, 100))))
    assert first.tolist() == [[1, -1], [2, 2]]
    assert second.tolist() == [[1, 100, 100], [2, 2, 100]]
    _, second = next(iter(both.padded_batch(2, padding_values=7)))
    assert second.tolist() == [[1, 7], [2, 2]]
    grid = Dataset.range(1, 3).map(
        lambda n: {"g": np.ones((n, n)), "s": np.str_("a" * n)}
    )
    (batch,) = grid.padded_batch(2)
    assert batch["g"].tolist() == [[[1, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert batch["s"].tolist() == ["a", "aa"]
    words = generated([1, 2], [], [3], output_types=np.int64).padded_batch(3)
    assert lists(words) == [[[1, 2], [0, 0], [3, 0]]]
    assert next(iter(words)).dtype == np.int64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([3],), ValueError, r"into `padded_shapes` \(3,\), got one of shape \(4,\)"),
        (([5, 5],), ValueError, "arrays of 2 dimensions"),
        ((([5], [5]),), TypeError, "`padded_shapes` to have a tuple of sizes"),
        (({"x": [5]},), TypeError, "`padded_shapes` to have a tuple of sizes"),
        (([-2],), TypeError, "`padded_shapes` to have a tuple of sizes"),
        # Meant as `drop_remainder`; True is an int.
        ((True,), TypeError, "`padded_shapes` to have a tuple of sizes.*got True"),
        (([False],), TypeError, "`padded_shapes` to have a tuple of sizes"),
        (([5], 0.5), TypeError, "`padding_values` of one int8, got 0.5"),
        (([5], {"x": 1}), TypeError, "expected `padding_values` like an element"),
        # int8 would make 44 of it.
        (([5], 300), TypeError, "`padding_values` of one int8, got 300"),
    ],
)
def test_what_padded_batch_refuses(arguments, error, message):
    rows = Dataset.range(1, 5).map(lambda x: np.full(x, x, np.int8))
    with pytest.raises(error, match=message):
        list(rows.padded_batch(4, *arguments))


def test_padded_batch_of_unsigned_numbers_and_what_does_not_fit():
    rows = Dataset.range(1, 3).map(lambda x: np.full(x, x, np.uint8))
    (batch,) = rows.padded_batch(2, padding_values=255)
    assert batch.dtype == np.uint8
    assert batch.tolist() == [[1, 255], [2, 2]]
    for value in (-1, 256, np.uint16(256)):
        with pytest.raises(TypeError, match="`padding_values` of one uint8, got"):
            list(rows.padded_batch(2, padding_values=value))
    grids = generated(np.ones((1, 4)), np.ones((2, 1)))
    with pytest.raises(ValueError, match=r"fit into .* \(2, 3\), got .* \(1, 4\)"):
        list(grids.padded_batch(2, [2, 3]))


def spec_of(shape, dtype=INT):
    return ArraySpec(shape, np.dtype(dtype))


def declared_empty(shape):
    return Dataset.from_generator(lambda: iter([]), output_signature=spec_of(shape))


FIVE, NONE = Dataset.range(5), Dataset.range(0)
ONES = Dataset.range(5).map(lambda x: x + 1)
NO_ROWS = slices(np.zeros((0, 3), np.float32))


@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        (FIVE.batch(2), spec_of((None,))),
        (FIVE.batch(2, drop_remainder=True), spec_of((2,))),
        (ONES.batch(2), spec_of((None,))),
        (ONES.batch(2, True).prefetch(1), spec_of((2,))),
        (ONES.batch(2, True).map(lambda x: x[:1]), spec_of((1,))),
        # Nothing to look at: functions are called with zeros.
        (ONES.take(1).batch(2, True).map(abs), spec_of((2,))),
        (NONE, spec_of(())),
        (NONE.map(lambda x: (x, x / 2)), (spec_of(()), spec_of((), float))),
        (NO_ROWS.map(lambda x: x[:2]).batch(4), spec_of((None, 2), np.float32)),
        (NO_ROWS.batch(4).map(np.float64).take(0), spec_of((None, 3), float)),
        (NO_ROWS.padded_batch(4).map(abs), spec_of((None, 3), np.float32)),
        (NO_ROWS.batch(4).map(lambda x: x[0]).take(0), spec_of((3,), np.float32)),
        (declared_empty((None, 2)).map(np.transpose), spec_of((2, None))),
        (FIVE.filter(lambda x: x < 0).map(lambda x: {"x": x}), {"x": spec_of(())}),
    ],
)
def test_element_spec(dataset, spec):
    assert dataset.element_spec == iter(dataset).element_spec == spec


def test_batches_of_batches():
    assert lists(FIVE.batch(2).batch(2))[0] == [[0, 1], [2, 3]]
    assert lists(FIVE.batch(zero_d(3), np.array(True))) == [[0, 1, 2]]


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
    dataset = FIVE.with_options(options).map(lambda x: x).batch(2)
    assert dataset.options() == options
    later = options.merge(Options(deterministic=True))
    assert dataset.with_options(Options(deterministic=True)).options() == later
    assert later.deterministic is True
    assert later.threading.private_threadpool_size == 4
    assert Dataset.zip(dataset, FIVE).options() == options
    assert FIVE.options() == Options()
    dataset.options().deterministic = None  # a copy
    assert dataset.options() == options
    with pytest.raises(AttributeError, match="shard_policy"):
        options.experimental_distribute.shard_policy = AutoShardPolicy.OFF
    with pytest.raises(TypeError, match=r"expected a `mpidist\.data\.Options`"):
        FIVE.with_options(mpidist.InputOptions())


def test_input_options():
    assert mpidist.InputOptions().auto_shard_policy is AutoShardPolicy.AUTO
    older = mpidist.InputOptions(experimental_prefetch_to_device=False)
    assert older == mpidist.InputOptions(False)
    assert mpidist.InputOptions(auto_shard_policy="off").auto_shard_policy.value == -1
    with pytest.raises(ValueError, match="one of OFF, AUTO, FILE, DATA, HINT"):
        mpidist.InputOptions(auto_shard_policy="NONE")
    with pytest.raises(TypeError, match="older name"):
        mpidist.InputOptions(True, experimental_prefetch_to_device=True)
    with pytest.raises(TypeError, match="InputReplicationMode"):
        mpidist.InputOptions(experimental_replication_mode="PER_WORKER")


def test_repr_tells_the_pipeline():
    dataset = slices(np.arange(9)).shuffle(seed=4).repeat(2)
    dataset = dataset.batch(zero_d(3), drop_remainder=True).prefetch(None)
    assert repr(dataset) == (
        "<mpidist.data.Dataset of 9 rows.shuffle(seed=4).repeat(2).batch(3, "
        "drop_remainder=True).prefetch(2)>"
    )
    assert repr(FIVE.prefetch(AUTOTUNE)).endswith(".prefetch(2)>")
    dataset = FIVE.shuffle(5, 4, False).map(abs, 3).interleave(Dataset.range, 2)
    assert repr(dataset) == (
        "<mpidist.data.Dataset of range(0, 5, 1).shuffle(5, seed=4, always in one "
        "order).map(abs).interleave(Dataset.range, 2, 1)>"
    )


@pytest.mark.parametrize(
    ("replicas", "batch", "policy", "note", "pieces"),
    [
        (
            *(64, 1000, "AUTO"),
            "1 of 64 replicas never get a row; take a multiple of 64 rows, or",
            "16 on 62, 8 on 1, 0 on 1",
        ),
        (64, 1000, "OFF", "", "16 on 40, 15 on 24"),
        (
            *(3, 2, "AUTO"),
            "1 of 3 replicas never get a row; take batches of 3 rows",
            "1 on 2, 0 on 1",
        ),
        (2, 40000, "AUTO", "", "20000 on 2"),
    ],
)
def test_the_plan_for_many_replicas(replicas, batch, policy, note, pieces):
    stage = Dataset.range(60000).batch(batch)._stage
    group = types.SimpleNamespace(num_replicas=replicas)
    read = Input(group, stage, AutoShardPolicy[policy], True)
    text = data.DistributedDataset(read).shard_plan
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert ("note" in text) == bool(note)
    assert note in " ".join(lines)
    assert f"rows of a full batch on how many replicas: {pieces}" in lines


def test_names_that_are_not_here_say_what_to_write_of_the_class_too():
    with pytest.raises(AttributeError, match=r"'Dataset' .*; write `Dataset\.from_"):
        Dataset.window  # noqa: B018
    with pytest.raises(AttributeError, match=r"'Dataset' has no attribute 'bacth'$"):
        Dataset.bacth  # noqa: B018


# Of TensorFlow 2.21's documentation, without `self`.
SIGNATURES = {
    "from_tensors": "tensors name",
    "from_tensor_slices": "tensors name",
    "from_generator": (
        "generator output_types output_shapes args output_signature name"
    ),
    "list_files": "file_pattern shuffle seed name",
    "zip": "args datasets name",
    "concatenate": "dataset name",
    "prefetch": "buffer_size name",
    "repeat": "count name",
    "enumerate": "start name",
    "shuffle": "buffer_size seed reshuffle_each_iteration name",
    "cache": "filename name",
    "take": "count name",
    "skip": "count name",
    "shard": "num_shards index name",
    "batch": "batch_size drop_remainder num_parallel_calls deterministic name",
    "padded_batch": "batch_size padded_shapes padding_values drop_remainder name",
    "map": (
        "map_func num_parallel_calls deterministic synchronous "
        "use_unbounded_threadpool name"
    ),
    "flat_map": "map_func name",
    "interleave": (
        "map_func cycle_length block_length num_parallel_calls deterministic name"
    ),
    "filter": "predicate name",
    "apply": "transformation_func",
    "take_while": "predicate name",
    "unbatch": "name",
    "with_options": "options name",
    "reduce": "initial_state reduce_func name",
    "options": "",
    "cardinality": "",
    "as_numpy_iterator": "",
}


def test_signatures_are_those_of_tensorflow():
    for method, names in SIGNATURES.items():
        parameters = list(inspect.signature(getattr(Dataset, method)).parameters)
        assert [x for x in parameters if x != "self"] == names.split(), method


# --- arguments that are refused -----------------------------------------------------

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
        (lambda: D.from_generator(open, args="path"), TypeError, "write `args=.x,.`"),
        (lambda: D.from_generator(range, args=3), TypeError, "write `args=.x,.`"),
        (lambda: generated(output_shapes=[]), TypeError, "without `out"),
        (
            lambda: generated(output_types=int, output_signature=int),
            TypeError,
            "together with",
        ),
        (
            lambda: generated(output_signature=int),
            TypeError,
            "expected `output_signature` to be a nest",
        ),
        (
            lambda: generated(output_types=(int, int), output_shapes=([],)),
            TypeError,
            "expected `output_shapes` to have a shape for each",
        ),
        (
            lambda: generated().element_spec,
            ValueError,
            "the dataset is empty, so its elements are unknown$",
        ),
        (
            lambda: NONE.map(lambda x: 1 // int(x)).element_spec,
            ValueError,
            "raised a ZeroDivisionError",
        ),
        (lambda: slices(np.float32(3)), ValueError, "at least one"),
        (lambda: slices({}), ValueError, "at least one dimension"),
        (lambda: slices("x.npy"), ValueError, r"numpy.load\(path, "),
        (lambda: slices(Path("x")), ValueError, r"numpy.load\(path, "),
        (
            lambda: slices((np.ones(3), np.ones(4))),
            ValueError,
            r"same first dimension, got shapes \(\(3,\), \(4,\)\)",
        ),
        (
            lambda: slices(np.ones(3), np.ones(3)),
            TypeError,
            r"`name` to be a str, got .* write `from_tensor_slices\(\(x, y\)\)`",
        ),
        (lambda: slices(None), TypeError, "got None"),
        (lambda: slices(np.ma.masked_array([1])), TypeError, "masked"),
        (lambda: D([1, 2]), TypeError, "from_tensor_slices"),
        (lambda: D.zip(), TypeError, "expected datasets"),
        (lambda: D.zip(TEN, [1]), TypeError, "expected datasets"),
        (lambda: TEN.concatenate([1]), TypeError, "expected a Dataset"),
        (lambda: TEN.filter(None), TypeError, "expected a function"),
        (lambda: TEN.map(3), TypeError, "expected a function"),
        (lambda: TEN.reduce(max, 0), TypeError, "a function as `reduce_func`, got 0"),
        (lambda: TEN.map(abs, 0), ValueError, "`num_parallel_calls` to"),
        (lambda: TEN.interleave(abs, 0), ValueError, "`cycle_length` to"),
        (lambda: TEN.interleave(abs, 1, 0), ValueError, "`block_length` to"),
        (lambda: TEN.skip(-2), ValueError, "`count` to be -1 or more"),
        (lambda: TEN.take(2**63), ValueError, r"`count` to be less than 2\*\*63"),
        (lambda: TEN.repeat(-2), ValueError, "`count` to be -1 or more"),
        *(
            (lambda x=x: TEN.take(x), TypeError, "`count` to be an int, got")
            for x in (np.array([3]), np.array(3.0), np.array(True), True, "3")
        ),
        (lambda: TEN.shard(2, 2), ValueError, "0 <= index < 2"),
        (lambda: TEN.enumerate("a"), TypeError, "`start` to be an int"),
        (lambda: TEN.batch(0), ValueError, "`batch_size` to be 1 or more"),
        (lambda: TEN.batch(2.0), TypeError, "`batch_size` to be an int"),
        (lambda: TEN.prefetch(-3), ValueError, "`buffer_size` to be 0"),
        (lambda: TEN.shuffle(0, 1), ValueError, "`buffer_size` to be 1"),
        (lambda: TEN.shuffle(), TypeError, "expected a size or a seed"),
        (lambda: TEN.shuffle(seed="a"), TypeError, "`seed` to be an int"),
        (lambda: TEN.shuffle(seed=-1), ValueError, "`seed` to be 0 or more"),
        (lambda: TEN.shuffle(1, 2, seed=3), TypeError, "multiple values"),
        (lambda: generated(1).shuffle(seed=1), ValueError, "one after the other"),
        (lambda: ENDLESS.shuffle(-2), ValueError, "before `repeat`"),
        (lambda: ENDLESS.shuffle(seed=1), ValueError, "before `repeat`"),
        (lambda: TEN.cache("file"), TypeError, "kept in memory, not in a file"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
