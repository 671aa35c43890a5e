"""Metrics over all replicas, by the names of Keras.

Create them in the scope of the strategy, on all ranks. Updates in a replica function do
not communicate; `Mean.result` does, and is the same on all ranks. `mpidist.Checkpoint`
saves them. For other metrics derive from `Metric` or `Mean`.
"""

from mpidist.metrics._comparisons import Accuracy as Accuracy
from mpidist.metrics._comparisons import BinaryAccuracy as BinaryAccuracy
from mpidist.metrics._comparisons import BinaryCrossentropy as BinaryCrossentropy
from mpidist.metrics._comparisons import CategoricalAccuracy as CategoricalAccuracy
from mpidist.metrics._comparisons import (
    CategoricalCrossentropy as CategoricalCrossentropy,
)
from mpidist.metrics._comparisons import MeanAbsoluteError as MeanAbsoluteError
from mpidist.metrics._comparisons import MeanSquaredError as MeanSquaredError
from mpidist.metrics._comparisons import RootMeanSquaredError as RootMeanSquaredError
from mpidist.metrics._comparisons import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from mpidist.metrics._comparisons import (
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
)
from mpidist.metrics._comparisons import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from mpidist.metrics._comparisons import (
    TopKCategoricalAccuracy as TopKCategoricalAccuracy,
)
from mpidist.metrics._confusion import AUC as AUC
from mpidist.metrics._confusion import FalseNegatives as FalseNegatives
from mpidist.metrics._confusion import FalsePositives as FalsePositives
from mpidist.metrics._confusion import Precision as Precision
from mpidist.metrics._confusion import Recall as Recall
from mpidist.metrics._confusion import TrueNegatives as TrueNegatives
from mpidist.metrics._confusion import TruePositives as TruePositives
from mpidist.metrics._metrics import Mean as Mean
from mpidist.metrics._metrics import Metric as Metric
from mpidist.metrics._metrics import Sum as Sum
