"""StrategyExtended: each method and attribute, at program level and in merge_fn."""

import collections

import numpy as np
import pytest
from replicas import (
    FIRST,
    MEAN,
    ON_READ,
    SUM,
    Traffic,
    context,
    make,
    merge,
    outcomes,
    own,
    raises_everywhere,
    this_replica,
)

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


@pytest.fixture(params=["program", "scope", "merge_fn"])
def in_cross_replica(request, strategy):
    """Give a function that calls another one in cross-replica context.

    ``fn(strategy, x)`` gets a PerReplica; what it returns is each rank's own.
    """

    def call(fn, x):
        if request.param == "merge_fn":
            return strategy.run(lambda: context().merge_call(fn, args=(x,)))
        value = strategy.run(lambda: x)
        if request.param == "program":
            return fn(strategy, value)
        with strategy.scope():
            return fn(strategy, value)

    call.kind = request.param
    return call


# --- attributes -----------------------------------------------------------------------


def test_attributes(strategy, rank, size):
    extended = strategy.extended
    assert len(extended.worker_devices) == size
    assert extended.parameter_devices == extended.worker_devices
    assert extended.non_slot_devices([]) == extended.worker_devices
    assert extended.experimental_between_graph is True
    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_should_init is True
    assert extended.should_checkpoint is (rank == 0)
    assert extended.should_save_summary is (rank == 0)
    default = mpidist.get_strategy().extended
    assert default.worker_devices == ("/rank:0/device:CPU:0",)
    assert default.experimental_between_graph is False
    assert default.should_checkpoint is True


def test_get_cross_replica_context(strategy):
    assert mpidist.get_cross_replica_context() is None  # outside: a replica of one
    with strategy.scope():
        assert mpidist.get_cross_replica_context() is strategy
    v = make(strategy, 1.0)
    seen = strategy.extended.update(v, lambda v: contexts(), group=False)
    assert seen == ((strategy,), (None,))
    assert own(strategy, merge(strategy, lambda s: contexts() == (s, None)))
    none, replica_context = strategy.run(contexts)
    assert none is None
    assert replica_context is not None


def contexts():
    return mpidist.get_cross_replica_context(), mpidist.get_replica_context()


def test_cluster_resolver(strategy, rank, size):
    resolver = strategy.cluster_resolver
    hosts = resolver.cluster_spec().job_tasks("worker")
    assert isinstance(resolver, mpidist.MPIClusterResolver)
    assert len(hosts) == len(resolver.devices) == size
    for number, node in enumerate(resolver.nodes):
        before = resolver.nodes[:number]
        assert resolver.local_ranks[number] == before.count(node)
        assert node <= len(set(before))
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)
    assert (resolver.environment, resolver.rpc_layer) == ("mpi", "mpi")
    assert resolver.master() == hosts[0]
    assert resolver.master("worker", size - 1) == hosts[-1]
    assert resolver.num_accelerators() == {}
    assert f"task {rank} of {size}" in repr(resolver)
    for bad in (("ps", 0), ("worker", size), ("worker", -1)):
        with pytest.raises(ValueError, match=r"No such job|No task"):
            resolver.master(*bad)
    assert mpidist.MPIClusterResolver(
        ("a",), 0, ("/rank:0/device:GPU:1",)
    ).num_accelerators() == {"GPU": 1}
    assert strategy.cluster_resolver is resolver
    assert mpidist.get_strategy().cluster_resolver is None


# --- reduce_to ------------------------------------------------------------------------


def test_reduce_to_each_device(strategy, rank, size, in_cross_replica):
    """An MPI Reduce: the result on that rank, None on the others, no Allreduce."""
    for root, device in enumerate(strategy.extended.worker_devices):
        traffic = Traffic(strategy)

        def fn(distribution, x, device=device):
            return distribution.extended.reduce_to(SUM, x, device)

        result = in_cross_replica(fn, np.array([1.0, rank]))
        if size > 1:
            assert traffic.calls["Allreduce"] == 0
            assert traffic.calls["Reduce"] == 1
        result = own(strategy, result)
        if rank == root or (in_cross_replica.kind == "merge_fn" and root == 0):
            assert result.tolist() == [size, size * (size - 1) / 2]
        else:
            assert result is None


