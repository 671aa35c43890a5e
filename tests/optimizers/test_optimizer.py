"""Optimizers: their state, one fused reduction, and mistakes on one rank."""

import copy
import re

import ml_dtypes
import numpy as np
import pytest
from replicas import (
    Traffic,
    assert_equal_copies,
    context,
    core_on_ranks,
    make,
    merge,
    on_ranks,
    own,
)

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist.optimizers import SGD, Adam, RMSprop, cosine_decay

mpi = pytest.mark.mpi


def test_variables_are_restored_by_assigning_them():
    rng = np.random.default_rng(2)
    gradients = rng.normal(size=(4, 3))

    def both():
        w = mpidist.Variable(np.ones(3), name="w")
        return w, Adam(cosine_decay(0.1, 4))

    w, optimizer = both()
    for g in gradients[:2]:
        optimizer.apply_gradients([(g, w)])
    saved = [v.numpy() for v in [w, *optimizer.variables]]
    for g in gradients[2:]:
        optimizer.apply_gradients([(g, w)])

    again, other = both()
    with pytest.raises(RuntimeError, match=r"write `optimizer\.build\(variables\)`"):
        other.variables  # noqa: B018
    with pytest.raises(RuntimeError, match="no state before"):
        other.iterations  # noqa: B018
    assert other.learning_rate == 0.1
    other.build([again])
    names = [v.name for v in other.variables]
    assert names == ["adam/iterations", "adam/momentum/w", "adam/velocity/w"]
    for variable, value in zip([again, *other.variables], saved, strict=True):
        variable.assign(value)
    assert other.learning_rate == cosine_decay(0.1, 4)(2)
    for g in gradients[2:]:
        other.apply_gradients([(g, again)])
    np.testing.assert_array_equal(again.numpy(), w.numpy())


def test_names_of_slots_are_unique():
    variables = [mpidist.Variable(np.ones(k + 1), name=n) for k, n in enumerate("aba")]
    optimizer = SGD(0.1, momentum=0.5, name="mine")
    optimizer.build(iter(variables))
    optimizer.build(variables)
    assert [(v.name, v.shape, v.trainable) for v in optimizer.variables] == [
        ("mine/iterations", (), False),
        ("mine/momentum/a", (1,), False),
        ("mine/momentum/b", (2,), False),
        ("mine/momentum/a_1", (3,), False),
    ]
    assert SGD(0.1).name == "sgd"
    rms = RMSprop(0.1, momentum=0.5, centered=True)
    rms.build(variables[:1])
    names = ["velocity", "average_gradient", "momentum"]
    assert [v.name for v in rms.variables[1:]] == [f"rmsprop/{n}/a" for n in names]


def test_none_is_skipped():
    w, b = (mpidist.Variable(np.ones(2), name=n) for n in "wb")
    optimizer = SGD(0.5, momentum=0.9)
    optimizer.apply_gradients([(None, b), (np.ones(2), w)])
    optimizer.apply_gradients([(np.ones(2), w), (None, b)])
    np.testing.assert_array_equal(b.numpy(), 1)
    np.testing.assert_allclose(w.numpy(), 1 - 0.5 * (1 + 1.9))
    assert int(optimizer.iterations) == 2
    with pytest.raises(ValueError, match=r"No gradients provided.*None for 'w', 'b'"):
        optimizer.apply_gradients([(None, w), (None, b)])
    with pytest.raises(TypeError, match=r"expected a `mpidist\.Variable`"):
        SGD(0.5).apply_gradients([(w, np.ones(2))])
    with pytest.raises(TypeError, match="build: expected a list of variables, got 3"):
        SGD(0.5).build(3)


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "learning_rat"])
def test_settings_cannot_be_assigned(name):
    """Otherwise the next step would not know of it."""
    sgd = mpidist.optimizers.SGD(0.1, momentum=0.5)
    with pytest.raises(AttributeError, match=rf"'{name}' cannot be assigned.*SGD\("):
        setattr(sgd, name, 0.9)
    sgd.learning_rate = 0.2
    assert sgd.learning_rate == 0.2


