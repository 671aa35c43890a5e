"""Optimizers: the formulas of torch, the same weights on any number of ranks."""

import re

import ml_dtypes
import numpy as np
import posing
import pytest
from replicas import from_replicas, own

import mpidist
from mpidist._strategy.strategy import group_of
from mpidist.optimizers import (
    SGD,
    Adam,
    AdamW,
    clip_by_global_norm,
    cosine_decay,
    linear_warmup,
    piecewise_constant,
)

mpi = pytest.mark.mpi
core = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


def apply_core(function):
    for mark in core:
        function = mark(function)
    return function


# --- the formulas, in one process -----------------------------------------------------

SHAPES = [(), (5,), (3, 4), (2, 1, 3), (0, 2), (40_000,)]
KINDS = {
    "sgd": (lambda **more: SGD(0.1, **more), "SGD", {"lr": 0.1}),
    "sgd decay": (
        lambda **more: SGD(0.1, weight_decay=0.3, **more),
        "SGD",
        {"lr": 0.1, "weight_decay": 0.3},
    ),
    "momentum": (
        lambda **more: SGD(0.1, 0.9, **more),
        "SGD",
        {"lr": 0.1, "momentum": 0.9},
    ),
    "momentum decay": (
        lambda **more: SGD(0.1, momentum=0.9, weight_decay=0.3, **more),
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
    ),
    "nesterov": (
        lambda **more: SGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.1, **more),
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (
        lambda **more: Adam(0.02, epsilon=1e-8, **more),
        "Adam",
        {"lr": 0.02},
    ),
    "adam betas": (
        lambda **more: Adam(0.02, 0.7, 0.95, 1e-3, **more),
        "Adam",
        {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3},
    ),
    "adamw": (
        lambda **more: AdamW(0.02, weight_decay=0.5, epsilon=1e-8, **more),
        "AdamW",
        {"lr": 0.02, "weight_decay": 0.5},
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 2.0])
def test_the_formulas_are_those_of_torch(kind, dtype, clip):
    torch = pytest.importorskip("torch")
    make, name, settings = KINDS[kind]
    rng = np.random.default_rng(0)
    initial = [np.asarray(rng.normal(size=shape), dtype) for shape in SHAPES]
    variables = [mpidist.Variable(x) for x in initial]
    optimizer = make(global_clipnorm=clip)
    tensors = [torch.tensor(x.copy(), requires_grad=True) for x in initial]
    reference = getattr(torch.optim, name)(tensors, **settings)
    for step in range(6):
        gradients = [np.asarray(rng.normal(size=s), dtype) for s in SHAPES]
        kept = [g.copy() for g in gradients]
        rate = 0.1 / (step + 1)  # changes, as by a schedule
        optimizer.learning_rate = rate
        for group in reference.param_groups:
            group["lr"] = rate
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = torch.tensor(gradient.copy())
        if clip:
            # torch divides by norm + 1e-6
            norm = np.sqrt(sum(float((t.grad.double() ** 2).sum()) for t in tensors))
            for tensor in tensors:
                tensor.grad *= clip / max(norm, clip)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        reference.step()
        for gradient, before in zip(gradients, kept, strict=True):
            np.testing.assert_array_equal(gradient, before)
    rounding = 200 * np.finfo(dtype).eps
    for variable, tensor in zip(variables, tensors, strict=True):
        assert variable.dtype == dtype
        np.testing.assert_allclose(
            variable.numpy(), tensor.detach().numpy(), rtol=rounding, atol=rounding
        )
    assert int(optimizer.iterations) == 6


