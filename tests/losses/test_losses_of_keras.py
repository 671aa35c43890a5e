"""Losses of Keras: torch's values and gradients, in each library, and by hand."""

from functools import partial

import numpy as np
import pytest
from replicas import from_replicas, local, this_replica

import mpidist
from mpidist import losses

ROWS, CLASSES = 5, 4
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
LABELS = np.array([0, 3, 1, 1, 2])
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]
BITS = RNG.integers(0, 2, size=(ROWS, CLASSES)).astype(np.float32)
REAL = (3 * RNG.normal(size=(ROWS, CLASSES))).astype(np.float32)
WEIGHTS = np.arange(ROWS, dtype=np.float32)

LIBRARIES = [
    "numpy",
    *(pytest.param(x, marks=pytest.mark.guests) for x in ("torch", "jax.numpy")),
]


def torch_function(name, **options):
    """Return a function of torch, which computes one loss per row."""
    functional = pytest.importorskip("torch").nn.functional
    function = getattr(functional, name)

    def per_row(pred, true):
        found = function(pred, true, reduction="none", **options)
        return found if found.ndim == 1 else found.mean(-1)

    return per_row


# The loss, labels, predictions, and the name in torch with its options and labels.
CASES = {
    "mse": (losses.MeanSquaredError, {}, REAL, LOGITS, "mse_loss", {}),
    "mae": (losses.MeanAbsoluteError, {}, REAL, LOGITS, "l1_loss", {}),
    "huber": (losses.Huber, {"delta": 1.5}, REAL, LOGITS, "huber_loss", {"delta": 1.5}),
    "binary": (losses.BinaryCrossentropy, {}, BITS, SHARES, "binary_cross_entropy", {}),
    "binary logits": (
        losses.BinaryCrossentropy,
        {"from_logits": True},
        BITS,
        LOGITS,
        "binary_cross_entropy_with_logits",
        {},
    ),
    "categorical": (
        losses.CategoricalCrossentropy,
        {"from_logits": True, "label_smoothing": 0.2},
        ONE_HOT,
        LOGITS,
        "cross_entropy",
        {"label_smoothing": 0.2},
    ),
    "sparse": (
        losses.SparseCategoricalCrossentropy,
        {"from_logits": True},
        LABELS,
        LOGITS,
        "cross_entropy",
        {},
    ),
}


def as_numpy(x):
    return x.detach().numpy() if hasattr(x, "detach") else np.asarray(x)


@pytest.mark.guests
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_values_and_gradients_are_those_of_torch(case, library):
    torch = pytest.importorskip("torch")
    kind, options, true, pred, name, torch_options = CASES[case]
    xp = pytest.importorskip(library)
    mine = (lambda x: torch.tensor(x)) if library == "torch" else xp.asarray
    of_torch = torch.tensor(pred, requires_grad=True)
    expected = torch_function(name, **torch_options)(of_torch, torch.tensor(true))
    (expected * torch.tensor(WEIGHTS)).sum().backward()
    slope, expected = of_torch.grad.numpy(), expected.detach().numpy()
    loss = kind(reduction="sum", **options)
    each = kind(reduction=losses.Reduction.NONE, **options)
    rows = each(mine(true), mine(pred))
    assert rows.dtype == mine(pred).dtype
    np.testing.assert_allclose(as_numpy(rows), expected, rtol=2e-6)
    total = loss(mine(true), mine(pred), sample_weight=WEIGHTS)
    want = np.dot(expected, WEIGHTS)
    np.testing.assert_allclose(as_numpy(total), want, rtol=2e-6)
    found = loss.gradient(mine(true), mine(pred), WEIGHTS)
    assert found.dtype == mine(pred).dtype
    np.testing.assert_allclose(as_numpy(found), slope, atol=1e-6)
    mean = kind(**options)
    np.testing.assert_allclose(
        as_numpy(mean(mine(true), mine(pred))), expected.mean(), rtol=2e-6
    )


