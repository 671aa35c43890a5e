"""Variables and Mirrored values as pytrees of JAX: one array, a copy of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from mpidist._values.array_like import ArrayLike
from mpidist._values.distributed import Mirrored
from mpidist._values.variable import Variable


def _flatten(x: ArrayLike) -> tuple[tuple[Any], None]:
    # A copy: arrays of JAX must not change, and a variable does.
    return (jax.numpy.array(x),), None


def _unflatten(_: None, children: Iterable[Any]) -> Any:
    (child,) = children
    return child  # a gradient or a traced value: an array, not a variable


for _kind in (Variable, Mirrored):
    jax.tree_util.register_pytree_node(_kind, _flatten, _unflatten)