def test_a_float16_variable_is_computed_in_float32():
    w = mpidist.Variable(np.ones(4, np.float16), name="w")
    b = mpidist.Variable(np.ones(4, ml_dtypes.bfloat16), name="b")
    optimizer = Adam(0.25)
    wide = mpidist.Variable(np.ones(4, np.float32), name="w")
    other = Adam(0.25)
    for g in ([1e-5, 1, 2, 300], [3, -1, 0, 1]):  # 1e-5 ** 2 is 0 in float16
        g = np.array(g, np.float16)
        optimizer.apply_gradients([(g, w), (g.astype(ml_dtypes.bfloat16), b)])
        before = wide.numpy()
        other.apply_gradients([(g.astype(np.float32), wide)])
        # Each step is rounded once, to the variable's dtype.
        step = wide.numpy() - before
        assert np.abs(step).max() > 0
        wide.assign((before + step).astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(w.numpy(), wide.numpy().astype(np.float16))
    assert w.dtype == np.float16
    assert b.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(b.numpy().astype(float), w.numpy(), rtol=0.02)
    assert {v.dtype.name for v in optimizer.variables} == {"int64", "float32"}


def test_variables_that_are_not_contiguous():
    rng = np.random.default_rng(1)
    x, g = rng.normal(size=(2, 5, 7))
    results = []
    for order in "CF":
        variable = mpidist.Variable(np.array(x, order=order))
        optimizer = SGD(0.1, momentum=0.9)
        for _ in range(3):
            optimizer.apply_gradients([(np.array(g, order=order), variable)])
        results.append(variable.numpy())
    np.testing.assert_array_equal(*results)


def test_a_gradient_that_is_a_view_of_a_variable():
    a, b = mpidist.Variable(np.ones(3)), mpidist.Variable(np.full(3, 2.0))
    SGD(0.5).apply_gradients([(b.value()[:], a), (a.value(), b)])
    np.testing.assert_array_equal(a.numpy(), [0.0] * 3)
    np.testing.assert_array_equal(b.numpy(), [1.5] * 3)


def test_variables_are_restored_by_assigning_them():
    rng = np.random.default_rng(2)
    gradients = rng.normal(size=(4, 3))

    def make():
        w = mpidist.Variable(np.ones(3), name="w")
        return w, Adam(cosine_decay(0.1, 4))

    w, optimizer = make()
    for g in gradients[:2]:
        optimizer.apply_gradients([(g, w)])
    saved = [v.numpy() for v in [w, *optimizer.variables]]
    for g in gradients[2:]:
        optimizer.apply_gradients([(g, w)])

    again, other = make()
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


def test_no_weight_decay_for_some():
    w, b, c = (mpidist.Variable(np.ones(2), name=n) for n in ("w", "bias", "c"))
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[c], var_names=["^bia"])
    optimizer.apply_gradients([(np.zeros(2), v) for v in (w, b, c)])
    np.testing.assert_array_equal(w.numpy(), 1 - 0.1 * 0.5)
    np.testing.assert_array_equal(b.numpy(), 1)
    np.testing.assert_array_equal(c.numpy(), 1)
    with pytest.raises(RuntimeError, match="before `build`"):
        optimizer.exclude_from_weight_decay(var_names=["w"])


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


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: SGD("a"), TypeError, "`learning_rate` to be a number or a function"),
        (lambda: SGD(-1), ValueError, "finite and 0 or more"),
        (lambda: SGD(np.nan), ValueError, "finite and 0 or more"),
        (lambda: SGD(momentum=1.0), ValueError, "0 or more and below 1"),
        (lambda: SGD(nesterov=True), ValueError, "needs a `momentum`"),
        (lambda: SGD(weight_decay="x"), TypeError, "`weight_decay` to be a number"),
        (lambda: SGD(global_clipnorm=0), ValueError, "above 0"),
        (lambda: SGD(name=3), TypeError, "`name`"),
        (lambda: Adam(beta_1=1), ValueError, "`beta_1`"),
        (lambda: Adam(epsilon=-1), ValueError, "`epsilon`"),
        (lambda: AdamW(weight_decay=-1), ValueError, "AdamW: expected `weight_decay`"),
        (lambda: cosine_decay(0.1, 0), ValueError, "`decay_steps`"),
        (lambda: linear_warmup(0.1, 0), ValueError, "`warmup_steps`"),
        (lambda: piecewise_constant([1], [1]), ValueError, "2 `values`"),
        (lambda: piecewise_constant([2, 1], [1, 2, 3]), ValueError, "to increase"),
    ],
)
def test_settings_that_make_no_sense(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_schedules():
    cosine = cosine_decay(0.4, 10, alpha=0.1)
    assert [cosine(0), cosine(10), cosine(99)] == pytest.approx([0.4, 0.04, 0.04])
    assert cosine(5) == pytest.approx(0.4 * 0.55)
    steps = piecewise_constant([2, 5], [1.0, 0.5, 0.1])
    assert [steps(k) for k in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.1]
    warm = linear_warmup(steps, 4)
    assert [warm(k) for k in range(5)] == [0.25, 0.5, 0.75, 0.5, 0.5]
    assert linear_warmup(0.3, 2)(0) == 0.15
    w = mpidist.Variable(np.zeros(1))
    optimizer = SGD(steps)
    rates = []
    for _ in range(7):
        rates.append(optimizer.learning_rate)
        optimizer.apply_gradients([(np.ones(1), w)])
    assert rates == [steps(k) for k in range(7)]
    np.testing.assert_allclose(w.numpy(), -sum(rates))


@pytest.mark.parametrize("rate", [np.nan, "x", None])
def test_a_schedule_that_gives_no_number_changes_nothing(rate):
    w = mpidist.Variable(np.ones(1))
    optimizer = SGD(lambda step: 0.1 if step == 0 else rate)
    optimizer.apply_gradients([(np.ones(1), w)])
    with pytest.raises((TypeError, ValueError), match="at step 1, expected"):
        optimizer.apply_gradients([(np.ones(1), w)])
    assert int(optimizer.iterations) == 1
    np.testing.assert_allclose(w.numpy(), 0.9)


def test_an_optimizer_is_not_pickled():
    import pickle

    optimizer = SGD(0.25, momentum=0.5)
    text = repr(optimizer)
    assert "SGD(momentum=0.5, nesterov=False" in text
    assert "learning_rate=0.25" in text
    with pytest.raises(TypeError, match=r"Save `optimizer\.variables`"):
        pickle.dumps(optimizer)


# --- clipping -------------------------------------------------------------------------


def test_clip_by_global_norm():
    grads = {"a": np.array([3.0, 0.0]), "b": [np.float32(4), None], "c": np.ones((0,))}
    clipped, norm = clip_by_global_norm(grads, 2.5)
    assert norm == 5
    assert norm.dtype == np.float64
    np.testing.assert_array_equal(clipped["a"], [1.5, 0])
    assert clipped["b"][0] == 2
    assert clipped["b"][0].dtype == np.float32
    assert clipped["b"][1] is None
    np.testing.assert_array_equal(grads["a"], [3, 0])
    same, norm = clip_by_global_norm(grads, 5.0)
    np.testing.assert_array_equal(same["a"], grads["a"])


def test_the_norm_is_computed_in_float64():
    x = np.full(70_000, 1e30, np.float32)
    (clipped,), norm = clip_by_global_norm([x], 1.0)
    assert norm == pytest.approx(1e30 * np.sqrt(70_000), rel=1e-6)
    assert clipped.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(clipped.astype(float)), 1, rtol=1e-6)
    assert clip_by_global_norm([], 1.0) == ([], 0.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_norm_that_is_not_finite_gives_nan(bad):
    (a, b), norm = clip_by_global_norm([np.array([1.0, bad]), np.ones(2)], 1.0)
    assert not np.isfinite(norm)
    assert np.isnan(a).all()
    assert np.isnan(b).all()


@pytest.mark.parametrize("clip", [0, -1, np.nan, "1", True])
def test_a_clip_norm_that_makes_no_sense(clip):
    with pytest.raises((TypeError, ValueError), match="`clip_norm`"):
        clip_by_global_norm([np.ones(2)], clip)


# --- losses, in one process -----------------------------------------------------------


def test_average_loss_of_one_replica():
    loss = np.array([1, 2, 6], np.float32)
    mean = mpidist.compute_average_loss(loss)
    assert mean == 3
    assert mean.dtype == np.float32
    assert mpidist.compute_average_loss(loss, global_batch_size=np.int64(6)) == 1.5
    weighted = mpidist.compute_average_loss(loss, sample_weight=np.array([0, 3, 1.0]))
    assert weighted == 4
    assert weighted.dtype == np.float32
    assert mpidist.compute_average_loss(loss, 2.0).dtype == np.float32
    half = mpidist.compute_average_loss(loss.astype(ml_dtypes.bfloat16), np.ones(3))
    assert half.dtype == ml_dtypes.bfloat16
    assert mpidist.compute_average_loss(np.array([1, 2])) == 1.5
    per_pixel = np.ones((2, 5, 3))
    assert mpidist.compute_average_loss(per_pixel) == 15
    assert mpidist.compute_average_loss(per_pixel, np.array([1, 0.0])) == 7.5
    assert mpidist.compute_average_loss(np.ones((0, 3), np.float16)) == 0
    big = np.full(3, 60_000, np.float16)  # whose sum is beyond float16
    assert mpidist.compute_average_loss(big) == 60_000
    assert mpidist.global_batch_size({"x": loss, "y": [per_pixel[:1, 0].T]}) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((np.float64(3),), ValueError, "one loss per example"),
        (([1.0],), TypeError, "got a list"),
        ((np.ones(2), np.ones(3)), ValueError, "`sample_weight`"),
        ((np.ones(2), None, -1), ValueError, "0 or more"),
        ((np.ones(2), None, 2.0), TypeError, "to be an int"),
    ],
)
def test_average_loss_of_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        mpidist.compute_average_loss(*arguments)


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        ({"x": np.ones(2), "y": np.ones((3, 2))}, ValueError, r"\(2,\) and .*\(3, 2\)"),
        (np.float64(1), TypeError, "has no rows"),
        ((), ValueError, "at least one array"),
        ("x", TypeError, "expected"),
    ],
)
def test_batch_size_of_wrong_arguments(batch, error, match):
    with pytest.raises(error, match=match):
        mpidist.global_batch_size(batch)


