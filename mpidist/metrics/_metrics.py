"""`Mean`, and what compares labels and predictions by it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist._base import backend, guests
from mpidist._base.expect import expect
from mpidist._base.types import HostArray, Nest
from mpidist._runtime import context, dispatch
from mpidist._values.distributed import Mirrored, is_per_replica
from mpidist._values.variable import Variable, storage_of

_PER_REPLICA: Final = (
    "update it in the function that you pass to `strategy.run`, or write "
    "`strategy.gather(values, axis=0)`"
)

_MASKED: Final = "write `x.filled(value)`, and give what is masked a weight of 0"


def _array(values: Nest, call: str) -> HostArray:
    """Return real numbers, in an array of any library or a list, as NumPy's."""
    what = "an array, as each replica has one"
    expect(not is_per_replica(values), call, what, values, _PER_REPLICA)
    masked = isinstance(values, np.ma.MaskedArray)
    expect(not masked, call, "an array without a mask", values, _MASKED)
    kind = guests.kind_of(values)
    x: Any = values
    if kind is not None:
        x = guests.as_stored(values, kind, call)
        x = x.host() if isinstance(x, guests.DeviceCopy) else x
    elif isinstance(values, (Mirrored, Variable)):
        x, _ = backend.as_array(values, call)
    x = backend.to_host(x)
    real = backend.number_kind(x.dtype) in "biuf"
    expect(real, call, "real numbers", values)
    found: HostArray = x.astype(np.float32) if backend.is_bfloat16(x.dtype) else x
    return found


class Mean:
    """The mean of all values since the last reset, on all replicas together.

    Args:
        name: of the metric; names of its variables begin with it.
        dtype: accepted and ignored.

    Attributes:
        total: the sum of the values: an ON_READ variable of dtype float64.
        count: their number, or the sum of their weights.
    """

    def __init__(self, name: str | None = None, dtype: object = None) -> None:
        self.name = name or type(self).__name__.lower()
        self.total, self.count = (
            Variable(
                0.0,
                name=f"{self.name}/{part}",
                synchronization="ON_READ",
                aggregation="SUM",
            )
            for part in ("total", "count")
        )

    @property
    def variables(self) -> list[Variable]:
        """The state."""
        return [self.total, self.count]

    def update_state(self, values: Nest, sample_weight: Nest = None) -> None:
        """Add values.

        In a replica function each replica adds its own, without communication.
        Collective in cross-replica context: values that are the same on all ranks are
        added once.

        Args:
            values: a number or an array.
            sample_weight: a number, or an array with a weight for each value or for
                each row, whose values are then averaged; 0 leaves them out.

        Raises:
            TypeError: for a PerReplica, and what is not an array of real numbers.
            ValueError: if the shapes do not match.
            RuntimeError: if it was made outside the scope of this strategy.
        """
        self._add(lambda x: x, sample_weight, values)

    @property
    def _call(self) -> str:
        return f"{type(self).__name__}.update_state"

    def _add(
        self, compare: Callable[..., HostArray], sample_weight: Nest, *given: Nest
    ) -> None:
        """Add what a comparison of the given arrays returns."""
        call, group = self._call, storage_of(self.total).group
        current = context.current().group
        if context.has_strategy() and group is not current:
            raise RuntimeError(
                f"{call}: {self.name!r} was not made in the scope of {current}, so "
                "each rank would have a result of its own; make it in `with "
                "strategy.scope():`"
            )
        alone = context.is_in_replica(group)
        with contextlib.nullcontext() if alone else dispatch.checking(group, call):
            values = compare(*(_array(x, call) for x in given))
            total, count = _sums(values.astype(np.float64), sample_weight, call)
        self.total.assign_add(total)
        self.count.assign_add(count)

    def result(self) -> Any:
        """Return the mean, a float64; 0 if there are no values. Collective."""
        with context.variable_sync_on_read_context():
            total, count = float(self.total), float(self.count)
        return np.float64(total / count if count else 0.0)

    def __call__(self, *args: Nest, **kwargs: Nest) -> Any:
        """Call `update_state`, and return `result`, which is collective."""
        self.update_state(*args, **kwargs)
        return self.result()

    def reset_state(self) -> None:
        """Forget all values. Collective, except in a replica function."""
        for variable in self.variables:
            variable.assign(0.0)

    reset_states = reset_state


def _sums(x: HostArray, sample_weight: Nest, call: str) -> tuple[float, float]:
    """Return the sum of the values, times their weights, and that of the weights."""
    if sample_weight is None:
        return float(x.sum()), float(x.size)
    w = _array(sample_weight, call).astype(np.float64)
    expect(
        w.shape == x.shape[: w.ndim],
        call,
        f"`sample_weight` of shape {x.shape}, or of its first axes",
        sample_weight,
        error=ValueError,
    )
    if not w.ndim:
        return float(x.sum() * w), float(x.size * w)
    rows = x
    if w.ndim < x.ndim:
        rows = x.reshape(*w.shape, math.prod(x.shape[w.ndim :])).mean(-1)
    return float((rows * w).sum()), float(w.sum())


class _Compared(Mean):
    """The mean of what a comparison of labels and predictions gives."""

    def update_state(  # type: ignore[override]  # as in Keras
        self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> None:
        """Add a batch: labels and predictions; otherwise as `Mean.update_state`."""
        self._add(self._compare, sample_weight, y_true, y_pred)

    def _compare(self, true: Any, pred: Any) -> Any:
        """Return a value for each row, or for each element."""
        raise NotImplementedError

    def _of_shape(self, true: Any, shape: tuple[int, ...]) -> Any:
        """Return the labels with the shape of what they are compared with.

        Only axes of length 1 may differ. NumPy would compare shape (n,) and (n, 1) as
        n * n pairs.
        """
        longer = [[n for n in s if n != 1] for s in (true.shape, shape)]
        what = f"`y_true` of shape {shape}, as `y_pred` has"
        expect(longer[0] == longer[1], self._call, what, true, error=ValueError)
        return true.reshape(shape)

    def _difference(self, true: Any, pred: Any) -> Any:
        return pred.astype(np.float64) - self._of_shape(true, pred.shape)


class Accuracy(_Compared):
    """How often predictions equal labels, of the same shape."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return self._of_shape(true, pred.shape) == pred


class SparseCategoricalAccuracy(_Compared):
    """How often the largest of the scores is that of the label, an int."""

    def _compare(self, true: Any, pred: Any) -> Any:
        found = pred.argmax(-1)
        return self._of_shape(true, found.shape) == found


class CategoricalAccuracy(_Compared):
    """How often the largest of the scores is that of the label, a one-hot row."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return self._of_shape(true, pred.shape).argmax(-1) == pred.argmax(-1)


class BinaryAccuracy(_Compared):
    """How often predictions are on the side of ``threshold`` that their labels say.

    Args:
        name: of the metric.
        threshold: predictions above it mean 1.
    """

    def __init__(
        self, name: str | None = None, dtype: object = None, threshold: float = 0.5
    ) -> None:
        super().__init__(name)
        self.threshold = threshold

    def _compare(self, true: Any, pred: Any) -> Any:
        return self._of_shape(true, pred.shape) == (pred > self.threshold)


class MeanSquaredError(_Compared):
    """The mean of the squares of the differences of predictions and labels."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return self._difference(true, pred) ** 2


class MeanAbsoluteError(_Compared):
    """The mean of the magnitudes of the differences of predictions and labels."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return abs(self._difference(true, pred))