def test_the_learning_rate_is_assigned_as_in_keras():
    sgd = mpidist.optimizers.SGD(0.2)
    before = sgd.learning_rate
    before.assign(np.asarray(0.5, ml_dtypes.bfloat16))
    assert (before, sgd.learning_rate, repr(before)) == (0.2, 0.5, "0.2")
    assert type(copy.deepcopy(before)) is float
    sgd.learning_rate.assign(lambda step: 0.25)
    assert sgd.learning_rate == 0.25
    with pytest.raises(ValueError, match="finite and 0 or more"):
        sgd.learning_rate.assign(-1.0)


def test_an_optimizer_is_not_pickled():
    import pickle

    optimizer = SGD(0.25, momentum=0.5)
    text = repr(optimizer)
    assert "SGD(momentum=0.5, nesterov=False" in text
    assert "learning_rate=0.25" in text
    with pytest.raises(TypeError, match=r"Save `optimizer\.variables`"):
        pickle.dumps(optimizer)


@core_on_ranks
def test_one_fused_reduction_and_nothing_else(strategy, size):
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(s)) for s in ((3, 2), (5,), (), (0,))]
    optimizer = Adam(0.1, global_clipnorm=1.0)
    optimizer.build(variables)
    moved = []

    def step():
        gradients = [np.full(v.shape, 2.0) for v in variables]
        traffic, before = Traffic(strategy), group_of(strategy).guard.sequence
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        headers = group_of(strategy).guard.sequence - before
        moved.append((traffic.calls, sum(traffic.bytes.values()), headers))

    for _ in range(3):
        strategy.run(step)
    for calls, nbytes, headers in moved:
        assert headers == 1
        by_mpi = calls.pop("Iallreduce", 0)  # of the header's 64 bytes
        assert by_mpi <= (size > 1)
        assert calls == ({"Allreduce": 1} if size > 1 else {})
        assert nbytes == (size > 1) * 8 * (6 + 5 + 1) + 64 * by_mpi