# --- on several ranks -----------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: Adam(cosine_decay(0.05, 20)),
    "adamw clipped": lambda: AdamW(0.05, weight_decay=0.1, global_clipnorm=0.5),
}


def assert_equal_copies(strategy, variables):
    """See that the copies of all ranks are the same, bit for bit."""
    gathered = strategy.gather(
        strategy.run(
            lambda: np.concatenate(
                [np.ravel(v.numpy()).view(np.uint8) for v in variables]
            )[None]
        ),
        axis=0,
    )
    assert (gathered == gathered[0]).all()


class Regression:
    """A linear model on 23 rows, whose batches differ in size, down to one row."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.x = rng.normal(size=(23, 3)).astype(np.float64)
        self.y = self.x @ [1.0, -2.0, 0.5] + 0.3
        self.cuts = [7, 8, 15, 19, 23]

    def batches(self, part, parts):
        """Yield this part's rows of each global batch: uneven, and also none."""
        start = 0
        for end in self.cuts:
            rows = np.arange(start, end)[part::parts]
            yield self.x[rows], self.y[rows]
            start = end

    def variables(self):
        return [
            mpidist.Variable(np.zeros(3), name="weights"),
            mpidist.Variable(np.float64(0), name="offset"),
        ]

    @staticmethod
    def gradients(variables, x, y, size):
        weights, offset = variables
        error = x @ weights + offset - y
        loss = mpidist.compute_average_loss(error**2, global_batch_size=size)
        return loss, [2 * x.T @ error / size, 2 * error.sum() / size]


