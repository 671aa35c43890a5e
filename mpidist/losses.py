"""Losses by the names of Keras, of NumPy, CuPy, torch and JAX arrays.

The functions return one loss per row; the classes add the rows up by their
``reduction``. Of torch tensors and JAX arrays the result has its gradient as always.
For arrays of NumPy and CuPy, which record none, `Loss.gradient` returns it in closed
form. Floats of 16 bits are computed with in float32. Nothing here communicates.

The formulas are those of Keras 3 (keras/src/losses/losses.py and
keras/src/backend/tensorflow/nn.py): losses are means over the last axis, and
probabilities are kept between 1e-7 and 1 - 1e-7.
"""

from __future__ import annotations

import math as _math
import sys as _sys
from collections import abc as _abc
from typing import Any as _Any
from typing import ClassVar as _ClassVar
from typing import NamedTuple as _NamedTuple

import numpy as _np

from mpidist._base import backend as _backend
from mpidist._base import guests as _guests
from mpidist._base.expect import expect as _expect
from mpidist._base.remedies import explain_keywords as _explain_keywords
from mpidist._base.types import Nest as _Nest
from mpidist._base.types import Shape as _Shape
from mpidist._runtime import context as _context
from mpidist._values.distributed import is_per_replica as _is_per_replica

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "Huber",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Reduction",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "categorical_crossentropy",
    "huber",
    "mean_absolute_error",
    "mean_squared_error",
    "sparse_categorical_crossentropy",
]

_EPSILON = 1e-7
_MEANS = ("auto", "sum_over_batch_size", "mean")
_KINDS = (*_MEANS, "sum", "none", None)


class Reduction:
    """How a loss adds up its rows: values of the argument ``reduction``.

    Attributes:
        NONE: not at all: one loss per row, for `mpidist.compute_average_loss`.
        SUM: their sum.
        SUM_OVER_BATCH_SIZE: their mean, which is refused in a strategy.
        AUTO: the same.
    """

    AUTO = "auto"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"


class _Pair(_NamedTuple):
    """Labels and predictions, of one library, shape and dtype; and that of results."""

    xp: _Any
    true: _Any
    pred: _Any
    dtype: _Any


def _cast(x: _Any, dtype: _Any) -> _Any:
    """Return an array in a dtype of its library."""
    if x.dtype == dtype:
        return x
    return x.to(dtype) if _guests.kind_of(x) == "torch" else x.astype(dtype)


