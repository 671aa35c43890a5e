"""Metrics: sums over all replicas, and what they compare."""

import numpy as np
import pytest
from replicas import from_replicas, local, raises_everywhere, this_replica

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2)]


class TopKOwn(mpidist.metrics.Metric):
    pass


@pytest.mark.one_size
def test_metrics_are_over_all_replicas(strategy, folder):
    with strategy.scope():
        mean = mpidist.metrics.Mean(name="loss")
        accuracy = mpidist.metrics.SparseCategoricalAccuracy()

    def step():
        i = this_replica()
        mean.update_state(np.arange(2.0 + i))  # 0, 1 and 0, 1, 2
        scores = np.array([[1.0, 0.0], [i, 1.0 - i]])
        accuracy.update_state([[0], [1]], scores)
        return mean([5.0], sample_weight=[2.0])

    expected = 24.0 / 9
    assert local(strategy, step) == expected
    assert mean.result() == expected
    assert (accuracy.result(), accuracy.name) == (0.75, "sparse_categorical_accuracy")
    names = {kind.__name__: kind().name for kind in (mpidist.metrics.AUC, TopKOwn)}
    assert names == {"AUC": "auc", "TopKOwn": "top_k_own"}
    checkpoint = mpidist.Checkpoint(mean=mean)
    checkpoint.save(folder / "c")
    mean.reset_states()
    assert mean.result() == 0.0
    checkpoint.restore(folder / "c")
    assert mean.result() == expected
    mean.reset_state()
    mean.update_state(4.0)  # in cross-replica context, where it is the same: once
    assert (mean.result(), float(mean.count)) == (4.0, 1.0)
    for message in raises_everywhere(
        TypeError, lambda: mean.update_state(from_replicas(strategy, lambda i: i))
    ):
        assert "strategy.run" in message


@pytest.mark.parametrize(
    ("kind", "true", "pred", "weight", "expected"),
    [
        ("Accuracy", [1, 2, 3], [1, 0, 3], None, 2 / 3),
        ("CategoricalAccuracy", [[0, 1], [1, 0]], [[0.2, 0.8], [0.4, 0.6]], None, 0.5),
        ("BinaryAccuracy", [1, 0, 1], [[0.6], [0.6], [0.9]], None, 2 / 3),
        ("BinaryAccuracy", [1, 0], [0.6, 0.6], [1.0, 3.0], 0.25),
        ("MeanSquaredError", [[0.0, 1.0]], [[2.0, 2.0]], None, 2.5),
        ("MeanSquaredError", [[0.0], [1.0]], [[2.0], [2.0]], [1.0, 0.0], 4.0),
        ("MeanAbsoluteError", [0.0, 1.0], [[2.0], [2.0]], None, 1.5),
        ("MeanAbsoluteError", [0.0, 1.0], [2.0, 2.0], 0.5, 1.5),
        ("SparseCategoricalAccuracy", [1, 0], [[0.0, 1], [0, 1]], None, 0.5),
    ],
)
def test_each_metric(strategy, kind, true, pred, weight, expected):
    metric = getattr(mpidist.metrics, kind)()
    metric.update_state(true, np.array(pred), weight)
    assert metric.result() == pytest.approx(expected)
    with pytest.raises(ValueError, match="y_true"):
        metric.update_state([1, 2, 3, 4, 5], np.array(pred))
    with pytest.raises(ValueError, match="sample_weight"):
        metric.update_state(true, np.array(pred), np.ones(7))


