"""Dataset: an input pipeline over arrays, with the methods of tf.data."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from mpidist._base import backend, nest, shuffle_seeds
from mpidist._base.expect import as_int, expect
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist.data import (
    _combinations as several,
    _conversions as conversions,
    _selections as selections,
)
from mpidist.data._ahead import AUTOTUNE, default_workers
from mpidist.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Options
from mpidist.data._positions import DatasetIterator
from mpidist.data._rows import block_of, lists_to_arrays, protected, stack_lists
from mpidist.data._sources import (
    Element,
    Generated,
    Range,
    as_dtype,
    declared,
    slices_of,
)
from mpidist.data._stages import INFINITE, Stage, name_of

_CYCLE: Final = 16
_AHEAD: Final = 2  # elements, for AUTOTUNE
FilePattern: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class _Names(type):
    """The class of `Dataset`, whose missing attributes have a message."""


class Dataset(metaclass=_Names):
    """Elements, which can be shuffled, batched, mapped and more, as in tf.data.

    The methods have the names, the order of arguments and the meaning of those of
    ``tf.data.Dataset``; elements are NumPy or CuPy arrays and numbers in nests.
    Datasets are immutable: each method returns a new one. Data is read only when an
    element is requested. Each iteration over a dataset starts from the beginning.
    ``name`` is accepted everywhere, without effect.

    Start with `from_tensor_slices`, `range`, `from_generator`, `from_tensors`,
    `list_files` or `zip`. Most datasets have random access: a rank reads its own rows
    only. After `from_generator`, `filter`, `take_while`, `unbatch`, `interleave` and
    `flat_map` there is none, and each rank goes through all elements; but a `map` and a
    `batch` that follow still run for its own rows only.
    """

    def __init__(self, stage: Stage) -> None:
        """Not for users: call `Dataset.from_tensor_slices`."""
        if not isinstance(stage, Stage):
            raise TypeError(
                "Dataset: write `mpidist.data.Dataset.from_tensor_slices(arrays)`"
            )
        self._stage = stage
        self._iterations = 0  # so far: the number of the next one

    @classmethod
    def from_tensor_slices(cls, tensors: Nest, name: str | None = None) -> Self:
        """Create a dataset from the rows of arrays.

        Args:
            tensors: an array, or a nest (tuples, dicts, lists) of arrays with the same
                first dimension; element i has row i of each. Anything with ``shape``
                and slices of rows is accepted as an array (``numpy.memmap``, an HDF5
                dataset); a list of numbers becomes an array. Or one object with
                ``__len__`` and ``__getitem__`` that returns a nest for each row, such
                as a grain MapDataset or a torch dataset.
            name: accepted.

        Raises:
            TypeError: if it is none of these, or the name is no str.
            ValueError: if the first dimensions differ, or there is none, as of text.

        Example::

            arrays = {"x": np.array([1.5, 2.5]), "y": np.array([0, 1])}
            dataset = mpidist.data.Dataset.from_tensor_slices(arrays)
            next(iter(dataset))  # {'x': np.float64(1.5), 'y': np.int64(0)}
        """
        hint = "write `from_tensor_slices((x, y))` for the rows of several arrays"
        is_name = name is None or isinstance(name, str)
        expect(is_name, "Dataset.from_tensor_slices", "`name` to be a str", name, hint)
        return cls(slices_of(tensors))

    @classmethod
    def from_tensors(cls, tensors: Nest, name: str | None = None) -> Self:
        """Create a dataset of one element.

        Args:
            tensors: the element: a nest of arrays and numbers. It is read-only.
            name: accepted.
        """
        block = block_of(lists_to_arrays(tensors), "Dataset.from_tensors")
        return cls(Element(protected(block.nest()), block.spec()))

    @classmethod
    def range(
        cls, *args: int, output_type: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Self:
        """Create a dataset of numbers: ``range(stop)``, ``range(start, stop, step)``.

        Args:
            *args: as for Python's range.
            output_type: their dtype.
            name: accepted.
        """
        numbers = [as_int("Dataset.range", "args", x, least=-(2**63)) for x in args]
        steps = range(*numbers)  # raises what Python's does
        dtype = as_dtype(output_type, "range")
        return cls(Range(steps.start, steps.stop, steps.step, dtype))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Nest]],
        output_types: Nest | None = None,
        output_shapes: Nest | None = None,
        args: Iterable[Any] | None = None,
        output_signature: Nest | None = None,
        name: str | None = None,
    ) -> Self:
        """Create a dataset from what a function yields.

        Each iteration, and each round of a `repeat`, calls the function again, and so
        does a distributed iterator after an element whose function, as of `map`, has
        raised. A position is reached by reading up to it: if the function returns an
        iterator that it has returned before, elements are lost.

        Args:
            generator: a function that returns an iterable of nests of arrays and
                numbers. In a distributed dataset each rank calls it, so it must yield
                the same on all.
            output_types: tf.data's older form: a nest of dtypes.
            output_shapes: with the former: a nest of shapes, None for any size.
            args: arguments for the function, which gets them as NumPy values.
            output_signature: a nest of `ArraySpec`. Not needed; if given, elements are
                converted to its dtypes, and their shapes are compared with it.
            name: accepted.

        Raises:
            TypeError: if an argument is invalid.
        """
        _as_call("from_generator", "generator", generator)
        expected = declared(output_signature, output_types, output_shapes)
        given = () if args is None else args
        is_text = isinstance(given, (str, bytes))
        many = hasattr(given, "__iter__") and not is_text
        call, hint = "Dataset.from_generator", "write `args=(x,)` for one argument"
        expect(many, call, "a tuple as `args`", args, hint)
        values = tuple(np.asarray(x)[()] for x in given)
        return cls(Generated(generator, values, expected))

    @classmethod
    def list_files(
        cls,
        file_pattern: FilePattern,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Create a dataset of the names of files, for `interleave`.

        Args:
            file_pattern: a pattern as for ``glob.glob``, or several. The names are
                sorted.
            shuffle: whether to shuffle them. None: if there is a seed.
            seed: as for `shuffle`.
            name: accepted.

        Raises:
            ValueError: if no file matches.
        """
        if isinstance(file_pattern, (str, os.PathLike)):
            file_pattern = [file_pattern]
        try:
            patterns = [os.fspath(pattern) for pattern in file_pattern]
        except TypeError as error:
            raise TypeError(
                "Dataset.list_files: expected a pattern or several, got "
                f"{file_pattern!r:.80}"
            ) from error
        names = {name for pattern in patterns for name in glob.glob(pattern)}
        if not names:
            raise ValueError(f"Dataset.list_files: no file matches {patterns}")
        stage = slices_of(np.array(sorted(names)))
        if shuffle or (shuffle is None and seed is not None):
            stage = selections.Shuffle(
                [stage], None, _as_seed("list_files", seed), seed is not None
            )
        return cls(stage)

    @classmethod
    def zip(
        cls, *args: Nest, datasets: Nest | None = None, name: str | None = None
    ) -> Self:
        """Create a dataset whose elements are those of several, side by side.

        Args:
            *args: datasets, for elements that are tuples; or a nest of datasets, for
                elements with its structure. The shortest one ends it.
            datasets: the nest, as tf.data's older form names it.
            name: accepted.
        """
        given = args if datasets is None else (*args, datasets)
        leaves, structure = nest.flatten(given[0] if len(given) == 1 else given)
        if not leaves or not all(isinstance(one, Dataset) for one in leaves):
            kinds = [type(one).__name__ for one in leaves]
            raise TypeError(f"Dataset.zip: expected datasets, got {kinds}")
        return cls(several.Zip([one._stage for one in leaves], structure))

    @classmethod
    def _of_numpy(cls, group: ReplicaGroup, arrays: Nest) -> Self:
        """Run `Strategy.experimental_make_numpy_dataset`, without communication.

        Args:
            group: the group of the strategy.
            arrays: a nest of arrays with the same first dimension; a list is stacked.
        """
        call = "experimental_make_numpy_dataset"
        context.require_cross_replica(group, call)
        return cls.from_tensor_slices(stack_lists(arrays, call))

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
        buffer for all of them, or ``shuffle(seed=1)``, gives a full permutation. Random
        access stays: the order of an epoch is computed without reading the elements,
        and takes 8 bytes for each.

        The order depends on the seed and on the number of the iteration over the
        dataset. As in TensorFlow, rows mix across the rounds of a `repeat` only if that
        comes before.

        Args:
            buffer_size: the size of the buffer; 1: the order stays. None, or
                `UNKNOWN_CARDINALITY`: a buffer for all elements.
            seed: an int, 0 or more. None: the next one of a sequence, which starts
                again in each run; `mpidist.seed_all` starts another one. It is the same
                on all ranks if they create the same datasets, or create them in a
                function that they pass to a strategy. In functions that are called as
                elements are read, None is 0.
            reshuffle_each_iteration: whether each iteration over the dataset, and each
                round of a later `repeat`, has a different order; None: True.
            name: accepted.

        Raises:
            TypeError: if there is neither a size nor a seed.
            ValueError: if there is no size, and the dataset is infinite or has no
                random access.

        Example::

            dataset = mpidist.data.Dataset.range(5).shuffle(5, seed=1)
            sorted(int(x) for x in dataset)  # [0, 1, 2, 3, 4]
        """
        stage, size = self._stage, None
        if buffer_size is None and seed is None:
            raise TypeError(
                "Dataset.shuffle: expected a size or a seed; write `shuffle(seed=1)` "
                "for an order of all elements, or as in tf.data `shuffle(buffer_size)`"
            )
        if buffer_size is not None:
            name, unknown = "buffer_size", UNKNOWN_CARDINALITY
            size = _as_count("shuffle", name, buffer_size, least=1, other=unknown)
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
        given, number = seed is not None, _as_seed("shuffle", seed)
        anew = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
        return Dataset(selections.Shuffle([stage], size, number, given, anew))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Repeat the dataset ``count`` times; None or -1: infinitely."""
        if count is not None:
            count = _as_count("repeat", "count", count, least=-1)
        count = None if count == -1 else count
        return Dataset(selections.Repeat([self._stage], f"repeat({count})", count))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Keep the first ``count`` elements; -1: all of them."""
        count = _as_count("take", "count", count, least=-1)
        stop = None if count < 0 else count
        return Dataset(selections.Part([self._stage], f"take({count})", 0, stop))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Leave out the first ``count`` elements; -1: all of them."""
        count = _as_count("skip", "count", count, least=-1)
        start, stop = (0, 0) if count < 0 else (count, None)
        return Dataset(selections.Part([self._stage], f"skip({count})", start, stop))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Keep every ``num_shards``-th element, starting at number ``index``.

        For `Strategy.distribute_datasets_from_function`:
        ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id)``. A
        `shuffle` before it, created outside of that function, needs a seed: without
        one, the ranks' orders differ, and so shards overlap, if one rank has created
        more such datasets than another.
        """
        num_shards = _as_count("shard", "num_shards", num_shards, least=1)
        index = _as_count("shard", "index", index, least=0)
        if index >= num_shards:
            raise ValueError(
                f"Dataset.shard: expected 0 <= index < {num_shards}, got {index}"
            )
        call = f"shard({num_shards}, {index})"
        return Dataset(selections.Part([self._stage], call, index, None, num_shards))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Add the elements of another dataset at the end.

        Raises:
            TypeError: if its elements differ in structure, dtype or number of
                dimensions, as far as that is known before reading.
        """
        is_one = isinstance(dataset, Dataset)
        expect(is_one, "Dataset.concatenate", "a Dataset", dataset)
        try:
            both = several.Concatenate([self._stage, dataset._stage])
        except (TypeError, ValueError) as error:
            raise TypeError(
                "Dataset.concatenate: expected a dataset with elements like those of "
                f"this one, {self._stage.spec()}, got {dataset._stage.spec()}"
            ) from error
        return Dataset(both)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Number the elements: each becomes ``(number, element)``, an int64 first."""
        start = _as_count("enumerate", "start", start, least=-(2**63))
        numbers = Range(start, None, 1, np.dtype(np.int64))
        return Dataset(several.Zip([numbers, self._stage], nest.flatten((0, 0))[1]))

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Keep each element in memory once it was loaded.

        Its NumPy arrays are read-only; of others each pass gets copies. In a
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
        return Dataset(selections.Cache([self._stage], "cache()"))

    def prefetch(self, buffer_size: int | None, name: str | None = None) -> Dataset:
        """Read up to ``buffer_size`` elements ahead in a thread; 0: do not.

        The thread runs the whole pipeline, wherever `prefetch` stands in it; for a
        distributed dataset each rank's own rows. None is `AUTOTUNE`, which means 2. At
        most 1024 elements are read ahead.
        """
        size = _as_tuned(
            "prefetch", "buffer_size", buffer_size, least=0, default=_AHEAD
        )
        return Dataset(selections.Same([self._stage], f"prefetch({size})", size))

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
                perhaps in a thread, and must not call collectives. It must return new
                arrays, not a buffer that it writes to again: `batch`, `shuffle` and
                `prefetch` keep several elements.
            num_parallel_calls: the number of threads that call it, each for one element
                at a time; `AUTOTUNE`: one for each core of this rank, up to 8. Useful
                if it waits for files or releases the GIL, as many NumPy functions do.
                The order of elements does not change; the threads are at most
                ``num_parallel_calls`` elements ahead.
            deterministic: accepted: the order is kept with False, too.
            synchronous: accepted, without effect.
            use_unbounded_threadpool: accepted, without effect.
            name: accepted.

        Example::

            dataset = mpidist.data.Dataset.range(3).map(lambda x: x**2)
            [int(x) for x in dataset]  # [0, 1, 4]
        """
        call = _as_call("map", "map_func", map_func)
        calls = _as_calls("map", num_parallel_calls, default_workers())
        return Dataset(conversions.Map([self._stage], call, map_func, calls))

    def filter(
        self, predicate: Callable[..., object], name: str | None = None
    ) -> Dataset:
        """Keep the elements for which a function returns True.

        Args:
            predicate: gets an element as in `map`, and returns a bool; in a distributed
                dataset the same on all ranks, each of which calls it for all elements.
            name: accepted.
        """
        call = _as_call("filter", "predicate", predicate)
        return Dataset(selections.Filter([self._stage], call, predicate))

    def take_while(
        self, predicate: Callable[..., object], name: str | None = None
    ) -> Dataset:
        """Keep the elements before the first for which a function returns False."""
        call = _as_call("take_while", "predicate", predicate)
        return Dataset(selections.Filter([self._stage], call, predicate))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Turn each element into a dataset by a function; read these in turn.

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

        Example::

            starts = mpidist.data.Dataset.from_tensor_slices([0, 10])
            dataset = starts.interleave(lambda i: mpidist.data.Dataset.range(i, i + 3))
            [int(x) for x in dataset]  # [0, 10, 1, 11, 2, 12]
        """
        call = _as_call("interleave", "map_func", map_func)[:-1]
        cycle = _as_tuned(
            "interleave", "cycle_length", cycle_length, least=1, default=_CYCLE
        )
        length = 1 if block_length is None else block_length
        length = _as_count("interleave", "block_length", length, least=1)
        readers = _as_calls("interleave", num_parallel_calls, cycle)

        def open_one(*element: Nest) -> Stage:
            try:
                made = map_func(*element)
            except Exception as error:  # NumPy's does not name a damaged file
                given = ", ".join(f"{x!r:.200}" for x in element)
                error.add_note(f"Dataset.interleave: in `map_func({given})`")
                raise
            expect(
                isinstance(made, Dataset),
                "Dataset.interleave",
                "`map_func` to return a Dataset",
                made,
                "write `Dataset.from_tensor_slices(...)` or `from_generator(...)`",
            )
            return made._stage

        call += f", {cycle}, {length})"
        return Dataset(
            several.Interleave([self._stage], call, open_one, cycle, length, readers)
        )

    def flat_map(
        self, map_func: Callable[..., Dataset], name: str | None = None
    ) -> Dataset:
        """Turn each element into a dataset by a function; read one after the other."""
        return self.interleave(map_func, cycle_length=1)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return ``transformation_func(self)``, which must be a Dataset."""
        _as_call("apply", "transformation_func", transformation_func)
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

        Example::

            dataset = mpidist.data.Dataset.range(5).batch(2)
            [x.tolist() for x in dataset]  # [[0, 1], [2, 3], [4]]
        """
        size = _as_count("batch", "batch_size", batch_size, least=1)
        drop = bool(drop_remainder)
        call = f"batch({size}{', drop_remainder=True' if drop else ''})"
        return Dataset(conversions.Batch([self._stage], call, size, drop))

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
            padded_shapes: the shape of each array of an element: a tuple, or a number
                for a vector, or a nest of them like an element. For a size of None or
                -1, or without shapes, it is that of the longest row of the batch; to
                find it, each rank of a distributed dataset has to load all rows.
            padding_values: a value for each array, or one for all; None: 0, False or an
                empty string.
            drop_remainder: whether to drop a last batch with fewer rows.
            name: accepted.
        """
        size = _as_count("padded_batch", "batch_size", batch_size, least=1)
        drop = bool(drop_remainder)
        padded_shapes = nest.map_structure(
            lambda x: x.tolist() if isinstance(x, np.ndarray) else x, padded_shapes
        )
        call = f"padded_batch({size}, {padded_shapes}, {padding_values}, {drop})"
        return Dataset(
            conversions.PaddedBatch(
                [self._stage], call, size, drop, padded_shapes, padding_values
            )
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """Split each element into its rows, which become the elements."""
        return Dataset(conversions.Unbatch([self._stage], "unbatch()"))

    # --- properties -----------------------------------------------------------

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Set the options in ``options`` that do not have their default value."""
        given = isinstance(options, Options)
        expect(given, "Dataset.with_options", "a `mpidist.data.Options`", options)
        return Dataset(selections.Same([self._stage], "", 0, copy.deepcopy(options)))

    def assert_cardinality(self, expected_cardinality: int) -> Dataset:
        """Declare the number of elements, for a dataset that does not know it.

        Reading raises ValueError if the number is another one.
        """
        count = _as_count(
            "assert_cardinality", "expected_cardinality", expected_cardinality, least=-1
        )
        call = f"assert_cardinality({count})"
        count = INFINITE if count == INFINITE_CARDINALITY else count
        return Dataset(selections.WithCardinality([self._stage], call, count))

    # --- elements -------------------------------------------------------------

    def options(self) -> Options:
        """Return a copy of the options."""
        return copy.deepcopy(self._stage.options)

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element.

        After a `map`, and where it is not declared, the first element is read to find
        it; if there is none, the function of the `map` is called with zeros.

        Raises:
            ValueError: if it cannot be found, since the dataset is empty.
        """
        return self._stage.element_spec

    def cardinality(self) -> int:
        """Return the number of elements.

        `INFINITE_CARDINALITY` (-1) if infinite, `UNKNOWN_CARDINALITY` (-2) if it is
        known only after reading.
        """
        return self._stage.cardinality()

    def __len__(self) -> int:
        return self._stage.require_length(
            "Dataset",
            "; write `sum(1 for _ in dataset)`, or `dataset.assert_cardinality(n)`",
        )

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._stage, self._iterations, self._begun)

    def _begun(self, stage: Stage, iterations: int) -> None:
        """Note what an iterator reads: later ones go on after it."""
        self._stage, self._iterations = stage, iterations

    def reduce(
        self,
        initial_state: Nest,
        reduce_func: Callable[..., Nest],
        name: str | None = None,
    ) -> Nest:
        """Fold the elements: ``state = reduce_func(state, element)`` for each."""
        _as_call("reduce", "reduce_func", reduce_func)
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def as_numpy_iterator(self) -> Iterator[Nest]:
        """Iterate over the elements, with the arrays of a GPU on the host."""
        return map(_on_host, self)

    def __repr__(self) -> str:
        return f"<mpidist.data.Dataset of {self._stage.text}>"


