"""The formulas are those of torch; the same weights on any number of ranks."""

import re

import ml_dtypes
import numpy as np
import posing
import pytest
from launching import ROOT
from replicas import assert_equal_copies, core_on_ranks, from_replicas, own

import mpidist
from mpidist.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
    clip_by_global_norm,
    cosine_decay,
    linear_warmup,
    piecewise_constant,
)

mpi = pytest.mark.mpi


SHAPES = [(), (5,), (3, 4), (2, 1, 3), (0, 2), (40_000,)]

KINDS = {
    "sgd": ("SGD", {}),
    "sgd decay": ("SGD", {"weight_decay": 0.3}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "momentum decay": ("SGD", {"momentum": 0.9, "weight_decay": 0.3}),
    "nesterov": ("SGD", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {"epsilon": 1e-8}),
    "adam betas": ("Adam", {"beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-3}),
    "rmsprop": ("RMSprop", {"rho": 0.99, "epsilon": 1e-8}),
    "rmsprop momentum": ("RMSprop", {"rho": 0.8, "momentum": 0.9, "epsilon": 1e-4}),
    "rmsprop centered": (
        "RMSprop",
        {"rho": 0.8, "momentum": 0.5, "epsilon": 1e-2, "centered": True},
    ),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.3, "epsilon": 1e-2}),
    "adamw": ("AdamW", {"weight_decay": 0.5, "epsilon": 1e-8}),
}
IN_TORCH = {"epsilon": "eps", "rho": "alpha"}


def settings_of_torch(settings):
    found = {IN_TORCH.get(name, name): value for name, value in settings.items()}
    if "beta_1" in found:
        found["betas"] = found.pop("beta_1"), found.pop("beta_2")
    return found


@pytest.mark.guests
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 2.0])
def test_the_formulas_are_those_of_torch(kind, dtype, clip):
    torch = pytest.importorskip("torch")
    name, settings = KINDS[kind]
    rng = np.random.default_rng(0)
    initial = [np.asarray(rng.normal(size=shape), dtype) for shape in SHAPES]
    variables = [mpidist.Variable(x) for x in initial]
    optimizer = getattr(mpidist.optimizers, name)(**settings, global_clipnorm=clip)
    tensors = [torch.tensor(x.copy(), requires_grad=True) for x in initial]
    reference = getattr(torch.optim, name)(tensors, **settings_of_torch(settings))
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


def test_every_optimizer_is_compared_and_ported():
    kinds = [x for x in vars(mpidist.optimizers).values() if isinstance(x, type)]
    rules = {x.__name__ for x in kinds if issubclass(x, mpidist.optimizers.Optimizer)}
    rules.remove("Optimizer")
    assert {name for name, _ in KINDS.values()} == rules
    script = (ROOT / "docs" / "port.sed").read_text(encoding="utf-8")
    for names in re.findall(r"\(([\w?|]*RMSprop[\w?|]*)\)", script):
        assert all(re.fullmatch(names, rule) for rule in rules), names


def test_centered_rmsprop_of_equal_gradients_is_finite():
    w = mpidist.Variable(np.zeros(4))
    optimizer = RMSprop(0.1, 0.5, centered=True)
    for _ in range(80):  # the variance is 0, and rounding makes it less
        optimizer.apply_gradients([(np.full(4, 1 / 3), w)])
    assert np.isfinite(w.numpy()).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_clipping_of_each_gradient_and_of_each_value(dtype):
    gradients = [np.array([3.0, -4.0], dtype), np.array([0.5], dtype)]
    for settings, expected in [
        ({"clipnorm": 2.5}, [[1.5, -2.0], [0.5]]),
        ({"clipvalue": 2.0}, [[2.0, -2.0], [0.5]]),
        ({"clipvalue": 0.25}, [[0.25, -0.25], [0.25]]),
        ({"global_clipnorm": 100}, [[3.0, -4.0], [0.5]]),
    ]:
        variables = [mpidist.Variable(np.zeros_like(g)) for g in gradients]
        optimizer = SGD(1.0, **settings)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for variable, step in zip(variables, expected, strict=True):
            np.testing.assert_allclose(-variable.numpy(), step, rtol=1e-3)
        assert next(iter(settings)) in repr(optimizer)
    w = mpidist.Variable(np.zeros(2))
    SGD(1.0, clipvalue=1.0).apply_gradients([(np.array([np.nan, np.inf]), w)])
    np.testing.assert_array_equal(w.numpy(), [np.nan, -1.0])


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


