"""The examples of tf.distribute's API pages, translated to NumPy.

Each docstring names the page. What the pages show for two replicas is written for n.
"""

import numpy as np
import pytest
from replicas import from_replicas, own

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]

SUM = mpidist.ReduceOp.SUM
MEAN = mpidist.ReduceOp.MEAN


def copies(strategy, variable):
    """Return the copy of each replica, stacked, on every rank."""
    return strategy.gather(strategy.run(lambda: variable.numpy()[None]), axis=0)


# --- ValueContext ---------------------------------------------------------------------


def test_value_context_made_directly():
    """ValueContext (r2.3): made by hand, with both numbers."""
    context = mpidist.experimental.ValueContext(
        replica_id_in_sync_group=2, num_replicas_in_sync=4
    )
    assert context.replica_id_in_sync_group == 2
    assert context.num_replicas_in_sync == 4
    assert "replica id 2" in str(context)
    assert "total replicas in sync: 4" in str(context)
    default = mpidist.experimental.ValueContext()
    assert (default.replica_id_in_sync_group, default.num_replicas_in_sync) == (0, 1)
    with pytest.raises(AttributeError):
        context.num_replicas_in_sync = 5


def test_value_context_passed_to_a_function(strategy, size):
    """ValueContext (r2.3): ``value_fn`` returns ``num_replicas_in_sync``."""

    def value_fn(value_context):
        return value_context.num_replicas_in_sync

    values = strategy.experimental_distribute_values_from_function(value_fn)
    assert isinstance(values, mpidist.PerReplica)
    assert strategy.experimental_local_results(values) == (size,)
    assert strategy.reduce(SUM, values, axis=None) == size * size


def test_values_from_an_array_by_replica(strategy, rank, size):
    """experimental_distribute_values_from_function: one element for each replica."""
    array_value = 10.0 - np.arange(size)

    def value_fn(value_context):
        return array_value[value_context.replica_id_in_sync_group]

    values = strategy.experimental_distribute_values_from_function(value_fn)
    assert strategy.experimental_local_results(values) == (10.0 - rank,)
    gathered = strategy.gather(strategy.run(lambda x: x[None], args=(values,)), axis=0)
    np.testing.assert_array_equal(gathered, array_value)


def test_values_made_for_each_worker_device(strategy, rank, size):
    """experimental_distribute_values_from_function: made beforehand, by device."""
    made = [(i, device) for i, device in enumerate(strategy.extended.worker_devices)]
    assert len(made) == size
    values = strategy.experimental_distribute_values_from_function(
        lambda context: {"made": [*made[context.replica_id_in_sync_group]]}
    )
    (results,) = strategy.experimental_local_results(values)
    assert results == {"made": [rank, strategy.extended.worker_devices[rank]]}
    assert isinstance(values["made"][1], mpidist.PerReplica)  # of any type


# --- ReplicaContext -------------------------------------------------------------------


def test_replica_context_in_run(strategy, rank, size):
    """ReplicaContext: ``get_replica_context`` in a replica function."""

    def func():
        context = mpidist.get_replica_context()
        assert isinstance(context, mpidist.ReplicaContext)
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == size
        return context.replica_id_in_sync_group

    ids = strategy.run(func)
    assert isinstance(ids, mpidist.PerReplica)
    assert strategy.experimental_local_results(ids) == (rank,)
    assert type(own(strategy, ids)) is int
    assert strategy.reduce(SUM, ids, axis=None) == size * (size - 1) // 2


def test_replica_context_of_the_2_0_page(strategy, rank):
    """ReplicaContext (r2.0): by ``experimental_run_v2``, the old name of run."""

    def func(x, *, y):
        return x + y + mpidist.get_replica_context().replica_id_in_sync_group

    result = strategy.experimental_run_v2(func, args=(100,), kwargs={"y": 20})
    assert strategy.experimental_local_results(result) == (120 + rank,)


def test_replica_context_devices(strategy, rank):
    """ReplicaContext.devices: a tuple of strings."""

    def func():
        return mpidist.get_replica_context().devices

    (devices,) = strategy.experimental_local_results(strategy.run(func))
    assert devices == (strategy.extended.worker_devices[rank],)
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert len(set(strategy.extended.worker_devices)) == len(
        strategy.extended.worker_devices
    )


