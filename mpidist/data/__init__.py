"""Input: `Dataset`, and the types that distributed datasets use.

``Strategy.experimental_distribute_dataset`` and
``Strategy.distribute_datasets_from_function`` accept a `Dataset` of this module, or any
other iterable.
"""

from __future__ import annotations

from mpidist.data._ahead import AUTOTUNE
from mpidist.data._dataset import Dataset
from mpidist.data._distribute import DistributedDataset
from mpidist.data._iterator import DistributedIterator
from mpidist.data._options import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ArraySpec,
    AutoShardPolicy,
    AutotuneOptions,
    DistributeOptions,
    InputContext,
    InputOptions,
    InputReplicationMode,
    OptimizationOptions,
    Options,
    ThreadingOptions,
)
from mpidist.data._positions import DatasetIterator, Optional, OutOfRangeError

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "AutoShardPolicy",
    "AutotuneOptions",
    "Dataset",
    "DatasetIterator",
    "DistributeOptions",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptimizationOptions",
    "Optional",
    "Options",
    "OutOfRangeError",
    "ThreadingOptions",
]
