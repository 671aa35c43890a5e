"""Metrics over all replicas, by the names of Keras.

Create them in the scope of the strategy, on all ranks. Updates in a replica function do
not communicate; `Mean.result` does, and is the same on all ranks. `mpidist.Checkpoint`
saves them. For other metrics derive from `Metric` or `Mean`.
"""

from mpidist._base.remedies import publish as _publish
from mpidist.metrics._comparisons import (
    Accuracy as Accuracy,
    BinaryAccuracy as BinaryAccuracy,
    BinaryCrossentropy as BinaryCrossentropy,
    CategoricalAccuracy as CategoricalAccuracy,
    CategoricalCrossentropy as CategoricalCrossentropy,
    CosineSimilarity as CosineSimilarity,
    KLDivergence as KLDivergence,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanAbsolutePercentageError as MeanAbsolutePercentageError,
    MeanSquaredError as MeanSquaredError,
    MeanSquaredLogarithmicError as MeanSquaredLogarithmicError,
    RootMeanSquaredError as RootMeanSquaredError,
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy as TopKCategoricalAccuracy,
)
from mpidist.metrics._confusion import (
    AUC as AUC,
    FalseNegatives as FalseNegatives,
    FalsePositives as FalsePositives,
    Precision as Precision,
    PrecisionAtRecall as PrecisionAtRecall,
    Recall as Recall,
    RecallAtPrecision as RecallAtPrecision,
    SensitivityAtSpecificity as SensitivityAtSpecificity,
    SpecificityAtSensitivity as SpecificityAtSensitivity,
    TrueNegatives as TrueNegatives,
    TruePositives as TruePositives,
)
from mpidist.metrics._metrics import Mean as Mean, Metric as Metric, Sum as Sum
from mpidist.metrics._scores import (
    BinaryIoU as BinaryIoU,
    F1Score as F1Score,
    FBetaScore as FBetaScore,
    IoU as IoU,
    MeanIoU as MeanIoU,
    R2Score as R2Score,
)

_publish(__name__)
