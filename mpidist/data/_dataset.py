"""Dataset: an input pipeline over arrays, with the methods of tf.data."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist.data import _stage_order as order
from mpidist.data._blocks import block_of
from mpidist.data._dataset_arguments import (
    FilePattern,
    as_calls,
    as_count,
    as_dtype,
    as_function,
    check_same_spec,
    declared,
    matching_files,
    shuffle_arguments,
    stack_lists,
    stage_of_slices,
)
from mpidist.data._dataset_base import Elements, stage_of
from mpidist.data._options import Options
from mpidist.data._records import INFINITE_CARDINALITY
from mpidist.data._stage import INFINITE, Stage
from mpidist.data._stage_batches import Batch, PaddedBatch, Unbatch
from mpidist.data._stage_combinations import Concatenate, Interleave, Zip
from mpidist.data._stage_functions import Filter, Map, TakeWhile
from mpidist.data._stage_sources import Generated, Range, Single, lists_to_arrays
from mpidist.data._workers import AUTOTUNE

_CYCLE: Final = 16


class Dataset(Elements):
    """Elements, which can be shuffled, batched, mapped and more, as in tf.data.

    The methods have the names, the order of arguments and the meaning of those of
    ``tf.data.Dataset``; elements are NumPy or CuPy arrays and numbers in nests.
    Datasets are immutable: each method returns a new one. Data is read only when an
    element is requested. Each iteration over a dataset starts from the beginning.

    Start with `from_tensor_slices`, `range`, `from_generator`, `from_tensors`,
    `list_files` or `zip`. The elements of most datasets can be found by number; after
    `from_generator`, `filter`, `take_while`, `unbatch`, `interleave` and `flat_map`
    only by going through those before them, on each rank. Then, too, `map` and `batch`
    run for a rank's own rows only.
    """

    def __init__(self, stage: Stage) -> None:
        """Not for users: call `Dataset.from_tensor_slices`."""
        if not isinstance(stage, Stage):
            raise TypeError(
                "Dataset: write `mpidist.data.Dataset.from_tensor_slices(arrays)`"
            )
        super().__init__(stage)

    # --- sources --------------------------------------------------------------

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
        return Dataset(stage_of_slices(tensors))

    @staticmethod
    def from_tensors(tensors: Nest) -> Dataset:
        """Create a dataset of one element.

        Args:
            tensors: the element: a nest of arrays and numbers. It is read-only.
        """
        block = block_of(lists_to_arrays(tensors), "Dataset.from_tensors")
        return Dataset(Single(block))

    @staticmethod
    def range(*args: int, output_type: npt.DTypeLike = np.int64) -> Dataset:
        """Create a dataset of numbers: ``range(stop)``, ``range(start, stop, step)``.

        Args:
            *args: as for Python's range.
            output_type: their dtype.
        """
        numbers = [as_count("range", "args", x, least=-(2**63)) for x in args]
        steps = builtins.range(*numbers)  # raises what Python's does
        dtype = as_dtype("range", output_type)
        return Dataset(Range(steps.start, steps.stop, steps.step, dtype))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Nest]],
        output_types: Nest | None = None,
        output_shapes: Nest | None = None,
        args: Iterable[Any] | None = None,
        output_signature: Nest | None = None,
    ) -> Dataset:
        """Create a dataset from what a function yields.

        Each iteration, and each round of a `repeat`, calls the function again. A saved
        position is reached by reading up to it.

        Args:
            generator: a function that returns an iterable of nests of arrays and
                numbers. In a distributed dataset each rank calls it, so it must yield
                the same on all.
            output_types: tf.data's older form: a nest of dtypes.
            output_shapes: with the former: a nest of shapes, None for any size.
            args: arguments for the function, which gets them as NumPy values.
            output_signature: a nest of `ArraySpec`. Not needed; if given, elements are
                converted to its dtypes, and their shapes are compared with it.

        Raises:
            TypeError: if an argument is invalid.
        """
        as_function("from_generator", "generator", generator)
        expected = declared(output_signature, output_types, output_shapes)
        values = tuple(np.asarray(x)[()] for x in args or ())
        return Dataset(Generated(generator, values, expected))

    @staticmethod
    def list_files(
        file_pattern: FilePattern,
        shuffle: bool | None = None,
        seed: int | None = None,
    ) -> Dataset:
        """Create a dataset of the names of files, for `interleave`.

        Args:
            file_pattern: a pattern as for ``glob.glob``, or several. The names are
                sorted.
            shuffle: whether to shuffle them, which needs a seed. None: if there is a
                seed.
            seed: as for `shuffle`.

        Raises:
            TypeError: for ``shuffle=True`` without a seed.
            ValueError: if no file matches.
        """
        names = matching_files(file_pattern)
        files = Dataset.from_tensor_slices(np.array(names))
        if shuffle or (shuffle is None and seed is not None):
            return files.shuffle(seed=seed)
        return files

    @staticmethod
    def zip(*args: Nest, datasets: Nest | None = None) -> Dataset:
        """Create a dataset whose elements are those of several, side by side.

        Args:
            *args: datasets, for elements that are tuples; or a nest of datasets, for
                elements with its structure. The shortest one ends it.
            datasets: the nest, as tf.data's older form names it.
        """
        given = args if datasets is None else (*args, datasets)
        leaves, structure = nest.flatten(given[0] if len(given) == 1 else given)
        if not leaves or not all(isinstance(one, Dataset) for one in leaves):
            kinds = [type(one).__name__ for one in leaves]
            raise TypeError(f"Dataset.zip: expected datasets, got {kinds}")
        return Dataset(Zip([stage_of(one) for one in leaves], structure))

    # --- order ----------------------------------------------------------------

    def shuffle(
        self,
        *args: Any,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        buffer_size: int | None = None,
    ) -> Dataset:
        """Shuffle the elements.

        If they are found by number, this is a full permutation. It takes 8 bytes for
        each element, and ``buffer_size`` is ignored. Otherwise it is tf.data's: each
        element is a random one of a buffer of ``buffer_size`` elements.

        The order depends on the seed and on the number of the iteration over the
        dataset, and is the same on all ranks. As in TensorFlow, rows mix across the
        rounds of a `repeat` only if that comes before.

        Call ``shuffle(seed)`` or, as in TensorFlow, ``shuffle(size, seed=seed)`` or
        ``shuffle(size, seed, reshuffle_each_iteration)``.

        Args:
            *args: the seed, or as above.
            seed: 0 or more. Required, because without a seed the ranks would shuffle
                differently.
            reshuffle_each_iteration: whether each iteration over the dataset, and each
                round of a later `repeat`, has a different order; None: True.
            buffer_size: see above.

        Raises:
            TypeError: if there is no seed.
            ValueError: if there is no size, but the dataset is infinite, or its
                elements are not found by number.
        """
        stage, anew = self._stage, reshuffle_each_iteration
        chosen = shuffle_arguments(stage, args, buffer_size, seed, anew)
        return Dataset(
            order.Shuffle(stage, chosen.seed, chosen.anew, chosen.buffer_size)
        )

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the dataset ``count`` times; None or -1: infinitely."""
        if count is not None and count != -1:
            count = as_count("repeat", "count", count, least=0)
        return Dataset(order.Repeat(self._stage, None if count == -1 else count))

    def take(self, count: int) -> Dataset:
        """Keep the first ``count`` elements; -1: all of them."""
        if count != -1:
            count = as_count("take", "count", count, least=0)
        return Dataset(order.Take(self._stage, count))

    def skip(self, count: int) -> Dataset:
        """Leave out the first ``count`` elements; -1: all of them."""
        if count != -1:
            count = as_count("skip", "count", count, least=0)
        return Dataset(order.Skip(self._stage, count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keep every ``num_shards``-th element, starting at number ``index``.

        For `Strategy.distribute_datasets_from_function`:
        ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id)``.
        """
        num_shards = as_count("shard", "num_shards", num_shards, least=1)
        index = as_count("shard", "index", index, least=0)
        if index >= num_shards:
            raise ValueError(
                f"Dataset.shard: expected 0 <= index < {num_shards}, got {index}"
            )
        return Dataset(order.Shard(self._stage, num_shards, index))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Add the elements of another dataset at the end.

        Raises:
            TypeError: if its elements differ in structure, dtype or number of
                dimensions, as far as that is known before reading.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"Dataset.concatenate: expected a Dataset, got {dataset!r}")
        other = stage_of(dataset)
        check_same_spec(self._stage.spec(), other.spec())
        return Dataset(Concatenate(self._stage, other))

    def enumerate(self, start: int = 0) -> Dataset:
        """Number the elements: each becomes ``(number, element)``, an int64 first."""
        start = as_count("enumerate", "start", start, least=-(2**63))
        numbers = Range(start, None, 1, np.dtype(np.int64))
        return Dataset(Zip([numbers, self._stage], nest.flatten((0, 0))[1]))

    def cache(self, filename: str = "") -> Dataset:
        """Keep each element in memory once it was loaded.

        Its NumPy arrays are read-only; of torch tensors each pass gets copies. In a
        distributed dataset each rank keeps its own rows. As in tf.data a `shuffle`
        before it has the order of the first iteration every time.

        Args:
            filename: must be empty.

        Raises:
            TypeError: if there is a filename.
        """
        if filename:
            raise TypeError(
                "Dataset.cache: elements are kept in memory, not in a file; write "
                "`numpy.save(path, array)` once, and `Dataset.from_tensor_slices("
                'numpy.load(path, mmap_mode="r"))`, which reads rows as needed'
            )
        return Dataset(order.Cache(self._stage))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Read up to ``buffer_size`` elements ahead in a thread; 0: do not.

        The thread runs the whole pipeline, wherever `prefetch` stands in it. It never
        calls MPI. In a distributed dataset each rank reads its own rows ahead.
        """
        if buffer_size == AUTOTUNE:
            buffer_size = 2
        size = as_count("prefetch", "buffer_size", buffer_size, least=0)
        return Dataset(order.Prefetch(self._stage, size))

    # --- functions ------------------------------------------------------------

    def map(
        self,
        map_func: Callable[..., Nest],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Apply a function to each element.

        Before `batch` the function gets one row; after `batch` it gets a batch. In the
        second case each rank of a distributed dataset has to read whole batches to get
        its rows of the result, so prefer the first.

        Args:
            map_func: gets an element (the parts of a tuple as separate arguments) and
                returns a nest of arrays and numbers. It runs when an element is read,
                in a thread if there are any, and must not call collectives. The arrays
                must be new, or not written again: `batch`, `shuffle` and `prefetch`
                keep several elements, and a buffer would have the last one in all.
            num_parallel_calls: the number of threads that call it, for elements one
                after the other; `AUTOTUNE`: one for each core of this rank, up to 8.
                Useful if it waits for files or releases the GIL, as many NumPy
                functions do. The order of elements does not change; the threads are at
                most ``num_parallel_calls`` elements ahead.
            deterministic: accepted: the order is kept with False, too.
        """
        as_function("map", "map_func", map_func)
        calls = as_calls("map", num_parallel_calls)
        return Dataset(Map(self._stage, map_func, calls))

    def filter(self, predicate: Callable[..., object]) -> Dataset:
        """Keep the elements for which a function returns True.

        Args:
            predicate: gets an element as in `map`, and returns a bool. In a distributed
                dataset each rank calls it for all elements, so it must return the same
                on all.
        """
        as_function("filter", "predicate", predicate)
        return Dataset(Filter(self._stage, predicate))

    def take_while(self, predicate: Callable[..., object]) -> Dataset:
        """Keep the elements before the first for which a function returns False."""
        as_function("take_while", "predicate", predicate)
        return Dataset(TakeWhile(self._stage, predicate))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Read the datasets that a function makes of the elements, in turn.

        For files: ``names.interleave(open_one, cycle_length=4)``. With
        ``AutoShardPolicy.FILE`` each replica opens files of its own.

        Args:
            map_func: gets an element as in `map`, and returns a `Dataset`.
            cycle_length: how many datasets are open at a time; None or `AUTOTUNE`: 16,
                where TensorFlow takes the number of cores, on which the order depends.
            block_length: how many elements of one come before the next one's turn.
            num_parallel_calls: how many of the open datasets have a thread that reads
                ``block_length`` elements ahead; `AUTOTUNE`: all.
            deterministic: accepted: the order is kept with False, too.
        """
        as_function("interleave", "map_func", map_func)
        if cycle_length in (None, AUTOTUNE):
            cycle_length = _CYCLE
        cycle = as_count("interleave", "cycle_length", cycle_length, least=1)
        length = 1 if block_length is None else block_length
        length = as_count("interleave", "block_length", length, least=1)
        readers = as_calls("interleave", num_parallel_calls)
        if num_parallel_calls == AUTOTUNE:
            readers = cycle

        def open_one(*element: Nest) -> Stage:
            made = map_func(*element)
            if not isinstance(made, Dataset):
                raise TypeError(
                    "Dataset.interleave: expected `map_func` to return a Dataset, got "
                    f"{made!r:.80} of type {type(made).__name__}; write "
                    "`Dataset.from_tensor_slices(...)` or `Dataset.from_generator(...)`"
                )
            return stage_of(made)

        open_one.__qualname__ = getattr(map_func, "__qualname__", "a function")
        return Dataset(Interleave(self._stage, open_one, cycle, length, readers))

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Read the datasets that a function makes of the elements, one by one."""
        return self.interleave(map_func, cycle_length=1)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return ``transformation_func(self)``, which must be a Dataset."""
        made = as_function("apply", "transformation_func", transformation_func)(self)
        if not isinstance(made, Dataset):
            raise TypeError(f"Dataset.apply: expected a Dataset, got {made!r}")
        return made

    # --- batches --------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Combine each ``batch_size`` consecutive elements into a batch.

        Args:
            batch_size: the number of rows in a batch; for
                `Strategy.experimental_distribute_dataset` that of all replicas
                together.
            drop_remainder: whether to drop a last batch with fewer rows.
            num_parallel_calls: accepted, without effect: use that of `map`.
            deterministic: accepted, without effect.
        """
        size = as_count("batch", "batch_size", batch_size, least=1)
        return Dataset(Batch(self._stage, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Nest | None = None,
        padding_values: Nest | None = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Combine elements into a batch, after padding each array at its end.

        Args:
            batch_size: the number of rows in a batch, as in `batch`.
            padded_shapes: the shape of each array of an element: a tuple, or a nest of
                tuples like an element. For a size of None or -1, or without shapes, it
                is that of the longest row of the batch; to find it, each rank of a
                distributed dataset has to load all rows.
            padding_values: a value for each array, or one for all; None: 0, False or an
                empty string.
            drop_remainder: whether to drop a last batch with fewer rows.
        """
        size = as_count("padded_batch", "batch_size", batch_size, least=1)
        drop = bool(drop_remainder)
        return Dataset(
            PaddedBatch(self._stage, size, drop, padded_shapes, padding_values)
        )

    def unbatch(self) -> Dataset:
        """Take elements apart into their rows."""
        return Dataset(Unbatch(self._stage))

    # --- properties -----------------------------------------------------------

    def with_options(self, options: Options) -> Dataset:
        """Set options; of `Options`, those that are not the default."""
        if not isinstance(options, Options):
            raise TypeError(
                "Dataset.with_options: expected a `mpidist.data.Options`, got "
                f"{options!r:.80}"
            )
        return Dataset(order.WithOptions(self._stage, copy.deepcopy(options)))

    def assert_cardinality(self, expected_cardinality: int) -> Dataset:
        """Declare the number of elements, if only reading would tell it.

        Reading raises ValueError if the number is another one.
        """
        count = expected_cardinality
        if count == INFINITE_CARDINALITY:
            count = INFINITE
        count = as_count("assert_cardinality", "expected_cardinality", count, least=0)
        return Dataset(order.WithCardinality(self._stage, count))

    @staticmethod
    def _of_numpy(group: ReplicaGroup, arrays: Nest) -> Dataset:
        """Run `Strategy.experimental_make_numpy_dataset`, without communication.

        Args:
            group: the group of the strategy.
            arrays: a nest of arrays with the same first dimension; a list is stacked.
        """
        call = "experimental_make_numpy_dataset"
        context.require_cross_replica(group, call)
        return Dataset.from_tensor_slices(stack_lists(arrays, call))