@pytest.mark.mpi(min_size=2)
def test_reduce_to_a_device_of_another_rank_in_merge_fn(strategy, rank, size):
    """A PerReplica: rank 0 may pass it on to where the value is."""

    def merge_fn(distribution, x):
        device = distribution.extended.worker_devices[size - 1]
        total = distribution.extended.reduce_to("SUM", x, device)
        assert isinstance(total, mpidist.PerReplica)
        assert distribution.experimental_local_results(total)[:-1] == (None,) * (
            size - 1
        )
        assert total.values[-1] == size
        return distribution.run(lambda t: -1.0 if t is None else t + 1.0, args=(total,))

    result = own(strategy, merge(strategy, merge_fn, 1.0))
    assert result == (size + 1.0 if rank == size - 1 else -1.0)


def test_reduce_to_a_device_of_other_values(strategy, rank, size):
    for op, value, expected in (
        ("SUM", lambda r: float(r), lambda n: n * (n - 1) / 2),
        ("MEAN", lambda r: r, lambda n: (n - 1) / 2),
        ("MEAN", lambda r: np.array([r, r]), lambda n: np.full(2, (n - 1) / 2)),
        ("SUM", lambda r: np.float16([r]), lambda n: np.float16([n * (n - 1) / 2])),
        ("MAX", lambda r: np.float16([r]), lambda n: np.float16([n - 1])),
        ("MIN", lambda r: np.float32(r), lambda n: np.float32(0)),
        ("PROD", lambda r: r + 1, lambda n: np.prod(np.arange(1, n + 1))),
        ("SUM", lambda r: 1j * r, lambda n: 1j * n * (n - 1) / 2),
        ("MAX", lambda r: np.array([r == 0]), lambda n: np.array([True])),
        ("SUM", lambda r: np.zeros((0, 2)), lambda n: np.zeros((0, 2))),
    ):
        mine = value(rank)
        everyone = strategy.run(lambda mine=mine: mine)
        for root in {0, size - 1}:
            device = strategy.extended.worker_devices[root]
            result = strategy.extended.reduce_to(op, everyone, device)
            if rank != root:
                assert result is None
                continue
            np.testing.assert_array_equal(result, expected(size))
            assert np.shape(result) == np.shape(mine)
            if isinstance(mine, (int, float, complex)):
                assert isinstance(result, (int, float, complex))
            elif op == "MEAN":
                assert result.dtype == np.float64
            else:
                assert result.dtype == mine.dtype


def test_reduce_to_a_device_of_nests_and_in_batches(strategy, rank, size):
    """Mixed destinations: one fused reduction for each."""
    devices = strategy.extended.worker_devices
    first, last = devices[0], devices[-1]
    v = make(strategy, np.zeros(2))

    def nest():
        return {"a": np.full(2, rank + 1.0), "b": [rank, np.float32([1.0])]}

    value = strategy.run(nest)
    total = size * (size + 1) / 2
    result = strategy.extended.reduce_to("SUM", value, last)
    if rank == size - 1:
        assert result["a"].tolist() == [total] * 2
        assert result["b"][0] == total - size
        assert isinstance(result["b"][0], int)
        assert result["b"][1].dtype == np.float32
    else:
        assert result == {"a": None, "b": [None, None]}
    traffic, x = Traffic(strategy), value["a"]
    pairs = iter([(x, v), (x, first), ([x], last), (x, x), (x, last)])
    results = strategy.extended.batch_reduce_to("SUM", pairs)
    if size > 1:
        assert (traffic.calls["Allreduce"], traffic.calls["Reduce"]) == (1, 2)
    for i in (0, 3):
        assert isinstance(results[i], mpidist.Mirrored)
        np.testing.assert_array_equal(results[i], [total] * 2)
    mine = [x is not None for x in (results[1], results[2][0], results[4])]
    assert mine == [rank == 0, rank == size - 1, rank == size - 1]
    np.testing.assert_array_equal(v, [0.0, 0.0])
    of_dict = {"v": (x, v)}.values()  # any iterable
    (result,) = strategy.extended.batch_reduce_to("SUM", of_dict)
    np.testing.assert_array_equal(result, [total] * 2)

    def merge_fn(distribution, x):
        both = distribution.extended.batch_reduce_to(
            "MEAN", [(x, first), (x, last), (x, v)]
        )
        return both[1:]

    at_last, mirrored = merge(strategy, merge_fn, float(rank))
    assert own(strategy, mirrored) == (size - 1) / 2
    if rank == size - 1:
        assert own(strategy, at_last) == (size - 1) / 2


