"""Metrics over all replicas, by the names of Keras.

Create them in the scope of the strategy, on all ranks. Updates in a replica function do
not communicate; `Mean.result` does, and is the same on all ranks. `mpidist.Checkpoint`
saves them. For other metrics derive from `Metric` or `Mean`.
"""

from __future__ import annotations

from mpidist.metrics._confusion import AUC as AUC
from mpidist.metrics._confusion import FalseNegatives as FalseNegatives
from mpidist.metrics._confusion import FalsePositives as FalsePositives
from mpidist.metrics._confusion import Precision as Precision
from mpidist.metrics._confusion import Recall as Recall
from mpidist.metrics._confusion import TrueNegatives as TrueNegatives
from mpidist.metrics._confusion import TruePositives as TruePositives
from mpidist.metrics._metrics import Accuracy as Accuracy
from mpidist.metrics._metrics import BinaryAccuracy as BinaryAccuracy
from mpidist.metrics._metrics import BinaryCrossentropy as BinaryCrossentropy
from mpidist.metrics._metrics import CategoricalAccuracy as CategoricalAccuracy
from mpidist.metrics._metrics import CategoricalCrossentropy as CategoricalCrossentropy
from mpidist.metrics._metrics import Mean as Mean
from mpidist.metrics._metrics import MeanAbsoluteError as MeanAbsoluteError
from mpidist.metrics._metrics import MeanSquaredError as MeanSquaredError
from mpidist.metrics._metrics import Metric as Metric
from mpidist.metrics._metrics import RootMeanSquaredError as RootMeanSquaredError
from mpidist.metrics._metrics import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from mpidist.metrics._metrics import (
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
)
from mpidist.metrics._metrics import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from mpidist.metrics._metrics import Sum as Sum
from mpidist.metrics._metrics import TopKCategoricalAccuracy as TopKCategoricalAccuracy

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "FalseNegatives",
    "FalsePositives",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
]