def test_replica_context_as_a_context_manager(strategy, rank, size):
    """ReplicaContext: made by hand and entered."""
    assert mpidist.get_strategy() is not strategy
    with mpidist.ReplicaContext(strategy, replica_id_in_sync_group=rank) as context:
        assert mpidist.get_replica_context() is context
        assert mpidist.get_strategy() is strategy
        assert not mpidist.in_cross_replica_context()
        assert context.replica_id_in_sync_group == rank
        total = context.all_reduce("SUM", 2.0)
    assert total == 2.0 * size
    assert not mpidist.has_strategy()
    assert mpidist.get_replica_context() is not context
    with mpidist.ReplicaContext(strategy, None) as context:
        assert context.replica_id_in_sync_group == rank
    with pytest.raises(ValueError, match="can only be an integer"):
        mpidist.ReplicaContext(strategy, "0")
    with pytest.raises(ValueError, match=f"this rank hosts replica {rank}"):
        mpidist.ReplicaContext(strategy, size)


def test_all_reduce_of_one_value(strategy, size):
    """ReplicaContext.all_reduce: of a scalar."""

    def step_fn():
        context = mpidist.get_replica_context()
        return context.all_reduce(SUM, np.float32(1.0))

    result = own(strategy, strategy.run(step_fn))
    assert result == size
    assert result.dtype == np.float32


def test_all_reduce_of_a_list(strategy, size):
    """ReplicaContext.all_reduce: of a list of two values."""

    def step_fn():
        context = mpidist.get_replica_context()
        value1, value2 = np.float64(1.0), np.array([2.0])
        return context.all_reduce(SUM, [value1, value2])

    result = own(strategy, strategy.run(step_fn))
    assert result == [size, 2.0 * size]


def test_all_reduce_of_a_nest(strategy, rank, size):
    """ReplicaContext.all_reduce (r2.0): a nest, SUM and MEAN, by name in any case."""

    def step_fn():
        context = mpidist.get_replica_context()
        value = {"a": 1 + rank, "b": [40, 1]}
        return context.all_reduce("sum", value), context.all_reduce("Mean", value)

    total, mean = own(strategy, strategy.run(step_fn))
    ids = size * (size - 1) / 2
    assert total == {"a": size + ids, "b": [40 * size, size]}
    assert mean == {"a": 1 + ids / size, "b": [40.0, 1.0]}


def test_all_reduce_with_options(strategy, size):
    """ReplicaContext.all_reduce: with CommunicationOptions, and with the old hints."""
    new = mpidist.experimental.CommunicationOptions(bytes_per_pack=64)
    old = mpidist.experimental.CollectiveHints(bytes_per_pack=64, timeout_seconds=50.0)
    tree = [np.full(i + 1, float(i)) for i in range(20)]

    def step_fn():
        context = mpidist.get_replica_context()
        return context.all_reduce(SUM, tree, new), context.all_reduce(
            SUM, tree, options=old
        )

    for result in own(strategy, strategy.run(step_fn)):
        for i, array in enumerate(result):
            np.testing.assert_array_equal(array, np.full(i + 1, float(i * size)))


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_all_gather_along_an_axis(strategy, size, axis):
    """ReplicaContext.all_gather: (2, 1) on each replica, along both axes."""
    value = np.array([[1], [2]])

    def gather_fn():
        return mpidist.get_replica_context().all_gather(value, axis=axis)

    result = own(strategy, strategy.run(gather_fn))
    np.testing.assert_array_equal(result, np.concatenate([value] * size, axis=axis))
    assert result.dtype == value.dtype


@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_of_uneven_sizes(strategy, rank, size, axis):
    """ReplicaContext.all_gather: sizes that differ along the axis only."""

    def part(i):
        shape = [3, 3]
        shape[axis] = i + 1
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * i

    def gather_fn():
        return mpidist.get_replica_context().all_gather(part(rank), axis=axis)

    result = own(strategy, strategy.run(gather_fn))
    expected = np.concatenate([part(i) for i in range(size)], axis=axis)
    np.testing.assert_array_equal(result, expected)