def test_reduce_to_of_what_is_the_same(strategy, rank, size, in_cross_replica):
    v = make(strategy, [1.0, 2.0])

    def fn(distribution, x):
        extended = distribution.extended
        mirrored = extended.reduce_to(mpidist.ReduceOp.MAX, x, v)
        assert extended.reduce_to("MEAN", mirrored, v) is mirrored
        assert extended.reduce_to("MEAN", v, v) is v
        assert extended.reduce_to("MAX", 3.0, v) == 3.0
        results = extended.batch_reduce_to("MEAN", [(mirrored, v), (x, v)])
        assert results[0] is mirrored
        ones = extended.broadcast_to(np.ones(2), v)  # rank 0 may not change its own
        same = distribution.reduce("MAX", ones, axis=None), distribution.gather(ones, 0)
        assert [x.flags.writeable for x in same] == [False] * 2
        return results[1]

    assert own(strategy, in_cross_replica(fn, float(rank))) == (size - 1) / 2
    for bad in ("SUM", "PROD", SUM):
        raises_everywhere(
            ValueError,
            lambda bad=bad: in_cross_replica(
                lambda s, x: s.extended.reduce_to(bad, v, v), 1.0
            ),
            "cannot be reduced",
        )


@pytest.mark.parametrize(
    "device",
    [
        "/cpu:0",
        "GPU:0",
        "/device:CPU:*",
        "/job:localhost/replica:0/task:0/device:CPU:0",
    ],
)
def test_devices_that_every_rank_has(strategy, rank, size, in_cross_replica, device):
    total = strategy.extended.reduce_to("SUM", strategy.run(lambda: rank), device)
    assert isinstance(total, mpidist.Mirrored)
    assert total == size * (size - 1) / 2
    first, second = in_cross_replica(
        lambda s, x: s.extended.batch_reduce_to("SUM", [(x, device), (x, x)]), 1.0
    )
    assert own(strategy, first) == own(strategy, second) == size
    assert strategy.extended.broadcast_to(2.0, device) == 2.0


def test_devices_of_tasks(strategy, rank, size):
    last = size - 1
    for device in (f"/job:worker/task:{last}", f"/replica:0/task:{last}/device:CPU:0"):
        total = strategy.extended.reduce_to("SUM", strategy.run(lambda: 1.0), device)
        assert total == (size if rank == last else None)


@pytest.mark.parametrize(
    "destinations",
    ["", "/", "nowhere", None, 3, ["a"], ("/rank:0/device:CPU:0",), "/task:99"],
)
@pytest.mark.one_size
def test_wrong_destinations(strategy, rank, in_cross_replica, destinations):
    for call in (
        lambda s, x: s.extended.reduce_to("SUM", x, destinations),
        lambda s, x: s.extended.batch_reduce_to("SUM", [(x, x), (x, destinations)]),
        lambda s, x: s.extended.broadcast_to(1.0, destinations),
    ):
        raises_everywhere(
            ValueError,
            lambda call=call: in_cross_replica(call, 1.0),
            "destinations must be",
        )