@pytest.mark.parametrize(
    ("kind", "options", "true"),
    [
        (losses.BinaryCrossentropy, {"label_smoothing": 0.1}, BITS),
        (losses.CategoricalCrossentropy, {"label_smoothing": 0.1}, ONE_HOT),
        (losses.SparseCategoricalCrossentropy, {}, LABELS),
        (losses.CategoricalCrossentropy, {"from_logits": True}, ONE_HOT),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.guests
def test_gradients_of_torch_and_jax_are_the_closed_form(kind, options, true, scale):
    """Of shares that do not add up to 1, too."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    pred = SHARES.astype(np.float64) * scale / 4
    loss = kind(**options)
    closed = loss.gradient(true, pred, WEIGHTS)
    x = torch.tensor(pred, requires_grad=True)
    loss(torch.tensor(true), x, WEIGHTS).backward()
    np.testing.assert_allclose(x.grad.numpy(), closed, rtol=1e-9, atol=1e-12)

    def of_jax(x):
        return loss(true, x, WEIGHTS)

    for gradient in (jax.grad(of_jax), jax.jit(jax.grad(of_jax))):
        found = gradient(jax.numpy.asarray(pred, jax.numpy.float32))
        np.testing.assert_allclose(found, closed, rtol=1e-4, atol=1e-6)


def test_values_by_hand():
    true, pred = [[0.0, 1.0], [0.0, 0.0]], [[0.6, 0.4], [0.4, 0.6]]
    # From the documentation of Keras.
    assert losses.BinaryCrossentropy()(true, pred) == pytest.approx(0.815, abs=1e-3)
    assert losses.MeanSquaredError(reduction="sum")(true, pred) == pytest.approx(0.62)
    one_hot, shares = [[0, 1, 0], [0, 0, 1]], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]]
    per_row = losses.categorical_crossentropy(one_hot, shares)
    np.testing.assert_allclose(per_row, [0.0513, 2.303], atol=1e-3)
    sparse = losses.SparseCategoricalCrossentropy(reduction=None)
    np.testing.assert_allclose(sparse([[1], [2]], shares), per_row, rtol=1e-5)
    weighted = losses.SparseCategoricalCrossentropy()([1, 2], shares, [0.3, 0.7])
    assert weighted == pytest.approx(0.814, abs=1e-3)
    binary = losses.BinaryCrossentropy(from_logits=True, reduction="none")
    np.testing.assert_allclose(
        binary([1, 0, 1, 0], [[100.0], [100.0], [-20.0], [-20.0]]),
        [0.0, 100.0, 20.0, np.exp(-20.0)],
        rtol=1e-6,
        atol=1e-40,
    )
    assert losses.categorical_crossentropy(np.ones((2, 0)), np.ones((2, 0))).shape == (
        2,
    )
    ruled_out = losses.categorical_crossentropy([[1, 0]], [[0.0, -np.inf]], True)
    assert ruled_out == [0.0]


def test_columns_are_not_compared_with_rows():
    column, row = np.zeros((3, 1)), np.arange(3.0)
    for true, pred in ((column, row), (row, column)):
        loss = losses.MeanAbsoluteError(reduction="none")
        assert loss(true, pred).shape == (3,)
        assert loss.gradient(true, pred).shape == pred.shape
    with pytest.raises(ValueError, match=r"`y_true` of shape \(3, 2\).*got \(2, 3\)"):
        losses.mean_squared_error(np.zeros((2, 3)), np.zeros((3, 2)))
    with pytest.raises(ValueError, match="ints from 0 to 3"):
        losses.sparse_categorical_crossentropy([4], LOGITS[:1])
    many = np.zeros((1, 5000), np.float16)  # which has no 4099
    many[0, 4099] = 11.0
    loss = losses.sparse_categorical_crossentropy([4099], many, True)
    assert loss[0] < 1.0


def test_settings_are_checked():
    for bad in ("avg", np.ones(2)):
        with pytest.raises(ValueError, match=r"`reduction` to be .*\(y_true, y_pred"):
            losses.MeanSquaredError(bad)
    with pytest.raises(ValueError, match="`axis` to be -1"):
        losses.CategoricalCrossentropy(axis=1)
    with pytest.raises(ValueError, match=r"crossentropy: .* `axis` to be -1"):
        losses.sparse_categorical_crossentropy([1], LOGITS[:1], axis=0)
    for call in (losses.Huber, lambda delta: losses.huber(REAL, REAL, delta)):
        with pytest.raises(ValueError, match="`delta` to be above 0, got -1"):
            call(-1.0)
    smoothed = (losses.BinaryCrossentropy, mpidist.metrics.CategoricalCrossentropy)
    for call in (*smoothed, partial(losses.binary_crossentropy, REAL, REAL)):
        with pytest.raises(ValueError, match="`label_smoothing` to be from 0 to 1"):
            call(label_smoothing=2)
    for room in (losses, mpidist.metrics):
        room.SparseCategoricalCrossentropy(ignore_class=None)
        with pytest.raises(TypeError, match="`sample_weight` of 0"):
            room.SparseCategoricalCrossentropy(ignore_class=-1)
    with pytest.raises(ValueError, match="`sample_weight` of shape"):
        losses.MeanSquaredError()(REAL, LOGITS, np.ones(3))
    with pytest.raises(AttributeError, match=r"losses\.mean_squared_error"):
        losses.mse  # noqa: B018
    with pytest.raises(AttributeError, match="write the formula"):
        losses.KLDivergence  # noqa: B018
    with pytest.raises(AttributeError, match=r"write `mpidist\.losses\."):
        losses.serialize  # noqa: B018

    class Cubes(losses.Loss):
        def call(self, y_true, y_pred):
            return abs(y_pred - y_true) ** 3

    assert Cubes(name="cubes")(np.zeros(2), np.array([1.0, 2.0]), [1.0, 0.0]) == 0.5

    class Numbers(losses.Loss):
        def call(self, y_true, y_pred):
            return [1.0, 2.0] if y_pred else y_true

    assert (Numbers("sum")(0.0, 1.0), Numbers("none")(4.0, 0.0)) == (3.0, 4.0)
    with pytest.raises(TypeError, match=r"Numbers\.call"):
        Numbers()(None, None)
    with pytest.raises(NotImplementedError, match="Cubes: its gradient"):
        Cubes().gradient(REAL, LOGITS)


@pytest.mark.mpi
@pytest.mark.replicas(2)
def test_a_mean_over_one_replica_is_refused(strategy):
    rows, mean = losses.Huber(reduction="none"), losses.Huber()
    with strategy.scope(), pytest.raises(ValueError, match="reduction='none'"):
        mean(REAL, LOGITS)

    def step():
        with pytest.raises(ValueError, match="compute_average_loss"):
            mean(REAL, LOGITS)
        part = slice(this_replica(), None, strategy.num_replicas_in_sync)
        return mpidist.compute_average_loss(
            rows(REAL[part], LOGITS[part]), global_batch_size=ROWS
        )

    shares = strategy.run(step)
    total = strategy.reduce("SUM", shares, axis=None)
    assert total == pytest.approx(losses.huber(REAL, LOGITS).mean(), rel=1e-6)
    assert local(strategy, lambda: rows(REAL, LOGITS)).shape == (ROWS,)
    with pytest.raises(TypeError, match="PerReplica"):
        rows(REAL, from_replicas(strategy, lambda i: LOGITS))


@pytest.mark.mpi
@pytest.mark.replicas(2)
def test_a_mean_at_program_level_after_experimental_set_strategy(strategy):
    mean = losses.Huber()
    mpidist.experimental_set_strategy(strategy)
    try:
        expected = losses.huber(REAL, LOGITS).mean()
        assert mean(REAL, LOGITS) == pytest.approx(expected, rel=1e-6)
        assert mean.gradient(REAL, LOGITS).shape == LOGITS.shape
        with strategy.scope(), pytest.raises(ValueError, match="reduction='none'"):
            mean(REAL, LOGITS)
        with pytest.raises(ValueError, match="compute_average_loss"):
            strategy.run(mean, args=(REAL, LOGITS))
    finally:
        mpidist.experimental_set_strategy(None)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_floats_of_16_bits_have_the_probability_1(library, name):
    """In these 1 - 1e-7 is 1, whose complement has no logarithm."""
    xp = pytest.importorskip(library)
    dtype = getattr(xp, name, None)
    if dtype is None:
        dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    make = xp.tensor if library == "torch" else xp.asarray
    true, pred = [[0.0, 1.0, 1.0]], make([[0.0, 1.0, 0.5]], dtype=dtype)
    loss = losses.BinaryCrossentropy(reduction="sum")
    rows, slope = losses.binary_crossentropy(true, pred), loss.gradient(true, pred)
    assert rows.dtype == slope.dtype == loss(true, pred).dtype == pred.dtype
    assert float(rows[0]) == pytest.approx(np.log(2) / 3, rel=1e-2)
    np.testing.assert_allclose(
        [float(x) for x in slope[0]], [0.0, 0.0, -2 / 3], atol=1e-2
    )
    many = make(np.full((20000, 1), 0.3).tolist(), dtype=dtype)
    mean = losses.MeanSquaredError()(np.zeros((20000, 1)), many)
    assert float(mean) == pytest.approx(0.09, rel=5e-3)


@pytest.mark.parametrize("library", LIBRARIES)
def test_integer_predictions_do_not_round_labels(library):
    xp = pytest.importorskip(library)
    pred = xp.tensor([[1, 2]]) if library == "torch" else xp.asarray([[1, 2]])
    assert float(losses.mean_squared_error([[0.5, 1.5]], pred)[0]) == 0.25
    assert float(losses.MeanSquaredError().gradient([[0.5, 1.5]], pred)[0, 0]) == 0.5


def test_weights_of_rows_may_have_a_last_axis_of_length_1():
    true, pred = np.zeros((2, 3, 4)), np.ones((2, 3, 4))
    loss = losses.MeanSquaredError(reduction="sum")
    for weights in ([1.0, 2.0], [[1.0], [2.0]], [[1.0] * 3, [2.0] * 3]):
        assert loss(true, pred, weights) == 9.0
        slope = loss.gradient(true, pred, weights)
        np.testing.assert_allclose(slope[:, 0, 0], [0.5, 1.0])
    assert loss(true, pred, [2.0]) == loss(true, pred, 2.0) == 12.0
    # As in Keras, the axis goes that one of them lacks.
    assert losses.mean_squared_error(true, pred[..., None]).shape == (2, 3)
    assert loss.gradient(true, pred[..., None]).shape == (2, 3, 4, 1)


def test_what_are_no_rows_of_real_numbers():
    with pytest.raises(TypeError, match="mean_squared_error: expected real numbers"):
        losses.mean_squared_error(REAL, LOGITS * 1j)
    with pytest.raises(TypeError, match="mean_squared_error: expected real numbers"):
        losses.mean_squared_error(REAL * 1j, LOGITS)
    for loss in (losses.huber, losses.sparse_categorical_crossentropy):
        with pytest.raises(ValueError, match="`y_pred` with at least one axis"):
            loss(1, 2.0)
