"""The cross-replica verbs: what every rank runs, at program level or on command.

`StrategyExtended` and `Strategy` perform them by name (`_dispatch`).
"""

from __future__ import annotations

import math
import pickle
import types
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist import _arrays, _context, _dispatch, _dtypes, _nest
from mpidist._collectives import Collectives
from mpidist._errors import CollectiveError
from mpidist._options import ReduceOp, as_reduce_op
from mpidist._policies import component_of, differs, is_same
from mpidist._replica import ValueContext, check_arguments
from mpidist._reports import Call, ErrorKind
from mpidist._values import (
    ArrayLike,
    DistributedValues,
    Mirrored,
    PerReplica,
    own_component,
    select_replica,
    to_plain,
)
from mpidist._variables import Variable

if TYPE_CHECKING:
    from mpidist._strategy import Strategy

# Reducing one value that is the same everywhere: these leave it as it is.
_IDEMPOTENT: Final = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)


@_dispatch.verb("call_for_each_replica")
def _call_for_each_replica(strategy: Strategy, fn: Any, args: Any, kwargs: Any) -> Any:
    extended = strategy.extended
    context = extended._replica_context
    call = _end_of_run(getattr(fn, "__qualname__", type(fn).__qualname__))
    guard = extended._collectives.guard
    error: BaseException | None = None
    kind: ErrorKind = "invalid"
    result = None
    structure = ""
    with guard.section():
        try:
            if not callable(fn):
                raise TypeError(f"run: expected `fn` to be a function, got {fn!r}")
            check_arguments("run", args, kwargs)
            for leaf in _nest.flatten((args, kwargs))[0] if args or kwargs else ():
                extended._registry.check("Strategy.run", leaf)
            args, kwargs = select_replica(tuple(args)), select_replica(kwargs)
            kind = "raised"
            frame = _context.Frame(
                strategy, _context.Level.REPLICA, replica_context=context
            )
            with _context.entered(frame):
                result = fn(*args, **kwargs)
            if isinstance(result, (types.GeneratorType, types.CoroutineType)):
                raise TypeError(
                    f"run: {call.text} is a generator or async function, which has not "
                    "begun when it returns; write a plain function"
                )
            structure = str(_nest.flatten(result)[1])
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            error = raised
            if isinstance(error, CollectiveError):
                kind = "agreed"
        error = guard.join(call, error, kind, structure)
    if error is not None:
        raise error
    return extended._registry.wrap_tree(PerReplica, result)


_ends: dict[str, Call] = {}


def _end_of_run(name: str) -> Call:
    call = _ends.get(name)
    if call is None:
        if len(_ends) > 1000:
            _ends.clear()
        call = _ends[name] = Call(f"the end of run({name})")
    return call


@_dispatch.verb("reduce")
def _reduce(strategy: Strategy, reduce_op: Any, value: Any, axis: Any) -> Any:
    collectives = strategy.extended._collectives
    try:
        op = as_reduce_op(reduce_op, "Strategy.reduce")
        leaves, structure = _nest.flatten(value)
        moving = [i for i, x in enumerate(leaves) if differs(x)]
        axes = _as_axes(axis)
        results = list(leaves)
        plain = _plain_of(strategy, leaves)
        for i, leaf in enumerate(leaves):
            strategy.extended._registry.check("Strategy.reduce", leaf)
            if i not in moving:
                results[i] = _reduce_same(strategy, op, leaf, axes, "Strategy.reduce")
        local = [component_of(leaves[i]) for i in moving]
        if axes is not None:
            pairs = [_arrays.as_array(x, "Strategy.reduce") for x in local]
            parts = [_reduce_axes(op, x, axes) for x, _ in pairs]
    except Exception as error:
        collectives.invalid("Strategy.reduce", error)
    if plain:
        collectives.check_plain("Strategy.reduce", plain)
    if axes is None:
        reduced = collectives.all_reduce(op, local, call="Strategy.reduce")
    else:
        reduced = _reduce_parts(collectives, op, parts, pairs)
    for i, x in zip(moving, reduced, strict=True):
        results[i] = x
    return structure.unflatten(results)


def _plain_of(strategy: Strategy, leaves: list[Any]) -> list[Any]:
    """Return the values that each rank has of its own, and that must be the same."""
    return [
        to_plain(own_component(x))
        for x in leaves
        if not differs(x) and not is_same(strategy, x)
    ]


