"""Dataset: an input pipeline over arrays, with the methods of tf.data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import numpy as np

from mpidist._base import nest
from mpidist._base.expect import expect
from mpidist._base.types import Nest
from mpidist.data import _stages as stages
from mpidist.data._ahead import AUTOTUNE
from mpidist.data._batches import Batch, PaddedBatch, Unbatch
from mpidist.data._combinations import Concatenate, Interleave, Zip
from mpidist.data._elements import (
    Elements,
    as_call,
    as_calls,
    as_count,
    as_seed,
    as_tuned,
    stage_of,
)
from mpidist.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Options
from mpidist.data._sources import Range
from mpidist.data._stage import INFINITE, Stage

_CYCLE: Final = 16
_AHEAD: Final = 2  # elements, for AUTOTUNE


class Dataset(Elements):
    """Elements, which can be shuffled, batched, mapped and more, as in tf.data.

    The methods have the names, the order of arguments and the meaning of those of
    ``tf.data.Dataset``; elements are NumPy or CuPy arrays and numbers in nests.
    Datasets are immutable: each method returns a new one. Data is read only when an
    element is requested. Each iteration over a dataset starts from the beginning.
    ``name`` is accepted everywhere, without effect.

    Start with `from_tensor_slices`, `range`, `from_generator`, `from_tensors`,
    `list_files` or `zip`. The elements of most datasets can be found by number; after
    `from_generator`, `filter`, `take_while`, `unbatch`, `interleave` and `flat_map`
    only by going through those before them, on each rank. Then, too, `map` and `batch`
    run for a rank's own rows only.
    """

    # --- order ----------------------------------------------------------------

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Shuffle the elements, as in tf.data.

        Each element is a random one of a buffer of the next ``buffer_size`` elements. A
        buffer for all of them, or ``shuffle(seed=1)``, gives a full permutation. If the
        elements are found by number, they still are: the order of a pass is computed
        without reading, and takes 8 bytes for each element.

        The order depends on the seed and on the number of the iteration over the
        dataset. As in TensorFlow, rows mix across the rounds of a `repeat` only if that
        comes before.

        Args:
            buffer_size: the size of the buffer; 1: the order stays. None, or
                `UNKNOWN_CARDINALITY`: a buffer for all elements.
            seed: 0 or more. None: the next one of a sequence, which is the same in each
                run, unless `mpidist.seed_all` begins another, and on all ranks if they
                make the same datasets, or make them in a function that they pass to a
                strategy; 0 in functions that run as elements are read.
            reshuffle_each_iteration: whether each iteration over the dataset, and each
                round of a later `repeat`, has a different order; None: True.
            name: accepted.

        Raises:
            TypeError: if there is neither a size nor a seed.
            ValueError: if there is no size, but the dataset is infinite, or its
                elements are not found by number.
        """
        stage, size = self._stage, None
        if buffer_size is None and seed is None:
            raise TypeError(
                "Dataset.shuffle: expected a size or a seed; write `shuffle(seed=1)` "
                "for an order of all elements, or as in tf.data `shuffle(buffer_size)`"
            )
        if buffer_size is not None:
            name, unknown = "buffer_size", UNKNOWN_CARDINALITY
            size = as_count("shuffle", name, buffer_size, least=1, other=unknown)
            size = None if size == unknown else size
        if size is None and stage.size >= INFINITE:
            raise ValueError(
                "Dataset.shuffle: this dataset has no end, so there is no order of all "
                "of it; write `shuffle` before `repeat`, or `shuffle(buffer_size, "
                "seed=seed)`"
            )
        if not stage.indexed and buffer_size is None:
            raise ValueError(
                "Dataset.shuffle: the elements of this dataset can only be read one "
                "after the other, so they are shuffled in a buffer; write "
                "`shuffle(buffer_size, seed=seed)`"
            )
        given, number = seed is not None, as_seed("shuffle", seed)
        anew = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
        return Dataset(stages.Shuffle(stage, size, number, given, anew))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Repeat the dataset ``count`` times; None or -1: infinitely."""
        if count is not None:
            count = as_count("repeat", "count", count, least=-1)
        count = None if count == -1 else count
        return Dataset(stages.Repeat(self._stage, f"repeat({count})", count))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Keep the first ``count`` elements; -1: all of them."""
        count = as_count("take", "count", count, least=-1)
        stop = None if count < 0 else count
        return Dataset(stages.Part(self._stage, f"take({count})", 0, stop))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Leave out the first ``count`` elements; -1: all of them."""
        count = as_count("skip", "count", count, least=-1)
        start, stop = (0, 0) if count < 0 else (count, None)
        return Dataset(stages.Part(self._stage, f"skip({count})", start, stop))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Keep every ``num_shards``-th element, starting at number ``index``.

        For `Strategy.distribute_datasets_from_function`:
        ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id)``. The
        shards of ranks overlap after a `shuffle` without a seed, made outside of the
        function, if one rank has made more such datasets than another: give it a seed.
        """
        num_shards = as_count("shard", "num_shards", num_shards, least=1)
        index = as_count("shard", "index", index, least=0)
        if index >= num_shards:
            raise ValueError(
                f"Dataset.shard: expected 0 <= index < {num_shards}, got {index}"
            )
        call = f"shard({num_shards}, {index})"
        return Dataset(stages.Part(self._stage, call, index, None, num_shards))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Add the elements of another dataset at the end.

        Raises:
            TypeError: if its elements differ in structure, dtype or number of
                dimensions, as far as that is known before reading.
        """
        is_one = isinstance(dataset, Dataset)
        expect(is_one, "Dataset.concatenate", "a Dataset", dataset)
        both = Concatenate(self._stage, stage_of(dataset))
        try:
            both.spec()
        except (TypeError, ValueError) as error:
            raise TypeError(
                "Dataset.concatenate: expected a dataset with elements like those of "
                f"this one, {self._stage.spec()}, got {stage_of(dataset).spec()}"
            ) from error
        return Dataset(both)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Number the elements: each becomes ``(number, element)``, an int64 first."""
        start = as_count("enumerate", "start", start, least=-(2**63))
        numbers = Range(start, None, 1, np.dtype(np.int64))
        return Dataset(Zip([numbers, self._stage], nest.flatten((0, 0))[1]))

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Keep each element in memory once it was loaded.

        Its NumPy arrays are read-only; of torch tensors each pass gets copies. In a
        distributed dataset each rank keeps its own rows. As in tf.data a `shuffle`
        before it has the order of the first iteration every time.

        Args:
            filename: must be empty.
            name: accepted.

        Raises:
            TypeError: if there is a filename.
        """
        if filename:
            raise TypeError(
                "Dataset.cache: elements are kept in memory, not in a file; write "
                "`numpy.save(path, array)` once, and `Dataset.from_tensor_slices("
                'numpy.load(path, mmap_mode="r"))`, which reads rows as needed'
            )
        return Dataset(stages.Cache(self._stage, "cache()"))

    def prefetch(self, buffer_size: int | None, name: str | None = None) -> Dataset:
        """Read up to ``buffer_size`` elements ahead in a thread; 0: do not.

        The thread runs the whole pipeline, wherever `prefetch` stands in it; for a
        distributed dataset each rank's own rows. None is `AUTOTUNE`, which means 2.
        """
        size = as_tuned("prefetch", "buffer_size", buffer_size, least=0, default=_AHEAD)
        return Dataset(stages.Same(self._stage, f"prefetch({size})", size))

    # --- functions ------------------------------------------------------------

    def map(
        self,
        map_func: Callable[..., Nest],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Apply a function to each element.

        Before `batch` the function gets one row; after `batch` a batch, of which each
        rank of a distributed dataset then has to read all rows, so prefer the first.

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
            synchronous: accepted, without effect.
            use_unbounded_threadpool: accepted, without effect.
            name: accepted.
        """
        call = as_call("map", "map_func", map_func)
        calls = as_calls("map", num_parallel_calls)
        return Dataset(stages.Map(self._stage, call, map_func, calls))

    def filter(
        self, predicate: Callable[..., object], name: str | None = None
    ) -> Dataset:
        """Keep the elements for which a function returns True.

        Args:
            predicate: gets an element as in `map`, and returns a bool; in a distributed
                dataset the same on all ranks, each of which calls it for all elements.
            name: accepted.
        """
        call = as_call("filter", "predicate", predicate)
        return Dataset(stages.Filter(self._stage, call, predicate))

    def take_while(
        self, predicate: Callable[..., object], name: str | None = None
    ) -> Dataset:
        """Keep the elements before the first for which a function returns False."""
        call = as_call("take_while", "predicate", predicate)
        return Dataset(stages.Filter(self._stage, call, predicate))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
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
            name: accepted.
        """
        call = as_call("interleave", "map_func", map_func)[:-1]
        cycle = as_tuned(
            "interleave", "cycle_length", cycle_length, least=1, default=_CYCLE
        )
        length = 1 if block_length is None else block_length
        length = as_count("interleave", "block_length", length, least=1)
        readers = as_calls("interleave", num_parallel_calls)
        if num_parallel_calls == AUTOTUNE:
            readers = cycle

        def open_one(*element: Nest) -> Stage:
            made = map_func(*element)
            expect(
                isinstance(made, Dataset),
                "Dataset.interleave",
                "`map_func` to return a Dataset",
                made,
                "write `Dataset.from_tensor_slices(...)` or `from_generator(...)`",
            )
            return stage_of(made)

        call += f", {cycle}, {length})"
        return Dataset(Interleave(self._stage, call, open_one, cycle, length, readers))

    def flat_map(
        self, map_func: Callable[..., Dataset], name: str | None = None
    ) -> Dataset:
        """Read the datasets that a function makes of the elements, one by one."""
        return self.interleave(map_func, cycle_length=1)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return ``transformation_func(self)``, which must be a Dataset."""
        as_call("apply", "transformation_func", transformation_func)
        made = transformation_func(self)
        expect(isinstance(made, Dataset), "Dataset.apply", "a Dataset", made)
        return made

    # --- batches --------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Combine each ``batch_size`` consecutive elements into a batch.

        Args:
            batch_size: the number of rows in a batch; for
                `Strategy.experimental_distribute_dataset` that of all replicas
                together.
            drop_remainder: whether to drop a last batch with fewer rows.
            num_parallel_calls: accepted, without effect: use that of `map`.
            deterministic: accepted, without effect.
            name: accepted.
        """
        size = as_count("batch", "batch_size", batch_size, least=1)
        drop = bool(drop_remainder)
        call = f"batch({size}{', drop_remainder=True' if drop else ''})"
        return Dataset(Batch(self._stage, call, size, drop))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Nest | None = None,
        padding_values: Nest | None = None,
        drop_remainder: bool = False,
        name: str | None = None,
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
            name: accepted.
        """
        size = as_count("padded_batch", "batch_size", batch_size, least=1)
        drop = bool(drop_remainder)
        call = f"padded_batch({size}, {padded_shapes}, {padding_values}, {drop})"
        return Dataset(
            PaddedBatch(self._stage, call, size, drop, padded_shapes, padding_values)
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """Take elements apart into their rows."""
        return Dataset(Unbatch(self._stage, "unbatch()"))

    # --- properties -----------------------------------------------------------

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Set options; of `Options`, those that are not the default."""
        given = isinstance(options, Options)
        expect(given, "Dataset.with_options", "a `mpidist.data.Options`", options)
        return Dataset(stages.Same(self._stage, "", 0, copy.deepcopy(options)))

    def assert_cardinality(self, expected_cardinality: int) -> Dataset:
        """Declare the number of elements, if only reading would tell it.

        Reading raises ValueError if the number is another one.
        """
        count = as_count(
            "assert_cardinality", "expected_cardinality", expected_cardinality, least=-1
        )
        count = INFINITE if count == INFINITE_CARDINALITY else count
        call = f"assert_cardinality({count})"
        return Dataset(stages.WithCardinality(self._stage, call, count))
