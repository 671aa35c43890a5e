"""A replica's share of a loss: its sum over rows, divided by the step's row count.

One rule holds everywhere: gradients are SUMMED over the replicas, and each replica
divides its loss by the number of rows of the whole step.
"""

from __future__ import annotations

import contextlib
from typing import Any, SupportsIndex

import numpy as np

from mpidist._base import backend, guests, nest
from mpidist._base.expect import as_int, as_row_weights, expect
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, Nest
from mpidist._runtime import context, dispatch
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import component
from mpidist._strategy.contexts import warn_of_own_value
from mpidist._values.distributed import PerReplica, is_per_replica

_SIZE = "global_batch_size"
_LOSS = "compute_average_loss"
_PENALTY = "scale_regularization_loss"
_WRITE = "write `mpidist.global_batch_size(batch)`, or None to compute it"


def global_batch_size(batch: Nest) -> int:
    """Return the total number of rows of all replicas in this step.

    Collective: one header and one Allreduce of 8 bytes. In a replica function every
    replica passes its own part; in cross-replica context all ranks pass the same
    PerReplica (inside ``merge_fn`` rank 0 does). Replicas may have different numbers of
    rows, or none.

    Args:
        batch: an array with one row per example, or a nest of such arrays with the same
            number of rows. In cross-replica context a PerReplica, or a nest of them.

    Returns:
        The sum of the replicas' numbers of rows; 0 if no replica has any.

    Raises:
        TypeError: if the batch has no row dimension or, in cross-replica context, is
            not per replica.
        ValueError: if the nest has no arrays, or they have different numbers of rows.
        RuntimeError: inside the function of ``update``.

    Example, on two replicas::

        def replica_fn():
            rows = np.zeros((1 + strategy.replica_id, 5))  # replica 1 has two rows
            return mpidist.global_batch_size(rows)  # 3


        strategy.run(replica_fn)
    """
    frame = context.current()
    if frame.level is context.Level.UPDATE:
        raise RuntimeError(
            f"{_SIZE}: this code runs {frame.level.value}, which does not communicate; "
            "call it before the `update`, and pass the number as an argument"
        )
    if frame.level is context.Level.REPLICA:
        return _sum_of_rows(frame.group, batch)
    return dispatch.perform(frame.group, _SIZE, batch)


@dispatch.operation(_SIZE)
def _global_batch_size(group: ReplicaGroup, batch: Nest) -> int:
    with group.guard.checking(_SIZE):
        leaves, structure = nest.flatten(batch)
        for leaf in leaves:
            if not isinstance(leaf, PerReplica):
                raise TypeError(
                    f"{_SIZE}: expected a PerReplica in cross-replica context, got a "
                    f"{type(leaf).__name__}, which could be the rows of one replica or "
                    "of all; pass the arguments of `strategy.run`, or call "
                    f"`mpidist.{_SIZE}` in the replica function"
                )
            group.registry.check(_SIZE, leaf)
        own = structure.unflatten([component(leaf) for leaf in leaves])
    return _sum_of_rows(group, own)


def _sum_of_rows(group: ReplicaGroup, batch: Nest) -> int:
    collectives = group.collectives
    with collectives.guard.checking(_SIZE):
        rows = _rows_of(batch, group)
    if not group.is_mpi:
        warn_of_own_value(_SIZE)
    return collectives.all_reduce(ReduceOp.SUM, rows, call=_SIZE)


def _rows_of(batch: Nest, group: ReplicaGroup) -> int:
    """Return the length of the first axis, which all arrays of the nest share."""
    rows: dict[int, str] = {}
    for leaf in nest.flatten(batch)[0]:
        group.registry.check(_SIZE, leaf)
        x, _ = backend.as_array(leaf, _SIZE)
        if x.ndim == 0:
            raise TypeError(
                f"{_SIZE}: expected arrays with one row per example, got "
                f"{backend.describe(x)}, which has no rows; pass the inputs or the "
                "labels of the step"
            )
        rows.setdefault(int(x.shape[0]), backend.describe(x))
    if not rows:
        raise ValueError(f"{_SIZE}: expected at least one array, got {batch!r:.80}")
    if len(rows) > 1:
        raise ValueError(
            f"{_SIZE}: expected arrays with the same number of rows, got "
            f"{' and '.join(rows.values())}; pass only those with one row per example"
        )
    return next(iter(rows))


