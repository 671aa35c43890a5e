"""Signatures and corners of tf.data that programs written for it use. No MPI here."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from test_data_methods import lists

import mpidist
from mpidist import data
from mpidist.data import ArraySpec, Dataset

INT = np.dtype(np.int64)

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


@pytest.mark.parametrize("method", SIGNATURES)
def test_a_signature_is_that_of_tensorflow(method):
    parameters = list(inspect.signature(getattr(Dataset, method)).parameters)
    assert [name for name in parameters if name != "self"] == SIGNATURES[method].split()


def test_numbers_may_be_arrays_without_dimensions():
    def zero_d(x):
        return np.array(x, np.int64)

    assert lists(Dataset.range(zero_d(4)).batch(zero_d(3))) == [[0, 1, 2], [3]]
    assert lists(Dataset.range(2).repeat(zero_d(2))) == [0, 1, 0, 1]
    assert lists(Dataset.range(2).repeat(zero_d(-1)).take(3)) == [0, 1, 0]
    assert lists(Dataset.range(5).take(zero_d(2))) == [0, 1]
    assert lists(Dataset.range(5).take(zero_d(-1))) == [0, 1, 2, 3, 4]
    assert lists(Dataset.range(5).skip(np.int32(3))) == [3, 4]
    assert lists(Dataset.range(5).shard(zero_d(2), zero_d(1))) == [1, 3]
    assert list(Dataset.range(1).enumerate(zero_d(7))) == [(7, 0)]
    shuffled = Dataset.range(9).shuffle(zero_d(9), seed=zero_d(3))
    assert lists(shuffled) == lists(Dataset.range(9).shuffle(9, seed=3))
    assert lists(Dataset.range(3).prefetch(zero_d(1))) == [0, 1, 2]
    assert lists(Dataset.range(3).batch(2, np.array(True))) == [[0, 1]]
    for wrong in (np.array([3]), np.array(3.0), np.array(True), True, "3"):
        with pytest.raises(TypeError, match="expected `count` to be an int, got"):
            Dataset.range(5).take(wrong)


def test_prefetch_of_none_is_autotune():
    dataset = Dataset.range(3).prefetch(None)
    assert repr(dataset) == repr(Dataset.range(3).prefetch(data.AUTOTUNE))
    assert lists(dataset) == [0, 1, 2]


def test_the_spec_of_an_empty_dataset():
    empty = Dataset.range(0)
    assert empty.element_spec == ArraySpec((), INT)
    assert empty.map(lambda x: (x, x / 2)).element_spec == (
        ArraySpec((), INT),
        ArraySpec((), np.dtype(float)),
    )
    rows = Dataset.from_tensor_slices(np.zeros((0, 3), np.float32))
    batches = rows.map(lambda x: x[:2]).batch(4)
    assert batches.element_spec == ArraySpec((None, 2), np.dtype(np.float32))
    after = rows.batch(4).map(lambda x: x.astype(np.float64)).take(0)
    assert after.element_spec == ArraySpec((None, 3), np.dtype(float))
    nothing = Dataset.range(9).filter(lambda x: x < 0).map(lambda x: {"x": x})
    assert nothing.element_spec == {"x": ArraySpec((), INT)}
    with pytest.raises(ValueError, match="raised a ZeroDivisionError"):
        empty.map(lambda x: 1 // int(x)).element_spec  # noqa: B018


def test_iterators_and_their_optionals_know_the_spec():
    iterator = iter(Dataset.from_tensor_slices({"x": np.zeros((1, 2))}))
    spec = {"x": ArraySpec((2,), np.dtype(float))}
    assert iterator.element_spec == spec
    assert iterator.get_next_as_optional().element_spec == spec
    end = iterator.get_next_as_optional()
    assert not end.has_value()
    assert end.element_spec == spec
    assert data.Optional(3, has_value=True).element_spec == ArraySpec((), INT)
    strategy = mpidist.get_strategy()
    batches = Dataset.range(3).batch(2)
    distributed = iter(strategy.experimental_distribute_dataset(batches))
    assert distributed.get_next_as_optional().element_spec == ArraySpec((None,), INT)
