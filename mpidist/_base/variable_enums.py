"""When and how the copies of a variable are combined: tf.distribute's enumerations."""

from __future__ import annotations

import enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are combined (as in TensorFlow)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas assign to one variable are combined."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3  # noqa: PIE796 - its name in TensorFlow 1
