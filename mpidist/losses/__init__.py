"""Losses with the names of Keras, for NumPy, CuPy, torch and JAX arrays.

The functions return one loss per row; the classes reduce the rows by their
``reduction``. With torch and JAX, results can be differentiated as usual. For NumPy and
CuPy, which cannot, `Loss.gradient` returns the gradient in closed form. 16-bit floats
are computed with in float32. Nothing here communicates.

The formulas are those of Keras 3 (keras/src/losses/losses.py and
keras/src/backend/tensorflow/nn.py): losses are means over the last axis, and
probabilities are kept between 1e-7 and 1 - 1e-7.
"""

from mpidist._base.remedies import publish as _publish
from mpidist.losses._classes import (
    BinaryCrossentropy as BinaryCrossentropy,
    CategoricalCrossentropy as CategoricalCrossentropy,
    Huber as Huber,
    Loss as Loss,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanSquaredError as MeanSquaredError,
    Reduction as Reduction,
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
)
from mpidist.losses._functions import (
    binary_crossentropy as binary_crossentropy,
    categorical_crossentropy as categorical_crossentropy,
    huber as huber,
    mean_absolute_error as mean_absolute_error,
    mean_squared_error as mean_squared_error,
    sparse_categorical_crossentropy as sparse_categorical_crossentropy,
)

_publish(__name__)
