"""Rows in columns: a nest of arrays with a common first dimension."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np

from mpidist._base import backend, checksums, nest
from mpidist._base.fingerprint import fingerprint
from mpidist._base.types import Array, HostArray, Nest

_DLPACK_CPU: Final = (1, 3, 11)  # host memory, and page-locked host memory


@dataclasses.dataclass
class RowBlock:
    """The leaves of a nest of arrays, and its structure."""

    leaves: Sequence[Array]
    structure: nest.Structure

    def nest(self) -> Nest:
        """Return the nest."""
        return self.structure.unflatten(self.leaves)

    def part(self, start: int, stop: int) -> RowBlock:
        """Return some of the rows, as views."""
        return RowBlock([leaf[start:stop] for leaf in self.leaves], self.structure)

    def checksum(self) -> int:
        """Return a checksum of its contents, the same in every process; not 0."""
        texts = [
            repr(leaf.tolist())
            if leaf.dtype.kind not in "biufcV"
            else f"{backend.describe(leaf)} {checksums.summarize(leaf)}"
            for leaf in self.leaves
        ]
        return fingerprint(self.structure.render(texts)) or 1

    def row(self, index: int) -> Nest:
        """Return the nest of one row."""
        return self.structure.unflatten([leaf[index] for leaf in self.leaves])


def as_leaf(x: Any, call: str) -> Array:
    """Return a leaf as a NumPy or CuPy array, without a copy if possible.

    Args:
        x: an array, a number, another array that supports DLPack, or anything with
            ``__array__``.
        call: the name of the call, for the message.

    Raises:
        TypeError: if a leaf is neither an array nor a number.
    """
    leaf: Array
    if type(x) is np.ndarray and x.dtype.isnative:
        return x  # the most common case: one for each row of a `map`
    if backend.is_device_array(x):
        leaf = x
        return leaf
    masked = isinstance(x, np.ma.MaskedArray)  # which `as_array` refuses
    if isinstance(x, (np.ndarray, np.generic)) and not masked:
        return native(np.asarray(x))
    if not masked and backend.is_array(x):
        leaf, _ = backend.as_array(x, call)
        return leaf
    if not masked and hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, call)
    if not masked and hasattr(x, "__array__") and not hasattr(type(x), "_as_component"):
        return native(np.asarray(x))
    leaf, _ = backend.as_array(x, call)
    return leaf


def _from_dlpack(x: Any, call: str) -> Array:
    module: ModuleType = np
    if int(x.__dlpack_device__()[0]) not in _DLPACK_CPU:
        module = sys.modules.get("cupy", np)
    try:
        leaf: Array = module.from_dlpack(x)
    except Exception as error:
        kind = type(x)
        raise TypeError(
            f"{call}: cannot take a {kind.__module__}.{kind.__qualname__} of dtype "
            f"{getattr(x, 'dtype', '?')} over DLPack ({error}); convert it to a dtype "
            "that NumPy has, on the host or, where CuPy is in use, on the GPU"
        ) from error
    return leaf


def native(x: HostArray) -> HostArray:
    """Return a NumPy array in this machine's byte order."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def block_of(element: Nest, call: str) -> RowBlock:
    """Return an element of a source, with its leaves as arrays."""
    leaves, structure = nest.flatten(element)
    return RowBlock([as_leaf(leaf, call) for leaf in leaves], structure)


def count_rows(block: RowBlock, call: str, replicas: int) -> int:
    """Return the common first dimension of a global batch.

    Raises:
        ValueError: if there is none: for scalars, or leaves of different lengths.
    """
    shapes = [leaf.shape for leaf in block.leaves]
    if not shapes:
        raise ValueError(f"{call}: got an element without arrays, {block.structure}")
    if any(not shape for shape in shapes):
        raise ValueError(
            f"{call}: got an element with a scalar, {describe_block(block)}, but "
            "expected batches of rows. Call the `batch` method on the input Dataset in "
            "order to be able to split your input across "
            f"{replicas} replicas"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"{call}: expected the arrays of a batch to have the same number of rows, "
            f"got {describe_block(block)}"
        )
    return int(shapes[0][0])


def describe_block(block: RowBlock) -> str:
    """Return for example ``{'x': float32 (8, 3)}``."""
    return block.structure.render([backend.describe(leaf) for leaf in block.leaves])


def stack(rows: Sequence[Nest], call: str) -> RowBlock:
    """Stack rows, which are nests.

    Raises:
        ValueError: if they differ in structure or shape.
    """
    blocks = [block_of(row, call) for row in rows]
    first = blocks[0]
    for other in blocks[1:]:
        if other.structure != first.structure:
            raise ValueError(
                f"{call}: expected rows of one structure, got {first.structure} and "
                f"{other.structure}"
            )
    columns = list(zip(*(block.leaves for block in blocks), strict=True))
    for column in columns:
        shapes = {leaf.shape for leaf in column}
        if len(shapes) > 1:
            one, two = sorted(shapes)[:2]
            raise ValueError(
                f"{call}: expected rows of one shape, got {one} and {two}; pad or cut "
                "them in a `map` before, or write `padded_batch`"
            )
    leaves = [backend.module_of(column[0]).stack(column) for column in columns]
    return RowBlock(leaves, first.structure)


def join(blocks: Sequence[RowBlock]) -> RowBlock:
    """Concatenate blocks into one.

    Raises:
        ValueError: if they differ in structure, dtype, or the shape of a row.
    """
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    for other in blocks[1:]:
        if other.structure != first.structure or any(
            one.shape[1:] != two.shape[1:] or one.dtype != two.dtype
            for one, two in zip(first.leaves, other.leaves, strict=True)
        ):
            raise ValueError(
                "Dataset.batch: expected rows of one structure, dtype and shape, got "
                f"{describe_block(first)} and {describe_block(other)}; pad or cut them "
                "in a `map` before, or write `padded_batch`"
            )
    columns = zip(*(block.leaves for block in blocks), strict=True)
    return RowBlock(
        [backend.module_of(column[0]).concatenate(column) for column in columns],
        blocks[0].structure,
    )


def gather(x: Any, indices: HostArray) -> Array:
    """Read rows of an array, or of anything with ``shape`` and slices of rows.

    Reads no other rows. The result is a new array.

    Args:
        x: a NumPy array (also a memmap), a CuPy array, an HDF5 dataset, ...
        indices: int64, in any order.
    """
    count = len(indices)
    first = int(indices[0]) if count else 0
    if count == 0 or (
        int(indices[-1]) - first + 1 == count and bool((np.diff(indices) == 1).all())
    ):
        part = x[first : first + count]
        if backend.is_device_array(part):
            copy: Array = part.copy()
            return copy
        return native(np.array(part))
    if backend.is_device_array(x):
        rows: Array = x[backend.like(x, indices)]
        return rows
    if isinstance(x, np.ndarray):
        return native(np.asarray(x[indices]))
    # HDF5 needs increasing indices, others support only slices: read runs of rows.
    unique, places = np.unique(indices, return_inverse=True)
    breaks = np.flatnonzero(np.diff(unique) != 1) + 1
    runs = np.split(unique, breaks)
    parts = [np.asarray(x[int(run[0]) : int(run[-1]) + 1]) for run in runs]
    return native(np.concatenate(parts)[places])