def train_alone(make, epochs=3):
    """Return weights and losses of a run on the whole batches, in this process."""
    problem = Regression()
    variables, optimizer, losses = problem.variables(), make(), []
    for _ in range(epochs):
        for x, y in problem.batches(0, 1):
            loss, gradients = problem.gradients(variables, x, y, len(y))
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            losses.append(loss)
    return [v.numpy() for v in variables], losses


@pytest.mark.parametrize("where", ["replica", "merge_fn", "program", "outside"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@apply_core
def test_training_is_the_same_on_any_number_of_ranks(strategy, rank, size, kind, where):
    expected, expected_losses = train_alone(OPTIMIZERS[kind])
    problem = Regression()
    with strategy.scope():
        variables = problem.variables()
    optimizer = OPTIMIZERS[kind]()

    def step(x, y):
        loss, gradients = problem.gradients(
            variables, x, y, mpidist.global_batch_size((x, y))
        )
        if where == "replica":
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        elif where == "merge_fn":
            mpidist.get_replica_context().merge_call(merge_fn, args=(gradients,))
        return loss, gradients

    def merge_fn(strategy, gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    losses = []
    for _ in range(3):
        for batch in problem.batches(rank, size):
            batch = from_replicas(strategy, lambda _, b=batch: b)
            loss, gradients = strategy.run(step, args=batch)
            if where == "program":
                with strategy.scope():
                    optimizer.apply_gradients(zip(gradients, variables, strict=True))
            elif where == "outside":
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            losses.append(strategy.reduce("SUM", loss, axis=None))
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-11)
    assert int(optimizer.iterations) == 15
    assert all(v.distribute_strategy is strategy for v in optimizer.variables)
    assert_equal_copies(strategy, [*variables, *optimizer.variables])


@apply_core
def test_one_fused_reduction_and_nothing_else(strategy, size):
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(s)) for s in ((3, 2), (5,), (), (0,))]
    optimizer = Adam(0.1, global_clipnorm=1.0)
    optimizer.build(variables)
    count = []

    def step():
        gradients = [np.full(v.shape, 2.0) for v in variables]
        before = strategy.communication_statistics()
        headers = group_of(strategy).guard.sequence
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        after = strategy.communication_statistics()
        count.append(
            {k: n - before.calls.get(k, 0) for k, n in after.calls.items()}
            | {"bytes": sum(after.bytes.values()) - sum(before.bytes.values())}
            | {"headers": group_of(strategy).guard.sequence - headers}
        )

    for _ in range(3):
        strategy.run(step)
    for calls in count:
        moved = {k: n for k, n in calls.items() if n}
        if size == 1:
            assert moved == {"headers": 1}
        else:
            data = 8 * (6 + 5 + 1)
            assert moved.pop("bytes") - moved.get("Iallreduce", 0) * 64 == data
            assert moved.pop("Allreduce") == 1
            assert moved.pop("headers") == 1
            assert moved in ({}, {"Iallreduce": 1})


