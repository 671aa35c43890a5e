"""Dataset: a small input pipeline over arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist.data import _stages
from mpidist.data._blocks import as_leaf
from mpidist.data._prefetch import Prefetcher
from mpidist.data._records import INFINITE_CARDINALITY
from mpidist.data._stages import INFINITE, Stage


class Dataset:
    """Rows of arrays, which can be shuffled, batched and repeated.

    It has the part of ``tf.data.Dataset`` that the pages of ``tf.distribute`` use. For
    anything else use another library, since `Strategy.experimental_distribute_dataset`
    accepts any iterable. Datasets are immutable: each method returns a new one. Data is
    read only when an element is requested, and only the part that it needs.

    Start with `from_tensor_slices`. Each iteration over a dataset starts from the
    beginning.
    """

    def __init__(self, stage: Stage) -> None:
        """Not for users: call `Dataset.from_tensor_slices`."""
        if not isinstance(stage, Stage):
            raise TypeError(
                "Dataset: write `mpidist.data.Dataset.from_tensor_slices(arrays)`"
            )
        self._stage = stage
        self._iterations = 0
        self._spec: Nest | None = None

    @staticmethod
    def from_tensor_slices(tensors: Nest) -> Dataset:
        """Create a dataset from the rows of arrays.

        Args:
            tensors: an array, or a nest (tuples, dicts, lists) of arrays with the same
                first dimension; element i has row i of each. Anything with ``shape``
                and slices of rows is accepted as an array (``numpy.memmap``, an HDF5
                dataset); a list of numbers becomes an array. Or one object with
                ``__len__`` and ``__getitem__`` that returns a nest for each row, such
                as a grain MapDataset or a torch dataset.

        Raises:
            TypeError: if it is none of these.
            ValueError: if the first dimensions differ, or there is none.
        """
        name = "Dataset.from_tensor_slices"
        if _is_row_source(tensors):
            return Dataset(_stages.Rows(tensors))
        leaves, structure = nest.flatten(_lists_to_arrays(tensors))
        arrays = [_as_array_like(leaf, name) for leaf in leaves]
        shapes = [tuple(x.shape) for x in arrays]
        if not shapes or not all(shapes):
            raise ValueError(
                f"{name}: expected arrays of at least one dimension, got "
                f"{structure.render([str(shape) for shape in shapes])}"
            )
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                f"{name}: expected arrays with the same first dimension, got shapes "
                f"{structure.render([str(shape) for shape in shapes])}"
            )
        return Dataset(_stages.Slices(arrays, structure))

    @staticmethod
    def _of_numpy(group: ReplicaGroup, arrays: Nest) -> Dataset:
        """Run `Strategy.experimental_make_numpy_dataset`, without communication.

        Args:
            group: the group of the strategy.
            arrays: a nest of arrays with the same first dimension; a list is stacked.
        """
        context.require_cross_replica(group, "experimental_make_numpy_dataset")
        return Dataset.from_tensor_slices(_stack_lists(arrays))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Combine each ``batch_size`` consecutive elements into a batch.

        Args:
            batch_size: the number of rows in a batch; for
                `Strategy.experimental_distribute_dataset` that of all replicas
                together.
            drop_remainder: whether to drop a last batch with fewer rows.
        """
        size = _as_count("batch", "batch_size", batch_size, least=1)
        return Dataset(_stages.Batch(self._stage, size, bool(drop_remainder)))

    def shuffle(
        self,
        *args: Any,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        buffer_size: int | None = None,
    ) -> Dataset:
        """Shuffle all elements: a full permutation.

        TensorFlow shuffles in a buffer; here there is no buffer, but the order takes 8
        bytes for each element. It depends on the seed and on the number of the
        iteration over the dataset, and is the same on all ranks. As in TensorFlow, rows
        mix across the rounds of a `repeat` only if that comes before.

        Call ``shuffle(seed)`` or, as in TensorFlow, ``shuffle(size, seed=seed)``.

        Args:
            *args: the seed. With ``seed=``, the size of TensorFlow's buffer, which is
                ignored.
            seed: 0 or more. Required, because without a seed the ranks would shuffle
                differently.
            reshuffle_each_iteration: whether each iteration over the dataset, and each
                round of a later `repeat`, has a different order.
            buffer_size: accepted and ignored.

        Raises:
            TypeError: if there is no seed.
            ValueError: if the dataset is infinite.
        """
        if len(args) == 1 and seed is None and buffer_size is None:
            (seed,) = args
        elif len(args) > (buffer_size is None) or seed is None:
            raise TypeError(
                "Dataset.shuffle: expected a seed, the same on all ranks; write "
                "`shuffle(seed)` or `shuffle(buffer_size, seed=seed)`"
            )
        seed = _as_count("shuffle", "seed", seed, least=0)
        if self._stage.size >= INFINITE:
            raise ValueError(
                "Dataset.shuffle: this dataset has no end, so there is no order of all "
                "of it; write `shuffle` before `repeat`"
            )
        return Dataset(_stages.Shuffle(self._stage, seed, reshuffle_each_iteration))

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the dataset ``count`` times; None or -1: infinitely."""
        if count is not None and count != -1:
            count = _as_count("repeat", "count", count, least=0)
        return Dataset(_stages.Repeat(self._stage, None if count == -1 else count))

    def map(self, fn: Callable[..., Nest]) -> Dataset:
        """Apply a function to each element.

        Before `batch` the function gets one row; after `batch` it gets a batch. In the
        second case each rank of a distributed dataset has to read whole batches to get
        its rows of the result, so prefer the first.

        Args:
            fn: gets an element (the parts of a tuple as separate arguments) and returns
                a nest of arrays and numbers. It runs when an element is read, in the
                thread of `prefetch` if there is one, and must not call collectives.
        """
        if not callable(fn):
            raise TypeError(f"Dataset.map: expected a function, got {fn!r}")
        return Dataset(_stages.Map(self._stage, fn))

    def take(self, count: int) -> Dataset:
        """Keep the first ``count`` elements; -1: all of them."""
        if count != -1:
            count = _as_count("take", "count", count, least=0)
        return Dataset(_stages.Take(self._stage, count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keep every ``num_shards``-th element, starting at number ``index``.

        For `Strategy.distribute_datasets_from_function`:
        ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id)``.
        """
        num_shards = _as_count("shard", "num_shards", num_shards, least=1)
        index = _as_count("shard", "index", index, least=0)
        if index >= num_shards:
            raise ValueError(
                f"Dataset.shard: expected 0 <= index < {num_shards}, got {index}"
            )
        return Dataset(_stages.Shard(self._stage, num_shards, index))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Read up to ``buffer_size`` elements ahead in a thread; 0: do not.

        The thread runs the whole pipeline, wherever `prefetch` stands in it. It never
        calls MPI. In a distributed dataset each rank reads its own rows ahead.
        """
        if buffer_size == -1:  # tf.data.AUTOTUNE
            buffer_size = 2
        size = _as_count("prefetch", "buffer_size", buffer_size, least=0)
        return Dataset(_stages.Prefetch(self._stage, size))

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element.

        After a `map` it is found by applying the function to the first row.

        Raises:
            ValueError: if this is needed and there is no row.
        """
        if self._spec is None:
            self._spec = self._stage.spec()
        if self._spec is None:
            if not self._stage.size:
                raise ValueError(
                    "Dataset.element_spec: the dataset is empty, so the "
                    "result of its `map` is unknown"
                )
            opened = self._stage.open(0, (0,))
            batched = self._stage.batch_size is not None
            block = opened.read(0, 1) if batched else opened.whole
            if block is not None:
                self._spec = _stages.spec_of(block.nest(), (None,) if batched else None)
        return self._spec

    def cardinality(self) -> int:
        """Return the number of elements; `INFINITE_CARDINALITY` (-1) if infinite."""
        size = self._stage.size
        return INFINITE_CARDINALITY if size >= INFINITE else size

    def __len__(self) -> int:
        if self._stage.size >= INFINITE:
            raise TypeError("Dataset: an infinite dataset has no len()")
        return self._stage.size

    def __iter__(self) -> Iterator[Nest]:
        in_pass = (self._iterations,)
        self._iterations += 1
        elements = _read(self._stage, in_pass)
        if self._stage.depth:
            return Prefetcher(elements, self._stage.depth)
        return elements

    def __repr__(self) -> str:
        return f"<mpidist.data.Dataset of {self._stage.text}>"