def _as_count(
    method: str, name: str, value: Any, *, least: int, other: int | None = None
) -> int:
    """Return an int, given one, or a 0-d array of one; ``other`` may be less."""
    call = f"Dataset.{method}"
    number = as_int(call, name, value)
    if number != other:
        as_int(call, name, number, least=least)
    what = f"`{name}` to be less than 2**63"
    expect(number < 2**63, call, what, number, error=ValueError)
    return number


def _as_tuned(method: str, name: str, value: Any, *, least: int, default: int) -> int:
    """Return an int as `as_count` does; the default for None and `AUTOTUNE`."""
    given = AUTOTUNE if value is None else value
    number = _as_count(method, name, given, least=least, other=AUTOTUNE)
    return default if number == AUTOTUNE else number


def _as_seed(method: str, seed: int | None) -> int:
    """Return the seed of a shuffle, which need not be given."""
    if seed is None:
        return shuffle_seeds.next_seed()
    return as_int(f"Dataset.{method}", "seed", seed, least=0)


def _as_calls(method: str, value: object, tuned: int) -> int:
    """Return the number of threads for ``num_parallel_calls``; 0: none."""
    if value is None:
        return 0
    return _as_tuned(method, "num_parallel_calls", value, least=1, default=tuned)


def _as_call(method: str, name: str, function: object) -> str:
    """Return the text of a call with a function, which this must be."""
    expected = f"a function as `{name}`"
    expect(callable(function), f"Dataset.{method}", expected, function)
    return f"{method}({name_of(function)})"


def _on_host(element: Nest) -> Nest:
    return nest.map_structure(
        lambda x: backend.to_host(x) if backend.is_device_array(x) else x, element
    )


def stage_of(dataset: Dataset) -> Stage:
    """Return the last stage of a dataset."""
    return dataset._stage


explain_attributes(_Names, "mpidist.data")
explain_attributes(Dataset, "mpidist.data")