@pytest.mark.one_size
def test_other_wrong_arguments(strategy, rank, in_cross_replica):
    options = mpidist.experimental.CommunicationOptions()
    for kind, call in (
        (ValueError, lambda s, x: s.extended.reduce_to("sum of", x, x)),
        (ValueError, lambda s, x: s.extended.reduce_to(FIRST, x, x)),
        (ValueError, lambda s, x: s.extended.batch_reduce_to("SUM", [x])),
        (ValueError, lambda s, x: s.extended.batch_reduce_to("SUM", [(x, x, x)])),
        (ValueError, lambda s, x: s.extended.batch_reduce_to("SUM", 3)),
        (TypeError, lambda s, x: s.extended.batch_reduce_to("SUM", x)),
        (
            TypeError,
            lambda s, x: s.extended.reduce_to(
                "SUM", x, x, options, experimental_hints=options
            ),
        ),
        (ValueError, lambda s, x: s.extended.call_for_each_replica(abs, args=x)),
        (TypeError, lambda s, x: s.extended.call_for_each_replica("text")),
        (TypeError, lambda s, x: s.extended.broadcast_to(x, x)),
        (TypeError, lambda s, x: s.extended.broadcast_to("text", x)),
        (ValueError, lambda s, x: s.extended.update_non_slot("there", abs)),
        (ValueError, lambda s, x: s.extended.update_non_slot(("a", "b"), abs)),
        (ValueError, lambda s, x: s.extended.update_non_slot([np.ones(3)], abs)),
    ):
        raises_everywhere(kind, lambda call=call: in_cross_replica(call, 1.0))
    for kind in (dict, collections.OrderedDict):
        raises_everywhere(
            TypeError,
            lambda kind=kind: strategy.extended.broadcast_to(kind(a=1.0), "/cpu:0"),
            f"got a {kind.__name__}; make a call for each of its values",
        )


@pytest.mark.mpi(min_size=2)
def test_destinations_that_differ(strategy, rank):
    value = strategy.run(lambda: 1.0)
    device = strategy.extended.worker_devices[rank % 2]
    for destinations in (device, value if rank else device):
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda d=destinations: strategy.extended.reduce_to("SUM", value, d),
        )


# --- update, update_non_slot ----------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_update_non_slot_that_fails_on_one_rank(strategy, rank, size):
    v = make(strategy, 1.0)

    def fn():
        v.assign(2.0)
        if rank == 1:
            raise KeyError("on purpose")

    devices = strategy.extended.worker_devices
    rows = outcomes(lambda: strategy.extended.update_non_slot(devices, fn))
    expected = ["KeyError" if i == 1 else "ReplicaError" for i in range(size)]
    assert [row.name for row in rows] == expected
    mpidist.check_in_sync(v)


def test_update_of_what_is_not_distributed(strategy, in_cross_replica):
    def fn(distribution, x):
        found = []
        result = distribution.extended.update(
            found, lambda f, y: (f.append(y), y)[1], args=(3,)
        )
        assert (found, result) == ([3], 3)

    in_cross_replica(fn, 1.0)
    raises_everywhere(
        TypeError,
        lambda: in_cross_replica(lambda s, x: s.extended.update(x, abs), 1.0),
    )


def test_in_a_replica_context_they_are_refused(strategy, rank):
    v = make(strategy, 1.0)
    extended = strategy.extended
    for call in (  # the others: programs of tests/conformance
        lambda: extended.read_var(v),
        lambda: extended.experimental_run_steps_on_iterator(abs, iter([1])),
    ):
        raises_everywhere(
            RuntimeError,
            lambda call=call: strategy.run(call),
            "cross-replica context",
            "mpidist.get_replica_context()",
        )


# --- variables and their containers ---------------------------------------------------


