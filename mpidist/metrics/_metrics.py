"""`Mean`, and what compares labels and predictions by it."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from mpidist._base.expect import expect
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._values.distributed import is_per_replica
from mpidist._values.variable import Variable, storage_of

_PER_REPLICA: Final = (
    "update it in the function that you pass to `strategy.run`, or write "
    "`strategy.gather(values, axis=0)`"
)


def _array(values: Nest, call: str) -> Any:
    """Return an array, of any library, unchanged, and anything else as NumPy's."""
    what = "an array, as each replica has one"
    expect(not is_per_replica(values), call, what, values, _PER_REPLICA)
    return values if hasattr(values, "shape") else np.asarray(values)


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
            TypeError: for a PerReplica.
            ValueError: if the shapes do not match.
            RuntimeError: if it was made outside the scope of this strategy.
        """
        call = f"{type(self).__name__}.update_state"
        group = context.current().group
        if context.has_strategy() and storage_of(self.total).group is not group:
            raise RuntimeError(
                f"{call}: {self.name!r} was not made in the scope of {group}, so each "
                "rank would have a result of its own; make it in `with "
                "strategy.scope():`"
            )
        x = _array(values, call)
        n = math.prod(x.shape)
        if sample_weight is None:
            total, count = float(x.sum()), float(n)
        else:
            w = _array(sample_weight, call)
            rank = len(w.shape)
            expect(
                w.shape == x.shape[:rank],
                call,
                f"`sample_weight` of shape {tuple(x.shape)}, or of its first axes",
                sample_weight,
                error=ValueError,
            )
            rows = x.reshape((*w.shape, -1)).mean(-1) if 0 < rank < len(x.shape) else x
            total = float((rows * w).sum())
            count = float(w.sum()) if rank else n * float(w)
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


class _Compared(Mean):
    """The mean of what a comparison of labels and predictions gives."""

    def update_state(  # type: ignore[override]  # as in Keras
        self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> None:
        """Add a batch: labels and predictions; otherwise as `Mean.update_state`."""
        call = f"{type(self).__name__}.update_state"
        true, pred = _array(y_true, call), _array(y_pred, call)
        super().update_state(self._compare(true, pred), sample_weight)

    def _compare(self, true: Any, pred: Any) -> Any:
        """Return a value for each row, or for each element."""
        raise NotImplementedError


def _of_shape(true: Any, shape: tuple[int, ...]) -> Any:
    """Return the labels with the shape of what they are compared with.

    NumPy would compare shape (n,) and (n, 1) as n * n pairs.
    """
    fits = math.prod(true.shape) == math.prod(shape)
    what = f"`y_true` of shape {tuple(shape)}, as `y_pred` has"
    expect(fits, "update_state", what, true, error=ValueError)
    return true.reshape(shape)


class Accuracy(_Compared):
    """How often predictions equal labels, of the same shape."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return _of_shape(true, pred.shape) == pred


class SparseCategoricalAccuracy(_Compared):
    """How often the largest of the scores is that of the label, an int."""

    def _compare(self, true: Any, pred: Any) -> Any:
        found = pred.argmax(-1)
        return _of_shape(true, found.shape) == found


class CategoricalAccuracy(_Compared):
    """How often the largest of the scores is that of the label, a one-hot row."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return _of_shape(true, pred.shape).argmax(-1) == pred.argmax(-1)


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
        return _of_shape(true, pred.shape) == (pred > self.threshold)


class MeanSquaredError(_Compared):
    """The mean of the squares of the differences of predictions and labels."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return (pred - _of_shape(true, pred.shape)) ** 2


class MeanAbsoluteError(_Compared):
    """The mean of the magnitudes of the differences of predictions and labels."""

    def _compare(self, true: Any, pred: Any) -> Any:
        return abs(pred - _of_shape(true, pred.shape))
