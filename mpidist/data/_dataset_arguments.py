"""What the methods of `Dataset` accept, and what they say otherwise."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mpidist._base import backend, nest
from mpidist._base.types import Nest
from mpidist.data._blocks import as_leaf
from mpidist.data._stage import INFINITE, Stage, common_spec
from mpidist.data._stage_sources import Declared, Rows, Slices, lists_to_arrays
from mpidist.data._workers import AUTOTUNE, default_workers


def as_count(method: str, name: str, value: object, *, least: int) -> int:
    """Return an int.

    Raises:
        TypeError: if it is none.
        ValueError: if it is less than ``least``.
    """
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


def as_calls(method: str, value: object) -> int:
    """Return the number of threads for ``num_parallel_calls``; 0: none."""
    if value is None:
        return 0
    if value == AUTOTUNE:
        return default_workers()
    return as_count(method, "num_parallel_calls", value, least=1)


def as_function(method: str, name: str, value: object) -> Callable[..., Any]:
    """Return a function.

    Raises:
        TypeError: if it is none.
    """
    if not callable(value):
        raise TypeError(
            f"Dataset.{method}: expected a function as `{name}`, got {value!r:.80}"
        )
    return value


FilePattern: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class ShuffleArguments(NamedTuple):
    """What `Dataset.shuffle` was called with."""

    seed: int
    anew: bool
    buffer_size: int | None


def shuffle_arguments(
    stage: Stage,
    args: tuple[Any, ...],
    buffer_size: int | None,
    seed: int | None,
    anew: bool | None,
) -> ShuffleArguments:
    """Return the arguments of `Dataset.shuffle`: the seed alone, or TensorFlow's.

    Raises:
        TypeError: if there is no seed.
        ValueError: if there is no size, and ``stage`` needs one.
    """
    given: dict[str, Any] = {"size": buffer_size, "seed": seed, "anew": anew}
    if len(args) == 1 and buffer_size is None and seed is None:
        given["seed"] = as_count("shuffle", "seed", args[0], least=0)
    else:
        for name, value in zip(given, args, strict=False):
            if given[name] is not None:
                given["seed"] = None  # given twice, or not given
                break
            given[name] = value
    if given["seed"] is None or len(args) > len(given):
        raise TypeError(
            "Dataset.shuffle: expected a seed, the same on all ranks; write "
            "`shuffle(seed)` or `shuffle(buffer_size, seed=seed)`"
        )
    size = given["size"]
    if size is not None:
        size = as_count("shuffle", "buffer_size", size, least=1)
    if size is None and stage.size >= INFINITE:
        raise ValueError(
            "Dataset.shuffle: this dataset has no end, so there is no order of all "
            "of it; write `shuffle` before `repeat`, or `shuffle(buffer_size, "
            "seed=seed)`"
        )
    if size is None and not stage.indexed:
        raise ValueError(
            "Dataset.shuffle: the elements of this dataset can only be read one "
            "after the other, so they are shuffled in a buffer; write "
            "`shuffle(buffer_size, seed=seed)`"
        )
    seed = as_count("shuffle", "seed", given["seed"], least=0)
    return ShuffleArguments(seed, given["anew"] is not False, size)


def matching_files(file_pattern: FilePattern) -> list[str]:
    """Return the sorted names of the files that match a pattern, or several.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(file_pattern, (str, os.PathLike)):
        file_pattern = [file_pattern]
    patterns = [os.fspath(pattern) for pattern in file_pattern]
    names = {name for pattern in patterns for name in glob.glob(pattern)}
    if not names:
        raise ValueError(f"Dataset.list_files: no file matches {patterns}")
    return sorted(names)