def test_a_metric_of_no_scope_is_of_one_process(strategy):
    mean = mpidist.metrics.Mean("loss")
    mean.update_state([1.0, 3.0])
    assert mean.result() == 2.0
    for message in raises_everywhere(
        RuntimeError, lambda: strategy.run(mean.update_state, args=(1.0,))
    ):
        assert "'loss' was not made in the scope of" in message
        assert "`with strategy.scope():`" in message
    assert mean.result() == 2.0


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("Mean", [np.ones(100_000, "float16")], 1.0),
        ("Mean", [np.zeros((0, 3)), np.zeros(0)], 0.0),
        ("MeanAbsoluteError", [np.uint8([5]), np.uint8([3])], 2.0),
        ("MeanAbsoluteError", [np.uint8([3]), np.uint8([5])], 2.0),
        ("MeanSquaredError", [np.uint8([20]), np.uint8([0])], 400.0),
        ("MeanAbsoluteError", [np.array([True]), np.array([False])], 1.0),
        ("MeanAbsolutePercentageError", [np.int8([-128]), np.float32([-64])], 50.0),
        (
            "MeanSquaredLogarithmicError",
            [np.float16([1000]), np.float16([1001])],
            (np.log1p(1001) - np.log1p(1000)) ** 2,
        ),
    ],
)
def test_sums_and_differences_are_of_float64(strategy, kind, given, expected):
    metric = getattr(mpidist.metrics, kind)()
    metric.update_state(*given)
    assert metric.result() == expected


def test_comparisons_are_of_the_narrower_dtype(strategy):
    """As in Keras: 0.6 is not a number of float32, and less than the nearest one."""
    narrow, wide = np.array([[0.6]], np.float32), [[0.6]]
    for pair in ((narrow, wide), (wide, narrow)):
        assert mpidist.metrics.Accuracy()(*pair) == 1.0
    for number in (0.6, np.float64(0.6)):
        below = mpidist.metrics.BinaryAccuracy(threshold=number)
        assert below([[0]], narrow) == 1.0
        score = mpidist.metrics.F1Score("micro", threshold=number)
        assert score([[1]], narrow) == 0.0
    for dtype in (np.float16, np.float32, np.float64):  # Keras 3.15: of float32
        above = mpidist.metrics.TruePositives(thresholds=0.3)
        score = mpidist.metrics.F1Score("micro", threshold=0.3)
        for metric in (above, score):
            assert metric([[1]], dtype([[0.3]])) == (dtype is np.float16)


@pytest.mark.guests
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_arrays_of_bfloat16(strategy, library):
    module = pytest.importorskip(library)
    ones = module.ones(1000, dtype=module.bfloat16)
    error = mpidist.metrics.MeanAbsoluteError()
    error.update_state(ones - 1, ones)
    assert (error.result(), float(error.total)) == (1.0, 1000.0)
    accuracy = mpidist.metrics.Accuracy()
    accuracy.update_state(np.ones((1000, 1), int), ones)
    assert accuracy.result() == 1.0


@pytest.mark.parametrize(
    "value", [None, "abc", {"a": 1}, 1j, [1, None], np.ma.masked_array([1.0], [True])]
)
def test_other_values_are_refused(strategy, value):
    mean = mpidist.metrics.Mean()
    with pytest.raises(TypeError, match=r"^Mean\.update_state: expected"):
        mean.update_state(value)


def test_shapes_are_equal_apart_from_axes_of_length_1(strategy):
    accuracy = mpidist.metrics.Accuracy()
    with pytest.raises(ValueError, match=r"^Accuracy\.update_state: .*\(3, 2\)"):
        accuracy.update_state(np.zeros((2, 3)), np.zeros((3, 2)))
    accuracy.update_state(np.zeros((1, 2, 3)), np.zeros((2, 1, 3)))
    assert float(accuracy.count) == 2.0


ROWS = np.array([[1.0, 2, 6], [0, 1, 2]])


@pytest.mark.parametrize(
    ("kind", "weight", "total", "count"),  # as Keras 3.15 has them
    [
        ("Mean", None, 4.0, 2.0),
        ("Mean", 0.5, 1.0, 0.5),
        ("Mean", [1.0, 2.0], 5.0, 3.0),
        ("Mean", [[3.0, 0, 0], [0, 3, 6]], 6.0, 4.0),
        ("Sum", 0.5, 6.0, None),
        ("Sum", [1.0, 2.0], 15.0, None),
        ("MeanSquaredError", None, 46 / 3, 2.0),
        ("MeanSquaredError", [1.0, 2.0], 17.0, 3.0),
        ("MeanAbsoluteError", 0.5, 1.0, 0.5),
        ("BinaryAccuracy", [1.0, 2.0], 1 / 3 * 2, 3.0),
    ],
)
def test_batches_with_and_without_weights(strategy, kind, weight, total, count):
    metric = getattr(mpidist.metrics, kind)()
    given = [ROWS] if kind in ("Mean", "Sum") else [np.zeros((2, 3)), ROWS]
    metric.update_state(*given, sample_weight=weight)
    assert float(metric.total) == pytest.approx(total)
    assert count is None or float(metric.count) == pytest.approx(count)


