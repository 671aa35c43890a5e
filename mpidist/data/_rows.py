"""Rows in columns: a nest of arrays with a common first dimension; their specs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np

from mpidist._base import backend, checksums, nest
from mpidist._base.fingerprint import fingerprint_of
from mpidist._base.types import Array, HostArray, Nest
from mpidist.data._options import ArraySpec, name_of_dtype, spec_with_rows

_SCALARS: Final = (bool, int, float, complex, str, bytes, np.generic)
_DLPACK_CPU: Final = (1, 3, 11)  # host memory, and page-locked host memory


@dataclasses.dataclass
class RowBlock:
    """The leaves of a nest of arrays, and its structure."""

    leaves: Sequence[Array]
    structure: nest.Structure

    @property
    def rows(self) -> int:
        """The first dimension, of which the first leaf decides."""
        leaves = self.leaves
        return int(leaves[0].shape[0]) if leaves and leaves[0].ndim else 1

    def nest(self) -> Nest:
        """Return the nest."""
        return self.structure.unflatten(self.leaves)

    def part(self, start: int, stop: int) -> RowBlock:
        """Return some of the rows, as views."""
        return RowBlock([leaf[start:stop] for leaf in self.leaves], self.structure)

    def row(self, index: int) -> Nest:
        """Return the nest of one row."""
        return self.structure.unflatten([leaf[index] for leaf in self.leaves])

    def spec(self, *, batched: bool = False) -> Nest:
        """Return the specs of the leaves; of batches of any number of rows."""
        specs = [ArraySpec(tuple(map(int, x.shape)), x.dtype) for x in self.leaves]
        spec = self.structure.unflatten(specs)
        return spec_with_rows(spec) if batched else spec

    def checksum(self) -> int:
        """Return a checksum of its contents, the same in every process; not 0."""

        def text_of(x: Array) -> str:
            is_number = x.dtype.kind in "biufcV"
            return checksums.summarize(x) if is_number else repr(x.tolist())

        return fingerprint_of(self.render(text_of)) or 1

    def render(self, text_of: Callable[[Array], str]) -> str:
        """Return the text of the structure with a text in the place of each leaf."""
        return self.structure.render([*map(text_of, self.leaves)])

    def __str__(self) -> str:
        """For example ``{'x': float32 (8, 3)}``."""
        return self.render(backend.describe)


@dataclasses.dataclass
class LazyBlock:
    """A batch of which only the rows that are requested are read.

    Attributes:
        rows: the number of rows.
        part: returns the rows from a start to a stop; None if there are none and their
            spec is unknown.
    """

    rows: int
    part: Callable[[int, int], RowBlock | None]


ONE_KIND: Final = "expected rows of one structure, dtype and shape, got"
PAD: Final = "pad or cut them in a `map` before, or write `padded_batch`"

# --- leaves ------------------------------------------------------------------------


def as_leaf(x: Any, call: str) -> Array:
    """Return a leaf as a NumPy or CuPy array, without a copy if possible."""
    if type(x) is np.ndarray and x.dtype.isnative:
        return x  # the most common case: one for each row of a `map`
    if isinstance(x, (np.ndarray, np.generic)):
        if not backend.is_masked(x):
            return _native(np.asarray(x))
    elif not backend.is_array(x):
        if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
            return _from_dlpack(x, call)
        if hasattr(x, "__array__") and not hasattr(type(x), "_as_component"):
            return _native(np.asarray(x))
        if isinstance(x, (str, bytes)):
            return exact_array(x)
    leaf, _ = backend.as_array(x, call)
    return leaf


def exact_array(x: Any) -> HostArray:
    """Return a list, a string or bytes as an array.

    Raises:
        ValueError: for text that NumPy would change, or lists of several lengths.
    """
    array = np.asarray(backend.of_lists(x, "Dataset"))
    if array.dtype.kind in "SU" and not _is_exact(array.tolist(), x):
        raise ValueError(
            f"Dataset: NumPy would change {x!r:.60}, as it drops NULs at the end of "
            "strings and bytes, and makes text of numbers beside text; write "
            "`numpy.frombuffer(data, numpy.uint8)` for bytes"
        )
    return array


def _is_exact(found: Any, x: Any) -> bool:
    if isinstance(found, list):
        return all(map(_is_exact, found, x))
    return bool(found == x)


def _from_dlpack(x: Any, call: str) -> Array:
    module: ModuleType = np
    if int(x.__dlpack_device__()[0]) not in _DLPACK_CPU:
        module = sys.modules.get("cupy", np)
    try:
        return module.from_dlpack(x)
    except Exception as error:
        kind = type(x)
        raise TypeError(
            f"{call}: cannot take a {kind.__module__}.{kind.__qualname__} of dtype "
            f"{getattr(x, 'dtype', '?')} over DLPack ({error}); convert it to a dtype "
            "that NumPy has, on the host or, where CuPy is in use, on the GPU"
        ) from error


def _native(x: HostArray) -> HostArray:
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def protected(tree: Nest) -> Nest:
    """Return an element that is kept and given again: its arrays cannot be changed."""
    return nest.map_structure(backend.read_only, tree)


def unshared(x: Nest) -> Nest:
    """Return a leaf that is kept, for the program: a copy, if it can be changed."""
    is_kept = isinstance(x, np.ndarray) and not x.flags.writeable
    return x if is_kept else backend.copied(x)


def copied(tree: Nest) -> Nest:
    """Return a copy of a nest and of its arrays."""
    return nest.map_structure(backend.copied, tree)


# --- nests -------------------------------------------------------------------------


def map_like(function: Callable[[Any, Any], Any], template: Nest, other: Nest) -> Nest:
    """Return ``function(leaf, part)`` for each leaf of a nest, and the part of another.

    That part may be a nest itself, such as a list where an array is expected.

    Raises:
        LookupError: if the other one has no part for a leaf.
    """
    leaves, structure = nest.flatten(template)
    return structure.unflatten(map(function, leaves, parts_like(template, other)))


def parts_like(template: Nest, other: Nest) -> list[Nest]:
    """Return the part of another nest for each leaf of a nest, as `map_like`."""
    inner = nest.parts_of(template)
    if inner is None:
        return [other]
    given = nest.parts_of(other)
    alike = isinstance(template, Mapping) is isinstance(other, Mapping)
    if not alike or given is None or given.keys() != inner.keys():
        raise LookupError
    return [x for key in inner for x in parts_like(inner[key], given[key])]


def convert_lists(
    tree: Nest,
    convert: Callable[[list[Any]], Nest],
    leaf: Callable[[Nest], Nest] = lambda x: x,
) -> Nest:
    """Return a nest with ``convert(list)`` in place of each outermost list.

    And with ``leaf(x)`` in place of the other leaves.
    """
    return nest.map_structure(
        lambda x: convert(x) if isinstance(x, list) else leaf(x),
        tree,
        is_leaf=lambda x: isinstance(x, list),
    )


def lists_to_arrays(tree: Nest, *, tuples: bool = False) -> Nest:
    """Convert lists of numbers or text in a nest to arrays; other lists stay nests.

    Args:
        tree: the nest.
        tuples: whether lists of tuples are arrays, too, if they are of one shape.
    """

    def convert(x: list[Any]) -> Nest:
        try:
            if _is_array(x) or (tuples and _form(x)):
                return exact_array(x)
            return [lists_to_arrays(part, tuples=tuples) for part in x]
        except RecursionError:
            raise nest.endless(x) from None

    return convert_lists(tree, convert)


def _is_array(tree: Nest) -> bool:
    if isinstance(tree, list):
        return all(map(_is_array, tree))
    return isinstance(tree, _SCALARS)


def _form(tree: Nest) -> tuple[tuple[int, ...], str] | None:
    """Return the shape and kind of lists of tuples; None where they have no one."""
    if isinstance(tree, _SCALARS):
        kind = np.asarray(tree).dtype.kind
        return (), "number" if kind in "iufc" else kind
    if not isinstance(tree, (list, tuple)):
        return None
    if isinstance(tree, tuple) and any(isinstance(x, list) for x in tree):
        return None  # a nest of lists, which are arrays
    forms = set(map(_form, tree))
    form = forms.pop() if len(forms) == 1 else None
    return form and ((len(tree), *form[0]), form[1])


def stack_lists(tree: Nest, call: str) -> Nest:
    """Stack the lists in a nest of arrays, as `tf.convert_to_tensor` does."""

    def stacked(parts: list[Nest]) -> Array:
        leaves = [as_leaf(stack_lists(part, call), call) for part in parts]
        if not leaves:
            return np.asarray(parts)
        return backend.module_of(leaves[0]).stack(leaves)

    return convert_lists(tree, stacked)


# --- blocks ------------------------------------------------------------------------


def block_of(element: Nest, call: str) -> RowBlock:
    """Return an element of a source, with its leaves as arrays."""
    leaves, structure = nest.flatten(element)
    return RowBlock([as_leaf(leaf, call) for leaf in leaves], structure)


def count_rows(block: RowBlock, replicas: int) -> int:
    """Return the common first dimension of a global batch."""
    call = "experimental_distribute_dataset"
    shapes = [leaf.shape for leaf in block.leaves]
    if not shapes:
        raise ValueError(f"{call}: got an element without arrays, {block.structure}")
    if not all(shapes):
        raise ValueError(
            f"{call}: got an element with a scalar, {block}, but expected batches of "
            "rows. Call the `batch` method on the input Dataset in order to be able to "
            f"split your input across {replicas} replicas"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"{call}: expected the arrays of a batch to have the same number of rows, "
            f"got {block}"
        )
    return int(shapes[0][0])


def stack(rows: Sequence[Nest], call: str) -> RowBlock:
    """Stack rows, which are nests."""
    blocks = [block_of(row, call) for row in rows]
    return _combine(blocks, "stack", lambda leaf: leaf.shape)


def join(blocks: Sequence[RowBlock]) -> RowBlock:
    """Concatenate blocks into one."""
    return _combine(
        blocks, "concatenate", lambda x: (name_of_dtype(x.dtype), x.shape[1:])
    )


def _combine(
    blocks: Sequence[RowBlock], method: str, kind: Callable[[Array], object]
) -> RowBlock:
    first = blocks[0]
    kinds = [kind(leaf) for leaf in first.leaves]
    for other in blocks[1:]:
        same = other.structure == first.structure
        if not same or [kind(leaf) for leaf in other.leaves] != kinds:
            raise ValueError(f"Dataset.batch: {ONE_KIND} {first} and {other}; {PAD}")
    columns = zip(*(block.leaves for block in blocks), strict=True)
    leaves = [getattr(backend.module_of(one[0]), method)(one) for one in columns]
    for number, leaf in enumerate(leaves):
        if leaf.dtype.kind in "SU":  # NumPy makes text of numbers beside it
            for other in blocks:
                if other.leaves[number].dtype.kind != first.leaves[number].dtype.kind:
                    raise ValueError(f"Dataset.batch: {ONE_KIND} {first} and {other}")
    return RowBlock(leaves, first.structure)


def gather(x: Any, indices: HostArray) -> Array:
    """Read rows of an array, or of anything with ``shape`` and slices of rows.

    Reads no other rows. The result is a new array.
    """
    count = len(indices)
    first = int(indices[0]) if count else 0
    found: Array
    if count < 2 or (
        int(indices[-1]) - first + 1 == count and bool((np.diff(indices) == 1).all())
    ):
        found = x[first : first + count]
        if backend.is_device_array(found):
            return found.copy()
        return _native(np.array(found))
    if backend.is_device_array(x):
        return x[backend.like(x, indices)]
    if isinstance(x, np.ndarray):
        return _native(np.asarray(x[indices]))
    # HDF5 needs increasing indices, others support only slices: read runs of rows.
    unique, places = np.unique(indices, return_inverse=True)
    runs = np.split(unique, np.flatnonzero(np.diff(unique) != 1) + 1)
    parts = [np.asarray(x[int(run[0]) : int(run[-1]) + 1]) for run in runs]
    return _native(np.concatenate(parts)[places])


# --- specs -------------------------------------------------------------------------


def empty_of(spec: Nest | None) -> RowBlock | None:
    """Return arrays without rows, on the host; None if a size is not known.

    Args:
        spec: the nest of specs of a batch. A scalar becomes a column.
    """
    if spec is None:
        return None
    leaves, structure = nest.flatten(spec)
    shapes = [leaf.shape[1:] for leaf in leaves]
    if any(None in shape for shape in shapes):
        return None
    both = zip(leaves, shapes, strict=True)
    empty = [np.empty((0, *shape), leaf.dtype) for leaf, shape in both]
    return RowBlock(empty, structure)


def describe_rows(block: RowBlock | None) -> str:
    """Return what the rows of a batch have in common; "" for None."""
    if block is None:
        return ""
    return block.render(lambda x: f"{name_of_dtype(x.dtype)} {tuple(x.shape[1:])}")


def describe(block: RowBlock) -> str:
    """Return the text that must be the same on all ranks: ``{'x': float32 (*, *)}``."""

    def text_of(x: Array) -> str:
        sizes = ", ".join("*" * x.ndim) if x.ndim > 1 else "*,"
        return f"{name_of_dtype(x.dtype)} ({sizes})"

    return block.render(text_of)
