"""The losses as classes: with a reduction, and a gradient in closed form."""

from __future__ import annotations

import math
from collections import abc
from typing import Any, ClassVar

from mpidist._base.expect import expect
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._strategy.average_loss import own_array, row_factors
from mpidist.losses._functions import (
    Pair,
    binary_crossentropy,
    cast,
    categorical_crossentropy,
    check_options,
    clipped,
    huber,
    inside,
    log_softmax,
    mean_absolute_error,
    mean_squared_error,
    one_hot,
    pair,
    smooth,
    sparse_categorical_crossentropy,
    widened,
)

_MEANS = ("auto", "sum_over_batch_size", "mean")
_KINDS = (*_MEANS, "sum", "none", None)


class Reduction:
    """How a loss adds up its rows: values of the argument ``reduction``.

    Attributes:
        NONE: not at all: one loss per row, for `mpidist.compute_average_loss`.
        SUM: their sum.
        SUM_OVER_BATCH_SIZE: their mean; refused in scopes and replica functions.
        AUTO: the same.
    """

    AUTO = "auto"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"


class Loss:
    """The base of the losses; derive from it, and define ``call(y_true, y_pred)``.

    Args:
        reduction: of the losses of the rows: "none" (or None), "sum", or
            "sum_over_batch_size" (also "auto", "mean"), which is their mean. In a
            strategy's scope and in replica functions the last is refused, as in
            TensorFlow: the mean over the rows of one replica is not its share of the
            mean over all rows. Write "none", and `mpidist.compute_average_loss`. At
            program level, after `experimental_set_strategy`, it is allowed.
        name: of the loss.
        dtype: accepted and ignored.

    Raises:
        ValueError: for another reduction.

    Example::

        def replica_fn(labels, predictions):
            loss = mpidist.losses.MeanSquaredError(reduction="none")
            return mpidist.compute_average_loss(loss(labels, predictions))


        losses = strategy.run(replica_fn, args=(np.zeros((4, 1)), np.ones((4, 1))))
        strategy.reduce("SUM", losses, axis=None)  # np.float64(1.0)
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        kind = type(self).__name__
        known = isinstance(reduction, str | None) and reduction in _KINDS
        what = f"`reduction` to be one of {', '.join(map(repr, _KINDS))}"
        hint = f"a loss of arrays is `{kind}()(y_true, y_pred)`"
        expect(known, kind, what, reduction, hint, error=ValueError)
        self.name: str = name or kind
        self.reduction: str = "none" if reduction is None else reduction
        self._options: dict[str, Any] = {}

    def call(self, y_true: Nest, y_pred: Nest) -> Any:
        """Return one loss per row."""
        raise NotImplementedError

    def __call__(self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None) -> Any:
        """Return the losses of the rows, reduced.

        Args:
            y_true: the labels.
            y_pred: the predictions.
            sample_weight: None, a number, or a factor for each row, or for each place
                of its first axes. The mean is still over the number of rows.

        Returns:
            An array of the library of ``y_pred``: a scalar, or with "none" of the shape
            of ``y_pred`` without its last axis.

        Raises:
            TypeError, ValueError: for invalid arguments.
            ValueError: if the reduction is a mean, in a scope or a replica function.
        """
        losses = self.call(y_true, y_pred)
        if not hasattr(losses, "dtype"):
            losses = own_array(losses, f"{type(self).__name__}.call")
        wide = widened(losses)
        factor, size = self._factor(wide, sample_weight), self._divisor(wide)
        found = wide if factor is None else wide * factor
        found = found if self.reduction == "none" else found.sum() / size
        return found if wide is losses else cast(found, losses.dtype)

    def _factor(self, losses: Any, sample_weight: Nest) -> Any:
        """Return what each row is multiplied by; None: nothing."""
        if sample_weight is None:
            return None
        return row_factors(sample_weight, losses, type(self).__name__)

    def _divisor(self, losses: Any) -> int:
        """Return the number of rows for a mean, else 1."""
        if self.reduction not in _MEANS:
            return 1
        if context.has_strategy() and not context.in_global_scope():
            kind = type(self).__name__
            raise ValueError(
                f"{kind}: reduction={self.reduction!r} is the mean over the rows of "
                f"one replica, not of all; write `{kind}(reduction='none')`, and "
                "`mpidist.compute_average_loss(losses, global_batch_size=n)`"
            )
        rows: int = math.prod(losses.shape)
        return max(1, rows)

    def gradient(self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None) -> Any:
        """Return the derivative of the loss with respect to the predictions.

        With the reduction "none" it is the derivative of the sum of the rows' losses:
        divide it by the number of rows of the whole step (`mpidist.global_batch_size`),
        as `mpidist.compute_average_loss` divides the losses.

        Args:
            y_true: the labels.
            y_pred: the predictions.
            sample_weight: as in a call.

        Returns:
            An array of the shape, library and dtype of ``y_pred``.

        Raises:
            TypeError, ValueError: as a call.
            NotImplementedError: for a class derived from `Loss` that does not define
                it.
        """
        y, slope = self._derivative(y_true, y_pred)
        losses = y.pred.sum(-1)
        factor = self._factor(losses, sample_weight)
        slope = slope if factor is None else slope * factor[..., None]
        slope = cast(slope / self._divisor(losses), y.dtype)
        shape = getattr(y_pred, "shape", None)
        return slope if shape is None else slope.reshape(tuple(shape))

    def _derivative(self, y_true: Nest, y_pred: Nest) -> tuple[Pair, Any]:
        """Return the arguments, and the derivative of each row's loss."""
        raise NotImplementedError(
            f"{type(self).__name__}: its gradient is not known; define "
            "`gradient(y_true, y_pred, sample_weight=None)`"
        )


