"""Input: a small `Dataset`, and the types that distributed datasets use.

``Strategy.experimental_distribute_dataset`` and
``Strategy.distribute_datasets_from_function`` accept a `Dataset` of this module, or any
other iterable.
"""

from __future__ import annotations

from mpidist.data._dataset import Dataset as Dataset
from mpidist.data._distribute import DistributedDataset as DistributedDataset
from mpidist.data._iterator import DistributedIterator as DistributedIterator
from mpidist.data._records import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from mpidist.data._records import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from mpidist.data._records import ArraySpec as ArraySpec
from mpidist.data._records import AutoShardPolicy as AutoShardPolicy
from mpidist.data._records import InputContext as InputContext
from mpidist.data._records import InputOptions as InputOptions
from mpidist.data._records import InputReplicationMode as InputReplicationMode
from mpidist.data._records import Optional as Optional
from mpidist.data._records import OutOfRangeError as OutOfRangeError

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "OutOfRangeError",
]