def _read(stage: Stage, in_pass: _stages.Pass) -> Iterator[Nest]:
    index = 0
    while index < stage.size:
        yield stage.elements(np.array([index]), in_pass)[0]
        index += 1


def stage_of(dataset: Dataset) -> Stage:
    """Return the last stage of a dataset."""
    return dataset._stage


def _stack_lists(tree: Nest) -> Nest:
    if isinstance(tree, list):
        parts = [
            as_leaf(_stack_lists(part), "experimental_make_numpy_dataset")
            for part in tree
        ]
        if not parts:
            return np.asarray(tree)
        return backend.module_of(parts[0]).stack(parts)
    if isinstance(tree, dict):
        return type(tree)({key: _stack_lists(part) for key, part in tree.items()})
    if isinstance(tree, tuple):
        items = [_stack_lists(part) for part in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def _lists_to_arrays(tree: Nest) -> Nest:
    """Convert lists of numbers in a nest to arrays."""
    if isinstance(tree, list):
        if _holds_numbers(tree):
            return np.asarray(tree)
        return [_lists_to_arrays(part) for part in tree]
    if isinstance(tree, dict):
        return type(tree)({key: _lists_to_arrays(part) for key, part in tree.items()})
    if isinstance(tree, tuple):
        parts = [_lists_to_arrays(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def _holds_numbers(tree: Nest) -> bool:
    if isinstance(tree, list):
        return bool(tree) and all(_holds_numbers(part) for part in tree)
    return isinstance(tree, (bool, int, float, complex, str, np.generic))


def _is_row_source(x: object) -> bool:
    return (
        hasattr(x, "__getitem__")
        and hasattr(x, "__len__")
        and not hasattr(x, "shape")
        and not isinstance(x, (list, tuple, str, bytes))
        and not (hasattr(x, "keys") and hasattr(x, "items"))
    )


def _as_array_like(x: Any, call: str) -> Any:
    """Return a leaf as an array, or unchanged if it supports slices of rows."""
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return x
    if hasattr(x, "__dlpack__") or not (
        hasattr(x, "shape") and hasattr(x, "__getitem__")
    ):
        return as_leaf(x, call)
    if isinstance(x, np.ma.MaskedArray):
        return as_leaf(x, call)
    return x


def _as_count(method: str, name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"Dataset.{method}: expected `{name}` to be an int, got {value!r} of type "
            f"{type(value).__name__}"
        )
    if value < least:
        raise ValueError(
            f"Dataset.{method}: expected `{name}` to be {least} or more, got {value}"
        )
    return int(value)