def _reduce_same(
    strategy: Strategy, op: ReduceOp, leaf: Any, axes: Any, call: str
) -> Any:
    """Reduce a value that is no PerReplica: the same on all replicas."""
    if isinstance(leaf, (list, tuple)) or leaf is None:
        raise TypeError(
            f"{call}: expected a PerReplica, got {leaf!r}; pass what `strategy.run` "
            "returned"
        )
    if not strategy.extended._is_mpi and axes is None:
        return own_component(leaf)  # of one replica, which needs no wrapping
    if op not in _IDEMPOTENT:
        raise ValueError(
            f"{call}: A non-DistributedValues value {leaf!r:.80} cannot be reduced "
            f"with the given reduce op ReduceOp.{op.name}. It is not per replica, so "
            "it is not clear how often it counts; pass what `strategy.run` returned, "
            "or make a per-replica value with "
            "`strategy.experimental_distribute_values_from_function`"
        )
    leaf = own_component(leaf)
    if axes is None:
        return leaf
    x, kind = _arrays.as_array(to_plain(leaf), call)
    part, count = _reduce_axes(op, x, axes)
    result = part / count if op is ReduceOp.MEAN else part
    entry = _dtypes.reduction(x.dtype, op, call)
    return (
        _arrays.restore(np.asarray(result, entry.result), kind)
        if kind != ("array")
        else _arrays.like(x, np.asarray(_arrays.to_host(result), entry.result))
    )


def _as_axes(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = axis if isinstance(axis, tuple) else (axis,)
    for one in axes:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            raise TypeError(
                "Strategy.reduce: expected `axis` to be an int, a tuple of ints or "
                f"None, got {axis!r}"
            )
    return tuple(int(one) for one in axes)


def _reduce_axes(op: ReduceOp, x: Any, axes: tuple[int, ...]) -> tuple[Any, int]:
    """Reduce one replica's array over its axes; return it and what was counted."""
    entry = _dtypes.reduction(x.dtype, op, "Strategy.reduce")
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"Strategy.reduce: expected -{x.ndim} <= axis < {x.ndim} for "
                f"{_arrays.describe(x)}, got axis={axis}"
            )
    xp = _arrays.module_of(x)
    count = math.prod(x.shape[axis] for axis in axes)
    if op is ReduceOp.PROD:
        return xp.prod(x, axis=axes, dtype=entry.compute), count
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return xp.sum(x, axis=axes, dtype=entry.compute), count
    if count == 0:
        kept = [n for k, n in enumerate(x.shape) if k not in _positive(axes, x.ndim)]
        return xp.full(kept, _identity(op, x.dtype), x.dtype), 0
    return (xp.min if op is ReduceOp.MIN else xp.max)(x, axis=axes), count


def _positive(axes: tuple[int, ...], ndim: int) -> set[int]:
    return {axis % ndim for axis in axes}


def _identity(op: ReduceOp, dtype: Any) -> Any:
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return np.inf if op is ReduceOp.MIN else -np.inf


def _reduce_parts(
    collectives: Collectives, op: ReduceOp, parts: list[Any], pairs: list[Any]
) -> list[Any]:
    """Reduce what each replica made of its own rows, and what it counted."""
    how = ReduceOp.SUM if op is ReduceOp.MEAN else op
    call = f"Strategy.reduce {op.name} over axes"
    arrays = [x for x, _ in parts]
    counts = np.array([n for _, n in parts], np.int64)
    if how is ReduceOp.SUM:
        arrays, totals = collectives.all_reduce(how, (arrays, counts), call=call)
    else:
        totals = collectives.all_reduce(ReduceOp.SUM, counts, call=call)
        arrays = collectives.all_reduce(how, arrays, call=call)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and not all(totals):
        raise ValueError(
            f"Strategy.reduce: {op.name} over an axis that has no elements on any "
            "replica"
        )
    results = []
    for reduced, total, (x, _) in zip(arrays, totals, pairs, strict=True):
        entry = _dtypes.reduction(x.dtype, op, "Strategy.reduce")
        if op is ReduceOp.MEAN:
            with np.errstate(invalid="ignore", divide="ignore"):
                reduced = np.true_divide(reduced, entry.compute.type(total))
        results.append(reduced.astype(entry.result, copy=False))
    return results


@_dispatch.verb("reduce_to")
def _reduce_to(
    strategy: Strategy, reduce_op: Any, value: Any, destinations: Any, options: Any
) -> Any:
    return _reduce_pairs(
        strategy, reduce_op, [(value, destinations)], options, "reduce_to"
    )[0]