@mpi
@pytest.mark.replicas(2, 3)
def test_in_merge_fn_it_is_one_command(strategy, size):
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(k)) for k in (3, 400)]
    optimizer = Adam(0.1)
    optimizer.build(variables)

    def calls(merge_fn):
        gradients = [np.ones(v.shape) for v in variables]
        before = strategy.communication_statistics()
        context = mpidist.get_replica_context()
        context.merge_call(merge_fn, args=(gradients,))
        after = strategy.communication_statistics()
        names = ("Ibcast", "Bcast", "Allreduce")
        return [after.calls.get(k, 0) - before.calls.get(k, 0) for k in names]

    def apply(strategy, gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step():
        return calls(apply), calls(lambda strategy, gradients: None)

    with_it, without = strategy.run(step)
    pairs = zip(with_it, without, strict=True)
    mine = [own(strategy, a) - own(strategy, b) for a, b in pairs]
    assert mine == ([1, 0, 1] if size > 1 else [0, 0, 0])


@apply_core
def test_the_first_apply_may_be_anywhere(strategy, size):
    for level in ("replica", "merge_fn", "program"):
        with strategy.scope():
            w = mpidist.Variable(np.zeros(2, np.float32), name="w")
        optimizer = SGD(1.0, momentum=0.5)

        def step(optimizer=optimizer, w=w):
            optimizer.apply_gradients([(np.ones(2, np.float32), w)])

        def merging(optimizer=optimizer, w=w):
            def merge_fn(strategy, g):
                optimizer.apply_gradients([(g, w)])
                return optimizer.iterations

            context = mpidist.get_replica_context()
            return context.merge_call(merge_fn, args=(np.ones(2, np.float32),))

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


@pytest.mark.mpi
@pytest.mark.replicas(2, 3)
@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("call", ["build", "apply_gradients"])
def test_bad_arguments_outside_every_scope_are_told(
    strategy, rank, size, call, culprit
):
    """No scope and no state says whose ranks they are: the variables given do."""
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(3), name="v")
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