def test_read_var_and_value_container(strategy, rank, size, in_cross_replica):
    v = make(strategy, [1.0, 2.0])
    total = make(strategy, 0.0, synchronization=ON_READ, aggregation=MEAN)
    strategy.run(lambda: total.assign(float(rank)))

    def fn(distribution, x):
        extended = distribution.extended
        read = extended.read_var(v)
        assert type(read) is np.ndarray
        read[...] = 9.0  # its own
        assert extended.read_var(total) == (size - 1) / 2
        plain = np.ones(2)
        assert extended.read_var(plain) is plain
        assert extended.value_container(v) is v
        assert extended.value_container(v.value()) is v
        assert all(extended.value_container(part) is v for part in v.values)
        assert extended.value_container(x) is x
        assert extended.value_container(v + 0.0) is not v
        assert extended.value_container(3.0) == 3.0
        assert extended.variable_created_in_scope(v)

    in_cross_replica(fn, 1.0)
    np.testing.assert_array_equal(v, [1.0, 2.0])
    assert strategy.extended.value_container(total.values[0]) is total
    plain = mpidist.Variable(1.0)
    assert not strategy.extended.variable_created_in_scope(plain)
    assert mpidist.get_strategy().extended.variable_created_in_scope(plain)
    with pytest.raises(TypeError, match="expected a `mpidist"):
        strategy.extended.variable_created_in_scope(np.ones(2))
    with pytest.raises(RuntimeError, match="Mixing different Strategy"):
        strategy.extended.read_var(plain)


def test_both_places_of_older_calls(strategy, rank):
    """What they do: programs of tests/conformance."""
    v = make(strategy, 1.0)
    for owner in (strategy, strategy.extended):
        with strategy.scope(), owner.colocate_vars_with(v):
            assert mpidist.Variable(2.0).distribute_strategy is strategy
    assert strategy.unwrap(strategy.run(lambda: rank)) == (rank,)


# --- steps on an iterator -------------------------------------------------------------


class Elements:
    """Has ``get_next``, as the iterators of tf.distribute."""

    def __init__(self, values):
        self._values = iter(values)

    def get_next(self):
        return next(self._values)


@pytest.mark.parametrize("kind", [iter, Elements])
def test_run_steps(size, in_cross_replica, kind):
    """More: programs of tests/conformance."""

    def step(ctx, x):
        distribution = mpidist.get_strategy()
        assert mpidist.get_cross_replica_context() is distribution
        loss = distribution.run(lambda y: y * (this_replica() + 1), (x,))
        ctx.set_last_step_output("sum", loss, "SUM")
        ctx.set_last_step_output("kept", loss)
        ctx.set_non_tensor_output("text", f"step {x}")

    def fn(distribution, x):
        run_steps = distribution.extended.experimental_run_steps_on_iterator
        ctx = run_steps(step, kind([1.0, 2.0, 4.0, 100.0]), 3)
        assert isinstance(ctx, mpidist.MultiStepContext)
        assert ctx.last_step_outputs["sum"] == 2.0 * size * (size + 1)
        kept = distribution.experimental_local_results(ctx.last_step_outputs["kept"])
        assert kept[0] == 4.0 * (distribution.replica_id + 1)
        assert ctx.non_tensor_outputs == {"text": "step 4.0"}
        assert ctx.run_op is None
        assert "sum" in repr(ctx)
        one, values = kind([1.0]), {"loss": 0.5}
        ctx = run_steps(lambda ctx, x: None, one, initial_loop_values=values)
        assert ctx.last_step_outputs == values

    in_cross_replica(fn, 1.0)


def test_outputs_of_all_replicas(strategy, size):
    v = make(strategy, 0.0, synchronization=ON_READ, aggregation=MEAN)

    def step():
        ctx = mpidist.MultiStepContext()
        v.assign(float(this_replica()))
        ctx.set_non_tensor_output("v", v)
        ctx.set_non_tensor_output("text", "same")
        assert ctx.non_tensor_outputs["text"] == ("same",) * size
        assert ctx.non_tensor_outputs["v"] == tuple(range(size))

    strategy.run(step)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "2"])
@pytest.mark.one_size
def test_wrong_numbers_of_steps(strategy, rank, size, in_cross_replica, bad):
    kind = ValueError if bad in (0, -1) else TypeError
    raises_everywhere(
        kind,
        lambda: in_cross_replica(
            lambda s, x: s.extended.experimental_run_steps_on_iterator(
                print, iter([1]), bad
            ),
            1.0,
        ),
    )
    if size > 1:  # what one rank finds wrong is told to all
        raises_everywhere(
            kind,
            lambda: strategy.extended.experimental_run_steps_on_iterator(
                lambda ctx, x: strategy.run(lambda: 1.0),
                iter([1, 2]),
                bad if rank == 1 else 2,
            ),
        )