def test_all_gather_of_a_nest(strategy, rank, size):
    """ReplicaContext.all_gather: a nest, whose leaves may differ in their sizes."""

    def gather_fn():
        value = {"a": [np.full((rank + 1, 2), rank)], "b": (np.full(1, -rank),)}
        return mpidist.get_replica_context().all_gather(value, axis=0)

    result = own(strategy, strategy.run(gather_fn))
    assert [*result] == ["a", "b"]
    rows = np.repeat(np.arange(size), np.arange(size) + 1)
    np.testing.assert_array_equal(result["a"][0], np.stack([rows, rows], axis=1))
    np.testing.assert_array_equal(result["b"][0], -np.arange(size))


def test_merge_call_gets_all_values_once(strategy, rank, size):
    """ReplicaContext.merge_call: once, with the strategy first and PerReplica then."""
    seen = []

    def merge_fn(distribution, values, *, factor):
        seen.append((distribution is strategy, type(values)))
        assert mpidist.get_replica_context() is None
        return factor * max(distribution.experimental_local_results(values))

    def step_fn():
        context = mpidist.get_replica_context()
        return context.merge_call(merge_fn, args=(rank + 1,), kwargs={"factor": "+"})

    assert strategy.run(step_fn) == "+" * size
    assert seen == ([(True, mpidist.PerReplica)] if rank == 0 else [])


# --- StrategyExtended -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["run", "call_for_each_replica"])
def test_call_for_each_replica_with_merge_call(strategy, rank, size, method):
    """StrategyExtended.call_for_each_replica (v1): s = 7, results 10 and 11 on two."""
    sums = []

    def merge_fn(distribution, three_plus_replica_id):
        return sum(distribution.experimental_local_results(three_plus_replica_id))

    def fn(three):
        context = mpidist.get_replica_context()
        v = three + context.replica_id_in_sync_group
        s = context.merge_call(merge_fn, args=(v,))
        sums.append(s)
        return s + v

    where = strategy if method == "run" else strategy.extended
    with strategy.scope():
        merged_results = getattr(where, method)(fn, args=[3])
    s = 3 * size + size * (size - 1) // 2
    assert sums == [s]
    assert strategy.experimental_local_results(merged_results) == (s + 3 + rank,)
    if size == 2:
        assert s == 7
        assert strategy.experimental_local_results(merged_results) == ((10, 11)[rank],)


@pytest.mark.parametrize("kind", ["variable", "value", "array", "other"])
def test_reduce_to_destinations(strategy, rank, size, kind):
    """StrategyExtended.reduce_to: to a variable, the value itself, a device, ..."""
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(2), name="destination")

    def merge_fn(distribution, value, other):
        destinations = {
            "variable": variable,
            "value": value,
            "array": np.zeros(1),
            "other": other,
        }[kind]
        reduced = distribution.extended.reduce_to(SUM, value, destinations)
        assert isinstance(reduced, mpidist.Mirrored)
        local_results = distribution.experimental_local_results(reduced)
        assert len(local_results) == size
        return reduced

    def step_fn():
        value = np.array([1.0, rank])
        return mpidist.get_replica_context().merge_call(merge_fn, args=(value, rank))

    result = own(strategy, strategy.run(step_fn))
    np.testing.assert_array_equal(result, [size, size * (size - 1) / 2])
    np.testing.assert_array_equal(variable, np.zeros(2))  # it does not change


def test_reduce_to_a_device(strategy, rank, size):
    """StrategyExtended.reduce_to: to a device string, the result is there alone."""
    for root, device in enumerate(strategy.extended.worker_devices):

        def merge_fn(distribution, value, device=device, root=root):
            reduced = distribution.extended.reduce_to(SUM, value, device)
            if root == 0:  # where merge_fn runs: the array itself
                assert type(reduced) is np.ndarray
                return reduced
            results = distribution.experimental_local_results(reduced)
            assert [x is None for x in results] == [i != root for i in range(size)]
            np.testing.assert_array_equal(results[root], [size, size * (size - 1) / 2])
            return reduced

        def step_fn(merge_fn=merge_fn):
            value = np.array([1.0, rank])
            return mpidist.get_replica_context().merge_call(merge_fn, args=(value,))

        result = strategy.run(step_fn)
        if root == 0 or rank == root:
            assert own(strategy, result).tolist() == [size, size * (size - 1) / 2]
        else:
            assert result is None


