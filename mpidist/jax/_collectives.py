"""Reductions of pytrees, and gradients that are reduced.

Variables and Mirrored values are pytrees, too: one array, a copy of theirs.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import nest, reporting, threads
from mpidist._base.cache import Cache
from mpidist._base.errors import on_rank, warn_caller
from mpidist._base.expect import expect
from mpidist._base.names import unique
from mpidist._base.reduce_op import ReduceOp, as_reduce_op
from mpidist._base.remedies import explain_keywords
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.current import check_root, group_of_call
from mpidist._strategy.strategy import Strategy
from mpidist._values.array_like import ArrayLike
from mpidist._values.consistency import Steps
from mpidist._values.distributed import Mirrored
from mpidist._values.variable import Variable

PyTree: TypeAlias = Any
"""Arrays and numbers in any containers that JAX knows."""

_MOST_STRUCTURES: Final = 256
_ADVICE: Final = "`parameters = mpidist.jax.broadcast(parameters)`"
_MANY: Final = 5
# How many functions of this code were called, since one was called twice.
_made: Final = threads.ReplicaLocal[collections.Counter[Any]](collections.Counter)
_names: Final[Cache[Any, list[str]]] = Cache(_MOST_STRUCTURES)


def all_reduce(
    tree: PyTree,
    op: ReduceOp | str = ReduceOp.MEAN,
    *,
    strategy: Strategy | None = None,
) -> PyTree:
    """Reduce the leaves of a pytree over the ranks, in one call. Collective.

    `ReplicaContext.all_reduce` does the same for lists, tuples and dicts. This takes
    any pytree, such as the modules of Equinox or the state of an optax optimizer, also
    at program level.

    Args:
        tree: arrays and numbers, with the same structure, shapes and dtypes on all
            ranks. None is not a leaf in JAX, and stays None.
        op: a `ReduceOp` or its name.
        strategy: the ranks; default: the current strategy.

    Returns:
        The same pytree with the results, the same on all ranks, bit for bit.

    Raises:
        TypeError: if a leaf is not an array, or is a tracer: inside a function that JAX
            transforms.
        CollectiveMismatchError: if structures, shapes or dtypes differ between ranks.
        RuntimeError: if no strategy is active.

    Example, on two replicas::

        tree = {"a": jax.numpy.ones(2)}
        total = mpidist.jax.all_reduce(tree, "SUM", strategy=strategy)
        total["a"].tolist()  # [2.0, 2.0]
    """
    call = "mpidist.jax.all_reduce"
    group = group_of_call(strategy, call)
    return _all_reduce(tree, op, group, call, group.all_reduce)


@explain_keywords("mpidist.jax.broadcast")
def broadcast(
    tree: PyTree, root: int = 0, *, strategy: Strategy | None = None
) -> PyTree:
    """Return the leaves of one rank on all ranks. Collective.

    Once, before training: for parameters whose initial values differ between ranks.

    Args:
        tree: arrays and numbers, with the same structure, shapes and dtypes on all
            ranks.
        root: the rank whose values are copied.
        strategy: the ranks; default: the current strategy.

    Returns:
        The same pytree with the values of the root.

    Raises:
        TypeError, ValueError: for other arguments.
        CollectiveMismatchError: if structures, shapes or dtypes differ between ranks.
        RuntimeError: if no strategy is active.
    """
    call = "mpidist.jax.broadcast"
    group = group_of_call(strategy, call)
    with group.guard.checking(call):
        check_root(root, group, call)
        leaves, structure = _flatten(tree)
    received = group.collectives.broadcast(leaves, root, call=f"{call} from {root}")
    return structure.unflatten([received[name] for name in leaves])


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: ReduceOp | str = ReduceOp.MEAN,
    jit: bool = True,
    strategy: Strategy | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad` of a loss, reduced over the ranks.

    Each rank computes loss and gradients of its own rows; one all-reduce makes them
    those of all rows. The returned function is collective, and cannot be transformed by
    JAX itself.

    Args:
        fun: the loss: a function of pytrees that returns a scalar.
        argnums: the arguments to differentiate by, as in JAX.
        has_aux: whether ``fun`` returns ``(loss, aux)``. The aux is this rank's own.
        op: MEAN if the loss is a mean over this rank's rows; SUM if it is this rank's
            share of the mean over all rows, as `mpidist.compute_average_loss` returns
            it for a ``global_batch_size``, which also holds for uneven batches. With
            MEAN a rank without rows whose loss is NaN gives a RuntimeWarning.
        jit: whether to compile the function before the reduction.
        strategy: the ranks; default: the current strategy, at each call.

    Returns:
        A function of the arguments of ``fun`` that returns ``(loss, gradients)``, or
        ``((loss, aux), gradients)``. Its first call compares the arguments that it
        differentiates by, and raises OutOfSyncError if they differ between ranks.

    Raises:
        TypeError: if ``fun`` is not a function.
        ValueError: if the operation is unknown.

    Example, on two replicas::

        def loss(w, x):
            return ((x @ w) ** 2).mean()


        step = mpidist.jax.value_and_grad(loss, strategy=strategy)
        x = jax.numpy.full((4, 2), strategy.replica_id)  # its own rows of each rank
        value, gradient = step(jax.numpy.ones(2), x)
        float(value), gradient.tolist()  # (2.0, [2.0, 2.0])
    """
    call = "mpidist.jax.value_and_grad"
    expect(callable(fun), call, "`fun` to be a function", fun)
    checked = as_reduce_op(op, call)
    local = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux)
    if jit:
        local = jax.jit(local)

    # Threads that are replicas may share this function.
    of_groups = weakref.WeakKeyDictionary[ReplicaGroup, Steps]()

    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        group = group_of_call(strategy, call)
        steps = of_groups.setdefault(group, Steps())

        def named() -> dict[str, Any]:
            count = len(args)  # JAX says what is wrong with other numbers
            numbers = [n for n in np.atleast_1d(argnums) if -count <= n < count]
            with group.guard.checking(call):
                return _flatten([args[n] for n in numbers])[0]

        steps.begin(group, named, call, _ADVICE)
        if jit and steps.number <= 2:
            _warn_of_functions(group, fun, call, steps.number == 1)
        try:
            value, gradients = local(*args, **kwargs)
        except Exception as error:
            told = Call(f"{call}, the function")
            raise group.guard.fail(told, error, "raised") from error.__cause__
        with group.guard.checking(call):
            loss, aux = value if has_aux else (value, None)
            if checked is ReduceOp.MEAN:
                _warn_of_no_rows(group, (args, kwargs), loss, call)
        by = f"gradients by argument {argnums}"  # which all ranks compare
        tree = {"loss": loss, by: gradients}
        tree = _all_reduce(tree, checked, group, call, group.all_reduce_of(steps))
        loss, gradients = tree["loss"], tree[by]
        return ((loss, aux) if has_aux else loss), gradients

    return reduced