def test_no_weight_decay_for_some():
    w, b, c = (mpidist.Variable(np.ones(2), name=n) for n in ("w", "bias", "c"))
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[c], var_names=["^bia"])
    for alone in ({"var_list": w}, {"var_names": "bias"}):  # "b", "i", "a" and "s"
        with pytest.raises(TypeError, match="weight_decay: expected a list"):
            optimizer.exclude_from_weight_decay(**alone)
    with pytest.raises(TypeError, match="`var_names=` for names"):
        optimizer.exclude_from_weight_decay(["bias"])
    optimizer.apply_gradients([(np.zeros(2), v) for v in (w, b, c)])
    np.testing.assert_array_equal(w.numpy(), 1 - 0.1 * 0.5)
    np.testing.assert_array_equal(b.numpy(), 1)
    np.testing.assert_array_equal(c.numpy(), 1)
    with pytest.raises(RuntimeError, match="before `build`"):
        optimizer.exclude_from_weight_decay(var_names=["w"])


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
        (lambda: SGD(clipnorm="x"), TypeError, "SGD: expected `clipnorm`"),
        (lambda: Adam(clipvalue=-1), ValueError, "Adam: expected `clipvalue`"),
        (lambda: Adam(clipvalue=1, clipnorm=1), ValueError, "`clipnorm` and `clipv"),
        (lambda: RMSprop(rho=1), ValueError, "RMSprop: expected `rho`"),
        (lambda: RMSprop(momentum=-1), ValueError, "RMSprop: expected `momentum`"),
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


OPTIMIZERS = {
    "sgd": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: Adam(cosine_decay(0.05, 20)),
    "rmsprop clipped": lambda: RMSprop(0.05, momentum=0.5, clipnorm=0.3),
    "adagrad": lambda: Adagrad(0.5),
    "adamw clipped": lambda: AdamW(0.05, weight_decay=0.1, global_clipnorm=0.5),
}


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
@core_on_ranks
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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_the_formulas_of_keras(nesterov, dtype):
    """By hand: the learning rate changes, and weights decay beside the momentum."""
    w, m = np.array([1.0, -2.0]), np.zeros(2)
    variable = mpidist.Variable(w.astype(dtype))
    optimizer = SGD.of_keras(
        piecewise_constant([1, 2], [0.5, 0.1, 0.3]), 0.9, nesterov, weight_decay=0.2
    )
    assert "of_keras=True" in repr(optimizer)
    for rate in (0.5, 0.5, 0.1, 0.3):
        g = 0.5 * w + 1
        optimizer.apply_gradients([(g.astype(dtype), variable)])
        w = w - rate * 0.2 * w
        m = 0.9 * m - rate * g
        w = w + (0.9 * m - rate * g if nesterov else m)
    tolerance = 1e-12 if dtype is np.float64 else 1e-2
    np.testing.assert_allclose(variable.numpy(), w, rtol=tolerance)
    assert optimizer.variables[1].name.startswith("sgd/velocity/")
    assert len(SGD.of_keras(0.1)._slot_names) == 0


@pytest.mark.parametrize(
    ("make", "settings", "expected"),
    [
        (RMSprop, {}, [0.0187728, 0.1087529, 0.1347511, 0.1351343]),
        (RMSprop, {"momentum": 0.9}, [0.0297922, 0.1804149, 0.2297443, 0.230504]),
        (
            RMSprop,
            {"momentum": 0.9, "centered": True},
            [0.0298512, 0.1925822, 0.2537119, 0.2546929],
        ),
        (Adam, {}, [0.0587174, 0.0598688, 0.0599865, 0.0599995]),
        (Adam, {"epsilon": 1e-3}, [0.0002839, 0.0027196, 0.019195, 0.0587174]),
        (Adagrad, {}, [0.00001897365, 0.0001897343, 0.001895156, 0.04037479]),
        (
            Adagrad,
            {"initial_accumulator_value": 0.0, "epsilon": 1e-5},
            [0.001895157, 0.01710912, 0.04037479, 0.04146253],
        ),
        (AdamW, {"weight_decay": 0.1}, [0.0645993, 0.0657481, 0.0658656, 0.0658786]),
    ],
)
def test_small_gradients_by_the_formulas_of_keras(make, settings, expected):
    """Of TensorFlow 2.21: three steps, each with a larger learning rate."""
    variable = mpidist.Variable(np.ones(4))
    optimizer = make.of_keras(0.01, **settings)
    for k in (1, 2, 3):
        optimizer.learning_rate = 0.01 * k
        optimizer.apply_gradients([(np.array([1e-4, 1e-3, 1e-2, 1.0]), variable)])
    np.testing.assert_allclose(1 - variable.numpy(), expected, rtol=1e-5, atol=3e-7)
    names = {v.name.split("/")[1] for v in optimizer.variables[1:]}
    assert make is not RMSprop or "momentum" not in names  # it is another quantity