@pytest.mark.one_size
@pytest.mark.parametrize("destinations", ["nowhere", "", None, 3, ["a"]])
def test_reduce_to_refuses_other_destinations(strategy, rank, destinations):
    """StrategyExtended.reduce_to: the same error on every rank."""
    value = strategy.run(lambda: 1.0)
    with pytest.raises(ValueError, match="destinations must be"):
        strategy.extended.reduce_to(SUM, value, destinations)
    assert strategy.reduce("MAX", value, axis=None) == 1.0


def test_reduce_to_and_update_in_cross_replica_context(strategy, rank, size):
    """StrategyExtended (v1): ``reduce_to(VariableAggregation.SUM, t, v)``, then update.

    In cross-replica context, without a merge_call; with the older keyword.
    """
    hints = mpidist.experimental.CollectiveHints(bytes_per_pack=1024)
    t = from_replicas(strategy, lambda i: np.array([1.0, i]))
    with strategy.scope():
        v = mpidist.Variable([10.0, 10.0])
        reduced = strategy.extended.reduce_to(
            mpidist.VariableAggregation.SUM, t, v, experimental_hints=hints
        )
        assert isinstance(reduced, mpidist.Mirrored)
        strategy.extended.update(v, lambda v, t: v.assign_sub(t), args=(reduced,))
    expected = 10.0 - np.array([size, size * (size - 1) / 2])
    np.testing.assert_array_equal(copies(strategy, v), [expected] * size)


def test_reduce_to_takes_options_by_either_name_only(strategy):
    """StrategyExtended.reduce_to: third argument, ``options`` or the older name."""
    options = mpidist.experimental.CommunicationOptions()
    value = strategy.run(lambda: 1.0)
    extended = strategy.extended
    results = [
        extended.reduce_to(MEAN, value, value, options),
        extended.reduce_to(MEAN, value, value, options=options),
        extended.batch_reduce_to(MEAN, [(value, value)], options)[0],
        extended.batch_reduce_to(
            MEAN,
            [(value, value)],
            experimental_hints=mpidist.experimental.CollectiveHints(),
        )[0],
    ]
    assert results == [1.0] * 4
    with pytest.raises(TypeError, match="experimental_hints"):
        extended.reduce_to(MEAN, value, value, options, experimental_hints=options)


def test_reduce_to_in_merge_fn_then_update(strategy, size):
    """StrategyExtended.reduce_to: reduced in merge_fn, assigned by update."""

    def merge_fn(distribution, value, var):
        reduced = distribution.extended.reduce_to(SUM, value, destinations=var)
        distribution.extended.update(
            var, lambda var, value: var.assign(value), args=(reduced,)
        )

    def step_fn(var):
        context = mpidist.get_replica_context()
        assert context.merge_call(merge_fn, args=(np.float64(1.0), var)) is None

    with strategy.scope():
        v = mpidist.Variable(0.0)
        strategy.run(step_fn, args=(v,))
    assert float(v) == size
    np.testing.assert_array_equal(copies(strategy, v), [size] * size)


def test_batch_reduce_to_in_merge_fn_then_update(strategy, rank, size):
    """StrategyExtended.batch_reduce_to: a list of results, one for each pair."""

    def merge_fn(distribution, value, other, var):
        pairs = [(value, var), (other, other), (value, value)]
        results = distribution.extended.batch_reduce_to(MEAN, pairs)
        assert type(results) is list
        assert len(results) == 3
        distribution.extended.update(
            var, lambda var, value: var.assign(value), args=(results[0],)
        )
        return results

    def step_fn(var):
        context = mpidist.get_replica_context()
        args = (np.array([rank, 1.0]), np.full((2, 2), 3, np.int32), var)
        return context.merge_call(merge_fn, args=args)

    with strategy.scope():
        v = mpidist.Variable([0.0, 0.0])
    first, second, third = own(strategy, strategy.run(step_fn, args=(v,)))
    expected = [(size - 1) / 2, 1.0]
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, np.full((2, 2), 3.0))
    assert second.dtype == np.float64  # the mean of integers
    np.testing.assert_array_equal(third, expected)
    np.testing.assert_array_equal(copies(strategy, v), [expected] * size)