@on_ranks
def test_in_merge_fn_it_is_one_command(strategy, size):
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(k)) for k in (3, 400)]
    optimizer = Adam(0.1)
    optimizer.build(variables)

    def calls(merge_fn):
        gradients = [np.ones(v.shape) for v in variables]
        traffic = Traffic(strategy)
        context().merge_call(merge_fn, args=(gradients,))
        return [traffic.calls[name] for name in ("Ibcast", "Bcast", "Allreduce")]

    def apply(strategy, gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step():
        return calls(apply), calls(lambda strategy, gradients: None)

    with_it, without = strategy.run(step)
    pairs = zip(with_it, without, strict=True)
    mine = [own(strategy, a) - own(strategy, b) for a, b in pairs]
    assert mine == ([1, 0, 1] if size > 1 else [0, 0, 0])


@core_on_ranks
def test_the_first_apply_may_be_anywhere(strategy, size):
    for level in ("replica", "merge_fn", "program"):
        w = make(strategy, np.zeros(2, np.float32), name="w")
        optimizer = SGD(1.0, momentum=0.5)

        def step(optimizer=optimizer, w=w):
            optimizer.apply_gradients([(np.ones(2, np.float32), w)])

        def merging(optimizer=optimizer, w=w):
            def merge_fn(strategy, g):
                optimizer.apply_gradients([(g, w)])
                return optimizer.iterations

            return context().merge_call(merge_fn, args=(np.ones(2, np.float32),))

        if level == "replica":
            strategy.run(step)
        elif level == "merge_fn":
            assert strategy.run(merging) is optimizer.iterations
        else:
            ones = strategy.run(lambda: np.ones(2, np.float32))
            optimizer.apply_gradients([(ones, w)])
        # The state is everybody's, at whatever level it was made.
        strategy.run(step)
        strategy.run(merging)
        np.testing.assert_array_equal(w.numpy(), -size * (1 + 1.5 + 1.75))
        assert int(optimizer.iterations) == 3
        assert [v.name for v in optimizer.variables] == [
            "sgd/iterations",
            "sgd/momentum/w",
        ]
        assert_equal_copies(strategy, [w, *optimizer.variables])


@on_ranks
@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("call", ["build", "apply_gradients"])
@pytest.mark.one_size
def test_bad_arguments_outside_every_scope_are_told(
    strategy, rank, size, call, culprit
):
    """No scope and no state says whose ranks they are: the variables given do."""
    variable = make(strategy, np.zeros(3), name="v")
    optimizer = SGD(0.1)
    bad = rank == (0 if culprit == "first" else size - 1)
    pair = (np.zeros(3), variable)
    if call == "build":
        function, right, wrong = optimizer.build, [variable], [variable, "no variable"]
    else:
        function, right = optimizer.apply_gradients, [pair]
        wrong = iter([pair, (variable, np.zeros(3))])
    expected = (TypeError, mpidist.ReplicaError)
    with pytest.raises(expected, match=r"expected a `mpidist\.V"):
        function(wrong if bad else right)
    optimizer.build([variable])
    optimizer.apply_gradients([(np.ones(3), variable)])


class Halving(mpidist.CollectiveAllReduce):
    """Sum half of each value, in a way of the user's own; or give what is wrong."""

    calls = 0
    wrong = None

    def reduce_implementation(self, reduce_op, value, destinations, options):
        strategy = mpidist.get_strategy()
        half = strategy.run(lambda x: x / 2, args=(value,))
        self.calls += 1
        total = super().reduce_implementation(reduce_op, half, destinations, options)
        on_one_rank = self.wrong is not fail
        if self.wrong is None or (on_one_rank and strategy.replica_id):
            return total
        return self.wrong(total)

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        return [self.reduce_implementation(reduce_op, v, d, options) for v, d in pairs]


def fail(_):
    raise ValueError("this is wrong")


@pytest.mark.parametrize(
    "wrong", [None, lambda x: x.numpy()[:1], lambda x: x + 1, fail]
)
@on_ranks
def test_cross_device_ops_of_the_user(size, wrong):
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=60)
    ops = Halving()
    strategy = mpidist.MPIStrategy(communication_options=options, cross_device_ops=ops)
    a, b = two_variables(strategy)
    optimizer = SGD(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(ONE, a), (None, b)]))
    ones = strategy.run(lambda: np.ones(2))
    optimizer.apply_gradients([(None, b), (ones, a)])
    optimizer.apply_gradients([(ones, a), (ones, b)])
    np.testing.assert_array_equal(a.numpy(), 1 - 0.75 * size)
    assert ops.calls == 4
    ops.wrong = wrong
    if wrong is not None and (size > 1 or wrong is fail):
        with pytest.raises((ValueError, mpidist.CollectiveError)) as caught:
            optimizer.apply_gradients([(ones, a), (ones, b)])
        message = "expected shape|do not make the same call|this is wrong"
        assert re.search(message, str(caught.value))
        np.testing.assert_array_equal(a.numpy(), 1 - 0.75 * size)
        assert int(optimizer.iterations) == 3
    strategy.run(lambda: None)  # it can still be used
    strategy.close()


@core_on_ranks
def test_gradients_that_are_reduced_already(strategy, size):
    w = make(strategy, np.zeros(2), name="w")
    optimizer = SGD(1.0)

    def step():
        g = context().all_reduce("SUM", np.ones(2))
        optimizer.apply_gradients([(g, w)], skip_gradients_aggregation=True)

    strategy.run(step)
    np.testing.assert_array_equal(w.numpy(), -size)
    ones = strategy.run(lambda: np.ones(2))
    total = strategy.extended.reduce_to("SUM", ones, w)
    optimizer.apply_gradients([(total, w)])  # Mirrored
    optimizer.apply_gradients([(np.full(2, 1.0), w)])  # plain, the same on all ranks
    np.testing.assert_array_equal(w.numpy(), -2 * size - 1)

    def merge_fn(strategy, g):
        total = strategy.extended.batch_reduce_to("SUM", [(g, w)])
        optimizer.apply_gradients([(total[0], w)])

    merge(strategy, merge_fn, np.ones(2))
    np.testing.assert_array_equal(w.numpy(), -3 * size - 1)
    assert int(optimizer.iterations) == 4