@pytest.mark.one_size
def test_metrics_in_lists_belong_to_the_metric(strategy):
    class Parts(mpidist.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.first = mpidist.metrics.Sum("first")
            self.parts = [self.first, {"b": (mpidist.metrics.Sum("second"),)}]

    with strategy.scope():
        parts = Parts()
    parts.parts[1]["b"][0].update_state(2.0)
    assert [v.name for v in parts.variables] == ["first/total", "second/total"]
    parts.reset_state()
    assert parts.parts[1]["b"][0].result() == 0.0


@pytest.mark.one_size
def test_an_error_on_one_rank_is_one_on_all(strategy):
    with strategy.scope():
        accuracy = mpidist.metrics.Accuracy()
    shape = (2, 3) if strategy.replica_id else (3, 2)
    for message in raises_everywhere(
        ValueError, lambda: accuracy.update_state(np.zeros(shape), np.zeros((3, 2)))
    ):
        assert "Accuracy.update_state" in message


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("MeanIoU", "num_classes", (2, 3)),
        ("BinaryAccuracy", "threshold", (0.5, 0.6)),
        ("AUC", "curve", ("ROC", "PR")),
        ("Precision", "thresholds", ([0.1, 0.5], [0.2, 0.5])),
    ],
)
def test_metrics_with_other_settings_on_one_replica(strategy, rank, kind, name, values):
    def make():
        with strategy.scope():
            value = values[min(rank, 1)]
            return getattr(mpidist.metrics, kind)(**{name: value}, dtype=object())

    parts = (f"{kind}(", *(f"{name}={value}" for value in values))
    raises_everywhere(mpidist.CollectiveMismatchError, make, *parts)


@pytest.mark.mpi(min_size=2)
def test_values_that_differ_change_nothing(strategy, rank):
    with strategy.scope():
        mean = mpidist.metrics.Mean()
        values = [3.0] if rank else [1.0, 2.0]  # of the same sum
        raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda: mean.update_state(values),
            "Mean.update_state",
        )
        assert float(mean.total) == float(mean.count) == 0


@pytest.mark.one_size
def test_a_sum_that_one_rank_does_not_ask_for_is_read_once(strategy):
    with strategy.scope():
        total, other = mpidist.metrics.Sum(), mpidist.metrics.Mean()
    mine = (total, other)[strategy.replica_id]
    # NumPy's np.float64(x) tries float(x), and after any exception x.__array__().
    raises_everywhere(mpidist.CollectiveMismatchError, mine.result)
    assert total.result() == 0.0


SCORES = np.random.default_rng(1).normal(size=(40, 6))
CLASSES = np.random.default_rng(2).integers(0, 6, 40)


def area(true, score):
    """Return the share of pairs in the right order: the exact area."""
    pairs = score[true == 1][:, None] - score[true == 0][None]
    return ((pairs > 0) + 0.5 * (pairs == 0)).mean()


