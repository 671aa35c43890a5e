"""The part of `Dataset` that makes no dataset of another: sources, and iteration."""

from __future__ import annotations

import builtins
import collections
import copy
import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from mpidist._base import backend, nest, shuffle_seeds
from mpidist._base.expect import as_int, expect
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist.data._ahead import AUTOTUNE, Ahead, default_workers, read_ahead
from mpidist.data._combinations import Zip
from mpidist.data._options import Options
from mpidist.data._positions import PositionedIterator, checked_state
from mpidist.data._rows import block_of, lists_to_arrays, protected, stack_lists
from mpidist.data._sources import (
    Generated,
    Range,
    Rows,
    as_dtype,
    declared,
    slices_of,
)
from mpidist.data._stage import Stage, Token, name_of
from mpidist.data._stages import Shuffle

FilePattern: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


# --- arguments of the methods ------------------------------------------------------


def as_count(
    method: str, name: str, value: Any, *, least: int, other: int | None = None
) -> int:
    """Return an int, given one, or a 0-d array of one; ``other`` may be less."""
    number = as_int(f"Dataset.{method}", name, value, least=-sys.maxsize)
    if number == other:
        return number
    return as_int(f"Dataset.{method}", name, number, least=least)


def as_tuned(method: str, name: str, value: Any, *, least: int, default: int) -> int:
    """Return an int as `as_count` does; the default for None and `AUTOTUNE`."""
    given = AUTOTUNE if value is None else value
    number = as_count(method, name, given, least=least, other=AUTOTUNE)
    return default if number == AUTOTUNE else number


def as_seed(method: str, seed: int | None) -> int:
    """Return the seed of a shuffle, which need not be given."""
    if seed is None:
        return shuffle_seeds.next_seed()
    return as_count(method, "seed", seed, least=0)


def as_calls(method: str, value: object) -> int:
    """Return the number of threads for ``num_parallel_calls``; 0: none."""
    if value is None:
        return 0
    workers = default_workers()
    return as_tuned(method, "num_parallel_calls", value, least=1, default=workers)


def as_call(method: str, name: str, function: object) -> str:
    """Return the text of a call with a function, which this must be."""
    expected = f"a function as `{name}`"
    expect(callable(function), f"Dataset.{method}", expected, function)
    return f"{method}({name_of(function)})"


# --- iteration ---------------------------------------------------------------------


class _Tokens:
    """The tokens of a stage, which go on after an element that failed.

    Attributes:
        left: those that were taken, and whose elements were not returned.
        error: what finding them raised.
    """

    def __init__(self, tokens: Iterator[Token]) -> None:
        self._tokens = tokens
        self.left: collections.deque[Token] = collections.deque()
        self.error: Exception | None = None

    def take(self) -> Iterator[Token]:
        """Yield those that are left, and then the others."""
        yield from tuple(self.left)
        while self.error is None:
            try:
                token = next(self._tokens)
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                break
            self.left.append(token)
            yield token
        raise self.error