@mpi
@pytest.mark.replicas(2, 3)
def test_build_may_be_anywhere(strategy):
    def in_replica(optimizer, w):
        strategy.run(lambda: optimizer.build([w]))

    def in_merge_fn(optimizer, w):
        def merge_fn(strategy):
            optimizer.build([w])

        strategy.run(lambda: mpidist.get_replica_context().merge_call(merge_fn))

    def in_program(optimizer, w):
        optimizer.build([w])

    for build in (in_replica, in_merge_fn, in_program):
        with strategy.scope():
            w = mpidist.Variable(np.zeros(2), name="w")
        optimizer = Adam(0.1)
        build(optimizer, w)
        assert len(optimizer.variables) == 3
        optimizer.iterations.assign(5)
        strategy.run(lambda o=optimizer, w=w: o.apply_gradients([(np.ones(2), w)]))
        assert int(optimizer.iterations) == 6


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
@mpi
@pytest.mark.replicas(2, 3)
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


@mpi
@pytest.mark.replicas(2, 3)
def test_indexed_slices_are_refused(strategy):
    a, _ = two_variables(strategy)
    rows = mpidist.IndexedSlices(np.ones(1), np.array([1]))
    with pytest.raises(TypeError, match=r"numpy\.add\.at"):
        strategy.run(lambda: SGD(0.5).apply_gradients([(rows, a)]))


@apply_core
def test_gradients_that_are_reduced_already(strategy, size):
    with strategy.scope():
        w = mpidist.Variable(np.zeros(2), name="w")
    optimizer = SGD(1.0)

    def step():
        context = mpidist.get_replica_context()
        g = context.all_reduce("SUM", np.ones(2))
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

    strategy.run(
        lambda: mpidist.get_replica_context().merge_call(merge_fn, (np.ones(2),))
    )
    np.testing.assert_array_equal(w.numpy(), -3 * size - 1)
    assert int(optimizer.iterations) == 4


@apply_core
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