def compute_average_loss(
    per_example_loss: Nest,
    sample_weight: Nest = None,
    global_batch_size: SupportsIndex | None = None,
) -> Nest:
    """Return this replica's share of the mean loss over all rows of the step.

    That is ``sum(per_example_loss * sample_weight) / global_batch_size``. The shares
    of all replicas add up to the loss of the whole batch, and their gradients to its
    gradient, whatever rows each replica has: reduce both with SUM, as
    `mpidist.optimizers` does. For replica functions, and outside every scope.

    Collective, unless ``global_batch_size`` is given: one header and one Allreduce of
    8 bytes determine the number of rows. (``tf.nn.compute_average_loss`` uses this
    replica's number of rows times the number of replicas instead, which is wrong for an
    uneven batch.)

    Args:
        per_example_loss: an array or list with one row per example, on this replica;
            any further axes are summed too, but the divisor is only the number of rows.
        sample_weight: None, a number, or an array or list of the shape of the losses,
            or of their leading axes. The divisor is still the number of rows.
        global_batch_size: the rows of all replicas, from
            `mpidist.global_batch_size`; the same on all replicas. None: it is computed.

    Returns:
        A scalar of the dtype of the loss (float64 for integers), on its device. It is 0
        if ``global_batch_size`` is, or no replica has any rows. For losses of torch and
        JAX one of the same library, with its gradient, by its rules for dtypes; in a
        function that JAX transforms pass ``global_batch_size``.

    Raises:
        TypeError, ValueError: for invalid arguments.
        RuntimeError: in cross-replica context.

    Example, on two replicas::

        def replica_fn():
            rows = np.full(1 + strategy.replica_id, 3.0)  # replica 1 has two rows
            return mpidist.compute_average_loss(rows)


        losses = strategy.run(replica_fn)
        strategy.reduce("SUM", losses, axis=None)  # np.float64(3.0)
    """
    frame = context.current()
    if frame.level is not context.Level.REPLICA:
        raise RuntimeError(
            f"{_LOSS}: this code runs {frame.level.value}, but the losses are those of "
            "one replica; call it in the function that you pass to `strategy.run`, and "
            'add up the shares with `strategy.reduce("SUM", losses, axis=None)`'
        )
    group, ask = frame.group, global_batch_size is None
    losses, total = per_example_loss, 0
    is_guest = guests.kind_of(losses) is not None
    with dispatch.checking(group, _LOSS) if ask else contextlib.nullcontext():
        if not is_guest:
            losses = backend.as_array(_listed(losses, _LOSS), _LOSS)[0]
            if losses.dtype.kind in "iu":  # whose products with weights overflow
                losses = losses.astype(np.float64)
        if losses.ndim == 0:
            raise ValueError(
                f"{_LOSS}: expected one loss per example, got {losses.dtype} (); leave "
                "out the mean over the examples"
            )
        if backend.is_number(sample_weight):  # it does not change the dtype
            losses = losses * np.asarray(sample_weight).item()  # not of NumPy's types
        elif sample_weight is not None:
            cast = not is_guest and backend.number_kind(losses.dtype) == "f"
            losses = losses * row_factors(sample_weight, losses, _LOSS, cast)
        if not ask:
            total = as_int(_LOSS, _SIZE, global_batch_size, least=0, hint=_WRITE)
    if ask:
        total = _sum_of_rows(group, losses)
    if is_guest:  # by functions of its library, also of no rows: the 0 has a gradient
        return losses.sum() / total if total else losses[:0].sum()
    return _share(losses, total)


def _share(losses: Array, divisor: int) -> Nest:
    """Return a sum divided by a number, in the dtype of the losses or float64.

    Of no rows it is 0.
    """
    losses, divisor = (losses, divisor) if divisor else (losses[:0], 1)
    result = backend.as_floating(losses.dtype)
    share = losses.sum(dtype=backend.widened(result))
    return (share / divisor).astype(result)


def scale_regularization_loss(regularization_loss: Nest) -> Nest:
    """Return this replica's share of a loss that all replicas compute alike.

    That is the loss divided by the number of replicas, for penalties on variables: the
    shares of all replicas add up to the loss. Not collective. For replica functions,
    and outside every scope. In TensorFlow ``tf.nn.scale_regularization_loss``.

    Args:
        regularization_loss: an array, list or number, the same on all replicas.

    Returns:
        The array, or its sum if it has axes, divided by the number of replicas; of the
        dtype of the loss (float64 for integers). For a loss of torch or JAX one of the
        same library, with its gradient, by its rules for dtypes.

    Raises:
        TypeError: if it is not an array.
        RuntimeError: in cross-replica context.
    """
    frame = context.current()
    if frame.level is not context.Level.REPLICA:
        raise RuntimeError(
            f"{_PENALTY}: this code runs {frame.level.value}, but the loss is that of "
            "one replica; call it in the function that you pass to `strategy.run`"
        )
    replicas, loss = frame.group.num_replicas, regularization_loss
    if guests.kind_of(loss) is not None:
        return loss.sum() / replicas
    return _share(backend.as_array(_listed(loss, _PENALTY), _PENALTY)[0], replicas)


def own_array(x: Nest, call: str) -> Any:
    """Return an array of NumPy or CuPy."""
    what = "an array, as each replica has one"
    hint = "call it in the function that you pass to `strategy.run`"
    expect(not is_per_replica(x), call, what, x, hint)
    return backend.as_array(backend.of_lists(x, call), call)[0]


def like(x: Nest, other: Any, call: str, cast: bool = True) -> Any:
    """Return an array in the library, on the device and in the dtype of another."""
    kind = guests.kind_of(other)
    if kind is None or guests.kind_of(x) != kind:
        x = own_array(x, call)
        if kind is None:
            expect_real(x, call)
            x = backend.like(other, x) if isinstance(x, np.ndarray) else x
            return x.astype(other.dtype) if cast else x
        x = guests.restore(x.copy(), kind)
    expect_real(x, call)
    if kind == "torch":
        return x.to(other if cast else other.device)
    return x.astype(other.dtype) if cast else x


def expect_real(x: Any, call: str) -> None:
    """Raise a TypeError if an array of any library has complex numbers."""
    expect("complex" not in str(x.dtype), call, "real numbers", x)


def row_factors(sample_weight: Nest, losses: Any, call: str, cast: bool = True) -> Any:
    """Return weights of rows in the library of the losses, with as many axes.

    Raises:
        TypeError, ValueError: if they are not numbers, or of another shape.
    """
    weights = like(sample_weight, losses, call, cast)
    return as_row_weights(call, weights, tuple(losses.shape))


def _listed(x: Nest, call: str) -> Nest:
    """Return a list of numbers as an array; anything else unchanged."""
    listed = isinstance(x, (list, tuple))
    if listed and any(guests.kind_of(leaf) is not None for leaf in nest.flatten(x)[0]):
        raise TypeError(
            f"{call}: got a list of torch tensors or JAX arrays; write "
            "`torch.stack(losses)` or `jax.numpy.stack(losses)`"
        )
    return backend.of_lists(x, call)