@_dispatch.verb("batch_reduce_to")
def _batch_reduce_to(
    strategy: Strategy, reduce_op: Any, pairs: Any, options: Any
) -> list[Any]:
    return _reduce_pairs(strategy, reduce_op, pairs, options, "batch_reduce_to")


def _reduce_pairs(
    strategy: Strategy, reduce_op: Any, pairs: Any, options: Any, call: str
) -> list[Any]:
    extended = strategy.extended
    try:
        op = as_reduce_op(reduce_op, call)
        values = []
        for pair in _check_pairs(pairs, call):
            values.append(pair[0])
            _check_destinations(strategy, pair[1], call)
        leaves, structure = _nest.flatten(values)
        results = list(leaves)
        moving = [i for i, x in enumerate(leaves) if differs(x)]
        for i, leaf in enumerate(leaves):
            if i not in moving and not (
                op in _IDEMPOTENT and isinstance(leaf, (Mirrored, Variable))
            ):
                results[i] = _reduce_same(strategy, op, leaf, None, call)
        local = [component_of(leaves[i]) for i in moving]
        plain = _plain_of(strategy, leaves)
        for leaf in leaves:
            extended._registry.check(call, leaf)
    except Exception as error:
        extended._collectives.invalid(call, error)
    if plain:
        extended._collectives.check_plain(call, plain)
    reduced = extended._collectives.all_reduce(op, local, options, call=call)
    wrapped = extended._registry.wrap_tree(Mirrored, reduced)
    for i, x in zip(moving, wrapped, strict=True):
        results[i] = x
    listed: list[Any] = structure.unflatten(results)
    return listed


def _check_pairs(pairs: Any, call: str) -> list[tuple[Any, Any]]:
    if isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        return [(pair[0], pair[1]) for pair in pairs]
    raise ValueError(
        f"{call}: expected `value_destination_pairs` to be a list of (value, "
        f"destinations) tuples, got {pairs!r:.200}"
    )


def _check_destinations(strategy: Strategy, destinations: Any, call: str) -> None:
    if isinstance(destinations, Variable):
        strategy.extended._check_owner(call, destinations)
        return
    if isinstance(destinations, (DistributedValues, ArrayLike)):
        return
    if _arrays.is_array(destinations):
        return
    if isinstance(destinations, str) and destinations in strategy.extended._devices:
        return
    raise ValueError(
        f"{call}: destinations must be a `mpidist.Variable`, a distributed value, an "
        f"array or one of {strategy.extended._devices}, got {destinations!r:.80}"
    )


@_dispatch.verb("broadcast_to")
def _broadcast_to(strategy: Strategy, marked: Any, destinations: Any) -> Any:
    extended = strategy.extended
    collectives = extended._collectives

    def make() -> list[Any]:
        value = marked.value
        _check_destinations(strategy, destinations, "broadcast_to")
        if isinstance(value, PerReplica):
            raise TypeError(
                "broadcast_to: got a PerReplica, which is not one value; write "
                "`strategy.extended.reduce_to(op, value, destinations)`"
            )
        if isinstance(value, (bool, int, float, complex)):
            return [value, True]
        # A copy: what happens to the array afterwards must not show on one rank.
        return [_arrays.as_array(to_plain(value), "broadcast_to")[0].copy(), False]

    value, is_number = collectives.share(make, "broadcast_to")
    if is_number:
        return value
    return extended._registry.wrap_tree(Mirrored, value)


@_dispatch.verb("gather")
def _gather(strategy: Strategy, value: Any, axis: Any) -> Any:
    collectives = strategy.extended._collectives
    try:
        strategy.extended._registry.check("Strategy.gather", value)
    except RuntimeError as error:
        collectives.invalid("Strategy.gather", error)
    if differs(value):
        own = component_of(value)
        return collectives.all_gather(own, axis, call="Strategy.gather")
    try:
        if isinstance(value, (list, tuple, dict)):
            raise TypeError(
                f"Strategy.gather: expected one PerReplica or array, got a "
                f"{type(value).__name__}; gather its parts one by one, or write "
                "`all_gather` in the replica function, which takes nests"
            )
        # Not per replica: returned as it is, not n times (as in TensorFlow).
        plain = own_component(value)
        _arrays.as_array(to_plain(plain), "Strategy.gather")
    except Exception as error:
        collectives.invalid("Strategy.gather", error)
    if is_same(strategy, value):
        collectives.guard.agree(Call("Strategy.gather of a value that is the same"))
    else:
        collectives.check_plain("Strategy.gather", [to_plain(plain)])
    return plain


