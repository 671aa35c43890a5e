"""What the methods of `Dataset` accept, and what they say otherwise."""

from __future__ import annotations

import glob
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from mpidist._base import nest
from mpidist._base.types import Nest
from mpidist.data._ahead import AUTOTUNE, default_workers
from mpidist.data._options import UNKNOWN_CARDINALITY
from mpidist.data._rows import common_spec
from mpidist.data._stage import INFINITE, Stage

FilePattern: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def as_count(method: str, name: str, value: Any, *, least: int) -> int:
    """Return an int, given one, or a 0-d array of one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"Dataset.{method}: expected `{name}` to be an int, got {value!r} of type "
            f"{type(value).__name__}"
        ) from None
    if number < least:
        raise ValueError(
            f"Dataset.{method}: expected `{name}` to be {least} or more, got {number}"
        )
    return number


def as_calls(method: str, value: object) -> int:
    """Return the number of threads for ``num_parallel_calls``; 0: none."""
    if value is None:
        return 0
    if value == AUTOTUNE:
        return default_workers()
    return as_count(method, "num_parallel_calls", value, least=1)


def as_function(method: str, name: str, value: object) -> Callable[..., Any]:
    """Return a function."""
    if not callable(value):
        raise TypeError(
            f"Dataset.{method}: expected a function as `{name}`, got {value!r:.80}"
        )
    return value


def shuffle_size(stage: Stage, buffer_size: Any, seed: Any) -> int | None:
    """Return the size of the buffer of `Dataset.shuffle`; None: for all elements."""
    if buffer_size is None and seed is None:
        raise TypeError(
            "Dataset.shuffle: expected a size or a seed; write `shuffle(seed=1)` for "
            "an order of all elements, or as in tf.data `shuffle(buffer_size)`"
        )
    if buffer_size is not None and buffer_size != UNKNOWN_CARDINALITY:
        return as_count("shuffle", "buffer_size", buffer_size, least=1)
    if stage.size >= INFINITE:
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
    return None


def matching_files(file_pattern: FilePattern) -> list[str]:
    """Return the sorted names of the files that match a pattern, or several."""
    if isinstance(file_pattern, (str, os.PathLike)):
        file_pattern = [file_pattern]
    patterns = [os.fspath(pattern) for pattern in file_pattern]
    names = {name for pattern in patterns for name in glob.glob(pattern)}
    if not names:
        raise ValueError(f"Dataset.list_files: no file matches {patterns}")
    return sorted(names)


def check_same_spec(first: Nest | None, second: Nest | None) -> None:
    """Check that two datasets can be concatenated, as far as their specs are known."""
    if first is None or second is None:
        return
    try:
        nest.map_structure(common_spec, first, second)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Dataset.concatenate: expected a dataset with elements like those of this "
            f"one, {first}, got {second}"
        ) from error