def test_more_metrics_of_classes(strategy):
    metrics, one_hot = mpidist.metrics, np.eye(6)[CLASSES]
    ranks = (SCORES[np.arange(40), CLASSES][:, None] < SCORES).sum(-1)
    logits = {"from_logits": True}
    share = np.exp(SCORES) / np.exp(SCORES).sum(-1, keepdims=True)
    entropy = -np.log(share[np.arange(40), CLASSES]).mean()
    for metric, true, pred, expected in (
        (metrics.SparseTopKCategoricalAccuracy(2), CLASSES, SCORES, (ranks < 2).mean()),
        (metrics.TopKCategoricalAccuracy(k=3), one_hot, SCORES, (ranks < 3).mean()),
        (metrics.SparseCategoricalCrossentropy(**logits), CLASSES, SCORES, entropy),
        (metrics.SparseCategoricalCrossentropy(), CLASSES[:, None], share, entropy),
        (metrics.CategoricalCrossentropy(**logits), one_hot, SCORES, entropy),
        (metrics.CategoricalCrossentropy(), one_hot, share, entropy),
        (metrics.RootMeanSquaredError(), [1.0, 2.0], [[1.0], [5.0]], np.sqrt(4.5)),
        (metrics.Sum(), None, [[1.0, 2.0], [3.0, 4.0]], 10.0),
    ):
        given = (pred,) if true is None else (true, pred)
        metric.update_state(*given)
        assert metric.result() == pytest.approx(expected, rel=1e-5)
        metric.reset_state()
        halves = [(*(x[k::2] for x in given), 2.0) for k in (0, 1)]
        for half in halves:
            metric.update_state(*half)
        factor = 2 if true is None else 1
        assert metric.result() == pytest.approx(factor * expected, rel=1e-5)
    bits, logit = CLASSES > 2, SCORES[:, 0]
    binary = metrics.BinaryCrossentropy(from_logits=True)
    binary.update_state(bits, logit)
    expected = np.log1p(np.exp(np.where(bits, -logit, logit))).mean()
    assert binary.result() == pytest.approx(expected)
    with pytest.raises(ValueError, match="ints from 0 to 5"):
        metrics.SparseTopKCategoricalAccuracy().update_state([6], SCORES[:1])
    total = metrics.Sum()
    total.update_state([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.5])
    assert total.result() == 6.5


def test_a_row_without_values_counts_nothing(strategy):
    mean = mpidist.metrics.Mean()
    mean.update_state(np.zeros((2, 0)), [1.0, 1.0])
    mean.update_state(np.zeros((0, 3)), np.zeros(0))
    assert (mean.result(), float(mean.count)) == (0.0, 0.0)
    mean.update_state([[1.0, 3.0], [5.0, 7.0]], [1.0, 3.0])
    assert (mean.result(), float(mean.count)) == (5.0, 4.0)


@pytest.mark.one_size
def test_counts_above_a_threshold(strategy, folder, size):
    metrics, true = mpidist.metrics, (CLASSES > 2).astype(np.float32)
    score = (1 / (1 + np.exp(-SCORES[:, 0] - true))).astype(np.float32)
    with strategy.scope():
        precision, recall = metrics.Precision(), metrics.Recall(thresholds=[0.3, 0.7])
        weighted = metrics.Precision()
        counts = [
            getattr(metrics, which + kind)(0.6)
            for which in ("True", "False")
            for kind in ("Positives", "Negatives")
        ]
        areas = [metrics.AUC(1000), metrics.AUC(1000, curve="PR")]
        logits = metrics.AUC(1000, from_logits=True)
    made = [precision, recall, *counts, *areas]

    def step():
        own = slice(this_replica(), None, size)
        for metric in made:
            metric.update_state(true[own, None], score[own])
        logits.update_state(true[own], np.log(score[own] / (1 - score[own])))
        weighted.update_state(true[own], score[own], np.arange(40.0)[own])

    strategy.run(step)
    found = score > 0.5
    assert precision.result() == pytest.approx(true[found].mean())
    by_hand = [(score[true == 1] > limit).mean() for limit in (0.3, 0.7)]
    np.testing.assert_allclose(recall.result(), by_hand)
    above = score > 0.6
    expected = [above & (true == 1), ~above & (true == 0)]
    expected += [above & (true == 0), ~above & (true == 1)]
    assert [count.result() for count in counts] == [x.sum() for x in expected]
    weights = np.arange(40.0)[found]
    share = np.average(true[found], weights=weights)
    assert weighted.result() == pytest.approx(share)
    assert areas[0].result() == pytest.approx(area(true, score), abs=5e-3)
    assert logits.result() == pytest.approx(area(true, score), abs=5e-3)
    # The average precision, which the interpolation comes close to.
    order = np.argsort(-score)
    precisions = np.cumsum(true[order]) / np.arange(1, 41)
    assert areas[1].result() == pytest.approx(
        precisions[true[order] == 1].mean(), abs=0.03
    )
    checkpoint = mpidist.Checkpoint(auc=areas[0], precision=precision)
    checkpoint.save(folder / "c")
    before = areas[0].result()
    areas[0].reset_state()
    assert areas[0].result() == 0.0
    checkpoint.restore(folder / "c")
    assert areas[0].result() == before