def _warn_of_no_rows(group: ReplicaGroup, tree: PyTree, loss: Any, call: str) -> None:
    leaves = jax.tree_util.tree_leaves(tree)
    if any(np.shape(leaf)[:1] == (0,) for leaf in leaves) and np.isnan(loss):
        text = (
            f"{call}: the loss is NaN on this rank, which has no rows, and so is the "
            'MEAN of all ranks; write `op="SUM"`, and in the loss `losses.sum() / n`, '
            "with the number of rows of all ranks (`mpidist docs sum_or_mean`)"
        )
        warn_caller(on_rank(group.replica_id, text))


def _warn_of_functions(group: ReplicaGroup, fun: Any, call: str, first: bool) -> None:
    """Warn of functions that the program defines again and again, to call them once."""
    code = getattr(fun, "__code__", None)
    made = _made.get()
    made[code] = made[code] + 1 if first else 0
    if code is not None and made[code] == _MANY and group.replica_id == 0:
        reporting.warn(
            f"mpidist: {call}: {fun.__qualname__} was defined {_MANY} times, and is "
            "compiled each time. Call value_and_grad once, before the loop, with a "
            "function of the parameters and the batch; or write `jit=False`"
        )


def _all_reduce(
    tree: PyTree, op: ReduceOp | str, group: ReplicaGroup, call: str, reduce: Any
) -> PyTree:
    with group.guard.checking(call):
        checked = as_reduce_op(op, call)
        leaves, structure = _flatten(tree)
    results = reduce(checked, leaves, None, call)
    return structure.unflatten([results[name] for name in leaves])


def _flatten(tree: PyTree) -> tuple[dict[str, Any], Any]:
    """Return the leaves by their names, for messages; and JAX's structure."""
    try:
        leaves, structure = jax.tree_util.tree_flatten(tree)
    except SystemError as error:  # as of a RecursionError in nanobind
        raise nest.endless(tree) from error.__cause__
    names = _names.get(structure)
    if names is None:
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        names = unique(jax.tree_util.keystr(path) for path, _ in paths)
        _names[structure] = names
    return dict(zip(names, leaves, strict=True)), structure


# --- variables as pytrees --------------------------------------------------


def _copy_of(x: ArrayLike) -> tuple[tuple[Any], None]:
    # A copy: arrays of JAX must not change, and a variable does.
    return (jax.numpy.array(x),), None


def _only(_: None, children: Iterable[Any]) -> Any:
    (child,) = children
    return child  # a gradient or a traced value: an array, not a variable


for _kind in (Variable, Mirrored):
    jax.tree_util.register_pytree_node(_kind, _copy_of, _only)
