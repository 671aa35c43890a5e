"""Scores of classes, outputs and pixels; of most each is a column of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mpidist._base.backend import as_number, as_positive
from mpidist._base.errors import warn_caller
from mpidist._base.expect import as_int, expect
from mpidist._base.types import HostArray, Nest
from mpidist._values.variable import Variable
from mpidist.metrics._confusion import _numbers, _ratio
from mpidist.metrics._metrics import (
    PairMetric,
    _each_weight,
    _largest,
    _of_shape,
    _weighted,
)


class _OfColumns(PairMetric):
    """The base of scores: each variable has a sum over the rows for each column."""

    _hint: str

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> tuple[Any, ...]:
        call = self._call
        columns = self._weights[0].shape or pred.shape[1:]
        what = f"`y_pred` of shape {('rows', *columns)}"
        fits = pred.ndim == 2 and pred.shape[1:] == columns
        expect(fits, call, what, pred, self._hint, error=ValueError)
        true = _of_shape(true, pred.shape, call).astype(np.float64)
        w = _each_weight(sample_weight, pred.shape, call)
        axis = 0 if self._weights[0].shape else None
        sums = [_weighted(x, w).sum(axis) for x in self._parts(true, pred)]
        return *sums, *self._counts(true)

    def _parts(self, true: HostArray, pred: HostArray) -> tuple[HostArray, ...]:
        """Return an array to sum for each variable, of the shape of the predictions."""
        raise NotImplementedError

    def _counts(self, true: HostArray) -> tuple[int, ...]:
        """Return what is added to the variables after those, whatever the weights."""
        return ()


class FBetaScore(_OfColumns):
    """The weighted harmonic mean of precision and recall, of each class.

    Labels and predictions have shape (rows, classes).

    Args:
        average: None: an array with the score of each class. "macro": their mean.
            "weighted": their mean, weighted by the number of labels 1. "micro": the
            score of all classes together.
        beta: how often recall counts as much as precision.
        threshold: predictions above it mean 1. None: the largest of a row, if it is
            not 0.
        name: of the metric.
        dtype: accepted and ignored.
        num_classes: how many columns there are; not needed for "micro". Keras finds
            it in the first batch.

    Raises:
        ValueError: if an argument is invalid, or the number of classes is missing.

    Example::

        metric = mpidist.metrics.FBetaScore(beta=2.0, threshold=0.5, num_classes=2)
        metric.update_state([[1, 1], [1, 0]], [[0.2, 0.6], [0.8, 0.7]])
        metric.result()  # array([0.55555556, 0.83333333])
    """

    _hint = "write `num_classes=` with the number of columns"

    def __init__(
        self,
        average: Literal["micro", "macro", "weighted"] | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str | None = None,
        dtype: object = None,
        *,
        num_classes: int | None = None,
    ) -> None:
        super().__init__(name or "fbeta_score")
        call = type(self).__name__
        fits = average in (None, "micro", "macro", "weighted")
        what = '`average` to be "micro", "macro", "weighted" or None'
        expect(fits, call, what, average, error=ValueError)
        as_positive(call, "beta", beta)
        if threshold is not None:
            fit = lambda x: 0 < x <= 1  # noqa: E731
            as_number(call, "threshold", threshold, fit, "above 0, up to 1")
        self.average = average
        self.beta: float = beta
        self.threshold: float | None = threshold
        shape: tuple[int, ...] = ()
        if average != "micro":
            what = "`num_classes`, as variables are made before the first batch"
            expect(
                num_classes is not None, call, what, None, self._hint, error=ValueError
            )
            shape = (as_int(call, "num_classes", num_classes, least=1),)
        for part in ("true_positives", "false_positives", "false_negatives", "labels"):
            self.add_weight(shape, name=part)

    def _parts(self, true: HostArray, pred: HostArray) -> tuple[HostArray, ...]:
        if self.threshold is None:
            found = (pred >= pred.max(-1, keepdims=True)) & (abs(pred) > 1e-9)
        else:
            found = pred.astype(np.float32) > np.float32(self.threshold)  # as in Keras
        return found * true, found * (1 - true), ~found * true, true

    def result(self) -> Any:
        """Return the score, a float64, or an array of them. Collective."""
        tp, fp, fn, labels = (variable.numpy() for variable in self._weights[:4])
        more = self.beta**2
        scores = _ratio((1 + more) * tp, (1 + more) * tp + more * fn + fp)
        if self.average == "weighted":
            return _ratio(np.sum(scores * labels), np.sum(labels))[()]
        return scores if self.average is None else np.mean(scores)


class F1Score(FBetaScore):
    """The harmonic mean of precision and recall, of each class; 0 without any.

    The arguments are those of `FBetaScore`, without ``beta``.
    """

    def __init__(
        self,
        average: Literal["micro", "macro", "weighted"] | None = None,
        threshold: float | None = None,
        name: str | None = None,
        dtype: object = None,
        *,
        num_classes: int | None = None,
    ) -> None:
        name = name or "f1_score"
        super().__init__(average, 1.0, threshold, name, num_classes=num_classes)


class R2Score(_OfColumns):
    """The fraction of the variance of the labels that predictions explain.

    Labels and predictions have shape (rows, outputs).

    For labels that are all the same it is 0, or, where their sums are rounded, as of
    0.1, a number without meaning, as in Keras; NaN without any, and if such labels are
    predicted exactly.

    Args:
        class_aggregation: "uniform_average": the mean over the outputs.
            "variance_weighted_average": weighted by the variance of each. None: an
            array with the score of each.
        num_regressors: the number of independent variables, for the adjusted score, or
            0. If there are not more labels than that and 1, it is not adjusted, and a
            RuntimeWarning says so.
        name: of the metric.
        dtype: accepted and ignored.
        num_outputs: how many columns there are. Keras finds it in the first batch.

    Raises:
        ValueError: if an argument is invalid.

    Example::

        metric = mpidist.metrics.R2Score()
        metric.update_state([[1.0], [3.0]], [[1.5], [2.5]])
        metric.result()  # np.float64(0.75)
    """

    _hint = "write `num_outputs=` with the number of columns"

    def __init__(
        self,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str | None = None,
        dtype: object = None,
        *,
        num_outputs: int = 1,
    ) -> None:
        super().__init__(name or "r2_score")
        known = (None, "uniform_average", "variance_weighted_average")
        what, fits = f"`class_aggregation` in {known}", class_aggregation in known
        expect(fits, "R2Score", what, class_aggregation, error=ValueError)
        self.class_aggregation = class_aggregation
        self.num_regressors: int = as_int(
            "R2Score", "num_regressors", num_regressors, least=0
        )
        columns = as_int("R2Score", "num_outputs", num_outputs, least=1)
        for part in ("squared_sum", "sum", "residual", "count"):
            self.add_weight((columns,), name=part)
        self.add_weight(name="num_samples")

    def _parts(self, true: HostArray, pred: HostArray) -> tuple[HostArray, ...]:
        return true * true, true, (true - pred) ** 2, np.ones_like(true)

    def _counts(self, true: HostArray) -> tuple[int, ...]:
        return (true.size,)

    def result(self) -> Any:
        """Return the score, a float64, or an array of them. Collective."""
        squares, sums, residual, count, samples = (v.numpy() for v in self._weights[:5])
        with np.errstate(divide="ignore", invalid="ignore"):
            total = squares - sums * (sums / count)
            scores: Any = 1 - residual / total
            scores[np.isinf(scores)] = 0.0
            if self.class_aggregation == "uniform_average":
                scores = scores.mean()
            elif self.class_aggregation is not None:
                scores = (total * scores).sum() / total.sum()
        free = float(samples) - self.num_regressors - 1
        if self.num_regressors and free > 0:
            scores = 1 - (1 - scores) * (free + self.num_regressors) / free
        elif self.num_regressors and samples:
            text = f"{samples:.0f} labels are too few for the adjusted score"
            hint = "it is the standard one; write `num_regressors=0`"
            warn_caller(
                f"R2Score.result: {text} with {self.num_regressors} regressors; {hint}"
            )
        return scores


# --- classes of pixels: intersection over union -----------------------------


class IoU(PairMetric):
    """The mean over classes of the intersection over the union; absent ones left out.

    The intersection is the number of pixels (or rows) whose label and prediction are
    both the class; the union, of those where at least one is. What is no class does not
    count; a weight of a row is that of its elements.

    Args:
        num_classes: the number of classes.
        target_class_ids: the classes whose mean it is.
        name: of the metric.
        dtype: accepted and ignored.
        ignore_class: pixels with this label do not count.
        sparse_y_true: whether labels are numbers of classes, without their fraction;
            False: scores of each class, of which the largest counts.
        sparse_y_pred: the same for predictions.
        axis: of the scores.

    Attributes:
        total_cm: the weights of pixels by label and prediction: an ON_READ variable.

    Raises:
        ValueError: if a target is no class.
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: object = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(name)
        num_classes = _as_count(self, num_classes)
        what = f"`target_class_ids` from 0 to {num_classes - 1}"
        self._targets = _numbers(target_class_ids, int)
        fits = bool(np.isin(self._targets, range(num_classes)).all())
        expect(fits, type(self).__name__, what, target_class_ids, error=ValueError)
        self.num_classes = num_classes
        self.ignore_class = ignore_class
        self._sparse = sparse_y_true, sparse_y_pred
        self._axis = axis
        shape = (num_classes, num_classes)
        self.total_cm: Variable = self.add_weight(shape, name="total_confusion_matrix")

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> tuple[HostArray]:
        true, pred = (
            x if sparse else _largest(x, self._axis)
            for x, sparse in zip((true, pred), self._sparse, strict=True)
        )
        n, shape = self.num_classes, pred.shape
        true, pred = _of_shape(true, shape, self._call).astype(int), pred.astype(int)
        weights = _each_weight(sample_weight, shape, self._call)
        counts = (true >= 0) & (true < n) & (pred >= 0) & (pred < n)
        counts &= true != (-1 if self.ignore_class is None else self.ignore_class)
        places = true[counts] * n + pred[counts]
        return (np.bincount(places, weights[counts], n * n).reshape(n, n),)

    def result(self) -> Any:
        """Return the mean, a float64; 0 without any of the classes. Collective."""
        matrix = self.total_cm.numpy()
        both = matrix.diagonal()
        union = (matrix.sum(0) + matrix.sum(1) - both)[self._targets]
        present = int(np.count_nonzero(union)) or 1
        return np.float64(_ratio(both[self._targets], union).sum() / present)


def _as_count(metric: IoU, num_classes: object) -> int:
    return as_int(type(metric).__name__, "num_classes", num_classes, least=1)


class MeanIoU(IoU):
    """The mean over all classes of the intersection over the union, as `IoU`."""

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: object = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        others = ignore_class, sparse_y_true, sparse_y_pred, axis
        targets = range(_as_count(self, num_classes))
        super().__init__(num_classes, targets, name, None, *others)


class BinaryIoU(IoU):
    """`IoU` of the classes 0 and 1.

    Args:
        target_class_ids: the classes whose mean it is.
        threshold: predictions that are this or more mean 1.
        name: of the metric.
        dtype: accepted and ignored.
    """

    def __init__(
        self,
        target_class_ids: Sequence[int] = (0, 1),
        threshold: float = 0.5,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(2, target_class_ids, name)
        call = type(self).__name__
        self.threshold: float = as_number(
            call, "threshold", threshold, np.isfinite, "finite"
        )

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> tuple[HostArray]:
        # In float32, as in Keras.
        pred = pred.astype(np.float32) >= np.float32(self.threshold)
        return super()._sums(true, pred, sample_weight)