def test_the_area_of_the_documentation_of_keras(strategy):
    auc = mpidist.metrics.AUC(num_thresholds=3)
    auc.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9])
    assert auc.result() == 0.75
    auc.reset_state()
    auc.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9], sample_weight=[1, 0, 0, 1])
    assert auc.result() == 1.0
    pr = mpidist.metrics.AUC(num_thresholds=3, curve="PR")
    pr.update_state([1, 1, 1, 0], [0.2, 0.4, 0.6, 0.8])
    assert 0.0 < pr.result() < 1.0
    for call, line in (
        (lambda: auc.update_state([1], [2.0]), "predictions between 0 and 1"),
        (lambda: mpidist.metrics.AUC(curve="x"), '"ROC" or "PR"'),
        (lambda: mpidist.metrics.AUC(1), "2 or more"),
        (lambda: auc.update_state([1, 0, 0], [[0.5, 0.5]]), "y_true"),
    ):
        with pytest.raises(ValueError, match=line):
            call()


PIXELS = np.arange(35).reshape(7, 5)
TRUE, WAVES = PIXELS % 4, np.sin(np.arange(140.0)).reshape(7, 5, 4)
SQUARES = np.cos(np.arange(24.0)).reshape(6, 4) ** 2
COLUMNS = (
    [[1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 0, 0]],
    [[0.2, 0.6, 0.7], [0.8, 0.5, 0.3], [0.1, 0.5, 0.6], [0.6, 0.0, 0.9]],
    [1.0, 2.0, 0.5, 1.0],
)


@pytest.mark.one_size
@pytest.mark.parametrize(
    ("kind", "options", "given", "expected"),  # of Keras 3.15
    [
        ("MeanIoU", {}, (PIXELS % 6 - 1, PIXELS % 7), 1 / 6),
        ("MeanIoU", {}, (TRUE, PIXELS % 3 + 0.7), 0.12745098),
        ("MeanIoU", {}, (TRUE, PIXELS % 3, PIXELS % 2), 0.0625),
        ("MeanIoU", {"ignore_class": 2}, (TRUE, PIXELS % 3), 0.1),
        ("MeanIoU", {"num_classes": 9}, ([[1], [1], [2]], [[1], [2], [2]]), 0.5),
        ("MeanIoU", {"sparse_y_pred": False}, (TRUE, WAVES), 0.11904762),
        (
            "MeanIoU",
            {"sparse_y_pred": False, "sparse_y_true": False, "axis": 1},
            (np.moveaxis(np.eye(4)[TRUE], -1, 1), np.moveaxis(WAVES, -1, 1)),
            0.11904762,
        ),
        ("IoU", {"target_class_ids": [1, 3]}, (TRUE, PIXELS % 7), 0.25),
        ("BinaryIoU", {}, (PIXELS % 2, PIXELS * 17 % 35 / 34), 1 / 34),
        (
            "BinaryIoU",
            {"target_class_ids": [1], "threshold": 0.25},
            (PIXELS % 2, PIXELS * 17 % 35 / 34, PIXELS % 3),
            0.26470588,
        ),
        ("CosineSimilarity", {}, (SQUARES, 1 - SQUARES), 0.33977732),
        ("CosineSimilarity", {}, (SQUARES, 1 - SQUARES, np.arange(6)), 0.35234928),
        ("KLDivergence", {}, (SQUARES, 1 - SQUARES, np.arange(6)), 5.1710682),
        (
            "MeanAbsolutePercentageError",
            {},
            (SQUARES, 1 - SQUARES, np.arange(6)),
            170771.6,
        ),
        (
            "MeanSquaredLogarithmicError",
            {},
            (SQUARES, 1 - SQUARES, np.arange(6)),
            0.23132247,
        ),
        ("F1Score", {"threshold": 0.5, "num_classes": 3}, COLUMNS, [6 / 7, 0, 0.75]),
        ("F1Score", {"average": "weighted", "num_classes": 3}, COLUMNS, 0.50555557),
        (
            "FBetaScore",
            {"average": "micro", "beta": 2.0, "threshold": 0.5},
            COLUMNS,
            0.61643845,
        ),
        (
            "FBetaScore",
            {"average": "macro", "beta": 0.5, "num_classes": 3},
            COLUMNS,
            0.49516901,
        ),
        ("PrecisionAtRecall", {"recall": 0.8}, COLUMNS, 0.72222221),
        (
            "RecallAtPrecision",
            {"precision": 0.7, "num_thresholds": 11},
            COLUMNS,
            0.86666667,
        ),
        ("SensitivityAtSpecificity", {"specificity": 0.5}, COLUMNS, 0.86666667),
        (
            "SpecificityAtSensitivity",
            {"sensitivity": 0.5, "num_thresholds": 1},
            COLUMNS,
            0.66666669,
        ),
        ("R2Score", {"num_outputs": 3}, COLUMNS, -0.34591666),
        (
            "R2Score",
            {"class_aggregation": None, "num_outputs": 3},
            COLUMNS,
            [-0.99125, 0.1135, -0.16],
        ),
        (
            "R2Score",
            {
                "class_aggregation": "variance_weighted_average",
                "num_regressors": 3,
                "num_outputs": 3,
            },
            COLUMNS,
            -0.63027167,
        ),
    ],
)
def test_what_keras_gives(strategy, folder, size, kind, options, given, expected):
    if kind in ("MeanIoU", "IoU"):
        options = {"num_classes": 4} | options
    with strategy.scope():
        metric = getattr(mpidist.metrics, kind)(**options)

    def step():
        own = slice(this_replica(), None, size)
        return metric(*(np.array(x)[own] for x in given))

    np.testing.assert_array_equal(local(strategy, step), metric.result())
    assert metric.result() == pytest.approx(expected)
    checkpoint = mpidist.Checkpoint(metric=metric)
    checkpoint.save(folder / "c")
    metric.reset_state()
    assert not np.nan_to_num(metric.result()).any()  # R2Score: NaN, as in Keras
    checkpoint.restore(folder / "c")
    assert metric.result() == pytest.approx(expected)


