"""Metrics of classes of pixels: intersection over union."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist._base.expect import as_int, expect
from mpidist._base.types import HostArray, Nest
from mpidist._values.variable import Variable
from mpidist.metrics._confusion import _numbers, _ratio
from mpidist.metrics._metrics import _each_weight, _of_shape, _OfPairs


class IoU(_OfPairs):
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
            x if sparse else x.argmax(self._axis)
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
        self.threshold = threshold

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> tuple[HostArray]:
        # In float32, as in Keras.
        pred = pred.astype(np.float32) >= np.float32(self.threshold)
        return super()._sums(true, pred, sample_weight)