@_dispatch.verb("update")
def _update(
    strategy: Strategy,
    var: Variable,
    fn: Any,
    args: Any,
    kwargs: Any,
    group: bool,
    text: str,
) -> Any:
    extended = strategy.extended
    guard = extended._collectives.guard
    written: list[Any] = []
    raised: BaseException | None = None
    kind: ErrorKind = "invalid"
    result = None
    summary = ""
    with guard.section():
        try:
            _check_update(fn, args, kwargs)
            summary = _summarize_arguments(args, kwargs) if guard.checks else ""
            kind = "raised"
            frame = _context.Frame(strategy, _context.Level.UPDATE, written=written)
            with _context.entered(frame):
                result = fn(
                    var, *select_replica(tuple(args)), **select_replica(dict(kwargs))
                )
            summary += str(_nest.flatten(result)[1])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raised = error
        failure = guard.join(Call(text), raised, kind, summary)
        if failure is not None:
            _make_equal(strategy, written)
    if failure is not None:
        raise failure
    return extended._registry.wrap_tree(Mirrored if group else PerReplica, result)


@_dispatch.verb("fail to update")
def _fail_to_update(strategy: Strategy, error: BaseException, text: str) -> None:
    """Take part in an update whose function did not arrive at this rank."""
    guard = strategy.extended._collectives.guard
    with guard.section():
        failure = guard.join(Call(text), error, "invalid")
        _make_equal(strategy, [])
    raise failure or error


def _check_update(fn: Any, args: Any, kwargs: Any) -> None:
    check_arguments("update", args, kwargs)
    if not callable(fn):
        raise TypeError(f"update: expected `fn` to be a function, got {fn!r}")
    for leaf in _nest.flatten((args, kwargs))[0]:
        if isinstance(leaf, PerReplica):
            raise ValueError(
                "update: got a PerReplica among the arguments, which would make "
                "the copies of the variable differ; reduce it first: "
                "`strategy.extended.reduce_to(op, value, var)`"
            )


def _summarize_arguments(args: Any, kwargs: Any) -> str:
    """Return a text of the plain arguments, which must be the same on all ranks."""
    leaves = [
        _arrays.summarize(_arrays.as_array(leaf, "update")[0])
        for leaf in _nest.flatten((tuple(args), kwargs))[0]
        if _arrays.is_array(leaf) or _arrays.is_number(leaf)
    ]
    return f"arguments {', '.join(leaves)}; result " if leaves else ""


def _make_equal(strategy: Strategy, written: list[Any]) -> None:
    """Give all ranks rank 0's copy of what an update wrote before it failed."""
    collectives = strategy.extended._collectives
    registry = strategy.extended._registry
    guard = collectives.guard
    if not guard.checks or guard.broken or guard.deserted:
        return
    mine = pickle.dumps(sorted({variable._key for variable in written}))
    keys = sorted(
        {k for d in collectives.comm.all_gather_objects(mine) for k in pickle.loads(d)}
    )
    variables = [registry.get(key) for key in keys]
    known = collectives.comm.all_gather_integers(
        [int(v is not None) for v in variables]
    )
    for index, variable in enumerate(variables):
        if all(row[index] for row in known):
            transport = collectives.transports.of(variable._array)
            transport.broadcast(_arrays.as_bytes(variable._array), 0)


@_dispatch.verb("distribute_values")
def _distribute_values(strategy: Strategy, value_fn: Any) -> Any:
    extended = strategy.extended
    context = ValueContext(extended._replica_id, extended._num_replicas)
    call = Call("experimental_distribute_values_from_function")
    guard = extended._collectives.guard
    raised: BaseException | None = None
    value = None
    structure = ""
    with guard.section():
        try:
            value = value_fn(context)
            structure = str(_nest.flatten(value)[1])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raised = error
        failure = guard.join(call, raised, "raised", structure)
    if failure is not None:
        raise failure
    registry = extended._registry
    leaves, shape = _nest.flatten(value)
    number = registry.next_key()
    return shape.unflatten(
        [registry.wrap(PerReplica, x, (number, i)) for i, x in enumerate(leaves)]
    )