class DatasetIterator(PositionedIterator):
    """Iterates over the elements of a `Dataset`: the result of ``iter(dataset)``.

    Its threads, if there are any, end with it. An element whose function raised an
    exception is left out, a batch with all its rows: the next call goes on after it; to
    try it again, pass `state` to `restore`. After an exception of what finds the
    elements (a generator, a predicate, the function of `interleave`), later calls raise
    a RuntimeError.
    """

    def __init__(self, dataset: Elements) -> None:
        """Not for users: call ``iter(dataset)``."""
        self._dataset, self._stage = dataset, dataset._stage
        self._go_to(dataset._iterations, 0)

    def _go_to(self, iteration: int, position: int) -> None:
        self._iteration, self._position = iteration, position
        self._dataset._iterations = iteration + 1
        self._tokens: _Tokens | None = None
        self._elements: Iterator[Nest] | None = None
        self._ended = self._failed = False
        self._broken: Exception | None = None  # by what finds the elements

    def _step(self, call: str) -> tuple[bool, Nest]:
        if self._ended:
            return False, None
        if self._broken:
            raise RuntimeError(
                f"{call}: the input raised a {type(self._broken).__name__} and cannot "
                "continue; make a new iterator with `iter(dataset)`"
            ) from self._broken
        tokens = self._tokens
        if tokens is None:
            stage, position = self._stage, self._position
            tokens = self._tokens = _Tokens(stage.tokens((self._iteration,), position))
        if self._failed:
            self._position += 1
            tokens.left.popleft()
            self._failed = False
        try:
            if self._elements is None:
                self._elements = self._stage.load(tokens.take())
                if self._stage.depth:
                    self._elements = read_ahead(self._elements, self._stage.depth)
            element = next(self._elements)
        except StopIteration:
            self._ended, self._elements = True, None
            return False, None
        except Exception as error:
            elements, self._elements = self._elements, None
            if error is tokens.error:
                self._broken = error
            elif tokens.left:
                self._failed = True
                if isinstance(elements, Ahead):
                    elements.close()  # its thread takes tokens
            raise
        except BaseException:  # Ctrl-C: the element is read again
            self._elements = self._tokens = None
            raise
        tokens.left.popleft()
        self._position += 1
        return True, element

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element: that of the dataset."""
        return self._dataset.element_spec

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position: the next element is the one after it.

        Args:
            state: the result of `state` of an iterator over the same dataset. Shuffles
                without a seed get those of the state, here and in later iterators.

        Raises:
            ValueError: if it is not such a state.
        """
        state = checked_state("DatasetIterator.restore", state, self.state())
        self._stage = self._stage.with_shuffle_seeds(iter(state["shuffle_seeds"]))
        self._dataset._stage = self._stage
        self._go_to(int(state["iteration"]), int(state["position"]))


class _Names(type):
    """The class of `Dataset`, whose missing attributes have a message."""


class Elements(metaclass=_Names):
    """The part of `Dataset` that makes no dataset of another."""

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
        as_call("from_generator", "generator", generator)
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
        if isinstance(file_pattern, (str, os.PathLike)):
            file_pattern = [file_pattern]
        patterns = [os.fspath(pattern) for pattern in file_pattern]
        names = {name for pattern in patterns for name in glob.glob(pattern)}
        if not names:
            raise ValueError(f"Dataset.list_files: no file matches {patterns}")
        stage = slices_of(np.array(sorted(names)))
        if shuffle or (shuffle is None and seed is not None):
            stage = Shuffle(stage, None, as_seed("list_files", seed), seed is not None)
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

    # --- elements -------------------------------------------------------------

    def options(self) -> Options:
        """Return a copy of the options."""
        return copy.deepcopy(self._stage.options)

    @property
    def element_spec(self) -> Nest:
        """The nest of `ArraySpec` of an element.

        After a `map`, and where it is not declared, it is found by reading the first
        element; if there is none, by calling the function of the `map` with zeros.

        Raises:
            ValueError: if the dataset is empty, and that does not tell it.
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
        return DatasetIterator(self)

    def reduce(
        self,
        initial_state: Nest,
        reduce_func: Callable[..., Nest],
        name: str | None = None,
    ) -> Nest:
        """Fold the elements: ``state = reduce_func(state, element)`` for each."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def as_numpy_iterator(self) -> Iterator[Nest]:
        """Iterate over the elements, with the arrays of a GPU on the host."""
        return map(_on_host, self)

    def __repr__(self) -> str:
        return f"<mpidist.data.Dataset of {self._stage.text}>"


def _on_host(element: Nest) -> Nest:
    return nest.map_structure(
        lambda x: backend.to_host(x) if backend.is_device_array(x) else x, element
    )


def stage_of(dataset: Elements) -> Stage:
    """Return the last stage of a dataset."""
    return dataset._stage


for _method in vars(Elements).values():
    if isinstance(_method, classmethod):  # for messages and tracebacks
        _method.__func__.__qualname__ = f"Dataset.{_method.__func__.__name__}"
explain_attributes(_Names, "mpidist.data")
explain_attributes(Elements, "mpidist.data")