@mpi
@pytest.mark.replicas(2, 3)
def test_plain_gradients_have_to_be_the_same(strategy, rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    with strategy.scope():
        w = mpidist.Variable(np.zeros(2), name="w")
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


def two_variables(strategy):
    with strategy.scope():
        return [mpidist.Variable(np.ones(2), name=n) for n in "ab"]


ONE = np.ones(2)
# What the last rank does wrong, from (optimizer, a, b, another strategy's variable).
WRONG = {
    "shape": (lambda o, a, b, c: [(np.ones(3), a), (ONE, b)], "expected shape"),
    "dtype": (lambda o, a, b, c: [(np.ones(2, "f"), a), (ONE, b)], r"astype\('float64"),
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
@mpi
@pytest.mark.replicas(2, 3)
def test_a_mistake_on_one_rank_is_raised_on_all(
    strategy, new_strategy, rank, size, what, built
):
    wrong, match = WRONG[what]
    harmless_alone = ("count", "order", "none", "rate", "setting")
    if size == 1 and what in harmless_alone:
        pytest.skip("one rank cannot differ")
    a, b = two_variables(strategy)
    other = new_strategy()
    with other.scope():
        c = mpidist.Variable(np.ones(2), name="c")
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


@apply_core
def test_mistakes_in_merge_fn_and_at_program_level(strategy, rank, size):
    a, b = two_variables(strategy)
    optimizer = SGD(0.25)

    def bad_shape(strategy, g):
        optimizer.apply_gradients([(g, a), (g, b)])

    def step(shape):
        mpidist.get_replica_context().merge_call(bad_shape, args=(np.ones(shape),))

    with pytest.raises((ValueError, mpidist.CollectiveError), match="expected shape"):
        strategy.run(step, args=(2 if rank < size - 1 else 3,))
    gradient = strategy.run(lambda: np.ones(2))
    with pytest.raises(ValueError, match="leave out `skip_gradients_aggregation`"):
        optimizer.apply_gradients([(gradient, a)], skip_gradients_aggregation=True)
    with pytest.raises(RuntimeError, match="inside the function of `update`"):
        strategy.extended.update(a, lambda v: optimizer.apply_gradients([(ONE, v)]))
    np.testing.assert_array_equal(a.numpy(), 1)
    optimizer.apply_gradients([(gradient, a), (gradient, b)])
    np.testing.assert_array_equal(b.numpy(), 1 - 0.25 * size)
    with strategy.scope():
        c = mpidist.Variable(np.ones(2), name="c")
    with pytest.raises(ValueError, match=r"'c'.*is not one of those"):
        optimizer.apply_gradients([(gradient, c)])
    with pytest.raises(ValueError, match="built for 2 variables"):
        optimizer.build([a])


@mpi
@pytest.mark.replicas(2, 3)
def test_an_optimizer_of_merge_fn_is_refused(strategy):
    def merge_fn(strategy):
        SGD(0.1)

    with pytest.raises(RuntimeError, match="exists on rank 0 only"):
        strategy.run(lambda: mpidist.get_replica_context().merge_call(merge_fn))


@mpi
@pytest.mark.replicas(2, 3)
def test_other_numbers_of_optimizers_are_found(strategy, rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    a, _ = two_variables(strategy)
    extra = Adam(0.1) if rank == 0 else None
    optimizer = SGD(0.5)

    def merge_fn(strategy, g):
        optimizer.apply_gradients([(g, a)])

    def step():
        mpidist.get_replica_context().merge_call(merge_fn, args=(np.ones(2),))

    with pytest.raises(RuntimeError, match="create optimizers on all ranks"):
        strategy.run(step)
    optimizer.build([a])  # from now on it is known by its state
    strategy.run(step)
    np.testing.assert_array_equal(a.numpy(), 1 - 0.5 * size)
    del extra
    # Level the counts, for the tests that follow.
    kept = None if rank == 0 else Adam(0.1)
    assert (kept is None) == (rank == 0)


@mpi
@pytest.mark.replicas(2, 3)
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


@mpi
@pytest.mark.replicas(2, 3)
def test_slots_can_not_be_assigned_in_a_replica_function(strategy):
    a, _ = two_variables(strategy)
    optimizer = SGD(0.5, momentum=0.5)
    optimizer.build([a])
    with pytest.raises((ValueError, mpidist.ReplicaError), match="aggregation"):
        strategy.run(lambda: optimizer.variables[1].assign(np.zeros(2)))


@mpi
@pytest.mark.replicas(2, 3)
def test_without_a_guard(new_strategy, size):
    strategy = new_strategy(guard=False)
    a, b = two_variables(strategy)
    optimizer = Adam(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(ONE, a), (ONE, b)]))
    np.testing.assert_allclose(a.numpy(), 0.5, rtol=1e-6)
    assert_equal_copies(strategy, [a, b, *optimizer.variables])


@pytest.mark.parametrize("bytes_per_pack", [0, 64])
@mpi
@pytest.mark.replicas(2, 3)
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


@pytest.mark.parametrize(
    "kind", ["posing", pytest.param("cupy", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@mpi
def test_on_a_device(monkeypatch, new_strategy, rank, size, kind, optimizer):
    if kind == "posing":
        posing.install(monkeypatch)
    else:
        pytest.importorskip("cupy")
    rng = np.random.default_rng(rank)
    host = [rng.normal(size=(2, 3)), np.asarray(rng.normal()), rng.normal(size=4)]
    results = []
    for device in ("cpu", "gpu"):
        strategy = new_strategy(device=device)
        xp = strategy.array_module
        with strategy.scope():
            variables = [mpidist.Variable(np.ones(g.shape)) for g in host]
        made = OPTIMIZERS[optimizer]()

        def step(made=made, variables=variables, xp=xp):
            gradients = [xp.asarray(g) for g in host]
            rows = mpidist.global_batch_size(gradients[0])
            loss = mpidist.compute_average_loss(gradients[0] ** 2)
            made.apply_gradients(zip(gradients, variables, strict=True))
            clipped, norm = clip_by_global_norm(gradients, 0.5)
            return rows, float(loss), float(norm), clipped[0]

        for _ in range(3):
            values = [own(strategy, v) for v in strategy.run(step)]
        clipped = values.pop()
        clipped = clipped.get() if device == "gpu" else clipped
        results.append([v.numpy() for v in variables + made.variables])
        results[-1] += [np.asarray(v) for v in [*values, clipped]]
        if device == "gpu":
            w, g = variables[0], host[0]
            with pytest.raises(
                (TypeError, mpidist.ReplicaError), match="an array on the GPU"
            ):
                strategy.run(lambda: made.apply_gradients([(g, w)]))  # noqa: B023
    for on_host, on_device in zip(*results, strict=True):
        np.testing.assert_allclose(on_device, on_host, rtol=1e-12, atol=1e-15)


# --- losses on several ranks ----------------------------------------------------------


@apply_core
def test_the_batch_size_of_a_step(strategy, rank, size):
    # 5, 0, 5, 10 ... rows
    rows = 5 if rank == 0 else 5 * (rank - 1)
    total = 5 + 5 * sum(range(size - 1))
    batch = from_replicas(
        strategy, lambda _: {"x": np.ones((rows, 2)), "y": np.arange(rows)}
    )

    def step(batch):
        inside = mpidist.global_batch_size(batch)

        def merge_fn(strategy, batch):
            return mpidist.global_batch_size(batch)

        context = mpidist.get_replica_context()
        return inside, context.merge_call(merge_fn, args=(batch,))

    for found in strategy.run(step, args=(batch,)):
        assert own(strategy, found) == total
    with strategy.scope():
        found = mpidist.global_batch_size(batch)
        assert found == total
        assert type(found) is int
        with pytest.raises(TypeError, match="expected a PerReplica"):
            mpidist.global_batch_size(np.ones(3))
        with pytest.raises(RuntimeError, match="the losses are those of one replica"):
            mpidist.compute_average_loss(np.ones(3))
    with pytest.raises(RuntimeError, match="belongs to another strategy"):
        mpidist.global_batch_size(batch)


@apply_core
def test_shares_of_the_loss_add_up(strategy, rank, size):
    losses = np.arange(7, dtype=np.float32)
    weights = np.linspace(0, 2, 7)
    mine = slice(rank, None, size)

    def step():
        return (
            mpidist.compute_average_loss(losses[mine]),
            mpidist.compute_average_loss(losses[mine], weights[mine]),
            mpidist.compute_average_loss(losses[mine], global_batch_size=7),
            mpidist.compute_average_loss(losses[:0]),
        )

    mean, weighted, given, nothing = strategy.reduce("SUM", strategy.run(step), None)
    assert mean == pytest.approx(3)
    assert given == pytest.approx(3)
    assert weighted == pytest.approx((losses * weights).sum() / 7)
    assert nothing == 0

    def uneven():  # all rows on the first replica
        return mpidist.compute_average_loss(losses if rank == 0 else losses[:0])

    assert strategy.reduce("SUM", strategy.run(uneven), None) == pytest.approx(3)


@mpi
@pytest.mark.replicas(2, 3)
def test_a_wrong_batch_on_one_rank_is_raised_on_all(strategy, rank, size):
    def step():
        wrong = rank == size - 1
        return mpidist.global_batch_size(np.float64(1) if wrong else np.ones(3))

    with pytest.raises(TypeError, match="has no rows"):
        strategy.run(step)
