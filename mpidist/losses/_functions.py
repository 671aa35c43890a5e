"""The losses as functions: one number for each row."""

from __future__ import annotations

from typing import Any

from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Nest
from mpidist.losses._pairs import (
    cast,
    check_options,
    clipped,
    cross_entropy,
    log_softmax,
    one_hot,
    pair,
    smooth,
)


def mean_squared_error(y_true: Nest, y_pred: Nest) -> Any:
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
    y = pair(y_true, y_pred, "mean_squared_error")
    return cast(((y.pred - y.true) ** 2).mean(-1), y.dtype)


def mean_absolute_error(y_true: Nest, y_pred: Nest) -> Any:
    """Return the mean over the last axis of ``abs(y_true - y_pred)``.

    Otherwise as `mean_squared_error`.
    """
    y = pair(y_true, y_pred, "mean_absolute_error")
    return cast(abs(y.pred - y.true).mean(-1), y.dtype)


def huber(y_true: Nest, y_pred: Nest, delta: float = 1.0) -> Any:
    """Return the mean over the last axis of half the squares of small differences.

    Of a difference e above ``delta``, a positive number, it is
    ``delta * (abs(e) - delta / 2)``. Otherwise as `mean_squared_error`.
    """
    check_options("huber", delta=delta)
    y = pair(y_true, y_pred, "huber")
    e = abs(y.pred - y.true)
    losses = y.xp.where(e <= delta, e * e / 2, delta * (e - delta / 2))
    return cast(losses.mean(-1), y.dtype)


def binary_crossentropy(
    y_true: Nest,
    y_pred: Nest,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Any:
    """Return the mean over the last axis of the cross-entropy of labels 0 and 1.

    Otherwise as `mean_squared_error`.

    Args:
        y_true: the labels, or probabilities.
        y_pred: probabilities, or logits.
        from_logits: whether they are logits.
        label_smoothing: moves labels towards 0.5 by this fraction, from 0 to 1.
        axis: -1; accepted for its name.
    """
    call = "binary_crossentropy"
    check_options(call, axis=axis, label_smoothing=label_smoothing)
    y = smooth(pair(y_true, y_pred, call), label_smoothing, 2)
    xp, true, pred, dtype = y
    if from_logits:
        zero = xp.zeros_like(pred)
        one, other = -xp.logaddexp(-pred, zero), -xp.logaddexp(pred, zero)
    else:
        p = clipped(xp, pred)
        one, other = xp.log(p), xp.log(1 - p)
    return cast(-(true * one + (1 - true) * other).mean(-1), dtype)


def categorical_crossentropy(
    y_true: Nest,
    y_pred: Nest,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Any:
    """Return the cross-entropy over the classes, which are the last axis.

    Otherwise as `mean_squared_error`.

    Args:
        y_true: one-hot labels, or probabilities.
        y_pred: a score of each class: probabilities, which are divided by their sum, or
            logits.
        from_logits: whether they are logits.
        label_smoothing: moves labels towards 1 / classes by this fraction, from 0 to 1.
        axis: -1; accepted for its name.
    """
    call = "categorical_crossentropy"
    check_options(call, axis=axis, label_smoothing=label_smoothing)
    y = pair(y_true, y_pred, call)
    y = smooth(y, label_smoothing, y.pred.shape[-1])
    if from_logits:
        log = log_softmax(y.xp, y.pred)
    else:
        log = y.xp.log(clipped(y.xp, y.pred / y.pred.sum(-1)[..., None]))
    return cross_entropy(y, log)


@explain_keywords("SparseCategoricalCrossentropy")
def sparse_categorical_crossentropy(
    y_true: Nest, y_pred: Nest, from_logits: bool = False, axis: int = -1
) -> Any:
    """Return the cross-entropy over the classes, which are the last axis.

    Otherwise as `mean_squared_error`.

    Args:
        y_true: the numbers of the classes, without the last axis, or with length 1.
        y_pred: a score of each class: probabilities, or logits.
        from_logits: whether they are logits.
        axis: -1; accepted for its name.

    Raises:
        ValueError: also for a label that is no class (a function that JAX transforms
            gives it a loss of 0).
    """
    check_options("sparse_categorical_crossentropy", axis=axis)
    y = one_hot(y_true, y_pred, "sparse_categorical_crossentropy")
    logits = y.pred if from_logits else y.xp.log(clipped(y.xp, y.pred))
    return cross_entropy(y, log_softmax(y.xp, logits))
