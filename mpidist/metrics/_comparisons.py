"""Metrics that are means of a comparison of labels and predictions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mpidist import losses
from mpidist._base.backend import as_number
from mpidist._base.expect import as_int, expect
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import HostArray, Nest
from mpidist.metrics._metrics import (
    Mean,
    PairMetric,
    _largest,
    _of_shape,
    _sums_of_rows,
)

_EPSILON: Final = 1e-7  # of Keras


class _Compared(PairMetric, Mean):  # type: ignore[misc]  # update_state as in Keras
    """The mean of what a comparison of labels and predictions gives, such as a loss."""

    _sparse = False  # whether a label is the number of the class of a row
    _loss: losses.Loss

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> tuple[float, float]:
        shape = pred.shape[:-1] if self._sparse else pred.shape
        found = self._compare(_of_shape(true, shape, self._call), pred)
        return _sums_of_rows(found, sample_weight, self._call)

    def _compare(self, true: Any, pred: Any) -> Any:
        """Return a value for each row, or for each element."""
        return self._loss.call(true, pred.astype(np.float64))


class Accuracy(_Compared):
    """The fraction of predictions that equal their label; of the same shape."""

    def _compare(self, true: Any, pred: Any) -> Any:
        if true.dtype.kind == pred.dtype.kind == "f":  # 0.1 is another one in float64
            narrow = min(true.dtype, pred.dtype, key=lambda dtype: dtype.itemsize)
            true, pred = true.astype(narrow), pred.astype(narrow)
        return true == pred


class SparseCategoricalAccuracy(_Compared):
    """The fraction of rows whose label, an int, is the class of the largest score."""

    _sparse = True

    def _compare(self, true: Any, pred: Any) -> Any:
        return true == _largest(pred)


class CategoricalAccuracy(_Compared):
    """The fraction of rows whose one-hot label is the class of the largest score."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return _largest(true) == _largest(pred)


class BinaryAccuracy(_Compared):
    """The fraction of predictions whose class, 0 or 1, equals the label.

    Args:
        name: of the metric.
        threshold: predictions above it mean 1.
    """

    def __init__(
        self, name: str | None = None, dtype: object = None, threshold: float = 0.5
    ) -> None:
        super().__init__(name)
        call = type(self).__name__
        self.threshold: float = as_number(
            call, "threshold", threshold, np.isfinite, "finite"
        )

    def _compare(self, true: Any, pred: Any) -> Any:
        return true == (pred > self.threshold)  # in the dtype of predictions


class MeanSquaredError(_Compared):
    """The mean squared difference between predictions and labels."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return (pred.astype(np.float64) - true) ** 2


class MeanAbsoluteError(_Compared):
    """The mean absolute difference between predictions and labels."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return abs(pred.astype(np.float64) - true)


class MeanAbsolutePercentageError(_Compared):
    """The mean absolute difference, in percent of the labels' absolute values.

    These count as 1e-7 or more.
    """

    def _compare(self, true: Any, pred: Any) -> Any:
        true, pred = true.astype(np.float64), pred.astype(np.float64)
        return 100.0 * abs(pred - true) / np.maximum(abs(true), _EPSILON)


class MeanSquaredLogarithmicError(_Compared):
    """The mean squared difference of ``log(1 + x)`` of predictions and labels.

    Both count as 1e-7 or more.
    """

    def _compare(self, true: Any, pred: Any) -> Any:
        one, other = (
            np.log1p(np.maximum(x.astype(np.float64), _EPSILON)) for x in (true, pred)
        )
        return (one - other) ** 2


class KLDivergence(_Compared):
    """The mean Kullback-Leibler divergence of predictions from labels.

    Probabilities, which are the last axis, count as 1e-7 or more.
    """

    def _compare(self, true: Any, pred: Any) -> Any:
        true, pred = (np.clip(x.astype(float), _EPSILON, 1) for x in (true, pred))
        return (true * np.log(true / pred)).sum(-1)


class CosineSimilarity(_Compared):
    """The mean cosine of the angle between labels and predictions.

    Args:
        name: of the metric.
        axis: of the vectors.
    """

    def __init__(
        self, name: str | None = None, dtype: object = None, axis: int = -1
    ) -> None:
        super().__init__(name)
        self.axis = axis

    def _compare(self, true: Any, pred: Any) -> Any:
        lengths = [
            np.linalg.norm(x.astype(float), axis=self.axis) for x in (true, pred)
        ]
        one, other = (np.maximum(x, _EPSILON) for x in lengths)
        return (true.astype(float) * pred).sum(self.axis) / one / other


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean squared difference."""

    def result(self) -> Any:
        """Return the root, a float64; 0 if there are no values. Collective."""
        return np.sqrt(super().result())


class SparseTopKCategoricalAccuracy(_Compared):
    """The fraction of rows where the label's score is one of the ``k`` largest.

    Labels are ints.

    Args:
        k: the number of scores. Others that equal the label's do not count against it.
            A row with a NaN is never right.
        name: of the metric.
    """

    _sparse = True

    def __init__(
        self, k: int = 5, name: str | None = None, dtype: object = None
    ) -> None:
        super().__init__(name)
        self.k: int = as_int(type(self).__name__, "k", k, least=1)

    def _compare(self, true: Any, pred: Any) -> Any:
        hit = true[..., None] == np.arange(pred.shape[-1])
        what = f"labels that are ints from 0 to {pred.shape[-1] - 1}"
        expect(bool(hit.any(-1).all()), self._call, what, true, error=ValueError)
        own = np.where(hit, pred, 0).sum(-1, keepdims=True)
        return ((pred > own).sum(-1) < self.k) & ~np.isnan(pred).any(-1)


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The fraction of rows where the label's score is one of the ``k`` largest.

    Labels are one-hot rows. Otherwise as `SparseTopKCategoricalAccuracy`.
    """

    _sparse = False

    def _compare(self, true: Any, pred: Any) -> Any:
        return super()._compare(true.argmax(-1), pred)


class BinaryCrossentropy(_Compared):
    """The mean of `mpidist.losses.binary_crossentropy`.

    Args:
        name: of the metric.
        from_logits: whether predictions are logits.
        label_smoothing: moves labels towards 0.5 by this fraction.
    """

    def __init__(
        self,
        name: str | None = None,
        dtype: object = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(name)
        self._loss = losses.BinaryCrossentropy(from_logits, label_smoothing)

    def _compare(self, true: Any, pred: Any) -> Any:
        # Each of a vector is a row.
        shape = pred.shape if pred.ndim > 1 else (pred.size, 1)
        return super()._compare(true.reshape(shape), pred.reshape(shape))


class CategoricalCrossentropy(_Compared):
    """The mean of `mpidist.losses.categorical_crossentropy`.

    Args:
        name: of the metric.
        from_logits: whether predictions are logits.
        label_smoothing: moves labels towards 1 / classes by this fraction.
        axis: must be -1.
    """

    def __init__(
        self,
        name: str | None = None,
        dtype: object = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        super().__init__(name)
        self._loss = losses.CategoricalCrossentropy(from_logits, label_smoothing, axis)


class SparseCategoricalCrossentropy(_Compared):
    """The mean of `mpidist.losses.sparse_categorical_crossentropy`.

    Args:
        name: of the metric.
        from_logits: whether predictions are logits.
        axis: must be -1.
    """

    _sparse = True

    @explain_keywords("SparseCategoricalCrossentropy")
    def __init__(
        self,
        name: str | None = None,
        dtype: object = None,
        from_logits: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(name)
        self._loss = losses.SparseCategoricalCrossentropy(from_logits, axis=axis)