def test_the_update_pattern_in_four_steps(strategy, rank, size):
    """StrategyExtended: gradients, merge_call, batch_reduce_to, update by a lambda.

    The lambda closes over local values: a number and an array. The result is that of
    one process on the whole batch.
    """
    points = np.arange(4.0 * size)
    targets = 3.0 * points - 7.0
    learning_rate, momentum = 0.01 / size**2, np.array(0.5)
    scale = np.linspace(0.0, 1.0, 20)  # large enough to travel from its buffer

    def gradients(slope, offset, x, y):
        error = slope * x + offset - y
        return [(error * x).sum() / points.size, error.sum() / points.size]

    with strategy.scope():
        slope = mpidist.Variable(0.0, name="slope")
        offset = mpidist.Variable(1.0, name="offset")
    variables = [slope, offset]

    def merge_fn(distribution, grads_and_vars):
        assert all(v is w for (_, v), w in zip(grads_and_vars, variables, strict=True))
        reduced = distribution.extended.batch_reduce_to(SUM, grads_and_vars)
        for grad, (_, var) in zip(reduced, grads_and_vars, strict=True):
            distribution.extended.update(
                var,
                lambda var, g: var.assign_sub(
                    learning_rate * g * (1 + momentum) * scale.mean()
                ),
                args=(grad,),
            )

    def step_fn(x, y):
        grads = gradients(slope, offset, x, y)
        pairs = [*zip(grads, variables, strict=True)]
        mpidist.get_replica_context().merge_call(merge_fn, args=(pairs,))

    rows = slice(4 * rank, 4 * rank + 4)
    single = np.array([0.0, 1.0])
    for _ in range(3):
        strategy.run(step_fn, args=(points[rows], targets[rows]))
        whole = np.array(gradients(*single, points, targets))
        single -= learning_rate * whole * 1.5 * scale.mean()
    np.testing.assert_allclose([slope, offset], single, rtol=1e-12)
    assert single[0] != 0.0
    assert len(np.unique(copies(strategy, slope))) == 1


def test_pairs_may_come_from_zip(strategy, size):
    """StrategyExtended.batch_reduce_to: ``zip(gradients, variables)`` as pairs."""

    def merge_fn(distribution, grads):
        return distribution.extended.batch_reduce_to(
            SUM, zip(grads, grads, strict=True)
        )

    def step_fn():
        args = ([np.ones(3), 2.0],)
        return mpidist.get_replica_context().merge_call(merge_fn, args=args)

    array, number = own(strategy, strategy.run(step_fn))
    np.testing.assert_array_equal(array, np.full(3, size))
    assert number == 2.0 * size


def test_pairs_may_come_from_a_generator(strategy, size):
    """StrategyExtended.batch_reduce_to: any iterable of pairs."""
    values = [strategy.run(lambda: 1.0), strategy.run(lambda: np.ones(2))]
    with strategy.scope():
        one, two = strategy.extended.batch_reduce_to(SUM, ((v, v) for v in values))
    assert one == size
    np.testing.assert_array_equal(two, [size, size])


@pytest.mark.parametrize("group", [True, False])
def test_update_in_cross_replica_context(strategy, rank, size, group):
    """StrategyExtended.update: by a function that assigns, grouped or not."""
    with strategy.scope():
        v = mpidist.Variable(5.0, aggregation=mpidist.VariableAggregation.SUM)

        def update_fn(v, x):
            v.assign(x)
            return v.read_value() + 1.0, None, "text"

        number, none, text = strategy.extended.update(
            v, update_fn, args=(2.0,), group=group
        )
    np.testing.assert_array_equal(copies(strategy, v), [2.0] * size)
    if group:
        assert isinstance(number, mpidist.Mirrored)
        assert float(number) == 3.0
        assert none is None
        assert text == "text"
    else:
        assert number == (3.0,)  # of the replicas that this process can see
        assert none == (None,)


def test_update_not_grouped_in_merge_fn(strategy, rank, size):
    """StrategyExtended.update: with ``group=False`` tuples of all replicas' results."""
    with strategy.scope():
        v = mpidist.Variable(np.arange(3.0))

    def merge_fn(distribution, x):
        def update_fn(v, x):
            v.assign_add(x)
            me = mpidist.get_strategy().replica_id
            return {"id": me, "value": v.read_value()}

        reduced = distribution.extended.reduce_to(SUM, x, v)
        result = distribution.extended.update(v, update_fn, (reduced,), group=False)
        assert result["id"] == tuple(range(size))
        assert len(result["value"]) == size
        return [*result["value"]]

    def step_fn():
        return mpidist.get_replica_context().merge_call(merge_fn, args=(np.ones(3),))

    for value in own(strategy, strategy.run(step_fn)):
        np.testing.assert_array_equal(value, np.arange(3.0) + size)