def _name(x: _Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _wide(x: _Any) -> _Any:
    """Return floats in float32 or wider: in float16, 1 - 1e-7 is 1."""
    if "float" not in _name(x) or x.dtype.itemsize > 2:
        return x
    torch = _guests.kind_of(x) == "torch"
    return _cast(x, _guests.library("torch").float32 if torch else _np.float32)


def _array(x: _Nest, call: str) -> _Any:
    """Return an array of NumPy or CuPy."""
    what = "an array, as each replica has one"
    hint = "call it in the function that you pass to `strategy.run`"
    _expect(not _is_per_replica(x), call, what, x, hint)
    x = _np.asarray(x) if isinstance(x, (list, tuple)) else x
    return _backend.as_array(x, call)[0]


def _as_floats(x: _Nest, call: str) -> tuple[_Any, _Any]:
    """Return an array of floats, and the library that computes with it."""
    kind = _guests.kind_of(x)
    default: _Any = float
    if kind is None:
        array = _array(x, call)
        xp = _sys.modules["cupy"] if _backend.is_device_array(array) else _np
    else:
        array, xp = x, _guests.library(kind)
        if kind == "torch":
            default = xp.get_default_dtype()
        else:
            xp = xp.numpy
    _expect_real(array, call)
    return array if "float" in _name(array) else _cast(array, default), xp


def _expect_real(x: _Any, call: str) -> None:
    _expect(not _name(x).startswith("complex"), call, "real numbers", x)


def _like(x: _Nest, other: _Any, call: str, cast: bool = True) -> _Any:
    """Return an array in the library, on the device and in the dtype of another."""
    kind = _guests.kind_of(other)
    if kind is None or _guests.kind_of(x) != kind:
        x = _array(x, call)
        if kind is None:
            _expect_real(x, call)
            x = _backend.like(other, x) if isinstance(x, _np.ndarray) else x
            return x.astype(other.dtype) if cast else x
        x = _guests.restore(x.copy(), kind)
    _expect_real(x, call)
    if kind == "torch":
        return x.to(other if cast else other.device)
    return x.astype(other.dtype) if cast else x


def _pair(y_true: _Nest, y_pred: _Nest, call: str, classes: bool = False) -> _Pair:
    """Return labels with the shape of predictions, or without their last axis.

    As in Keras, only a last axis of length 1 may be missing in one of them.
    """
    given, xp = _as_floats(y_pred, call)
    pred = _wide(given)
    what = "`y_pred` with at least one axis"
    _expect(pred.ndim > 0, call, what, y_pred, error=ValueError)
    # Numbers of classes stay ints: float16 has not all of them.
    true = _like(y_true, pred, call, cast=not classes)
    shape = tuple(pred.shape)[: pred.ndim - classes]
    if tuple(true.shape) == (*shape, 1):
        if classes or len(shape) != 1:
            true = true.reshape(shape)
        else:
            pred = pred.reshape(true.shape)
    elif (*tuple(true.shape), 1) == shape:
        if classes or len(shape) <= 2:
            true = true.reshape(shape)
        else:
            pred = pred.reshape(true.shape)
    elif tuple(true.shape) != shape:
        raise ValueError(
            f"{call}: expected `y_true` of shape {shape}, for `y_pred` of shape "
            f"{tuple(pred.shape)}, got {tuple(true.shape)}"
        )
    return _Pair(xp, true, pred, given.dtype)


def _one_hot(y_true: _Nest, y_pred: _Nest, call: str) -> _Pair:
    y = _pair(y_true, y_pred, call, classes=True)
    pred = y.pred
    n = pred.shape[-1]
    classes = _like(_np.arange(n), pred, call, cast=False)
    true = _like(y.true[..., None] == classes, pred, call)
    if not _is_traced(true):
        known = bool((true.sum(-1) == 1).all())
        what = f"labels that are ints from 0 to {n - 1}"
        hint = "give rows without a label another one, and a `sample_weight` of 0"
        _expect(known, call, what, y_true, hint, error=ValueError)
    return y._replace(true=true)


def _is_traced(x: _Any) -> bool:
    """Return whether this is an array of JAX that has no values yet."""
    jax = _guests.library("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def _log_softmax(xp: _Any, x: _Any) -> _Any:
    x = x - xp.amax(x, axis=-1)[..., None]
    return x - xp.log(xp.exp(x).sum(-1))[..., None]


def _clipped(xp: _Any, p: _Any) -> _Any:
    return xp.clip(p, _EPSILON, 1 - _EPSILON)


def _inside(p: _Any) -> _Any:
    return (p >= _EPSILON) & (p <= 1 - _EPSILON)


def _cross_entropy(y: _Pair, log: _Any) -> _Any:
    # Of a class that is ruled out by a logit of -inf, and has no share, it is 0.
    log = y.xp.where(y.true == 0, y.xp.zeros_like(log), log)
    return _cast(-(y.true * log).sum(-1), y.dtype)


def _smooth(y: _Pair, label_smoothing: float, n: int) -> _Pair:
    true = y.true * (1 - label_smoothing) + label_smoothing / n
    return y._replace(true=true) if label_smoothing else y


def mean_squared_error(y_true: _Nest, y_pred: _Nest) -> _Any:
    """Return the mean over the last axis of ``(y_true - y_pred) ** 2``.

    Args:
        y_true: the labels, of the shape of the predictions; either may have a last axis
            of length 1 that the other lacks.
        y_pred: the predictions: floats, of NumPy, CuPy, torch or JAX.

    Returns:
        An array without the last axis, in the library and dtype of ``y_pred``.

    Raises:
        TypeError, ValueError: if they are no arrays, or their shapes differ.
    """
    y = _pair(y_true, y_pred, "mean_squared_error")
    return _cast(((y.pred - y.true) ** 2).mean(-1), y.dtype)


def mean_absolute_error(y_true: _Nest, y_pred: _Nest) -> _Any:
    """Return the mean over the last axis of ``abs(y_true - y_pred)``.

    Otherwise as `mean_squared_error`.
    """
    y = _pair(y_true, y_pred, "mean_absolute_error")
    return _cast(abs(y.pred - y.true).mean(-1), y.dtype)


def huber(y_true: _Nest, y_pred: _Nest, delta: float = 1.0) -> _Any:
    """Return the mean over the last axis of half the squares of small differences.

    Of a difference e above ``delta`` it is ``delta * (abs(e) - delta / 2)``. Otherwise
    as `mean_squared_error`.
    """
    y = _pair(y_true, y_pred, "huber")
    e = abs(y.pred - y.true)
    losses = y.xp.where(e <= delta, e * e / 2, delta * (e - delta / 2))
    return _cast(losses.mean(-1), y.dtype)


def binary_crossentropy(
    y_true: _Nest,
    y_pred: _Nest,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
) -> _Any:
    """Return the mean over the last axis of the cross-entropy of labels 0 and 1.

    Otherwise as `mean_squared_error`.

    Args:
        y_true: the labels, or probabilities.
        y_pred: probabilities, or logits.
        from_logits: whether they are logits.
        label_smoothing: moves labels towards 0.5 by this fraction.
    """
    y = _smooth(_pair(y_true, y_pred, "binary_crossentropy"), label_smoothing, 2)
    xp, true, pred, dtype = y
    if from_logits:
        zero = xp.zeros_like(pred)
        one, other = -xp.logaddexp(-pred, zero), -xp.logaddexp(pred, zero)
    else:
        p = _clipped(xp, pred)
        one, other = xp.log(p), xp.log(1 - p)
    return _cast(-(true * one + (1 - true) * other).mean(-1), dtype)


def categorical_crossentropy(
    y_true: _Nest,
    y_pred: _Nest,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
) -> _Any:
    """Return the cross-entropy over the classes, which are the last axis.

    Otherwise as `mean_squared_error`.

    Args:
        y_true: one-hot labels, or probabilities.
        y_pred: a score of each class: probabilities, which are divided by their sum, or
            logits.
        from_logits: whether they are logits.
        label_smoothing: moves labels towards 1 / classes by this fraction.
    """
    y = _pair(y_true, y_pred, "categorical_crossentropy")
    y = _smooth(y, label_smoothing, y.pred.shape[-1])
    if from_logits:
        log = _log_softmax(y.xp, y.pred)
    else:
        log = y.xp.log(_clipped(y.xp, y.pred / y.pred.sum(-1)[..., None]))
    return _cross_entropy(y, log)


def sparse_categorical_crossentropy(
    y_true: _Nest, y_pred: _Nest, from_logits: bool = False
) -> _Any:
    """Return the cross-entropy over the classes, which are the last axis.

    Otherwise as `mean_squared_error`.

    Args:
        y_true: the numbers of the classes, without the last axis, or with length 1.
        y_pred: a score of each class: probabilities, or logits.
        from_logits: whether they are logits.

    Raises:
        ValueError: also for a label that is no class (a function that JAX transforms
            gives it a loss of 0).
    """
    y = _one_hot(y_true, y_pred, "sparse_categorical_crossentropy")
    logits = y.pred if from_logits else y.xp.log(_clipped(y.xp, y.pred))
    return _cross_entropy(y, _log_softmax(y.xp, logits))


def _leading(weights: _Shape, values: _Shape) -> _Shape:
    """Return a shape without the last axes of length 1 that do not fit another one."""
    while weights and weights[-1] == 1 and weights != values[: len(weights)]:
        weights = weights[:-1]
    return weights


class Loss:
    """The base of the losses; derive from it, and define ``call(y_true, y_pred)``.

    Args:
        reduction: of the losses of the rows: "none" (or None), "sum", or
            "sum_over_batch_size" (also "auto", "mean"), which is their mean. In a
            strategy's scope and in replica functions the last is refused, as in
            TensorFlow: the mean over the rows of one replica is not its share of the
            mean over all rows. Write "none", and `mpidist.compute_average_loss`.
        name: of the loss.
        dtype: accepted and ignored.

    Raises:
        ValueError: for another reduction.
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        kind = type(self).__name__
        known = reduction in _KINDS
        what = f"`reduction` to be one of {', '.join(map(repr, _KINDS))}"
        _expect(known, kind, what, reduction, error=ValueError)
        self.name = name or kind
        self.reduction = "none" if reduction is None else reduction
        self._options: dict[str, _Any] = {}

    def call(self, y_true: _Nest, y_pred: _Nest) -> _Any:
        """Return one loss per row."""
        raise NotImplementedError

    def __call__(
        self, y_true: _Nest, y_pred: _Nest, sample_weight: _Nest = None
    ) -> _Any:
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
            ValueError: if the reduction is a mean and there is a strategy.
        """
        losses = self.call(y_true, y_pred)
        if not hasattr(losses, "dtype"):
            losses = _array(losses, f"{type(self).__name__}.call")
        wide = _wide(losses)
        factor, size = self._factor(wide, sample_weight), self._divisor(wide)
        found = wide if factor is None else wide * factor
        found = found if self.reduction == "none" else found.sum() / size
        return found if wide is losses else _cast(found, losses.dtype)

    def _factor(self, losses: _Any, sample_weight: _Nest) -> _Any:
        """Return what each row is multiplied by; None: nothing."""
        if sample_weight is None:
            return None
        kind = type(self).__name__
        weights = _like(sample_weight, losses, kind)
        shape = tuple(losses.shape)
        weights = weights.reshape(_leading(tuple(weights.shape), shape))
        what = f"`sample_weight` of shape {shape}, or of its first axes"
        fits = tuple(weights.shape) == shape[: weights.ndim]
        _expect(fits, kind, what, sample_weight, error=ValueError)
        return weights.reshape(
            tuple(weights.shape) + (1,) * (len(shape) - weights.ndim)
        )

    def _divisor(self, losses: _Any) -> int:
        """Return the number of rows for a mean, else 1."""
        if self.reduction not in _MEANS:
            return 1
        if _context.has_strategy():
            kind = type(self).__name__
            raise ValueError(
                f"{kind}: reduction={self.reduction!r} is the mean over the rows of "
                f"one replica, not of all; write `{kind}(reduction='none')`, and "
                "`mpidist.compute_average_loss(losses, global_batch_size=n)`"
            )
        rows: int = _math.prod(losses.shape)
        return max(1, rows)

    def gradient(
        self, y_true: _Nest, y_pred: _Nest, sample_weight: _Nest = None
    ) -> _Any:
        """Return the derivative of the loss with respect to the predictions.

        With the reduction "none" that of the sum of the losses of the rows: divide it
        by the rows of the whole step (`mpidist.global_batch_size`), as
        `mpidist.compute_average_loss` does the losses.

        Args:
            y_true: the labels.
            y_pred: the predictions.
            sample_weight: as in a call.

        Returns:
            An array of the shape, library and dtype of ``y_pred``.

        Raises:
            TypeError, ValueError: as a call.
            NotImplementedError: of a class of the user, which has no ``_derivative``.
        """
        y, slope = self._derivative(y_true, y_pred)
        losses = y.pred.sum(-1)
        factor = self._factor(losses, sample_weight)
        slope = slope if factor is None else slope * factor[..., None]
        slope = _cast(slope / self._divisor(losses), y.dtype)
        shape = getattr(y_pred, "shape", None)
        return slope if shape is None else slope.reshape(tuple(shape))

    def _derivative(self, y_true: _Nest, y_pred: _Nest) -> tuple[_Pair, _Any]:
        """Return the arguments, and the derivative of each row's loss."""
        raise NotImplementedError(
            f"{type(self).__name__}: its gradient is not known; define "
            "`gradient(y_true, y_pred, sample_weight=None)`"
        )


class _Elementwise(Loss):
    """A mean over the last axis of a function of each element."""

    _function: _ClassVar[_abc.Callable[..., _Any]]

    def call(self, y_true: _Nest, y_pred: _Nest) -> _Any:
        return type(self)._function(y_true, y_pred, **self._options)

    def _derivative(self, y_true: _Nest, y_pred: _Nest) -> tuple[_Pair, _Any]:
        y = _pair(y_true, y_pred, self._function.__name__)
        return y, self._slope(y) / max(1, y.pred.shape[-1])

    def _slope(self, y: _Pair) -> _Any:
        raise NotImplementedError


class MeanSquaredError(_Elementwise):
    """`mean_squared_error`, reduced over the rows; see `Loss`."""

    _function = mean_squared_error

    def _slope(self, y: _Pair) -> _Any:
        return 2 * (y.pred - y.true)


class MeanAbsoluteError(_Elementwise):
    """`mean_absolute_error`, reduced over the rows; see `Loss`."""

    _function = mean_absolute_error

    def _slope(self, y: _Pair) -> _Any:
        return y.xp.sign(y.pred - y.true)


class Huber(_Elementwise):
    """`huber`, reduced over the rows; see `Loss`.

    Args:
        delta: of `huber`.
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
        self._options = {"delta": delta}

    def _slope(self, y: _Pair) -> _Any:
        delta = self._options["delta"]
        return y.xp.clip(y.pred - y.true, -delta, delta)


class BinaryCrossentropy(_Elementwise):
    """`binary_crossentropy`, reduced over the rows; see `Loss`.

    Args:
        from_logits: whether predictions are logits.
        label_smoothing: moves labels towards 0.5 by this fraction.
        axis: -1; accepted for its name.
        reduction: as for `Loss`.
        name: of the loss.
    """

    _function = binary_crossentropy

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
        _check_axis(type(self).__name__, axis)
        self._options = {"from_logits": from_logits, "label_smoothing": label_smoothing}

    def _slope(self, y: _Pair) -> _Any:
        xp, true, pred, _ = _smooth(y, self._options["label_smoothing"], 2)
        if self._options["from_logits"]:
            return xp.exp(-xp.logaddexp(-pred, xp.zeros_like(pred))) - true
        p = _clipped(xp, pred)
        return (p - true) / (p * (1 - p)) * _inside(pred)


class CategoricalCrossentropy(Loss):
    """`categorical_crossentropy`, reduced over the rows; see `Loss`.

    Args:
        from_logits: whether predictions are logits.
        label_smoothing: moves labels towards 1 / classes by this fraction.
        axis: -1; accepted for its name.
        reduction: as for `Loss`.
        name: of the loss.
    """

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
        _check_axis(type(self).__name__, axis)
        self._options = {"from_logits": from_logits, "label_smoothing": label_smoothing}

    def call(self, y_true: _Nest, y_pred: _Nest) -> _Any:
        """Return one loss per row."""
        return categorical_crossentropy(y_true, y_pred, **self._options)

    def _derivative(self, y_true: _Nest, y_pred: _Nest) -> tuple[_Pair, _Any]:
        y = _pair(y_true, y_pred, "categorical_crossentropy")
        y = _smooth(y, self._options["label_smoothing"], y.pred.shape[-1])
        if self._options["from_logits"]:
            return y, _slope_of_logits(y, y.pred)
        total = y.pred.sum(-1)[..., None]
        p = y.pred / total
        of_share = -y.true / _clipped(y.xp, p) * _inside(p)
        return y, (of_share - (of_share * p).sum(-1)[..., None]) / total


class SparseCategoricalCrossentropy(Loss):
    """`sparse_categorical_crossentropy`, reduced over the rows; see `Loss`.

    Args:
        from_logits: whether predictions are logits.
        reduction: as for `Loss`.
        axis: -1; accepted for its name.
        name: of the loss.
    """

    @_explain_keywords("SparseCategoricalCrossentropy")
    def __init__(
        self,
        from_logits: bool = False,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(reduction, name)
        _check_axis(type(self).__name__, axis)
        self._options = {"from_logits": from_logits}

    def call(self, y_true: _Nest, y_pred: _Nest) -> _Any:
        """Return one loss per row."""
        return sparse_categorical_crossentropy(y_true, y_pred, **self._options)

    def _derivative(self, y_true: _Nest, y_pred: _Nest) -> tuple[_Pair, _Any]:
        y = _one_hot(y_true, y_pred, "sparse_categorical_crossentropy")
        if self._options["from_logits"]:
            return y, _slope_of_logits(y, y.pred)
        p = _clipped(y.xp, y.pred)
        return y, _slope_of_logits(y, y.xp.log(p)) / p * _inside(y.pred)


def _slope_of_logits(y: _Pair, logits: _Any) -> _Any:
    share = y.xp.exp(_log_softmax(y.xp, logits))
    return share * y.true.sum(-1)[..., None] - y.true


def _check_axis(call: str, axis: int) -> None:
    hint = "write `numpy.moveaxis(x, axis, -1)` for the predictions and one-hot labels"
    _expect(axis == -1, call, "`axis` to be -1", axis, hint, error=ValueError)
