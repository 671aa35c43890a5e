"""Metrics over all replicas, by the names of Keras.

Create them in the scope of the strategy, on all ranks. Updates in a replica function do
not communicate; `Mean.result` does, and is the same on all ranks. `mpidist.Checkpoint`
saves them. For other metrics derive from `Mean`, or use ON_READ variables in this way.
"""

from __future__ import annotations

from mpidist.metrics._metrics import Accuracy as Accuracy
from mpidist.metrics._metrics import BinaryAccuracy as BinaryAccuracy
from mpidist.metrics._metrics import CategoricalAccuracy as CategoricalAccuracy
from mpidist.metrics._metrics import Mean as Mean
from mpidist.metrics._metrics import MeanAbsoluteError as MeanAbsoluteError
from mpidist.metrics._metrics import MeanSquaredError as MeanSquaredError
from mpidist.metrics._metrics import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "SparseCategoricalAccuracy",
]