def test_update_in_a_merge_call_with_the_variable_as_argument(strategy, size):
    """StrategyExtended.update: the variable comes through merge_call's args."""
    with strategy.scope():
        v = mpidist.Variable(0.0)

    def merge_fn(distribution, v):
        def update_fn(v):
            return v.assign(1.0)

        return distribution.extended.update(v, update_fn)

    def replica_fn():
        return mpidist.get_replica_context().merge_call(merge_fn, args=(v,))

    result = strategy.run(replica_fn)
    assert result is v  # what assign returns: the variable, as itself
    np.testing.assert_array_equal(copies(strategy, v), [1.0] * size)


def test_update_of_what_is_no_distributed_variable(strategy):
    """StrategyExtended.update: "otherwise this method returns fn(var, ...)"."""
    with strategy.scope():
        mirrored = strategy.extended.broadcast_to(np.ones(2), np.ones(1))
        result = strategy.extended.update(
            [1.0], lambda var, x, *, y: (var, x, y), args=(mirrored,), kwargs={"y": 2}
        )
    assert result[0] == [1.0]
    np.testing.assert_array_equal(result[1], np.ones(2))
    assert result[2] == 2


@pytest.mark.one_size
def test_update_refuses_values_that_differ(strategy, rank, size):
    """StrategyExtended.update: per-replica values may not make the copies differ."""
    if size == 1:
        pytest.skip("one copy cannot differ")
    with strategy.scope():
        v = mpidist.Variable(1.0)
        per_replica = strategy.run(lambda: 1.0 + rank)
        for how in ({"args": (per_replica,)}, {"kwargs": {"x": per_replica}}):
            with pytest.raises(mpidist.CollectiveMismatchError, match="reduce_to"):
                strategy.extended.update(v, lambda v, x: v.assign(x), **how)
    np.testing.assert_array_equal(copies(strategy, v), [1.0] * size)


def test_broadcast_to(strategy, rank, size):
    """StrategyExtended.broadcast_to (v1): rank 0's value, everywhere."""
    with strategy.scope():
        v = mpidist.Variable(np.zeros(3))
        device = strategy.extended.worker_devices[0]
        for destinations in (v, np.zeros(3), device):
            mirrored = strategy.extended.broadcast_to(
                np.arange(3.0) + rank, destinations
            )
            assert isinstance(mirrored, mpidist.Mirrored)
            np.testing.assert_array_equal(mirrored, np.arange(3.0))
        v.assign(mirrored)
    np.testing.assert_array_equal(copies(strategy, v), [np.arange(3.0)] * size)


def test_broadcast_to_returns_python_numbers(strategy, rank):
    """StrategyExtended.broadcast_to: a Python number comes back as one."""
    with strategy.scope():
        number = strategy.extended.broadcast_to(7 + rank, np.zeros(1))
    assert number == 7  # rank 0's
    assert type(number) is int


def test_broadcast_to_in_merge_fn(strategy, rank, size):
    """StrategyExtended.broadcast_to: the coordinator gives its value to all."""

    def merge_fn(distribution, x):
        table = np.outer(np.arange(30.0), [1.0, -1.0])
        mirrored = distribution.extended.broadcast_to(table, x)
        assert isinstance(mirrored, mpidist.Mirrored)
        assert len(distribution.experimental_local_results(mirrored)) == size
        return mirrored

    def step_fn():
        table = mpidist.get_replica_context().merge_call(merge_fn, args=(1.0,))
        return table[:, 1] + rank

    result = own(strategy, strategy.run(step_fn))
    np.testing.assert_array_equal(result, rank - np.arange(30.0))


# --- DistributedValues ----------------------------------------------------------------


def test_distributed_values_from_run(strategy, rank):
    """DistributedValues (r2.3): returned by run."""

    def run():
        return mpidist.get_replica_context().replica_id_in_sync_group

    distributed_values = strategy.run(run)
    assert isinstance(distributed_values, mpidist.DistributedValues)
    assert strategy.experimental_local_results(distributed_values) == (rank,)