def test_settings_that_are_no_numbers_are_refused():
    metrics, losses = mpidist.metrics, mpidist.losses
    for call, line in (
        (lambda x: metrics.AUC(x), "AUC: .*`num_thresholds` to be an int"),
        (lambda x: metrics.TopKCategoricalAccuracy(x), "`k` to be an int"),
        (lambda x: metrics.FBetaScore("micro", x), "`beta` to be a number"),
        (lambda x: metrics.RecallAtPrecision(x), "`precision` to be a number"),
        (lambda x: metrics.BinaryAccuracy(threshold=x), "`threshold` to be a number"),
        (lambda x: metrics.BinaryIoU(threshold=x), "`threshold` to be a number"),
        (lambda x: losses.Huber(x), "Huber: .*`delta` to be a number"),
    ):
        with pytest.raises(TypeError, match=f"{line}, got '2' of type str"):
            call("2")
    with pytest.raises(TypeError, match=r"`name` to be a string.*`update_state`"):
        metrics.MeanSquaredError(np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="`k` to be 1 or more, got 0"):
        metrics.SparseTopKCategoricalAccuracy(k=0)


def test_what_scores_refuse():
    metrics = mpidist.metrics
    two = metrics.F1Score(num_classes=2)
    for call, line in (
        (metrics.F1Score, "`num_classes`, as variables are made before the first"),
        (lambda: metrics.F1Score("mean", num_classes=2), '`average` to be "micro"'),
        (lambda: metrics.FBetaScore("micro", beta=0.0), "`beta` to be above 0"),
        (lambda: metrics.F1Score("micro", threshold=1.5), "`threshold` to be above 0"),
        (lambda: metrics.R2Score("mean"), "`class_aggregation` in"),
        (lambda: metrics.PrecisionAtRecall(1.5), "`recall` to be from 0 to 1"),
        (lambda: metrics.RecallAtPrecision(0.5, 0), "`num_thresholds` to be 1"),
        (lambda: metrics.AUC(10**30), "AUC: num_thresholds=10* is too many"),
        (lambda: two.update_state([[1, 0, 0]], [[0.5, 0.5, 0.1]]), "num_classes="),
        (lambda: metrics.R2Score().update_state([1.0], [1.0]), "num_outputs="),
        (lambda: metrics.IoU(2, [2]), r"^IoU: expected .* from 0 to 1, got \[2\]"),
    ):
        with pytest.raises(ValueError, match=line):
            call()
    score = metrics.R2Score(num_regressors=2)
    score.update_state([[1.0], [4.0], [3.0]], [[2.0], [4.0], [4.0]])
    with pytest.warns(RuntimeWarning, match="3 labels are too few"):
        assert score.result() == pytest.approx(4 / 7)