def stage_of_slices(tensors: Nest) -> Stage:
    """Return the stage for the argument of ``from_tensor_slices``.

    Raises:
        TypeError: if it is not a nest of arrays, or an object whose items are rows.
        ValueError: if the first dimensions differ, or there is none.
    """
    name = "Dataset.from_tensor_slices"
    if is_row_source(tensors):
        return Rows(tensors)
    leaves, structure = nest.flatten(lists_to_arrays(tensors))
    arrays = [as_array_like(leaf, name) for leaf in leaves]
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
    return Slices(arrays, structure)


def is_row_source(x: object) -> bool:
    """Whether this is one object whose items are rows."""
    return (
        hasattr(x, "__getitem__")
        and hasattr(x, "__len__")
        and not hasattr(x, "shape")
        and not isinstance(x, (list, tuple, str, bytes))
        and not (hasattr(x, "keys") and hasattr(x, "items"))
    )


def as_array_like(x: Any, call: str) -> Any:
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


def stack_lists(tree: Nest, call: str) -> Nest:
    """Stack the lists in a nest of arrays, as `tf.convert_to_tensor` does."""
    if isinstance(tree, list):
        parts = [as_leaf(stack_lists(part, call), call) for part in tree]
        if not parts:
            return np.asarray(tree)
        return backend.module_of(parts[0]).stack(parts)
    if isinstance(tree, dict):
        return type(tree)({key: stack_lists(part, call) for key, part in tree.items()})
    if isinstance(tree, tuple):
        items = [stack_lists(part, call) for part in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def declared(signature: Nest, types: Nest, shapes: Nest) -> Nest | None:
    """Return the nest of `Declared` for the arguments of ``from_generator``.

    Args:
        signature: a nest of `ArraySpec`, or of anything with a shape and a dtype.
        types: a nest of dtypes, if there is no signature.
        shapes: a nest of shapes like ``types``, or None.

    Raises:
        TypeError: if they are none of these, or given together.
    """
    call = "Dataset.from_generator"
    if signature is None:
        if types is None and shapes is None:
            return None
        if types is None:
            raise TypeError(f"{call}: got `output_shapes` without `output_types`")
        return _of_types(types, shapes)
    if types is not None or shapes is not None:
        raise TypeError(
            f"{call}: got `output_signature` together with `output_types` or "
            "`output_shapes`; write the first only"
        )
    leaves, structure = nest.flatten(signature)
    found = []
    for leaf in leaves:
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            raise TypeError(
                f"{call}: expected `output_signature` to be a nest of "
                f"`mpidist.data.ArraySpec(shape, dtype)`, got {leaf!r:.80} in it"
            )
        shape = None if leaf.shape is None else tuple(leaf.shape)
        found.append(Declared(np.dtype(leaf.dtype), shape))
    return structure.unflatten(found)


def _of_types(types: Nest, shapes: Nest) -> Nest:
    if isinstance(types, dict):
        return type(types)(
            {
                key: _of_types(part, None if shapes is None else shapes[key])
                for key, part in types.items()
            }
        )
    if isinstance(types, (tuple, list)):
        inner = [None] * len(types) if shapes is None else shapes
        return type(types)(_of_types(*both) for both in zip(types, inner, strict=True))
    shape = None if shapes is None else tuple(shapes)
    return Declared(as_dtype("from_generator", types), shape)


def as_dtype(method: str, value: npt.DTypeLike) -> np.dtype[Any]:
    """Return a dtype.

    Raises:
        TypeError: if NumPy has none of this name.
    """
    try:
        return np.dtype(value)
    except TypeError as error:
        raise TypeError(
            f"Dataset.{method}: expected a dtype of NumPy, got {value!r:.60}"
        ) from error


def check_same_spec(first: Nest | None, second: Nest | None) -> None:
    """Check that two datasets can be concatenated, as far as their specs are known.

    Raises:
        TypeError: if their elements differ in structure, dtype or dimensions.
    """
    if first is None or second is None:
        return
    try:
        nest.map_structure(common_spec, first, second)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Dataset.concatenate: expected a dataset with elements like those of this "
            f"one, {first}, got {second}"
        ) from error
