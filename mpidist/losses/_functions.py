"""The losses as functions, one number for each row, and what they are made of."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from mpidist._base import backend, guests
from mpidist._base.expect import expect
from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Nest
from mpidist._strategy.average_loss import expect_real, like, own_array

_EPSILON = 1e-7


def mean_squared_error(y_true: Nest, y_pred: Nest) -> Any:
    """Return the mean over the last axis of ``(y_true - y_pred) ** 2``.

    Args:
        y_true: the labels, of the shape of the predictions; either may have a last axis
            of length 1 that the other lacks.
        y_pred: the predictions: floats, of NumPy, CuPy, torch or JAX.

    Returns:
        An array without the last axis, in the library and dtype of ``y_pred``.

    Raises:
        TypeError, ValueError: if they are not arrays, or their shapes differ.
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
    """Return the mean over the last axis of the Huber loss of the differences.

    For a difference e it is ``e**2 / 2`` if ``abs(e) <= delta``, which is greater than
    0, and otherwise ``delta * (abs(e) - delta / 2)``. Otherwise as
    `mean_squared_error`.
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
        axis: must be -1.
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
        axis: must be -1.
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
        axis: must be -1.

    Raises:
        ValueError: also for a label that is no class (a function that JAX transforms
            gives it a loss of 0).
    """
    check_options("sparse_categorical_crossentropy", axis=axis)
    y = one_hot(y_true, y_pred)
    logits = y.pred if from_logits else y.xp.log(clipped(y.xp, y.pred))
    return cross_entropy(y, log_softmax(y.xp, logits))


# --- labels and predictions of one library, dtype and shape ---------------------------


class Pair(NamedTuple):
    """Labels and predictions, of one library, shape and dtype; and that of results."""

    xp: Any
    true: Any
    pred: Any
    dtype: Any


def cast(x: Any, dtype: Any) -> Any:
    """Return an array in a dtype of its library."""
    if x.dtype == dtype:
        return x
    return x.to(dtype) if guests.kind_of(x) == "torch" else x.astype(dtype)


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def widened(x: Any) -> Any:
    """Return floats in float32 or wider: in float16, 1 - 1e-7 is 1."""
    if "float" not in _name(x) or x.dtype.itemsize > 2:
        return x
    torch = guests.kind_of(x) == "torch"
    return cast(x, guests.library("torch").float32 if torch else np.float32)


def _as_floats(x: Nest, call: str) -> tuple[Any, Any]:
    """Return an array of floats, and the library that computes with it."""
    kind = guests.kind_of(x)
    default: Any = float
    if kind is None:
        array = own_array(x, call)
        xp = sys.modules["cupy"] if backend.is_device_array(array) else np
    else:
        array, xp = x, guests.library(kind)
        if kind == "torch":
            default = xp.get_default_dtype()
        else:
            xp = xp.numpy
    expect_real(array, call)
    return array if "float" in _name(array) else cast(array, default), xp


def pair(y_true: Nest, y_pred: Nest, call: str, classes: bool = False) -> Pair:
    """Return labels with the shape of predictions, or without their last axis.

    As in Keras, only a last axis of length 1 may be missing in one of them.
    """
    given, xp = _as_floats(y_pred, call)
    pred = widened(given)
    what = "`y_pred` with at least one axis"
    expect(pred.ndim > 0, call, what, y_pred, error=ValueError)
    # Numbers of classes stay ints: float16 has not all of them.
    true = like(y_true, pred, call, cast=not classes)
    shape = tuple(pred.shape)[: pred.ndim - classes]
    own = tuple(true.shape)
    longer = own == (*shape, 1)
    if not longer and shape not in (own, (*own, 1)):
        raise ValueError(
            f"{call}: expected `y_true` of shape {shape}, for `y_pred` of shape "
            f"{tuple(pred.shape)}, got {own}"
        )
    if classes or (len(shape) != 1 if longer else len(shape) <= 2):
        true = true.reshape(shape)
    else:
        pred = pred.reshape(own)
    return Pair(xp, true, pred, given.dtype)


def check_options(
    call: str, *, axis: int = -1, delta: float = 1.0, label_smoothing: float = 0.0
) -> None:
    """Raise a ValueError if an option of a loss is none that it can have."""
    hint = "write `numpy.moveaxis(x, axis, -1)` for the predictions and one-hot labels"
    expect(axis == -1, call, "`axis` to be -1", axis, hint, error=ValueError)
    backend.as_positive(call, "delta", delta)
    name, value = "label_smoothing", label_smoothing
    backend.as_number(call, name, value, lambda x: 0 <= x <= 1, "from 0 to 1")


def one_hot(y_true: Nest, y_pred: Nest) -> Pair:
    call = "sparse_categorical_crossentropy"
    y = pair(y_true, y_pred, call, classes=True)
    pred = y.pred
    n = pred.shape[-1]
    classes = like(np.arange(n), pred, call, cast=False)
    true = like(y.true[..., None] == classes, pred, call)
    jax = guests.library("jax")
    if jax is None or not isinstance(true, jax.core.Tracer):  # it has values
        known = bool((true.sum(-1) == 1).all())
        what = f"labels that are ints from 0 to {n - 1}"
        hint = "give rows without a label another one, and a `sample_weight` of 0"
        expect(known, call, what, y_true, hint, error=ValueError)
    return y._replace(true=true)


def log_softmax(xp: Any, x: Any) -> Any:
    x = x - xp.amax(x, axis=-1)[..., None]
    return x - xp.log(xp.exp(x).sum(-1))[..., None]


def clipped(xp: Any, p: Any) -> Any:
    return xp.clip(p, _EPSILON, 1 - _EPSILON)


def inside(p: Any) -> Any:
    return (p >= _EPSILON) & (p <= 1 - _EPSILON)


def cross_entropy(y: Pair, log: Any) -> Any:
    # Of a class that is ruled out by a logit of -inf, and has no share, it is 0.
    log = y.xp.where(y.true == 0, y.xp.zeros_like(log), log)
    return cast(-(y.true * log).sum(-1), y.dtype)


def smooth(y: Pair, label_smoothing: float, n: int) -> Pair:
    if not label_smoothing or not n:
        return y
    return y._replace(true=y.true * (1 - label_smoothing) + label_smoothing / n)