@pytest.mark.parametrize("wrong", [None, "text", {"a": 1}, [[1], [1, 2]], 10**30])
def test_settings_that_are_no_numbers(wrong):
    metrics = mpidist.metrics
    for name, call in (
        ("Recall", lambda: metrics.Recall({1, 2} if wrong is None else wrong)),
        ("BinaryIoU", lambda: metrics.BinaryIoU(wrong)),
        ("IoU", lambda: metrics.IoU(3, wrong)),
        ("IoU", lambda: metrics.IoU(-1 if wrong == 10**30 else wrong, [0])),
        ("MeanIoU", lambda: metrics.MeanIoU(0 if wrong == 10**30 else wrong)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected `"):
            call()


def test_lists_of_several_lengths():
    with pytest.raises(ValueError, match=r"^Mean.*: expected an array or lists of one"):
        mpidist.metrics.Mean().update_state([[1], [1, 2]])
    with pytest.raises(ValueError, match=r"^Dataset: expected an array or lists"):
        mpidist.data.Dataset.from_tensor_slices([[1], [1, 2]])


@pytest.mark.one_size
def test_a_metric_of_ones_own(strategy, size):
    class Largest(mpidist.metrics.Metric):
        def __init__(self, name="spread", **kwargs):
            super().__init__(name=name, **kwargs)
            self.squares = self.add_weight(name="squares", initializer="zeros")
            self.rows = self.add_weight("rows", dtype=np.float32)

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.squares.assign_add(np.sum((y_true - y_pred) ** 2))
            self.rows.assign_add(len(y_true))

        def result(self):
            return np.sqrt(self.squares / self.rows)

    with strategy.scope():
        metric = Largest()
    assert [v.name for v in metric.variables] == ["spread/squares", "spread/rows"]

    def step():
        i = this_replica()
        return metric(np.full(i + 1, 3.0), np.zeros(i + 1))

    assert local(strategy, step) == 3.0
    assert metric.result() == 3.0
    rows = size * (size + 1) // 2
    assert float(metric.rows) == rows
    metric.reset_state()
    assert float(metric.rows) == 0.0
    with pytest.raises(ValueError, match='`initializer` to be "zeros"'):
        metric.add_weight(initializer="ones")


def test_a_metric_is_made_again_from_its_config(strategy):
    class Scaled(mpidist.metrics.Mean):
        def __init__(self, scale, name="scaled", **kwargs):
            super().__init__(name=name, **kwargs)
            self.scale = scale

        def result(self):
            return self.scale * super().result()

    with strategy.scope():
        for metric in (
            mpidist.metrics.Precision([0.1, 0.9], name="p"),
            Scaled(3, dtype=np.float32),
        ):
            config = metric.get_config()
            again = type(metric).from_config(config)
            assert again.get_config() == config
            assert again.name == metric.name
        again.update_state([1.0, 3.0])
    assert config == {"scale": 3, "dtype": np.float32}
    assert again.result() == 6.0
    assert metric.result() == 0.0


def test_thresholds_keep_their_order_and_are_from_0_to_1():
    metrics = mpidist.metrics
    given = [0, 1, 1], [0.5, 0.5, 0.8]
    for limits, expected in (
        ([0.3, 0.7], [2 / 3, 1.0]),
        ([0.7, 0.3], [1.0, 2 / 3]),
        ([0.7, 0.3, 0.7], [1.0, 2 / 3, 1.0]),
        ([0.7], 1.0),  # as in Keras, a number
    ):
        found = metrics.Precision(limits)(*given)
        np.testing.assert_allclose(found, expected)
        assert np.shape(found) == np.shape(expected)
    for limits in (2.0, np.nan, [], [0.5, -0.1]):
        with pytest.raises(ValueError, match="Recall: expected `thresholds`"):
            metrics.Recall(limits)
    auc = metrics.AUC(from_logits=True)
    assert auc([0, 1, 0, 1], [-1e4, 1e4, -5.0, 5.0]) == 1.0  # without a warning


def test_what_is_not_a_number_counts_as_its_weight_and_is_never_right():
    metrics = mpidist.metrics
    assert metrics.Mean()([np.nan, 1.0], [0.0, 1.0]) == 1.0
    assert metrics.Sum()([np.inf, 1.0], [0.0, 1.0]) == 1.0
    assert metrics.AUC()([0, 1, 1], [0.1, 0.9, np.nan], [1.0, 1.0, 0.0]) == 1.0
    scores = [[np.nan, 1.0, 2.0], [3.0, np.nan, 2.0], [-np.inf, 0.0, 1.0]]
    assert metrics.SparseTopKCategoricalAccuracy(2)([0, 0, 1], scores) == 1 / 3
    # Keras 3.15
    assert metrics.SparseCategoricalAccuracy()([0, 0, 1], scores) == 1 / 3
    assert metrics.CategoricalAccuracy()(np.eye(3)[[2, 1, 2]], scores) == 2 / 3
    classes = metrics.MeanIoU(3, sparse_y_pred=False)
    assert classes([2, 0, 2], scores) == 1.0


def test_weights_of_rows_with_a_last_axis_of_length_1():
    metrics = mpidist.metrics
    rows = np.arange(6.0).reshape(2, 3)
    for weights in ([1.0, 3.0], [[1.0], [3.0]]):
        mean = metrics.Mean()
        assert (mean(rows, weights), float(mean.count)) == (3.25, 4.0)
        true = np.ones((2, 3))
        assert metrics.TruePositives()(true, true, weights) == 12.0
    mean = metrics.Mean()
    assert (mean(rows, [2.0, 2.0]), mean(rows, [2.0])) == (2.5, 2.5)
    assert float(mean.count) == 4.0 + 4.0


@pytest.mark.one_size
def test_metrics_of_metrics_and_of_variables(strategy, folder, size):
    class F1(mpidist.metrics.Metric):
        def __init__(self):
            super().__init__(name="f1")
            self.precision = mpidist.metrics.Precision()
            self.recall = mpidist.metrics.Recall()

        def update_state(self, y_true, y_pred):
            self.precision.update_state(y_true, y_pred)
            self.recall.update_state(y_true, y_pred)

        def result(self):
            p, r = self.precision.result(), self.recall.result()
            return {"f1": 2 * p * r / max(p + r, 1e-7), "precision": p}

        def reset_state(self):
            self.precision.reset_state()
            self.recall.reset_state()

    class OfRows:  # no metric
        def result(self):
            return self.rows

    class Rows(OfRows, mpidist.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.rows = self.add_weight(name="rows")

        def update_state(self, x):
            self.rows.assign_add(len(x))

    class Batches(mpidist.metrics.Mean):
        def __init__(self):
            super().__init__()
            self.batches = self.add_weight(name="batches")

        def update_state(self, values):
            super().update_state(values)
            self.batches.assign_add(1.0)

    with strategy.scope():
        f1, rows, batches = F1(), Rows(), Batches()

    def step():
        i = this_replica()
        f1.update_state([1, 0, 1], [0.9, 0.8, 0.9 * (i == 0)])
        batches.update_state([1.0, 2.0])
        return rows(np.zeros(i + 2))

    assert local(strategy, step) == size * (size + 3) // 2
    right = size + 1
    p, r = right / (right + size), right / (2 * size)
    found = f1.result()
    assert found["precision"] == pytest.approx(p)
    assert found["f1"] == pytest.approx(2 * p * r / (p + r))
    assert (batches.result(), float(batches.batches)) == (1.5, size)
    checkpoint = mpidist.Checkpoint(f1=f1)
    checkpoint.save(folder / "c")
    f1.reset_states()
    assert f1.result() == {"f1": 0.0, "precision": 0.0}
    checkpoint.restore(folder / "c")
    assert f1.result() == found
