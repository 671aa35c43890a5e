"""Where the elements of a `Dataset` come from: arrays, numbers, a generator."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist.data._arguments import FilePattern, as_count, as_function, matching_files
from mpidist.data._combinations import Zip
from mpidist.data._elements import Elements, stage_of
from mpidist.data._rows import block_of, lists_to_arrays, protected, stack_lists
from mpidist.data._sources import (
    Generated,
    Range,
    Rows,
    as_dtype,
    declared,
    slices_of,
)
from mpidist.data._stages import Shuffle


class Sources(Elements):
    """The part of `Dataset` that makes datasets of other data."""

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
            TypeError: if it is none of these.
            ValueError: if the first dimensions differ, or there is none.
        """
        return cls(slices_of(tensors))

    @classmethod
    def from_tensors(cls, tensors: Nest, name: str | None = None) -> Self:
        """Create a dataset of one element.

        Args:
            tensors: the element: a nest of arrays and numbers. It is read-only.
            name: accepted.
        """
        block = block_of(lists_to_arrays(tensors), "Dataset.from_tensors")
        return cls(Rows([protected(block.nest())], "1 element", block.spec()))

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
        numbers = [as_count("range", "args", x, least=-(2**63)) for x in args]
        steps = builtins.range(*numbers)  # raises what Python's does
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
            name: accepted.

        Raises:
            TypeError: if an argument is invalid.
        """
        as_function("from_generator", "generator", generator)
        expected = declared(output_signature, output_types, output_shapes)
        values = tuple(np.asarray(x)[()] for x in args or ())
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
        names = matching_files(file_pattern)
        stage = slices_of(np.array(names))
        if shuffle or (shuffle is None and seed is not None):
            number = (
                0 if seed is None else as_count("list_files", "seed", seed, least=0)
            )
            stage = Shuffle(stage, f"shuffle(seed={number})", None, number, True)
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
        if not leaves or not all(isinstance(one, Elements) for one in leaves):
            kinds = [type(one).__name__ for one in leaves]
            raise TypeError(f"Dataset.zip: expected datasets, got {kinds}")
        return cls(Zip([stage_of(one) for one in leaves], structure))

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


for _method in vars(Sources).values():
    if isinstance(_method, classmethod):  # for messages and tracebacks
        _method.__func__.__qualname__ = f"Dataset.{_method.__func__.__name__}"