@core_on_ranks
def test_reduced_gradients_that_are_views_of_variables(strategy):
    with strategy.scope():
        a, b = mpidist.Variable(np.ones(3)), mpidist.Variable(np.full(3, 2.0))
    optimizer = SGD(0.5)

    def step():
        pairs = [(b.value()[:], a), (a.value(), b)]
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    strategy.run(step)
    np.testing.assert_array_equal(a.numpy(), [0.0] * 3)
    np.testing.assert_array_equal(b.numpy(), [1.5] * 3)
    optimizer.apply_gradients([(b, a), (a, b)])  # Mirrored, at program level
    np.testing.assert_array_equal(a.numpy(), [-0.75] * 3)
    np.testing.assert_array_equal(b.numpy(), [1.5] * 3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.replicas(2, 3)
def test_plain_gradients_have_to_be_the_same(strategy, rank):
    w = make(strategy, np.zeros(2), name="w")
    optimizer = SGD(1.0)
    mine = np.full(2, float(rank))
    with pytest.raises(mpidist.CollectiveMismatchError, match="not per replica"):
        optimizer.apply_gradients([(mine, w)])

    def step():
        optimizer.apply_gradients([(mine, w)], skip_gradients_aggregation=True)

    with pytest.raises(mpidist.CollectiveMismatchError, match="not per replica"):
        strategy.run(step)
    # A variable that was made outside the scope is each process's own, too.
    plain = mpidist.Variable(mine)
    with pytest.raises(mpidist.CollectiveMismatchError, match="not per replica"):
        optimizer.apply_gradients([(plain, w)])
    np.testing.assert_array_equal(w.numpy(), 0)
    assert int(optimizer.iterations) == 0


@pytest.mark.parametrize(("own", "given"), [("f4", "f8"), ("f8", "f4"), ("f4", "f2")])
def test_gradients_of_another_float_are_cast_as_in_keras(strategy, own, given):
    variable = make(strategy, np.ones(3, own))
    optimizer = mpidist.optimizers.SGD(0.5)
    n = strategy.num_replicas_in_sync
    # Each replica may have its own.
    dtype = own if strategy.replica_id else given
    gradient = np.full(3, 1.0 / n, dtype)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
    assert variable.dtype == own
    np.testing.assert_allclose(variable, 0.5, rtol=1e-3)


def two_variables(strategy):
    with strategy.scope():
        return [mpidist.Variable(np.ones(2), name=n) for n in "ab"]


ONE = np.ones(2)
SLICES = mpidist.IndexedSlices(np.ones(1), np.array([1]))

# What the last rank does wrong, from (optimizer, a, b, another strategy's variable).
WRONG = {
    "shape": (lambda o, a, b, c: [(np.ones(3), a), (ONE, b)], "expected shape"),
    "dtype": (lambda o, a, b, c: [(np.ones(2, "i"), a), (ONE, b)], r"astype\('float64"),
    "complex": (lambda o, a, b, c: [(ONE * 1j, a), (ONE, b)], r"gradient\.real"),
    "slices": (lambda o, a, b, c: [(SLICES, a), (ONE, b)], r"numpy\.add\.at"),
    "object": (lambda o, a, b, c: [("x", a), (ONE, b)], "gradient of Variable 'a'"),
    "count": (lambda o, a, b, c: [(ONE, a)], "do not make the same call"),
    "order": (lambda o, a, b, c: [(ONE, b), (ONE, a)], "do not make the same call"),
    "none": (lambda o, a, b, c: [(ONE, a), (None, b)], "do not make the same call"),
    "all none": (lambda o, a, b, c: [(None, a), (None, b)], "No gradients"),
    "nothing": (lambda o, a, b, c: [], "at least one variable"),
    "pair": (lambda o, a, b, c: [(ONE, a, 3), (ONE, b)], "pairs"),
    "not iterable": (lambda o, a, b, c: 3, "iterable"),
    "swapped": (lambda o, a, b, c: [(a, ONE), (b, ONE)], r"\(gradient, variable\)"),
    "twice": (lambda o, a, b, c: [(ONE, a), (ONE, a)], "'a' is given twice"),
    "foreign": (lambda o, a, b, c: [(ONE, c), (ONE, b)], "Mixing different"),
    "plain": (
        lambda o, a, b, c: [(ONE, np), (ONE, b)],
        "expected a `mpidist.Variable`",
    ),
    "rate": (lambda o, a, b, c: setattr(o, "learning_rate", 0.3), "learning_rate=0.3"),
    # That rank uses another optimizer.
    "setting": (lambda o, a, b, c: None, "momentum=0.7"),
    "function": (
        lambda o, a, b, c: setattr(o, "learning_rate", lambda step: 1 / step),
        "division by zero",
    ),
}


@pytest.mark.parametrize("built", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("what", WRONG)
@on_ranks
def test_a_mistake_on_one_rank_is_raised_on_all(
    strategy, new_strategy, rank, size, what, built
):
    wrong, match = WRONG[what]
    harmless_alone = ("count", "order", "none", "rate", "setting")
    if size == 1 and what in harmless_alone:
        pytest.skip("one rank cannot differ")
    a, b = two_variables(strategy)
    other = new_strategy()
    c = make(other, np.ones(2), name="c")
    optimizer, another = SGD(0.25, momentum=0.5), SGD(0.25, momentum=0.7)
    state = [a, b]
    if built:
        for one in (optimizer, another):
            one.build([a, b])
            state += one.variables
    before = [v.numpy() for v in state]
    used = another if what == "setting" and rank == size - 1 else optimizer

    def step():
        pairs = [(ONE, a), (ONE, b)]
        if rank == size - 1:
            given = wrong(optimizer, a, b, c)
            pairs = pairs if given is None and what != "nothing" else given
        used.apply_gradients(pairs)

    kinds = (ValueError, TypeError, RuntimeError, ZeroDivisionError)
    with pytest.raises(kinds) as caught:
        strategy.run(step)
    assert re.search(match, str(caught.value)), str(caught.value)
    for variable, value in zip(state, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    # The strategy is usable, and so is an optimizer that all ranks agree on.
    good = SGD(0.25)
    strategy.run(lambda: good.apply_gradients([(ONE, a), (ONE, b)]))
    np.testing.assert_array_equal(a.numpy(), 1 - 0.25 * size)


@core_on_ranks
def test_mistakes_in_merge_fn_and_at_program_level(strategy, rank, size):
    a, b = two_variables(strategy)
    optimizer = SGD(0.25)

    def bad_shape(strategy, g):
        optimizer.apply_gradients([(g, a), (g, b)])

    mine = np.ones(2 if rank < size - 1 else 3)
    with pytest.raises((ValueError, mpidist.CollectiveError), match="expected shape"):
        merge(strategy, bad_shape, mine)
    gradient = strategy.run(lambda: np.ones(2))
    with pytest.raises(ValueError, match="leave out `skip_gradients_aggregation`"):
        optimizer.apply_gradients([(gradient, a)], skip_gradients_aggregation=True)
    with pytest.raises(RuntimeError, match="inside the function of `update`"):
        strategy.extended.update(a, lambda v: optimizer.apply_gradients([(ONE, v)]))
    np.testing.assert_array_equal(a.numpy(), 1)
    optimizer.apply_gradients([(gradient, a), (gradient, b)])
    np.testing.assert_array_equal(b.numpy(), 1 - 0.25 * size)
    c = make(strategy, np.ones(2), name="c")
    with pytest.raises(ValueError, match=r"'c'.*is not one of those"):
        optimizer.apply_gradients([(gradient, c)])
    with pytest.raises(ValueError, match="built for 2 variables"):
        optimizer.build([a])


@on_ranks
@pytest.mark.one_size
def test_an_optimizer_of_merge_fn_is_refused(strategy):
    def merge_fn(strategy):
        SGD(0.1)

    with pytest.raises(RuntimeError, match="exists on rank 0 only"):
        merge(strategy, merge_fn)


@pytest.mark.mpi(min_size=2)
@pytest.mark.replicas(2, 3)
def test_other_numbers_of_optimizers_are_found(strategy, rank, size):
    a, _ = two_variables(strategy)
    extra = Adam(0.1) if rank == 0 else None
    optimizer = SGD(0.5)

    def merge_fn(strategy, g):
        optimizer.apply_gradients([(g, a)])

    with pytest.raises(RuntimeError, match="create optimizers on all ranks"):
        merge(strategy, merge_fn, np.ones(2))
    optimizer.build([a])  # from now on it is known by its state
    merge(strategy, merge_fn, np.ones(2))
    np.testing.assert_array_equal(a.numpy(), 1 - 0.5 * size)
    del extra
    # Level the counts, for the tests that follow.
    kept = None if rank == 0 else Adam(0.1)
    assert (kept is None) == (rank == 0)


@on_ranks
@pytest.mark.one_size
def test_plain_variables_under_a_strategy_are_refused(strategy):
    w = mpidist.Variable(np.ones(2), name="w")
    with pytest.raises(RuntimeError, match="created outside every scope"):
        strategy.run(lambda: SGD(0.1).apply_gradients([(ONE, w)]))
    SGD(0.5).apply_gradients([(ONE, w)])
    np.testing.assert_array_equal(w.numpy(), 0.5)
    a, _ = two_variables(strategy)
    optimizer = SGD(0.5)
    optimizer.build([w])
    with pytest.raises(RuntimeError, match="create an optimizer for each strategy"):
        strategy.run(lambda: optimizer.apply_gradients([(ONE, a)]))


@on_ranks
def test_without_a_guard(new_strategy, size):
    strategy = new_strategy(guard=False)
    a, b = two_variables(strategy)
    optimizer = Adam(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(ONE, a), (ONE, b)]))
    np.testing.assert_allclose(a.numpy(), 0.5, rtol=1e-6)
    assert_equal_copies(strategy, [a, b, *optimizer.variables])


@pytest.mark.parametrize("bytes_per_pack", [0, 64])
@on_ranks
def test_dtypes_and_packs(new_strategy, rank, size, bytes_per_pack):
    strategy = new_strategy(bytes_per_pack=bytes_per_pack)
    dtypes = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.longdouble]
    with strategy.scope():
        variables = [mpidist.Variable(np.ones((3, 4), d)) for d in dtypes * 2]
    optimizer = SGD(0.5, momentum=0.5)

    def step():
        gradients = [np.full((3, 4), rank + 1, v.dtype) for v in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    strategy.run(step)
    total = size * (size + 1) / 2
    for variable in variables:
        assert variable.numpy().astype(float).tolist() == [[1 - total / 2] * 4] * 3
    assert_equal_copies(strategy, [*variables, *optimizer.variables])


@mpi
def test_a_gradient_may_be_what_a_replica_keeps(strategy, size):
    with strategy.scope():
        w = mpidist.Variable(np.zeros(2))
        kept = mpidist.Variable(np.zeros(2), synchronization="ON_READ")
        optimizer = SGD(1.0)

    def step():
        replica = mpidist.get_replica_context().replica_id_in_sync_group
        kept.assign(np.full(2, float(replica)))
        optimizer.apply_gradients([(kept, w)])

    strategy.run(step)
    assert_equal_copies(strategy, [w])
    assert w.numpy().tolist() == [-float(sum(range(size)))] * 2
    with strategy.scope(), pytest.raises(TypeError, match="which is ON_READ; write"):
        optimizer.apply_gradients([(kept, w)])


def test_a_class_derived_as_from_kerass_says_what_to_write():
    class Average(mpidist.optimizers.Optimizer):
        def __init__(self, optimizer, name="average", **kwargs):
            super().__init__(name, **kwargs)

    for kwargs in ({}, {"clipnorm": 1.0}):
        with pytest.raises(
            TypeError, match=r"`class Average\(mpidist\..*`class Average:`"
        ):
            Average(mpidist.optimizers.SGD(0.1), **kwargs)