def test_distributed_values_as_input_of_run(strategy, rank):
    """DistributedValues (r2.3): passed to run, and looked at locally."""
    distributed_values = from_replicas(strategy, lambda i: np.array([5.0 + i]))

    def run(x):
        assert type(x) is np.ndarray
        return x + 1.0

    updated_value = strategy.run(run, args=(distributed_values,))
    (before,) = strategy.experimental_local_results(distributed_values)
    (after,) = strategy.experimental_local_results(updated_value)
    np.testing.assert_array_equal(before, [5.0 + rank])
    np.testing.assert_array_equal(after, [6.0 + rank])


def test_distributed_values_reduced(strategy, size):
    """DistributedValues (r2.3): reduced with SUM along axis 0."""
    distributed_values = from_replicas(strategy, lambda i: np.array([5.0 + i]))
    reduced_value = strategy.reduce(SUM, distributed_values, axis=0)
    assert reduced_value == 5.0 * size + size * (size - 1) / 2


def test_local_results_of_other_values(strategy):
    """Strategy.experimental_local_results: ``(value,)`` for what is one value."""
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0])
    value = object()
    assert strategy.experimental_local_results(value) == (value,)
    assert strategy.experimental_local_results(None) == (None,)
    assert strategy.experimental_local_results({}) == ({},)
    (copy,) = strategy.experimental_local_results(v)
    np.testing.assert_array_equal(copy, [1.0, 2.0])


# --- Strategy.reduce and gather -------------------------------------------------------


def test_reduce_of_replica_ids(strategy, size):
    """Strategy.reduce: SUM of each replica's number."""

    def step_fn():
        return mpidist.get_replica_context().replica_id_in_sync_group

    total = strategy.reduce("SUM", strategy.run(step_fn), axis=None)
    assert total == size * (size - 1) // 2


def test_reduce_along_no_axis_and_along_axis_0(strategy, size):
    """Strategy.reduce: a global batch, [0, 1, 2, 3] on replica 0, [4, ...] on 1."""
    examples = from_replicas(strategy, lambda i: np.arange(4 * i, 4 * i + 4))
    whole = np.arange(4 * size).reshape(size, 4)
    np.testing.assert_array_equal(
        strategy.reduce(SUM, examples, axis=None), whole.sum(axis=0)
    )
    assert strategy.reduce(SUM, examples, axis=0) == whole.sum()
    if size == 2:
        assert strategy.reduce(SUM, examples, axis=0) == 28
        assert [*strategy.reduce(SUM, examples, axis=None)] == [4, 6, 8, 10]


def test_reduce_mean_of_an_uneven_last_batch(strategy, size):
    """Strategy.reduce: [0, 1, 2, 3] and [4, 5] have the mean 2.5, not 3."""

    def rows(i):
        return np.arange(4.0 * i, 4.0 * i + (2 if i == size - 1 and i else 4))

    everything = np.concatenate([rows(i) for i in range(size)])
    batch = from_replicas(strategy, rows)
    assert strategy.reduce(MEAN, batch, axis=0) == everything.mean()
    per_replica_means = strategy.run(lambda x: x.mean(), args=(batch,))
    naive = strategy.reduce(MEAN, per_replica_means, axis=None)
    assert naive == np.mean([rows(i).mean() for i in range(size)])
    if size == 2:
        assert strategy.reduce(MEAN, batch, axis=0) == 2.5
        assert naive == 3.0


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_along_an_axis(strategy, size, axis):
    """Strategy.gather: (2, 1) on each replica gives (2 n, 1), or (2, n)."""
    value = strategy.experimental_distribute_values_from_function(
        lambda _: np.array([[1], [2]])
    )
    gathered = strategy.gather(value, axis=axis)
    expected = np.concatenate([[[1], [2]]] * size, axis=axis)
    np.testing.assert_array_equal(gathered, expected)
    assert gathered.shape == ((2 * size, 1) if axis == 0 else (2, size))


def test_gather_of_uneven_shapes(strategy, size):
    """Strategy.gather: shapes that differ along the axis, in replica order."""
    value = from_replicas(strategy, lambda i: np.full((1, 2 + i, 1), i))
    gathered = strategy.gather(value, axis=1)
    expected = np.repeat(np.arange(size), 2 + np.arange(size))
    np.testing.assert_array_equal(gathered, expected[None, :, None])
