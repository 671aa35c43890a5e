"""mpidist.jax: two ranks do what one does with all rows, on JAX's own functions."""

import dataclasses
import functools

import numpy as np
import pytest
from replicas import ON_TWO, everywhere, make, raises_everywhere, wait_for_reports

import mpidist
from mpidist._base import remedies

pytestmark = [pytest.mark.guests, *ON_TWO]

ROWS = 16


def parameters(jax, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": jax.numpy.asarray(rng.normal(size=(4, 3)), jax.numpy.float32),
        "b": (jax.numpy.zeros(3), None),
    }


def make_rows(jax):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    return jax.numpy.asarray(x), jax.numpy.arange(ROWS) % 3


def losses_of(jax, p, x, y):
    scores = x @ p["w"] + p["b"][0]
    return -jax.nn.log_softmax(scores)[jax.numpy.arange(len(y)), y]


def bits(jax, tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def assert_close(jax, tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert isinstance(x, jax.Array)
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_functions_do_not_get_the_errors_of_each_other(on_nodes, jax, mj):
    """With `error_feedback`, though their arguments have the same shapes."""
    strategy = on_nodes(compression="fp16", error_feedback=True)
    zeros = jax.numpy.zeros(50_000)
    values = jax.numpy.arange(50_000.0)
    for x in (values * 1e4, jax.numpy.ones(50_000)):
        step = mj.value_and_grad(lambda w, x: (w * x).sum(), strategy=strategy)
        np.testing.assert_allclose(step(zeros, x)[1], x, rtol=1e-3)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("level", ["scope", "argument", "replica"])
def test_value_and_grad(strategy, rank, jax, mj, level, jit):
    x, y = make_rows(jax)
    p = parameters(jax)

    def loss(p, x, y):
        return losses_of(jax, p, x, y).mean()

    expected = jax.value_and_grad(loss)(p, x, y)
    x, y = x[rank::2], y[rank::2]
    given = {"strategy": strategy} if level == "argument" else {}
    step = mj.value_and_grad(loss, jit=jit, **given)
    if level == "scope":
        with strategy.scope():
            result = step(p, x, y)
    elif level == "argument":
        result = step(p, x, y=y)
    else:
        result = []
        strategy.run(lambda: result.extend(step(p, x, y)))
        result = tuple(result)
    assert_close(jax, result, expected)
    assert everywhere(bits(jax, result)) == [bits(jax, result)] * 2


def test_parameters_that_differ_at_the_first_call(strategy, rank, jax, mj):
    def loss(p, x, y):
        return losses_of(jax, p, x, y).mean()

    x, y = make_rows(jax)
    step = mj.value_and_grad(loss, strategy=strategy)
    mine = parameters(jax, seed=rank)
    for text in raises_everywhere(
        mpidist.OutOfSyncError, lambda: step(mine, x[rank::2], y[rank::2])
    ):
        assert "['w']' on rank 1" in text.replace('"', "'")
        assert "`parameters = mpidist.jax.broadcast(parameters)`" in text
    same = mj.broadcast(mine, strategy=strategy)
    value, _ = step(same, x[rank::2], y[rank::2])
    assert everywhere(bits(jax, value)) == [bits(jax, value)] * 2
    step(mine, x[rank::2], y[rank::2])  # only the first call is compared


def test_functions_that_are_defined_in_each_step(strategy, rank, mj, caplog):
    def step(x, jit):
        def loss(p):
            return p * x

        return mj.value_and_grad(loss, jit=jit, strategy=strategy)(2.0)[0]

    assert [step(x, False) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert "defined" not in caplog.text
    assert [step(x, True) for x in range(1, 7)] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    wait_for_reports()
    if rank == 0:
        assert caplog.text.count("was defined 5 times, and is compiled each time") == 1


def test_trainings_with_functions_of_their_own_are_no_reason_to_warn(
    strategy, rank, mj, caplog
):
    for x in range(6):
        step = mj.value_and_grad(lambda p, x=x: p * x, strategy=strategy)
        assert [step(2.0)[0] for _ in range(2)] == [2.0 * x] * 2
    wait_for_reports()
    assert "defined" not in caplog.text


def test_one_function_for_several_strategies_compares_once_for_each(
    strategy, new_strategy, rank, mj
):
    """Threads that are replicas share a function, too."""
    step = mj.value_and_grad(lambda p: p * p)
    other = new_strategy()
    for one in (strategy, other):
        with one.scope():
            step(1.0)
    for one in (strategy, other):
        with one.scope():
            assert step(float(rank))[0] == 0.5


def test_numbers_of_arguments(strategy, jax, mj):
    one = jax.numpy.ones(2)
    loss, _ = mj.value_and_grad(jax.numpy.vdot, np.int64(1), strategy=strategy)(
        one, one
    )
    assert loss == 2
    step = mj.value_and_grad(jax.numpy.vdot, 2, strategy=strategy)
    assert all(
        "3 positional" in text
        for text in raises_everywhere(TypeError, lambda: step(one, one))
    )


def test_a_function_that_raises_on_one_rank(strategy, rank, jax, mj):
    step = mj.value_and_grad(lambda p, x: (p * x).sum(), strategy=strategy)
    one, rows = jax.numpy.ones(2), jax.numpy.ones(2 + rank)
    endless = [one]
    if rank == 1:
        endless.append(endless)
    for call in (step, functools.partial(mj.broadcast, strategy=strategy)):
        raises_everywhere(ValueError, lambda x=call: x(endless), "contains itself")
    by = mj.value_and_grad(lambda p, x: (p * x).sum(), rank % 2, strategy=strategy)
    error, text = mpidist.CollectiveMismatchError, "gradients by argument 1"
    raises_everywhere(error, lambda: by(one, one), text)
    error = mpidist.ReplicaError if rank == 0 else TypeError
    with pytest.raises(error, match="got incompatible shapes"):
        step(one, rows)
    assert step(one, one)[0] == 2


def test_aux_and_argnums_with_uneven_rows(strategy, rank, jax, mj):
    x, y = make_rows(jax)
    p = parameters(jax)

    def loss(scale, p, x, y):
        losses = scale * losses_of(jax, p, x, y)
        share = mpidist.compute_average_loss(losses, global_batch_size=ROWS)
        return share, len(y)

    part = slice(0, 3) if rank == 0 else slice(3, ROWS)

    def replica():
        step = mj.value_and_grad(loss, argnums=(0, 1), has_aux=True, op="SUM")
        return step(2.0, p, x[part], y[part])

    results = []
    strategy.run(lambda: results.append(replica()))
    (((value, rows), gradients),) = results
    assert rows == (3 if rank == 0 else 13)

    def whole(scale, p):
        return scale * losses_of(jax, p, x, y).mean()

    expected = jax.value_and_grad(whole, argnums=(0, 1))(2.0, p)
    assert_close(jax, (value, gradients), expected)


def test_a_mean_of_no_rows_warns_and_what_it_says_works(strategy, rank, jax, mj):
    x = jax.numpy.full((0 if rank == 1 else 4, 2), 2.0)

    def mean(w, x):
        return (x @ w).mean()

    def share(w, x, n):
        return (x @ w).sum() / n

    def step():
        mj.value_and_grad(mean, strategy=strategy)(jax.numpy.ones(2), x)

    # A warning is an error here, and so one on all ranks.
    for message in raises_everywhere(RuntimeWarning, step):
        assert "[rank 1] mpidist.jax.value_and_grad: the loss is NaN" in message
    reduced = mj.value_and_grad(share, op="SUM", strategy=strategy)
    loss, gradient = reduced(jax.numpy.ones(2), x, sum(everywhere(len(x))))
    assert (float(loss), gradient.tolist()) == (4.0, [2.0, 2.0])


def test_training_is_that_of_one_rank(strategy, rank, jax, mj):
    x, y = make_rows(jax)

    def loss(p, x, y):
        return losses_of(jax, p, x, y).mean()

    def train(p, step, x, y):
        values = []
        for _ in range(5):
            value, gradients = step(p, x, y)
            p = jax.tree.map(lambda a, b: a - 0.5 * b, p, gradients)
            values.append(float(value))
        return values, p

    one, its = train(parameters(jax), jax.jit(jax.value_and_grad(loss)), x, y)
    p = mj.broadcast(parameters(jax, seed=rank), strategy=strategy)
    step = mj.value_and_grad(loss, strategy=strategy)
    two, ours = train(p, step, x[rank::2], y[rank::2])
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert_close(jax, ours, its)
    assert everywhere(bits(jax, ours)) == [bits(jax, ours)] * 2


def test_pytrees_that_mpidist_does_not_know(strategy, rank, jax, mj):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: object
        rest: object

    tree = Layer(jax.numpy.full(3, rank + 1.0), (None, [rank, np.ones(2) * rank]))
    total = mj.all_reduce(tree, "SUM", strategy=strategy)
    assert isinstance(total, Layer)
    assert total.weight.tolist() == [3, 3, 3]
    none, (number, array) = total.rest
    assert none is None
    assert (number, type(number)) == (1, int)
    assert type(array) is np.ndarray
    for root in (0, 1):
        sent = mj.broadcast(tree, root, strategy=strategy)
        assert sent.weight.tolist() == [root + 1] * 3
        assert sent.rest[1][0] == root
    assert mj.all_reduce((), strategy=strategy) == ()


def test_variables_are_pytrees_of_one_array(strategy, jax, mj):
    variable = make(strategy, np.arange(3, dtype=np.float32))
    mirrored = strategy.extended.broadcast_to(np.ones(3, np.float32), variable)

    def square(w):
        return (w * w).sum()

    assert jax.grad(square)(variable).tolist() == [0, 2, 4]
    assert jax.jit(square)({"v": variable}["v"]) == 5
    value, gradient = mj.value_and_grad(square, strategy=strategy)(mirrored)
    assert value == 3
    (leaf,) = jax.tree.leaves([variable])
    variable.assign(variable * 0)
    assert leaf.tolist() == [0, 1, 2]  # a copy
    assert jax.tree.map(lambda x: x + 1, [variable])[0].tolist() == [1, 1, 1]
    assert gradient.tolist() == [2, 2, 2]


def test_errors(strategy, rank, jax, mj):
    ones = jax.numpy.ones(3)
    bad = rank == 1  # on this rank alone
    reduce = functools.partial(mj.all_reduce, strategy=strategy)
    step = mj.value_and_grad(lambda y: y.sum(), strategy=strategy)
    differ = mpidist.CollectiveMismatchError
    for kind, message, call in [
        (RuntimeError, "no strategy is active", lambda: mj.all_reduce(ones)),
        (ValueError, "expected one of", lambda: reduce(ones, "BAD" if bad else "SUM")),
        (TypeError, "JAX tracer", lambda: jax.jit(reduce)(ones)),
        (TypeError, "JAX tracer", lambda: jax.grad(lambda x: step(x)[0])(ones)),
        (TypeError, "got 'text'", lambda: reduce(["text" if bad else ones])),
        (ValueError, "0 to 1, got 5", lambda: mj.broadcast(ones, 5, strategy=strategy)),
        (TypeError, "to be a function", lambda: mj.value_and_grad(3)),
        (differ, "float32 (2,)", lambda: reduce({"a": ones[: 2 + rank]})),
        (differ, "['b']", lambda: reduce({"b" if bad else "a": ones})),
    ]:
        for text in raises_everywhere(kind, call):
            assert message in text
    assert reduce(ones).tolist() == [1, 1, 1]


def test_the_keyword_of_horovod(strategy, rank, jax, mj):
    tree = {"w": jax.numpy.full(2, float(rank))}
    with strategy.scope():
        assert mj.broadcast(tree, root_rank=0)["w"].tolist() == [0.0, 0.0]
        for message in raises_everywhere(
            TypeError, lambda: mj.broadcast(tree, root_rank=1)
        ):
            assert "write `root=1`" in message
    losses = jax.numpy.array([jax.numpy.nan, 1.0])
    assert float(mpidist.compute_average_loss(losses, global_batch_size=0)) == 0


def test_the_share_of_a_penalty_has_a_gradient(jax, mj):
    gradient = jax.grad(lambda w: mpidist.scale_regularization_loss(w**2))
    assert gradient(jax.numpy.array([1.0, 2.0])).tolist() == [2.0, 4.0]


def test_calls_that_are_begun(strategy, jax, rank, size):
    """Arrays of JAX, alone and in a nest, as of the calls that are made."""
    jnp = jax.numpy

    def tree():
        return {
            "b16": jnp.full((3, 4), 1.5 + rank, jnp.bfloat16),
            "f32": [jnp.arange(50_000.0) * (rank + 1), np.ones(3)],
            "number": (1.0, 2),
        }

    def step():
        ctx = mpidist.get_replica_context()
        handles = [
            ctx.all_reduce_async("SUM", tree()),
            ctx.all_gather_async(jnp.full((rank + 1, 2), rank), 0),
        ]
        found = [handle.result() for handle in handles]
        expected = [
            ctx.all_reduce("SUM", tree()),
            ctx.all_gather(jnp.full((rank + 1, 2), rank), 0),
        ]
        return jax.tree.leaves(found), jax.tree.leaves(expected)

    kept = []
    strategy.run(lambda: kept.append(step()))
    for x, y in zip(*kept[0], strict=True):
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y)
    assert [x.dtype for x in kept[0][0][:2]] == [jnp.bfloat16, jnp.float32]


def test_names_of_jax_and_mpi4jax(mj):
    """Of programs that call the collectives of a compiled function."""
    for name, remedy in remedies.tables()["names"]["mpidist.jax"].items():
        with pytest.raises(AttributeError) as caught:
            getattr(mj, name)
        assert remedy in str(caught.value)