class _OfFunction(Loss):
    """What a function returns, with the options of the loss."""

    _function: ClassVar[abc.Callable[..., Any]]

    def call(self, y_true: Nest, y_pred: Nest) -> Any:
        """Return one loss per row."""
        return type(self)._function(y_true, y_pred, **self._options)


class _Elementwise(_OfFunction):
    """A mean over the last axis of a function of each element."""

    def _derivative(self, y_true: Nest, y_pred: Nest) -> tuple[Pair, Any]:
        y = pair(y_true, y_pred, self._function.__name__)
        return y, self._slope(y) / max(1, y.pred.shape[-1])

    def _slope(self, y: Pair) -> Any:
        raise NotImplementedError


class MeanSquaredError(_Elementwise):
    """`mean_squared_error`, reduced over the rows; see `Loss`."""

    _function = mean_squared_error

    def _slope(self, y: Pair) -> Any:
        return 2 * (y.pred - y.true)


class MeanAbsoluteError(_Elementwise):
    """`mean_absolute_error`, reduced over the rows; see `Loss`."""

    _function = mean_absolute_error

    def _slope(self, y: Pair) -> Any:
        return y.xp.sign(y.pred - y.true)


class Huber(_Elementwise):
    """`huber`, reduced over the rows; see `Loss`.

    Args:
        delta: as for `huber`.
        reduction: as for `Loss`.
        name: of the loss.
    """

    _function = huber

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(reduction, name)
        check_options("Huber", delta=delta)
        self._options = {"delta": delta}

    def _slope(self, y: Pair) -> Any:
        delta = self._options["delta"]
        return y.xp.clip(y.pred - y.true, -delta, delta)


class _CrossEntropy(_OfFunction):
    """With labels that can be smoothed; `BinaryCrossentropy` has the arguments."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(reduction, name)
        kind = type(self).__name__
        check_options(kind, axis=axis, label_smoothing=label_smoothing)
        self._options = {"from_logits": from_logits, "label_smoothing": label_smoothing}


class BinaryCrossentropy(_CrossEntropy, _Elementwise):
    """`binary_crossentropy`, reduced over the rows; see `Loss`.

    Args:
        from_logits: whether predictions are logits.
        label_smoothing: moves labels towards 0.5 by this fraction.
        axis: must be -1.
        reduction: as for `Loss`.
        name: of the loss.
    """

    _function = binary_crossentropy

    def _slope(self, y: Pair) -> Any:
        xp, true, pred, _ = smooth(y, self._options["label_smoothing"], 2)
        if self._options["from_logits"]:
            return xp.exp(-xp.logaddexp(-pred, xp.zeros_like(pred))) - true
        p = clipped(xp, pred)
        return (p - true) / (p * (1 - p)) * inside(pred)


class CategoricalCrossentropy(_CrossEntropy):
    """`categorical_crossentropy`, reduced over the rows; see `Loss`.

    Args:
        from_logits: whether predictions are logits.
        label_smoothing: moves labels towards 1 / classes by this fraction.
        axis: must be -1.
        reduction: as for `Loss`.
        name: of the loss.
    """

    _function = categorical_crossentropy

    def _derivative(self, y_true: Nest, y_pred: Nest) -> tuple[Pair, Any]:
        y = pair(y_true, y_pred, "categorical_crossentropy")
        y = smooth(y, self._options["label_smoothing"], y.pred.shape[-1])
        if self._options["from_logits"]:
            return y, _slope_of_logits(y, y.pred)
        total = y.pred.sum(-1)[..., None]
        p = y.pred / total
        of_share = -y.true / clipped(y.xp, p) * inside(p)
        return y, (of_share - (of_share * p).sum(-1)[..., None]) / total


class SparseCategoricalCrossentropy(_OfFunction):
    """`sparse_categorical_crossentropy`, reduced over the rows; see `Loss`.

    Args:
        from_logits: whether predictions are logits.
        reduction: as for `Loss`.
        axis: must be -1.
        name: of the loss.
    """

    _function = sparse_categorical_crossentropy

    @explain_keywords("SparseCategoricalCrossentropy")
    def __init__(
        self,
        from_logits: bool = False,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(reduction, name)
        check_options(type(self).__name__, axis=axis)
        self._options = {"from_logits": from_logits}

    def _derivative(self, y_true: Nest, y_pred: Nest) -> tuple[Pair, Any]:
        y = one_hot(y_true, y_pred)
        if self._options["from_logits"]:
            return y, _slope_of_logits(y, y.pred)
        p = clipped(y.xp, y.pred)
        return y, _slope_of_logits(y, y.xp.log(p)) / p * inside(y.pred)


def _slope_of_logits(y: Pair, logits: Any) -> Any:
    share = y.xp.exp(log_softmax(y.xp, logits))
    return share * y.true.sum(-1)[..., None] - y.true
