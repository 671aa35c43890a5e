"""The global norm of gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.expect import expect
from mpidist._base.types import Array, Nest
from mpidist._values.distributed import is_per_replica
from mpidist.optimizers._arguments import array_functions

# Elements processed at a time: on the host as many as fit into a core's cache, on a GPU
# enough to keep it busy.
HOST_BLOCK: Final = 1 << 15
DEVICE_BLOCK: Final = 1 << 24
_LIMITS: Final = ("clipnorm", "clipvalue", "global_clipnorm")
_NOTHING: Final[Array] = np.empty(0)


def clip_by_global_norm(
    grads: Nest, clip_norm: float, use_norm: Nest = None
) -> tuple[Nest, Nest]:
    """Scale gradients so that their global norm is at most ``clip_norm``.

    The formula is that of ``tf.clip_by_global_norm`` (Pascanu et al. 2013,
    https://arxiv.org/abs/1211.5063, algorithm 1): each gradient times
    ``clip_norm / max(global_norm, clip_norm)``, where ``global_norm`` is the square
    root of the sum of the squares of all elements. If the norm is at most
    ``clip_norm``, nothing changes. If the norm is infinite or NaN, all results are NaN.

    This function does not communicate: pass it gradients that are already reduced, and
    all replicas get the same result. Clipping each replica's own gradients before they
    are summed is a different algorithm, whose result depends on the number of replicas.

    Args:
        grads: a nest of arrays and numbers; None where there is no gradient.
        clip_norm: the maximum norm, greater than 0.
        use_norm: the global norm, if it is known already.

    Returns:
        The nest with new arrays of the same dtypes (float64 for integers; None stays),
        and the norm before clipping: a float64 scalar, computed in float64, on the
        gradients' device; or ``use_norm``.

    Raises:
        TypeError: if a gradient is not an array (a PerReplica is not one), or
            ``use_norm`` not a number.
        ValueError: if ``clip_norm`` is not greater than 0.

    Example::

        grads = {"w": np.array([3.0, 4.0]), "b": None}
        clipped, norm = mpidist.optimizers.clip_by_global_norm(grads, clip_norm=1.0)
        clipped  # {'w': array([0.6, 0.8]), 'b': None}
    """
    call = "clip_by_global_norm"
    clip = backend.as_positive(call, "clip_norm", clip_norm)
    leaves, structure = nest.flatten(grads)
    for leaf in leaves:
        if is_per_replica(leaf):
            raise TypeError(
                f"{call}: got a PerReplica; reduce it first: "
                '`strategy.reduce("SUM", gradients, axis=None)`, or in a replica '
                'function `mpidist.get_replica_context().all_reduce("SUM", gradients)`'
            )
    pairs = [None if x is None else backend.as_array(x, call) for x in leaves]
    with np.errstate(all="ignore"):
        given = [pair[0] for pair in pairs if pair is not None]
        norm = use_norm
        if norm is None:
            real = [abs(x) if x.dtype.kind == "c" else x for x in given]
            norm = global_norm(real, norm_scratch(real))
        number = backend.as_array(norm, f"{call}: `use_norm`")[0]
        fits = number.shape == () and number.dtype.kind != "b"
        expect(fits, call, "`use_norm` to be a number", use_norm)
        scale = clip_scale(number, clip)
        clipped = [
            None if pair is None else backend.as_given(_scaled(pair[0], scale), pair[1])
            for pair in pairs
        ]
    return structure.unflatten(clipped), norm


def check_limits(kind: str, settings: Mapping[str, object]) -> dict[str, float]:
    """Return the limit of gradients among settings that is not None, by its name.

    Raises:
        TypeError, ValueError: if it is not one number greater than 0.
    """
    given = [name for name in _LIMITS if settings[name] is not None]
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name in given)
        raise ValueError(f"{kind}: got {names}; leave out all but one")
    return {name: backend.as_positive(kind, name, settings[name]) for name in given}


def scales_for(
    limits: dict[str, float], arrays: Sequence[Array], scratch: Array
) -> list[Array]:
    """Return the factor of each gradient, by `clipnorm` or `global_clipnorm`.

    Args:
        limits: from `check_limits`.
        arrays: the gradients.
        scratch: from `norm_scratch`.
    """
    limit = limits.get("clipnorm")
    if limit is not None:
        return [clip_scale(global_norm([x], scratch), limit) for x in arrays]
    norm = global_norm(arrays, scratch)
    return [clip_scale(norm, limits["global_clipnorm"])] * len(arrays)


def blocks(x: Array) -> Iterator[slice]:
    """Yield the slices of a flat array to process, one at a time."""
    size = int(x.size)
    step = DEVICE_BLOCK if backend.is_device_array(x) else HOST_BLOCK
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def norm_scratch(arrays: Sequence[Array]) -> Array:
    """Return the scratch memory that `global_norm` of these arrays needs."""
    if not arrays:
        return _NOTHING
    largest = max(arrays, key=lambda x: int(x.size))
    size = max((part.stop - part.start for part in blocks(largest)), default=0)
    return backend.empty_like(largest, (size,), np.float64)


def global_norm(arrays: Sequence[Array], scratch: Array) -> Array:
    """Return the square root of the sum of all squares, in float64.

    The order of the sum depends only on the shapes, so equal arrays give equal bits.
    """
    sums = []
    for x in arrays:
        flat = backend.flat(backend.contiguous(x))
        for part in blocks(flat):
            wide = scratch[: part.stop - part.start]
            wide[...] = flat[part]
            wide *= wide
            sums.append(wide.sum())
    return array_functions.sqrt(sum(sums[1:], sums[0]) if sums else np.float64(0))


def clip_scale(norm: Array, clip_norm: float) -> Array:
    """Return the factor for gradients of this norm; NaN for inf and NaN."""
    if math.isinf(clip_norm):
        return norm - norm + 1.0
    return clip_norm / array_functions.maximum(norm, clip_norm) + (norm - norm)


def _scaled(x: Array, scale: Array) -> Array:
    dtype = backend.as_floating(x.dtype)
    wide = backend.widened(dtype)
    product = array_functions.multiply(x.astype(wide, copy=False), scale.astype(wide))
    return product.astype(dtype, copy=False)
