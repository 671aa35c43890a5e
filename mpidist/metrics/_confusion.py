"""Metrics of how often predictions above a threshold are right."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from mpidist._base.backend import as_number
from mpidist._base.expect import as_int, expect
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import HostArray, Nest
from mpidist.metrics._metrics import PairMetric, _each_weight, _of_shape

_COUNTS: Final = (
    "true_positives",
    "false_positives",
    "true_negatives",
    "false_negatives",
)


def _ratio(x: HostArray, y: HostArray) -> HostArray:
    """Return x / y, and 0 where y is."""
    return np.divide(x, y, out=np.zeros_like(x), where=y != 0)


def _numbers(given: object, kind: type) -> HostArray:
    """Return numbers from 0 as an array; -1 if some are no numbers."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return np.asarray(given, kind)
    return np.full(1, -1, kind)


def _evenly(call: str, num_thresholds: int, least: int) -> HostArray:
    """Return so many thresholds from 0 to 1."""
    count = as_int(call, "num_thresholds", num_thresholds, least=least)
    try:
        return np.linspace(0.0, 1.0, count)
    except (ValueError, MemoryError) as error:
        raise ValueError(f"{call}: num_thresholds={count} is too many") from error


class _Confusion(PairMetric):
    """Counts, by threshold, of predictions that are right and wrong.

    Args:
        thresholds: a number or several: predictions above it mean 1. None: 0.5.
        name: of the metric.
        from_logits: whether predictions are logits, and not between 0 and 1.
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None,
        name: str | None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name)
        limit = 0.5 if thresholds is None else thresholds
        self.thresholds: float | Sequence[float] = limit
        limits = np.atleast_1d(np.asarray(self.thresholds, np.float64))
        self._limits, self._places = np.unique(limits, return_inverse=True)
        self._from_logits = from_logits
        for part in _COUNTS:
            setattr(self, part, self.add_weight(self._limits.shape, name=part))

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> tuple[HostArray, ...]:
        call, given = self._call, pred
        true = _of_shape(true, pred.shape, call)
        weights = _each_weight(sample_weight, pred.shape, call)
        if pred.dtype.kind != "f":
            pred = pred.astype(np.float64)
        if self._from_logits:
            pred = np.exp(-np.logaddexp(0.0, -pred.astype(np.float64)))
        inside = bool(((pred >= 0) & (pred <= 1) | (weights == 0)).all())
        what = "predictions between 0 and 1"
        hint = "write `1 / (1 + numpy.exp(-logits))` for logits"
        expect(inside, call, what, given, hint, error=ValueError)
        # Above the first k thresholds: in the dtype of the predictions, but float32 for
        # float16, which has other thresholds, as in Keras.
        limits = self._limits.astype(np.promote_types(pred.dtype, np.float32))
        k = np.searchsorted(limits, pred.ravel())
        above, below = [], []
        for label in (True, False):
            w = np.where((true.ravel() != 0) == label, weights.ravel(), 0.0)
            counts = np.bincount(k, w, self._limits.size + 1)
            passed = np.cumsum(counts[::-1])[::-1][1:]
            above.append(passed)
            below.append(counts.sum() - passed)
        return *above, below[1], below[0]


class _OfCounts(_Confusion):
    """A count, or its share of two counts; for each of several thresholds.

    Args:
        thresholds: a number or a list: predictions above it mean 1. None: 0.5.
        name: of the metric.
    """

    # The places in `_COUNTS` of the count, and of another one for the share.
    _which: ClassVar[tuple[int, ...]]

    @explain_keywords("Precision")
    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        what = "`thresholds` to be one or more numbers from 0 to 1"
        limits = _numbers(0.5 if thresholds is None else thresholds, float)
        fits = limits.size and limits.ndim < 2 and ((limits >= 0) & (limits <= 1)).all()
        expect(fits, type(self).__name__, what, thresholds, error=ValueError)
        super().__init__(thresholds, name)

    def result(self) -> Any:
        """Return it: a float64, or an array for several thresholds. Collective."""
        found, *others = (self._weights[place].numpy() for place in self._which)
        if others:
            found = _ratio(found, found + others[0])
        found = found[self._places]
        return found if found.size > 1 else found[0]


class Precision(_OfCounts):
    """The fraction of predictions above a threshold with label 1; 0 without any.

    Labels are 0 or not, and count as 1 then. A weight of a row is that of its elements.

    Args:
        thresholds: a number or a list, from 0 to 1: predictions above it mean 1. None:
            0.5.
        name: of the metric.
    """

    _which = (0, 1)


class Recall(_OfCounts):
    """The fraction of labels 1 with a prediction above a threshold; 0 without any.

    The arguments are those of `Precision`.
    """

    _which = (0, 3)


class TruePositives(_OfCounts):
    """The number, or weight, of predictions above a threshold with the label 1.

    The arguments are those of `Precision`.
    """

    _which = (0,)


class FalsePositives(_OfCounts):
    """The number, or weight, of predictions above a threshold with the label 0.

    The arguments are those of `Precision`.
    """

    _which = (1,)


class TrueNegatives(_OfCounts):
    """The number, or weight, of predictions not above a threshold with the label 0.

    The arguments are those of `Precision`.
    """

    _which = (2,)


class FalseNegatives(_OfCounts):
    """The number, or weight, of predictions not above a threshold with the label 1.

    The arguments are those of `Precision`.
    """

    _which = (3,)


class AUC(_Confusion):
    """The area under a curve, approximated by thresholds as in Keras.

    Labels are 0 or not, and count as 1 then. A weight of a row is that of its elements.

    Args:
        num_thresholds: how many, evenly from just below 0 to just above 1.
        curve: "ROC", by trapezoids; or "PR", precision over recall, interpolated as
            by Davis and Goadrich 2006 (https://doi.org/10.1145/1143844.1143874).
        name: of the metric.
        from_logits: whether predictions are logits.

    Raises:
        ValueError: for another curve, or fewer than 2 thresholds.
    """

    @explain_keywords("AUC")
    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        *,
        name: str | None = None,
        dtype: object = None,
        from_logits: bool = False,
    ) -> None:
        fits = curve in ("ROC", "PR")
        expect(fits, "AUC", '`curve` to be "ROC" or "PR"', curve, error=ValueError)
        limits = _evenly("AUC", num_thresholds, 2)
        limits[0], limits[-1] = -1e-7, 1 + 1e-7
        super().__init__(limits.tolist(), name, from_logits)
        self.curve = curve

    def result(self) -> Any:
        """Return the area, a float64. Collective."""
        tp, fp, tn, fn = (variable.numpy() for variable in self._weights[:4])
        if self.curve == "ROC":
            y, x = _ratio(tp, tp + fn), _ratio(fp, fp + tn)
            return np.float64(((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2).sum())
        p = tp + fp
        dtp = tp[:-1] - tp[1:]
        slope = _ratio(dtp, p[:-1] - p[1:])
        intercept = tp[1:] - slope * p[1:]
        both = (p[:-1] > 0) & (p[1:] > 0)
        ratio = np.divide(p[:-1], p[1:], out=np.ones_like(dtp), where=both)
        return np.float64(
            _ratio(slope * (dtp + intercept * np.log(ratio)), (tp + fn)[1:]).sum()
        )


class _BestAt(_Confusion):
    """The largest share at the thresholds where another share is large enough."""

    # The places in `_COUNTS` of the two counts of each share.
    _limited: ClassVar[tuple[int, int]]
    _wanted: ClassVar[tuple[int, int]]

    def _begin(
        self, least: float, num_thresholds: int, name: str | None, argument: str
    ) -> None:
        call = type(self).__name__
        as_number(call, argument, least, lambda x: 0 <= x <= 1, "from 0 to 1")
        limits = _evenly(call, num_thresholds, 1)
        _Confusion.__init__(self, list(limits) if len(limits) > 1 else [0.5], name)
        self._least = least

    def result(self) -> Any:
        """Return it, a float64; 0 if the other is nowhere large enough. Collective."""
        counts = [variable.numpy() for variable in self._weights[:4]]
        limited, wanted = (
            _ratio(counts[i], counts[i] + counts[k])
            for i, k in (self._limited, self._wanted)
        )
        return np.float64(np.where(limited >= self._least, wanted, 0.0).max())


class PrecisionAtRecall(_BestAt):
    """The largest precision at a threshold with at least this recall.

    Args:
        recall: from 0 to 1.
        num_thresholds: how many, evenly from 0 to 1; 1: 0.5.
        name: of the metric.

    Example::

        metric = mpidist.metrics.PrecisionAtRecall(0.5)
        metric.update_state([0, 0, 0, 1, 1], [0.0, 0.3, 0.8, 0.3, 0.8])
        metric.result()  # np.float64(0.5)
    """

    _limited, _wanted = (0, 3), (0, 1)

    @explain_keywords("Precision")
    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        *,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        self._begin(recall, num_thresholds, name, "recall")


class RecallAtPrecision(_BestAt):
    """The largest recall at a threshold with at least this precision.

    The arguments are those of `PrecisionAtRecall`, with ``precision`` first.
    """

    _limited, _wanted = (0, 1), (0, 3)

    @explain_keywords("Precision")
    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        *,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        self._begin(precision, num_thresholds, name, "precision")


class SensitivityAtSpecificity(_BestAt):
    """The largest sensitivity at a threshold with at least this specificity.

    They are the fractions of labels 1, and of labels 0, whose prediction is right. The
    arguments are those of `PrecisionAtRecall`, with ``specificity`` first.
    """

    _limited, _wanted = (2, 1), (0, 3)

    @explain_keywords("Precision")
    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        *,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        self._begin(specificity, num_thresholds, name, "specificity")


class SpecificityAtSensitivity(_BestAt):
    """The largest specificity at a threshold with at least this sensitivity.

    As `SensitivityAtSpecificity`, with ``sensitivity`` first.
    """

    _limited, _wanted = (0, 3), (2, 1)

    @explain_keywords("Precision")
    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        *,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        self._begin(sensitivity, num_thresholds, name, "sensitivity")
